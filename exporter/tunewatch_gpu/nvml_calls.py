"""Calling NVML: what its return codes mean for a reading, for a GPU and for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from tunewatch_gpu.readings import (
    ERROR,
    GPU_LOST,
    MALFORMED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN_VALUE,
)
from tunewatch_gpu.snapshot import clean_label
from tunewatch_gpu.source import SourceUnavailable

# Return codes by what they mean for us (nvml.h; numbers because older nvidia-ml-py lacks some names).
SESSION_GONE = {
    1: "uninitialized",
    9: "driver_not_loaded",
    12: "library_not_found",
    18: "driver_library_mismatch",
}
GPU_GONE = {15: GPU_LOST, 16: RESET_REQUIRED, 28: GPU_LOST}
# 2: a query that makes no sense for this kind of handle; 13: older driver than the query; 25: struct
# version; 26: deprecated.
ABSENT = {
    2: NOT_SUPPORTED,
    3: NOT_SUPPORTED,
    13: NOT_SUPPORTED,
    25: NOT_SUPPORTED,
    26: NOT_SUPPORTED,
    4: NO_PERMISSION,
    999: UNKNOWN_VALUE,
}

Handle = Any

# Not an NVMLError, and unknown to nvidia-ml-py before 13.
_LIBRARY_MISMATCH = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)


class GpuDown(Exception):
    """This GPU does not answer; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Absent(Exception):
    """A query has no answer; `reason` as in `readings`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def ask(query: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The answer to `query`; Absent, GpuDown or SourceUnavailable by what the driver's code means."""
    try:
        return query(*arguments, **options)
    except pynvml.NVMLError as error:
        code = error.value
        if code in SESSION_GONE:
            raise SourceUnavailable(SESSION_GONE[code], f"NVML: {error}") from None
        if code in GPU_GONE:
            raise GpuDown(GPU_GONE[code]) from None
        raise Absent(ABSENT.get(code, ERROR)) from None
    except _LIBRARY_MISMATCH:
        raise Absent(NOT_SUPPORTED) from None
    except UnicodeDecodeError:
        raise Absent(MALFORMED) from None


def ask_for_all(query: Callable[[], Any]) -> Any:
    """The answer to a query without which there is no collection."""
    try:
        return query()
    except pynvml.NVMLError as error:
        raise SourceUnavailable(SESSION_GONE.get(error.value, "nvml_error"), f"NVML: {error}") from None


def decode(text: str | bytes) -> str:
    """nvidia-ml-py returns str in some versions and bytes in others."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def ask_text(default: str, query: Callable[..., str | bytes], *arguments: Any) -> str:
    """The answer to a query for a text, fit for a label; `default` where there is none."""
    try:
        return clean_label(decode(ask(query, *arguments))) or default
    except Absent:
        return default

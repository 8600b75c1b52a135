"""Numbers out of whatever a trainer puts into its logs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

MAX_KEY_LENGTH = 128

_last_device_read = -math.inf


def as_number(value: Any, *, wait: bool = False) -> float | int | None:
    """Return `value` as a plain number, or None where it is not one.

    Understood: int, float, numpy scalars, tensors of one element, and strings that spell a number
    (transformers 5 prints `'4.19'`). None, bool, lists, integers beyond the floats and everything else are no
    numbers. Reading a tensor of an accelerator waits for it, so without `wait` that is "unknown".
    """
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else None
    if isinstance(value, str):
        try:
            return float(value) if "_" not in value else None  # "1_000" is Python's spelling, no trainer's
        except ValueError:
            return None
    try:
        return _item(value, wait)
    except Exception:  # whatever object a trainer logs, the other values of the log are worth having
        return None


def _item(value: Any, wait: bool) -> float | int | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1 or (value.device.type != "cpu" and not wait):
            return None
        if hasattr(value, "full_tensor"):  # a DTensor: all ranks would have to read it, and we may be alone
            return None
        value = value.detach().item()
    elif callable(getattr(value, "item", None)) and getattr(value, "size", 1) == 1:
        value = value.item()
    return as_number(value) if isinstance(value, (int, float)) else None


def _may_wait() -> bool:
    """Whether it is time to wait for an accelerator again: at most once a second."""
    global _last_device_read
    now = time.monotonic()
    if now - _last_device_read < 1.0:
        return False
    _last_device_read = now
    return True


def _on_device(value: Any) -> bool:
    device = getattr(value, "device", None)
    return getattr(device, "type", "cpu") != "cpu"


def split_finite(logs: Mapping[Any, Any]) -> tuple[dict[str, float | int], dict[str, str]]:
    """Split `logs` into finite numbers, and the names of those that are "nan", "inf" or "-inf".

    Tensors of an accelerator are read (all of them, for the first one waits for the rest) at most once a second.
    """
    finite: dict[str, float | int] = {}
    nonfinite: dict[str, str] = {}
    logs = dict(logs)
    wait = any(map(_on_device, logs.values())) and _may_wait()
    for raw_key, raw in logs.items():
        value = as_number(raw, wait=wait)
        if value is None:
            continue
        key = str(raw_key)[:MAX_KEY_LENGTH]
        if isinstance(value, int) or math.isfinite(value):
            finite[key] = value
        else:
            nonfinite[key] = spell_nonfinite(value)
    return finite, nonfinite


def spell_nonfinite(value: float) -> str:
    """Spell a non-finite float the way events do: "nan", "inf" or "-inf"."""
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")

"""The interface behind which every way of asking a driver stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tunewatch_gpu.snapshot import Request, Snapshot

Announce = Callable[[str, int | None], None]
"""Called with the source's name and a GPU's index before each, so that a hang or a crash can be blamed."""

TellXid = Callable[[str, str, int, float], None]
"""Called with the source's name, a GPU's uuid, the code and the Unix time of an Xid error, at once."""


class SourceUnavailable(Exception):
    """A whole collection failed: `reason` is a word for a label, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Source(Protocol):
    """A way to read GPUs. `read` opens what it needs, `close` gives it back; both may be called again."""

    name: str

    def read(self, request: Request) -> Snapshot:
        """One collection, or SourceUnavailable."""

    def close(self) -> None:
        """Release the driver."""

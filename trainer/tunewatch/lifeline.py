"""Ties a child's life to its parent's (Linux): nothing stays behind when the parent is killed with -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None] | None:
    """For `preexec_fn`: the child gets signal `number` when the *thread* that started it ends; None elsewhere.

    See prctl(2), PR_SET_PDEATHSIG.
    """
    if _LIBC is None:
        return None
    prctl, parent = _LIBC.prctl, os.getpid()

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return set_signal

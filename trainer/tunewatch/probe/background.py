"""Work that can wait a moment, done on a thread of its own so that the training thread does not wait for it.

A system call or a line of JSON costs the training thread ten times what it costs in a loop: between two steps the
training has filled the caches with its own. Done together, ten times a second, it is cheap again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

PERIOD = 0.1
"""Seconds after which what was asked for is done, at most (while the process runs at all)."""

_IDLE = 20
"""Rounds without work after which the thread sleeps until it is called."""


class Background:
    """Calls `work` every PERIOD as long as it returns True now and then. `work` must not raise."""

    def __init__(self, work: Callable[[], bool]) -> None:
        """`work` does what there is to do, and says whether there was any."""
        self._work = work
        self.asleep = True
        """Whether nobody looks for work: who has some must `wake`."""
        self._ended = False
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look for work again. Raises RuntimeError where a thread can not be started."""
        self.asleep = False
        if self._thread is not None:
            self._ring()
            return
        self._thread = threading.Thread(target=self._run, name="tunewatch-writer", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._thread, self.asleep = None, True
            raise

    def end(self, seconds: float = 1.0) -> None:
        """End the thread, and wait for it a moment; what there is to do stays undone."""
        self._ended = True
        self._ring()
        if (
            self._thread is not None
            and self._thread.is_alive()
            and self._thread is not threading.current_thread()
        ):
            self._thread.join(seconds)

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _run(self) -> None:
        idle = 0
        while not self._ended:
            idle = 0 if self._work() else idle + 1
            if idle <= _IDLE:
                self._bell.acquire(timeout=PERIOD)
                continue
            self.asleep = True
            if not self._work() and not self._ended:  # what came just before nobody woke us for
                self._bell.acquire()
            self.asleep, idle = False, 0

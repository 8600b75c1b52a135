"""Which collections also ask for what changes seldom or costs much."""

from __future__ import annotations

import time
from collections.abc import Callable

_COLLECTIONS = 6
_SECONDS = 30.0


class Pace:
    """Every sixth collection, or the first one after 30 seconds: whichever comes first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = 0
        self._due_at = 0.0

    def due(self) -> bool:
        """Whether this collection is one of them; to be called once in each."""
        self._left -= 1
        if self._left > 0 and self._clock() < self._due_at:
            return False
        self._left, self._due_at = _COLLECTIONS, self._clock() + _SECONDS
        return True

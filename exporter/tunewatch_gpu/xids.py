"""Counting Xid errors that two sources tell of, NVML's events and the kernel log, without counting one twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_MOST_CODES = 32  # of one GPU; about 170 codes exist, and a GPU rarely shows more than three
_HIGHEST_CODE = 999
_QUIET = 600.0  # seconds after which no source owes an echo of an earlier error any more

TOO_MANY = "too_many_codes"
NO_CODE = "no_xid"


@dataclass(slots=True)
class XidCount:
    """One code of one GPU: how often each source told of it, and when an error was last new (Unix time)."""

    told: Counter[str] = field(default_factory=Counter)
    last: float = 0.0

    @property
    def count(self) -> int:
        """Errors: each source tells an error once or misses it, so the one that told most is nearest the truth."""
        return max(self.told.values(), default=0)


class XidCounts:
    """Xid errors by GPU and code. Times are Unix times."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], XidCount] = {}

    def record(self, source: str, uuid: str, code: int, time: float) -> str:
        """Take in what `source` tells; "" or the reason why it is not counted."""
        if not 0 < code <= _HIGHEST_CODE:
            return NO_CODE
        count = self._counts.get((uuid, code))
        if count is None:
            if sum(known == uuid for known, _ in self._counts) >= _MOST_CODES:
                return TOO_MANY
            count = self._counts[uuid, code] = XidCount()
        before = count.count
        if time - count.last > _QUIET:
            # Whoever missed an error long ago must not have its next one taken for an echo.
            for known in count.told:
                count.told[known] = before
            count.told[source] = before
        count.told[source] += 1
        if count.count > before:
            count.last = max(count.last, time)
        return ""

    def __iter__(self) -> Iterator[tuple[str, int, XidCount]]:
        """GPU, code and count, in order."""
        return (
            (uuid, code, count)
            for (uuid, code), count in sorted(self._counts.items(), key=lambda item: item[0])
        )

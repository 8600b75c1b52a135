"""How far the preparation of the dataset is.

TRL tokenizes inside `SFTTrainer.__init__` and tells nobody but a progress bar. `datasets` makes all its bars
from one class; while a bar runs, its counts are passed on. The bars may be disabled: only their calls matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, float | None], None]
"""Takes what is being done and the part of it that is done (0 to 1, None when the total is unknown)."""

MIN_INTERVAL = 0.5

_STEPS = {
    "Generating": "reading the dataset",
    "Applying": "formatting",
    "Converting": "converting to chat format",
    "Adding": "adding end tokens",
    "Tokenizing": "tokenizing",
    "Building": "building labels",
    "Truncating": "truncating",
    "Packing": "packing",
    "Dropping": "dropping empty rows",
    "Filter": "filtering",
}
"""First words of the bars of `datasets` and TRL. Others are not quoted: a description is free text."""


@contextmanager
def dataset_progress(report: Report) -> Iterator[None]:
    """Call `report` for every bar of `datasets`: at its begin and end, and at most twice a second between."""
    from datasets.utils import tqdm

    original_init, original_update, original_close = tqdm.__init__, tqdm.update, tqdm.close

    def init(bar: Any, *args: Any, **kwargs: Any) -> None:
        original_init(bar, *args, **kwargs)
        words = (kwargs.get("desc") or "").split()
        bar.tunewatch = _Bar(
            _STEPS.get(words[0] if words else "", "preparing the dataset"), kwargs.get("total"), report
        )

    def update(bar: Any, n: float | None = 1) -> Any:
        bar.tunewatch.advance(n or 0)
        return original_update(bar, n)

    def close(bar: Any) -> None:
        bar.tunewatch.finish()
        original_close(bar)

    tqdm.__init__, tqdm.update, tqdm.close = init, update, close
    try:
        yield
    finally:
        tqdm.__init__, tqdm.update, tqdm.close = original_init, original_update, original_close


class _Bar:
    def __init__(self, step: str, total: float | None, report: Report) -> None:
        self._step, self._total, self._report = step, total, report
        self._done = 0.0
        self._last = time.monotonic()
        self._finished = False
        report(step, 0.0 if total else None)

    def advance(self, n: float) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._last >= MIN_INTERVAL:
            self._last = now
            self._report(self._step, self._ratio())

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._report(self._step, self._ratio())

    def _ratio(self) -> float | None:
        return min(1.0, self._done / self._total) if self._total else None

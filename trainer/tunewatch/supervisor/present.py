"""What the detectors are told of the present, taken from a run's record and its output folder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tunewatch.health import Disk, Saves, Work
from tunewatch.supervisor.checkpoints import Checkpoint, newest_complete
from tunewatch.supervisor.record import Record


def work_by_rank(pulses: Mapping[int, Mapping[str, float]]) -> dict[int, Work]:
    """What each rank of this machine has done."""
    return {
        rank: Work(
            steps=pulse["step_seconds_count"],
            seconds=pulse["step_seconds_sum"],
            tokens=None if math.isnan(pulse["tokens_all_total"]) else pulse["tokens_all_total"],
            data=pulse["data_seconds"],
            compute=pulse["compute_seconds"],
        )
        for rank, pulse in pulses.items()
    }


def saves_of(record: Record) -> Saves:
    """When the training saves, by its arguments as they took effect; by the epoch's length where it saves by epochs."""
    arguments, main = record.effective, record.main
    strategy = arguments.get("save_strategy")
    every = None
    if strategy == "steps":
        every = interval(arguments.get("save_steps"))
    elif strategy == "epoch" and main is not None and main["epoch"] > 0 and main["step"] > 0:
        every = max(1, round(main["step"] / main["epoch"]))
    limit = record.save_total_limit
    if limit and (arguments.get("load_best_model_at_end") or strategy == "best"):
        limit = max(2, limit)  # the best one stays beside the newest
    return Saves(strategy, every, record.max_steps, limit or None)


def interval(value: object) -> int | None:
    """Steps between two of a kind; a share of the training (below 1) is resolved by the trainer, not by us."""
    return int(value) if isinstance(value, (int, float)) and value >= 1 else None


class SettledDisk:
    """The output folder's disk as of the last look that came back while nothing was being written to it.

    In the middle of a save there may be one checkpoint too many, and the disk is fuller than it will be.
    """

    def __init__(self) -> None:
        self.disk = Disk()
        self._looked = 0
        self._was_writing = False

    def look(
        self,
        number: int,
        found: Sequence[Checkpoint] | None,
        free: float | None,
        inodes: float | None,
        *,
        writing: bool,
    ) -> None:
        """Take in the look of that number, and whether a checkpoint is being written now."""
        if free is None:
            self.disk = Disk()
        elif number != self._looked and not writing and not self._was_writing:
            newest = newest_complete(found or ())
            self.disk = Disk(
                free=free,
                inodes=inodes,
                size=newest.size_bytes if newest else None,
                files=newest.files if newest else None,
                present=sum(item.complete for item in found or ()),
            )
        self._looked, self._was_writing = number, writing

"""What the detectors that look at the clock need to know of the present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """What one rank has done since its process began, as its pulse counts it.

    `steps` that ended and their `seconds`, evaluation and saving taken out; `tokens` given to it, padding included
    (None is unknown); `data` and `compute` are the seconds of these two phases.
    """

    steps: float
    seconds: float
    tokens: float | None
    data: float
    compute: float


@dataclass(frozen=True)
class Saves:
    """When a training saves, as far as its arguments tell.

    `strategy` is that of transformers (no, steps, epoch, best; None is unknown), `every` the steps between two saves,
    `last` the training's last step, at which it saves too, and `keep` how many checkpoints it leaves.
    """

    strategy: str | None = None
    every: int | None = None
    last: int | None = None
    keep: int | None = None

    @property
    def only_at_the_end(self) -> bool:
        """Whether nothing is saved before the last step, or not even then."""
        if self.strategy == "no":
            return True
        return self.every is not None and self.last is not None and self.every >= self.last

    def latest(self, step: int) -> int | None:
        """The last step up to `step` at which it should have saved; None where that is not known, or there is none."""
        if self.every is None:
            return None
        if self.last is not None and step >= self.last:
            return self.last
        return step // self.every * self.every or None

    def to_come(self, step: int) -> int | None:
        """How many saves are still to come after `step`; None where that is not known."""
        if self.strategy == "no":
            return 0
        if self.every is None or self.last is None:
            return None
        return max(0, -(-self.last // self.every) - step // self.every) if step < self.last else 0

    def nth(self, step: int, number: int) -> int | None:
        """The step of the save that is the so manieth after `step`, counted from 1."""
        if self.every is None or self.last is None:
            return None
        return min(self.last, (step // self.every + number) * self.every)


@dataclass(frozen=True)
class Disk:
    """The disk of the output folder as the last look found it, no save being under way; None is unknown.

    `size` and `files` are those of the newest complete checkpoint, `present` counts the complete ones. `inodes` is how
    many more files fit, None where nothing limits them.
    """

    free: float | None = None
    inodes: float | None = None
    size: float | None = None
    files: int | None = None
    present: int = 0


@dataclass(frozen=True)
class Moment:
    """What the detectors need to know of the present; times are CLOCK_MONOTONIC seconds. None is unknown, and raises
    nothing.

    `unsaved_seconds`: time of steps since the last complete checkpoint; `save_seconds_apart`: the usual time between
    two of them; `saved_step`: the last step of which a save ended or a complete checkpoint lies there; `writing`:
    whether a checkpoint folder is there that is not complete; `broken_checkpoint`: the name of the newest one when it
    is not complete and is not being written, and `good_checkpoint` that of the newest complete one; `checkpoint_steps`:
    the steps of all complete ones. `behind` says
    which rank the others wait for, "" where none does, and `last_in_step` names it where it is the only one that has
    not come as far in the step as the others. `activity` is what it prepares, as in a phase event. `left_seconds` is
    how long the rest of the steps takes, pauses included, and `deadline` when the run's time is over.
    """

    now: float
    phase: str
    detail: str
    last_activity: float
    step: int | None
    first_step: bool
    seconds_per_step: float | None
    unsaved_seconds: float | None = None
    save_seconds_apart: float | None = None
    saved_step: int | None = None
    writing: bool = False
    broken_checkpoint: str | None = None
    good_checkpoint: str | None = None
    checkpoint_steps: frozenset[int] | None = None
    behind: str = ""
    last_in_step: int | None = None
    activity: str | None = None
    max_steps: int | None = None
    session_steps: float = 0.0
    left_seconds: float | None = None
    deadline: float | None = None
    saves: Saves = field(default_factory=Saves)
    disk: Disk = field(default_factory=Disk)
    ranks: Mapping[int, Work] = field(default_factory=dict)

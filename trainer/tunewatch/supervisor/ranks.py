"""Which rank holds up the others: they wait for each other in the collectives, so a hang of one is a hang of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from tunewatch.health.life import WAITING
from tunewatch.probe.pulse import PHASES

_ORDER = ("prepare", "evaluate", "save", "data", "compute", "package")
"""What follows upon a step's end, in its order."""


class Laggard(NamedTuple):
    """A rank that the others wait for: `doing` is its phase in words, `step` the last step that it finished."""

    rank: int
    doing: str
    step: int | None

    def __str__(self) -> str:
        after = f" after step {self.step}" if self.step is not None else ""
        return f"rank {self.rank} is behind: {self.doing}{after}"


def laggard(pulses: Mapping[int, Mapping[str, float]]) -> Laggard | None:
    """The rank that has come least far: by its steps, then by its phase, then within its step; None where all stand
    alike, or there is one only. It means something only while nothing moves: a moment ago it may have been another."""
    reached = {rank: _how_far(pulse) for rank, pulse in pulses.items()}
    if len(set(reached.values())) < 2:
        return None
    rank = min(reached, key=lambda one: (reached[one], one))
    pulse = pulses[rank]
    step = None if math.isnan(pulse["step"]) else int(pulse["step"])
    return Laggard(rank, WAITING[PHASES[int(pulse["phase"])]], step)


def last_in_step(pulses: Mapping[int, Mapping[str, float]]) -> int | None:
    """The rank that alone is not as far in the step as the others; None where there is none, or not all are in it."""
    stands = {(pulse["step"], PHASES[int(pulse["phase"])]) for pulse in pulses.values()}
    if len(pulses) < 2 or len(stands) > 1 or stands.pop()[1] != "compute":
        return None
    last, second, *_ = sorted(pulses, key=lambda rank: pulses[rank]["step_stage"])
    return last if pulses[last]["step_stage"] < pulses[second]["step_stage"] else None


def _how_far(pulse: Mapping[str, float]) -> tuple[float, int, float]:
    phase = PHASES[int(pulse["phase"])]
    step = -1.0 if math.isnan(pulse["step"]) else pulse["step"]
    return step, _ORDER.index(phase), pulse["step_stage"] if phase == "compute" else 0.0

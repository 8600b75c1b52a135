"""What a scenario makes of one simulated card at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class CardState:
    """What holds for one card at one moment; None and {} where the scenario says nothing.

    `throttle` is the share of time by reason now, `throttled` the seconds by reason so far, `ecc` the errors
    by kind so far, `run_memory` GiB by run.
    """

    lost: bool = False
    reset_required: bool = False
    recovery_action: str = "none"
    temperature: float | None = None
    utilization: float | None = None
    power: float | None = None
    run_memory: Mapping[str, float] = field(default_factory=dict)
    throttle: Mapping[str, float] = field(default_factory=dict)
    throttled: dict[str, float] = field(default_factory=dict)
    ecc: dict[str, float] = field(default_factory=dict)

"""The numbers the detectors compare with, each with its default."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tunewatch.health.verdict import SIGNALS


class ThresholdError(ValueError):
    """A threshold or signal that there is not, or a limit that can not be; the text says which, and what is allowed."""


@dataclass(frozen=True)
class Thresholds:
    """Limits of the detectors; a `log` is one training log line. What each is for stands with its detector.

    `off` names signals that are never raised. Raises ThresholdError on a name that is no signal, and on a limit that is
    not above 0.
    """

    nonfinite_streak: int = 3
    nonfinite_many: int = 10
    nonfinite_window: int = 100
    dead_loss: float = 0.05
    no_gradient_start: int = 5
    no_gradient_later: int = 30
    scaler_search_steps: int = 50
    scaler_search_skips: int = 25
    skipped_share: float = 0.2
    schedule_tail: float = 0.98
    lr_jump: float = 1.5
    lr_jump_of_peak: float = 0.25
    lr_fallen: float = 0.95
    lr_risen: float = 1.05
    lr_risen_of_peak: float = 0.05
    flat_logs: int = 30
    flat_ratio: float = 0.99
    flat_best_ratio: float = 0.97
    flat_sigma: float = 0.3
    still_logs: int = 10
    still_spread: float = 0.003
    collapse_share: float = 0.02
    collapse_loss: float = 0.02
    collapse_accuracy: float = 0.99
    collapse_of_eval: float = 0.01
    data_logs: int = 3
    huge_loss: float = 1000.0
    spike_sigma: float = 4.5
    spike_ratio: float = 0.5
    spike_least: float = 0.1
    spike_floor: float = 0.02
    spikes_sigma: float = 6.0
    spike_window: int = 10
    spike_hits: int = 2
    burst_sigma: float = 2.8
    burst_floor: float = 0.002
    diverging_ratio: float = 0.3
    diverging_least: float = 0.15
    diverging_of_first: float = 2.5
    diverging_floor: float = 0.01
    diverging_sigma: float = 4.5
    diverging_clear_ratio: float = 0.2
    diverging_clear_sigma: float = 8.0
    diverging_logs: int = 10
    grad_sigma: float = 6.0
    grad_factor: float = 10.0
    grad_hits: int = 3
    grad_burst_sigma: float = 2.5
    overfit_ratio: float = 1.10
    overfit_least: float = 0.01
    overfit_evals: int = 2
    overfit_sigma: float = 2.5
    rising_evals: int = 3
    rising_ratio: float = 1.05
    loss_scale_tolerance: float = 0.25
    writers_score: float = 2.4
    risk_seconds: float = 1800.0
    risk_factor: float = 2.5
    risk_without: float = 14400.0
    overdue_steps: int = 2
    overdue_seconds: float = 300.0
    room_margin: float = 0.05
    late_steps: int = 20
    late_seconds: float = 60.0
    pace_steps: int = 5
    pace_seconds: float = 60.0
    pace_windows: int = 5
    slow_ratio: float = 0.6
    starved_share: float = 0.3
    starved_wait: float = 0.05
    slow_rank_share: float = 0.3
    slow_rank_wait: float = 0.1
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.off - SIGNALS.keys()):
            near = _nearest(unknown[0], SIGNALS)
            raise ThresholdError(
                f"no such signal: {', '.join(unknown)}; there are {', '.join(SIGNALS)}{near}"
            )
        for name in self.names():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ThresholdError(f"threshold {name}: {value!r} is not a number above 0")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The limits, without `off`."""
        return tuple(field.name for field in fields(cls) if field.name != "off")

    @classmethod
    def chosen(cls, limits: Mapping[Any, Any] | None = None, off: Iterable[Any] = ()) -> Thresholds:
        """The defaults with what a user set; raises ThresholdError, which names what is wrong and the nearest name."""
        names, values = cls.names(), dict[str, Any]()
        for name, value in (limits or {}).items():
            if name not in names:
                raise ThresholdError(
                    f"no such threshold: {name}; there are {', '.join(names)}{_nearest(str(name), names)}"
                )
            values[name] = _limit(name, value, whole=isinstance(getattr(cls, name), int))
        return cls(**values, off=frozenset(map(str, off)))

    def set_by_user(self) -> dict[str, float]:
        """The limits that are not the defaults."""
        return {
            name: getattr(self, name)
            for name in self.names()
            if getattr(self, name) != getattr(Thresholds, name)
        }


def _limit(name: str, value: Any, *, whole: bool) -> float:
    """A limit as a number; what counts logs, steps or evaluations is a whole one."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else value
    if not 0 < number < math.inf or (whole and number != int(number)):
        raise ThresholdError(
            f"threshold {name}: {value!r} is not a {'whole ' if whole else ''}number above 0"
        )
    return int(number) if whole else float(number)


def _nearest(name: str, valid: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""

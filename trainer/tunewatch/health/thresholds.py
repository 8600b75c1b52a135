"""The numbers the detectors compare with, each with its default."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tunewatch.health.verdict import SIGNALS


@dataclass(frozen=True)
class Thresholds:
    """Limits of the detectors; a `log` is one training log line. What each is for stands with its detector.

    `off` names signals that are never raised. Raises ValueError on a name that is no signal, and on a limit that is
    not above 0.
    """

    nonfinite_streak: int = 3
    dead_loss: float = 0.05
    no_gradient_start: int = 5
    no_gradient_later: int = 30
    scaler_search_steps: int = 50
    scaler_search_skips: int = 25
    skipped_share: float = 0.2
    schedule_tail: float = 0.98
    lr_jump: float = 1.5
    lr_jump_of_peak: float = 0.25
    lr_fallen: float = 0.8
    lr_risen: float = 1.25
    lr_risen_of_peak: float = 0.1
    flat_logs: int = 30
    flat_ratio: float = 0.99
    flat_best_ratio: float = 0.97
    flat_sigma: float = 0.4
    still_logs: int = 10
    still_spread: float = 0.003
    data_logs: int = 3
    huge_loss: float = 100.0
    spike_sigma: float = 5.0
    spike_ratio: float = 0.5
    spike_least: float = 0.1
    spike_floor: float = 0.05
    spikes_sigma: float = 6.0
    spike_window: int = 20
    spike_hits: int = 2
    burst_sigma: float = 2.0
    burst_floor: float = 0.02
    diverging_ratio: float = 0.3
    diverging_least: float = 0.15
    diverging_sigma: float = 4.0
    diverging_logs: int = 10
    grad_sigma: float = 6.0
    grad_factor: float = 10.0
    grad_hits: int = 3
    grad_burst_sigma: float = 2.5
    overfit_ratio: float = 1.10
    overfit_least: float = 0.01
    overfit_evals: int = 2
    overfit_sigma: float = 2.0
    rising_evals: int = 3
    rising_ratio: float = 1.05
    loss_scale_tolerance: float = 0.25
    writers_score: float = 2.4
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.off - SIGNALS.keys()):
            raise ValueError(f"no such signal: {', '.join(unknown)}; there are {', '.join(SIGNALS)}")
        for name in self.names():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"threshold {name}: {value!r} is not a number above 0")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The limits, without `off`."""
        return tuple(field.name for field in fields(cls) if field.name != "off")

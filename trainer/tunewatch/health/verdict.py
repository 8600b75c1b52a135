"""What can be found out about a run, and what holds of it now."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Any

LEVELS = ("info", "attention", "bad")
"""Weakest first. `info` is a note: it never changes the health of a run."""

SIGNALS: dict[str, str] = {
    # numbers that are none
    "nonfinite": "bad",
    "nonfinite_isolated": "attention",
    "norm_overflow": "info",
    "fp16_overflow": "bad",
    "fp16_skips": "info",
    # nothing is learned
    "zero_loss": "bad",
    "labels_masked": "bad",
    "nothing_trainable": "bad",
    "no_gradient": "bad",
    "lr_zero": "bad",
    "lr_zero_expected": "info",
    "flat": "attention",
    "collapsed_loss": "attention",
    "data_not_consumed": "attention",
    "settings_without_effect": "attention",
    # the shape of the curve
    "loss_huge": "attention",
    "loss_scale": "attention",
    "spike": "info",
    "spikes": "attention",
    "diverging": "bad",
    "grad_spike": "info",
    "grad_explosion": "attention",
    # evaluation
    "eval_nonfinite": "attention",
    "no_best_checkpoint": "attention",
    "overfitting": "attention",
    "eval_rising": "attention",
    # sessions and schedules
    "resume_lost": "bad",
    "lr_restarted": "attention",
    "schedule_reshaped": "attention",
    "arguments_overridden": "info",
    "never_logs": "info",
    "step_back": "info",
    "two_writers": "attention",
    # life, disk and hub
    "stalled": "bad",
    "hub_push_failed": "attention",
    "checkpoint_broken": "attention",
    "work_at_risk": "attention",
    "checkpoint_overdue": "attention",
    "will_not_fit": "attention",
    # pace
    "slow": "attention",
    "data_starved": "attention",
    "slow_rank": "attention",
}
"""Every signal there is, with its level."""

CLEAN_LOGS = 10
"""Training logs after which a signal whose condition no longer holds is taken back."""


@dataclass(frozen=True)
class Verdict:
    """One finding about a run.

    `signal` is a name of SIGNALS, `level` its level, `step` where it was seen (None before the first step),
    `message` one sentence of what is the matter and `advice` one of what to do. Neither quotes data.
    """

    signal: str
    level: str
    step: int | None
    message: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Findings:
    """The verdicts that hold now. A detector reports its condition; this keeps the verdict a while longer.

    `hold` says the condition is true, `release` that it no longer is: the verdict then stays for CLEAN_LOGS training
    logs, so that no signal flickers and no scrape misses it. `note` is both at once, for what happens at one log.
    `drop` takes a verdict back now. The step of a verdict is that of its first report. Signals that are `off` are known
    all the same, for a stall or damaged weights tell how a run ended; they are only in no verdict.
    """

    def __init__(self, off: frozenset[str] = frozenset()) -> None:
        self._off = off
        self._active: dict[str, Verdict] = {}
        self._released: dict[str, int] = {}
        """Logs since the condition of an active signal became false."""

    def __contains__(self, signal: object) -> bool:
        return signal in self._active

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for verdict in self._active.values() if verdict.signal not in self._off]

    @property
    def signals(self) -> Set[str]:
        """The names of `verdicts`; cheap enough to ask after each log."""
        return self._active.keys() - self._off if self._off else self._active.keys()

    def hold(self, signal: str, step: int | None, message: str, advice: str) -> None:
        known = self._active.get(signal)
        self._active[signal] = Verdict(
            signal, SIGNALS[signal], known.step if known else step, message, advice
        )
        self._released.pop(signal, None)

    def note(self, signal: str, step: int | None, message: str, advice: str) -> None:
        self.drop(signal)
        self.hold(signal, step, message, advice)
        self.release(signal)

    def is_held(self, signal: str) -> bool:
        """Whether the condition itself is true now."""
        return signal in self._active and signal not in self._released

    def release(self, signal: str) -> None:
        if signal in self._active:
            self._released.setdefault(signal, 0)

    def drop(self, *signals: str) -> None:
        for signal in signals:
            self._active.pop(signal, None)
            self._released.pop(signal, None)

    def keep_only(self, *signals: str) -> None:
        self.drop(*(self._active.keys() - set(signals)))

    def next_log(self) -> None:
        """Another training log has come in: what was released grows older."""
        if not self._released:
            return
        for signal, age in list(self._released.items()):
            if age >= CLEAN_LOGS:
                self.drop(signal)
            else:
                self._released[signal] = age + 1

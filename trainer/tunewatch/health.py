"""Verdicts about one run: computed online on its events and pulses, with constant memory.

Every verdict about a single run comes from here: the supervisor and the tests feed the same
detectors. A signal has one fixed level, so an alert is a thin rule on `tunewatch_health{signal}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

LEVELS = ("info", "attention", "bad")

SIGNALS: dict[str, str] = {
    "nonfinite": "bad",
    "nonfinite_isolated": "attention",
    "eval_nonfinite": "attention",
    "stalled": "bad",
    "resume_lost": "bad",
}
"""Every signal there is, with its level."""

MAX_BROKEN_EVALS = 32
"""Evaluation sets that are remembered as broken."""

CLEAN_STEPS = 10
"""Steps without a fault after which a signal about single steps is taken back."""


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


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, a run may show no sign of life before it is called stalled.

    `step` and `step_factor`: after the first step the limit is the larger of `step` and `step_factor` times the
    run's own recent step time. Evaluation and saving have the larger of their limit and three times the longest
    one so far. Sources of the defaults: on real logs a limit of 10 x the usual gap (at least 300 s) never fired on
    a healthy run, while evaluations of 1800 s and more are common.
    """

    prepare: float = 3600.0
    first_step: float = 1800.0
    step: float = 300.0
    step_factor: float = 10.0
    evaluate: float = 1800.0
    save: float = 1800.0
    package: float = 1800.0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class Moment:
    """What the detectors need to know of the present; times are CLOCK_MONOTONIC seconds."""

    now: float
    phase: str
    detail: str
    last_activity: float
    step: int | None
    first_step: bool
    seconds_per_step: float | None


class Health:
    """The verdicts about one run, kept up to date by `event` and `tick`."""

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self.deadline: float | None = None
        self._active: dict[str, Verdict] = {}
        self._longest = {"evaluate": 0.0, "save": 0.0}
        self._precision = "fp32"
        self._sees_each_step = False
        self._streak = 0
        self._streak_start: int | None = None
        self._last_bad_step = -1
        self._broken_evals: set[str] = set()
        self._known = False

    @property
    def verdicts(self) -> list[Verdict]:
        """What holds now, the worst first."""
        return sorted(self._active.values(), key=lambda verdict: -LEVELS.index(verdict.level))

    @property
    def level(self) -> str:
        """One word for the run: ok, attention, bad, or unknown while nothing was heard of it."""
        worst = max((LEVELS.index(verdict.level) for verdict in self._active.values()), default=0)
        if worst:
            return LEVELS[worst]
        return "ok" if self._known else "unknown"

    def is_active(self, signal: str) -> bool:
        return signal in self._active

    @property
    def nonfinite_since(self) -> int | None:
        """First step of a streak of damaged steps that goes on; None when the last step was sound."""
        return self._streak_start if self._streak and "nonfinite" in self._active else None

    # -- on events ----------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the run folder."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _on_train_begin(self, event: Mapping[str, Any]) -> None:
        self._known = True
        self._precision = event.get("effective", {}).get("precision", "fp32")
        self._sees_each_step = event.get("nan_visibility") == "each step"
        self._end_streak()
        self._last_bad_step = -1
        self._broken_evals.clear()
        for signal in ("nonfinite", "nonfinite_isolated", "eval_nonfinite", "resume_lost"):
            self._active.pop(signal, None)
        restored = event.get("restored") or {}
        lost = [part for part in ("optimizer", "scheduler") if restored.get(part) is False]
        if event.get("step") and lost:
            what = " and ".join("learning rate schedule" if part == "scheduler" else part for part in lost)
            self._raise(
                "resume_lost",
                event["step"],
                f"The resume at step {event['step']} did not restore the {what}: it starts anew.",
                "Stop, and resume from a checkpoint that holds optimizer.pt and scheduler.pt.",
            )

    def _on_nonfinite(self, event: Mapping[str, Any]) -> None:
        self._bad_step(
            event.get("step"),
            loss=bool(event.get("loss")),
            norm=bool(event.get("grad_norm")),
            norm_is_sound=bool(event.get("norm_seen", True)),
        )

    def _on_finite(self, event: Mapping[str, Any]) -> None:
        self._end_streak()

    def _on_log(self, event: Mapping[str, Any]) -> None:
        self._known = True
        nonfinite, values, step = event.get("nonfinite") or {}, event.get("values") or {}, event.get("step")
        self._evaluations(step, values, nonfinite)
        if self._sees_each_step:
            return
        loss, norm = "loss" in nonfinite, "grad_norm" in nonfinite
        if loss or norm:
            # The trainer's filter logs a dead loss as 0.
            self._bad_step(
                step, loss=loss or values.get("loss") == 0.0, norm=norm, norm_is_sound="grad_norm" in values
            )
        elif "loss" in values:
            self._end_streak()

    def _evaluations(self, step: int | None, values: Mapping[str, Any], nonfinite: Mapping[str, str]) -> None:
        """Each evaluation set has a log of its own: a sound one does not heal another."""
        for key in values:
            self._broken_evals.discard(key)
        for key, what in nonfinite.items():
            if _is_eval_loss(key) and len(self._broken_evals) < MAX_BROKEN_EVALS:
                self._broken_evals.add(key)
                self._raise(
                    "eval_nonfinite", step, f"The evaluation loss ({key}) at step {step} is {what}.",
                    "Check the evaluation data for rows without labels; the best checkpoint can not be told.",
                )  # fmt: skip
        if not self._broken_evals:
            self._active.pop("eval_nonfinite", None)

    def _on_evaluate(self, event: Mapping[str, Any]) -> None:
        self._remember("evaluate", event.get("seconds"))

    def _on_save(self, event: Mapping[str, Any]) -> None:
        self._remember("save", event.get("seconds"))

    def _remember(self, phase: str, seconds: Any) -> None:
        if isinstance(seconds, (int, float)) and math.isfinite(seconds):
            self._longest[phase] = max(self._longest[phase], seconds)

    def _end_streak(self) -> None:
        self._streak, self._streak_start = 0, None

    def _bad_step(
        self, step: int | None, *, loss: bool, norm: bool, norm_is_sound: bool | None = None
    ) -> None:
        """One step whose loss or gradient norm was not finite, and that the fp16 scaler did not skip.

        A non-finite gradient is in the weights at once. A non-finite loss whose gradients stayed finite (the user
        zeroes them, say) did no harm yet. Under fp16 a scaler that we can not see (DeepSpeed's) may have skipped
        the step: there it takes three in a row. Several ranks may report the same step.
        """
        if not self._streak:
            self._streak_start = step
        if not self._streak or step != self._last_bad_step:
            self._streak += 1
        self._last_bad_step = step if step is not None else self._last_bad_step
        sound = self._sees_each_step if norm_is_sound is None else norm_is_sound
        tolerant = self._precision == "fp16" or (loss and not norm and sound)
        what = "loss and gradient norm" if loss and norm else "loss" if loss else "gradient norm"
        if tolerant and self._streak < 3:
            self._raise(
                "nonfinite_isolated", step,
                f"The {what} of step {step} is not finite; nothing shows that it reached the weights.",
                "Keep it running, and look at the data of that step if it comes again.",
            )  # fmt: skip
            return
        self._active.pop("nonfinite_isolated", None)
        if "nonfinite" not in self._active:
            self._raise(
                "nonfinite", self._streak_start,
                f"The {what} is NaN or infinite since step {self._streak_start}: the weights are damaged.",
                "Stop it. Resume from a checkpoint before that step with a lower learning rate or bf16.",
            )  # fmt: skip

    # -- on time ------------------------------------------------------------------------------------------

    def tick(self, moment: Moment) -> None:
        """Judge the time since the last sign of life, and take back what has healed."""
        self._known = True
        allowed = self.allowed(moment)
        self.deadline = moment.last_activity + allowed
        silent = moment.now - moment.last_activity
        if silent > allowed:
            self._raise("stalled", moment.step, _stall_message(moment, silent), _stall_advice(moment))
        else:
            self._active.pop("stalled", None)
        step = moment.step
        if step is not None and self._streak == 0 and step - self._last_bad_step >= CLEAN_STEPS:
            self._active.pop("nonfinite", None)
            self._active.pop("nonfinite_isolated", None)

    def allowed(self, moment: Moment) -> float:
        """Seconds of silence that the run's phase and own pace excuse."""
        patience = self.patience
        match moment.phase:
            case "prepare":
                return patience.prepare
            case "evaluate":
                return max(patience.evaluate, 3 * self._longest["evaluate"])
            case "save":
                return max(patience.save, 3 * self._longest["save"])
            case "package":
                return patience.package
        if moment.detail == "skipping data" and moment.phase == "data" and moment.first_step:
            return patience.prepare
        if moment.first_step or moment.seconds_per_step is None:
            return patience.first_step
        return max(patience.step, patience.step_factor * moment.seconds_per_step)

    def silence(self) -> None:
        """The run has ended: time proves nothing any more."""
        self.deadline = None
        self._active.pop("stalled", None)

    def _raise(self, signal: str, step: int | None, message: str, advice: str) -> None:
        known = self._active.get(signal)
        self._active[signal] = Verdict(
            signal, SIGNALS[signal], known.step if known else step, message, advice
        )


def _is_eval_loss(key: str) -> bool:
    return key.startswith("eval_") and key.endswith("loss")


_WAITING = {
    "prepare": "while preparing",
    "data": "waiting for the next batch",
    "compute": "inside a step",
    "evaluate": "in an evaluation",
    "save": "saving a checkpoint",
    "package": "after the training",
}


def _stall_message(moment: Moment, silent: float) -> str:
    where = _WAITING.get(moment.phase, moment.phase)
    if moment.detail and moment.phase in ("prepare", "save"):
        where += f" ({moment.detail})"
    if moment.phase in ("data", "compute") and moment.first_step:
        return f"No first step yet: no sign of life for {human_duration(silent)}, {where}."
    after = f" after step {moment.step}" if moment.step is not None else ""
    return f"No sign of life for {human_duration(silent)}{after}, {where}."


def _stall_advice(moment: Moment) -> str:
    match moment.phase:
        case "prepare":
            return "Look at the log; a hanging tokenization often goes away with dataset_num_proc=1."
        case "data":
            return "Look at the data loader: slow storage, dead workers, or ranks with unequal data."
        case "save":
            return "Look at the disk of output_dir: full, slow, or a network mount that hangs."
        case "evaluate":
            return "Look at the GPU and at compute_metrics; a smaller evaluation set helps."
    return "Look at the GPU and the ranks (py-spy dump); if it does not come back, stop it and resume."


def human_duration(seconds: float) -> str:
    """Spell a duration with its two largest units: 42 s, 5 min 30 s, 3 h 5 min, 2 d 4 h."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total} s"
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s"

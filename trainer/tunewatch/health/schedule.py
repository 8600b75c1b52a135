"""The learning rate and the length of the schedule, within a session and across resumes."""

from __future__ import annotations

import math
from collections import deque

from tunewatch.health.reading import Reading, finite
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

MAX_RATES = 512
"""Logged learning rates that are kept, to compare with those after a resume."""


class ZeroRate:
    """`lr_zero`, `lr_zero_expected`.

    A learning rate of exactly 0 is usual in the warm-up, in the last 2 % of the steps (`schedule_tail` 0.98), and while
    the fp16 scaler skips steps (the scheduler waits with it): a note. Two logs of it elsewhere are bad. Where neither
    the warm-up nor the length is known (a log read on its own) it takes three. Source: the zeros that transformers'
    schedules log. Can not see: a rate that is only too small, or that of a second group of parameters.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._training = training
        self._zeros = 0

    def log(self, reading: Reading, *, skipping: bool) -> None:
        if reading.lr is None:
            return
        if reading.lr != 0.0:
            if self._zeros:
                self._zeros = 0
                self._findings.release("lr_zero")
            return
        training, step = self._training, reading.step
        warm = step is not None and training.warmup_steps is not None and step <= training.warmup_steps
        explained = warm or skipping or reading.norm_bad is not None
        if explained or training.at_the_end(step, self._limits.schedule_tail):
            self._expected(step)
            return
        self._zeros += 1
        known = training.max_steps is not None and training.warmup_steps is not None
        if self._zeros < (2 if known else 3):
            self._expected(step)
            return
        self._findings.drop("lr_zero_expected")
        self._findings.hold(
            "lr_zero", step,
            f"The learning rate is 0 since {self._zeros} logs, outside of warm-up and end: nothing is learned.",
            "Stop it, check the learning rate and its schedule, and resume or restart.",
        )  # fmt: skip

    def _expected(self, step: int | None) -> None:
        self._findings.note(
            "lr_zero_expected", step,
            "The learning rate is 0 for now, as it is at the first and the last step of many schedules.",
            "Keep it running.",
        )  # fmt: skip


class Restart:
    """`lr_restarted`: the learning rate rises again, or a resume does not go on where it was.

    Within a log: peak p, trough t since the peak; when t < `lr_fallen` (0.95) p, the rate is above `lr_risen` (1.05) t
    and t + `lr_risen_of_peak` (0.05) p. Off for schedules that are cyclic by name (`restart`, `cycl`).
    After a resume: the first rate is compared with the one logged before at that step, or with the last one before it;
    it is far off when the two differ by a factor of `lr_jump` (1.5) and by `lr_jump_of_peak` (0.25) of the highest rate
    seen. Silent in the warm-up. Source: no schedule of transformers rises again but the cyclic ones; limits chosen on
    public logs with and without a restart. Can not see: a restart on a plateau (constant schedules), which changes
    nothing, or within the first 5 % of the decay.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._training = Training()
        self._rates: deque[tuple[int, float]] = deque(maxlen=MAX_RATES)
        self._peak = 0.0
        self._trough = math.inf
        self._highest = 0.0
        self._awaited = False

    def begin(self, training: Training) -> None:
        self._training = training
        self._peak, self._trough = 0.0, math.inf
        self._awaited = training.step > 0 and bool(self._rates)
        if not training.step:
            self._rates.clear()
            self._highest = 0.0

    def past(self, step: int | None, rate: float | None) -> None:
        """A log of an earlier session."""
        if rate is None:
            return
        self._highest = max(self._highest, rate)
        if step is not None:
            self._rates.append((step, rate))

    def log(self, reading: Reading) -> None:
        rate, step = reading.lr, reading.step
        if rate is None:
            return
        if self._awaited:
            self._awaited = False
            self._compare(step, rate)
        if rate >= self._peak or rate > self._trough:
            self._follow(step, rate)
        else:
            self._trough = rate
        if rate > self._highest:
            self._highest = rate
        if step is not None:
            self._rates.append((step, rate))

    def _compare(self, step: int | None, rate: float) -> None:
        if step is None or step <= (self._training.warmup_steps or 0):
            return
        before = [(at, old) for at, old in reversed(self._rates) if at <= step]
        if not before:
            return
        at, old = max(before, key=lambda item: item[0])
        if self._far(rate, old):
            self._findings.hold(
                "lr_restarted", step,
                f"The learning rate was {old:.3g} at step {at} before the resume and is {rate:.3g} at step {step}.",
                "Stop it, and resume from a checkpoint that holds scheduler.pt, with the same schedule.",
            )  # fmt: skip

    def _far(self, rate: float, old: float) -> bool:
        low, high = min(rate, old), max(rate, old)
        return high - low > self._limits.lr_jump_of_peak * self._highest and high > self._limits.lr_jump * low

    def _follow(self, step: int | None, rate: float) -> None:
        """A rate that is no new trough."""
        limits, trough, peak = self._limits, self._trough, self._peak
        fell = trough < limits.lr_fallen * peak
        rises = rate > limits.lr_risen * trough and rate - trough > limits.lr_risen_of_peak * peak
        if fell and rises and not self._training.cyclic:
            self._findings.note(
                "lr_restarted", step,
                f"The learning rate rose again to {rate:.3g} after it had come down to {trough:.3g}.",
                "Check that the resume restored the schedule; resume with scheduler.pt if it did not.",
            )  # fmt: skip
        if rate >= peak or (fell and rises):
            self._peak, self._trough = rate, math.inf


class Resume:
    """`resume_lost`, `schedule_reshaped`, `arguments_overridden`, `never_logs`: facts of the start, which hold for the
    session.

    `resume_lost`: a resume that did not bring back the optimizer or the scheduler; said before the first step.
    `schedule_reshaped`: a resume whose number of steps is not that of the session before; the schedule is a function of
    it, so the learning rate bends there. `arguments_overridden`: logging, evaluation or saving every n steps, where the
    trainer took another n (of the checkpoint) than the arguments say. `never_logs`: more steps between two logs than
    there are steps (transformers logs every 500 unless it is told), so that no loss will be seen before the end.
    Source: the trainer's own arguments and state. Can not see: what a checkpoint held that is of the wrong run.
    """

    NAMES = (("logging_steps", "logs"), ("eval_steps", "evaluates"), ("save_steps", "saves"))

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._max_steps: int | None = None

    def begin(self, training: Training) -> None:
        if training.step:
            self._lost(training)
            self._reshaped(training)
        self._overridden(training)
        self._never_logs(training)
        self.past(training)

    def past(self, training: Training) -> None:
        """A training of an earlier session."""
        self._max_steps = training.max_steps

    def _never_logs(self, training: Training) -> None:
        apart = finite((training.effective or {}).get("logging_steps"))
        if apart is None or training.max_steps is None or apart <= training.max_steps:
            return
        self._findings.hold(
            "never_logs", training.step,
            f"It logs every {apart:.0f} steps and has {training.max_steps}: no loss will be seen before the end.",
            "Set logging_steps to a small share of the steps; NaN is seen all the same.",
        )  # fmt: skip

    def _lost(self, training: Training) -> None:
        restored = training.restored or {}
        lost = [part for part in ("optimizer", "scheduler") if restored.get(part) is False]
        if not lost:
            return
        what = " and ".join("learning rate schedule" if part == "scheduler" else part for part in lost)
        self._findings.hold(
            "resume_lost", training.step,
            f"The resume at step {training.step} did not restore the {what}: it starts anew.",
            "Stop, and resume from a checkpoint that holds optimizer.pt and scheduler.pt.",
        )  # fmt: skip

    def _reshaped(self, training: Training) -> None:
        old, new = self._max_steps, training.max_steps
        if old is None or new is None or old == new or training.restart:
            return
        self._findings.hold(
            "schedule_reshaped", training.step,
            f"The run was planned for {old} steps and goes on for {new}: the learning rate schedule has another shape.",
            "Keep it when you meant to change the length; else stop, and resume with the old one.",
        )  # fmt: skip

    def _overridden(self, training: Training) -> None:
        changes = []
        for name, does in self.NAMES:
            asked = finite((training.requested or {}).get(name))
            got = finite((training.effective or {}).get(name))
            if asked is not None and 0 < asked < 1 and training.max_steps is not None:
                asked = float(math.ceil(asked * training.max_steps))
            if asked is not None and got is not None and asked >= 1 and asked != got:
                changes.append(f"{does} every {got:g} steps and not every {asked:g}")
        if changes:
            self._findings.hold(
                "arguments_overridden", training.step,
                f"Not as asked for, the trainer {', '.join(changes)}.",
                "Keep it, or delete the numbers in the checkpoint's trainer_state.json before the next resume.",
            )  # fmt: skip

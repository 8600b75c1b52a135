"""Numbers that are none: NaN and infinity in the steps, and the steps that an fp16 scaler skips."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from tunewatch.health.reading import Reading, whole
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

CLEAN_STEPS = 10
"""Steps without a fault after which a signal about single steps is taken back, where each step is seen."""


class NonFinite:
    """`nonfinite`, `nonfinite_isolated`, `norm_overflow`.

    A gradient norm that is not finite is in the weights at once: bad at the first such step or log, however good its
    loss still looks (transformers' filter logs a dead loss as a flattering mean, or as exactly 0.0). Two cases do no
    harm by themselves; they are bad `nonfinite_streak` (3) times in a row, or `nonfinite_many` (10) times within
    `nonfinite_window` (100) steps (logs, where the steps are not seen):
    - fp16, or a precision that is not known: a scaler that looks for its scale may have skipped the step
      (`norm_overflow`, a note). Healthy public logs have one to three such lines, at most two in a row. A loss logged
      as 0.0 beside it leaves no doubt, unless the training optimizes a reward, where 0.0 is usual. A log during which
      the count of skipped steps grew is explained by that, and does not count (`fp16_overflow` judges the skips).
    - a loss that is not finite although the gradients stayed so (the user zeroes them): `nonfinite_isolated`.
    Where each step is seen, a sound one after fewer than three takes `nonfinite` back to `nonfinite_isolated`: somebody
    dropped the gradients in time.
    Where each step is seen (events `nonfinite`, `finite`) the logs are not judged a second time.
    Source: streaks and filters as measured on public logs and real trainings.
    Can not see: a damaged step between two logs when only the logs are seen.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._training = Training()
        self._streak = 0
        self._last_bad = -1
        self._rate: float | None = None
        self._logs = 0
        self._places: deque[tuple[int, int | None]] = deque(maxlen=max(1, int(limits.nonfinite_many)))
        """Of the last bad ones: the number of the step or log, and the step."""
        self.streak_start: int | None = None

    def begin(self, training: Training) -> None:
        self._training = training
        self._end_streak()
        self._last_bad = -1
        self._rate, self._logs = training.learning_rate, 0
        self._places.clear()

    def step(self, event: Mapping[str, Any]) -> None:
        """A `nonfinite` event: one step."""
        loss, norm = bool(event.get("loss")), bool(event.get("grad_norm"))
        harmless = loss and not norm and bool(event.get("norm_seen", True))
        step = whole(event.get("step"))
        self._bad(
            step, self._last_bad if step is None else step, loss=loss, norm=norm,
            tolerant=harmless or self._training.precision == "fp16",
        )  # fmt: skip

    def sound(self) -> None:
        """A `finite` event: the first sound step after such."""
        short = 0 < self._streak < self._limits.nonfinite_streak
        if short and self._findings.is_held("nonfinite") and not self._many(self._last_bad):
            self._recovered()
        self._end_streak()

    def log(self, reading: Reading, *, skipped: bool) -> None:
        """`skipped`: whether the scaler skipped steps since the log before."""
        if reading.lr is not None:
            self._rate = reading.lr
        if not (reading.train or reading.bad) or self._training.sees_each_step:
            return
        self._logs += 1
        if not reading.bad:
            if self._streak:
                self._end_streak()
            return
        loss, norm = reading.loss_bad is not None, reading.norm_bad is not None
        zero = norm and reading.loss == 0.0 and not reading.preference
        if skipped and not loss:
            self._overflow(reading.step)
            return
        harmless = loss and reading.norm is not None
        precision = self._training.precision
        scaled = precision == "fp16" or (precision is None and not loss)
        self._bad(
            reading.step, self._logs, loss=loss or zero, norm=norm,
            tolerant=(harmless or scaled) and not zero,
        )  # fmt: skip

    def tick(self, step: int | None) -> None:
        sound = self._training.sees_each_step and not self._streak
        if not sound or step is None or step - self._last_bad < CLEAN_STEPS:
            return
        if not self._many(step):
            self._findings.drop("nonfinite")
        self._findings.drop("nonfinite_isolated", "norm_overflow")

    @property
    def since(self) -> int | None:
        return self.streak_start if self._streak and "nonfinite" in self._findings else None

    def _many(self, now: int) -> bool:
        """Whether the last window before `now`, a step or log, holds too many."""
        places = self._places
        return len(places) == places.maxlen and now - places[0][0] < self._limits.nonfinite_window

    def _end_streak(self) -> None:
        self._streak, self.streak_start = 0, None
        for signal in ("nonfinite", "nonfinite_isolated", "norm_overflow"):
            self._findings.release(signal)

    def _bad(self, step: int | None, place: int, *, loss: bool, norm: bool, tolerant: bool) -> None:
        """One step or log that is not finite. Several ranks may report the same step."""
        if not self._streak:
            self.streak_start = step
        if not self._streak or step is None or step != self._last_bad:
            self._streak += 1
        if not self._places or self._places[-1][0] != place:
            self._places.append((place, step))
        self._last_bad = step if step is not None else self._last_bad
        what = "loss and gradient norm" if loss and norm else "loss" if loss else "gradient norm"
        at = f" of step {step}" if step is not None else ""
        if not tolerant or self._streak >= self._limits.nonfinite_streak:
            self._findings.drop("nonfinite_isolated", "norm_overflow")
            self._damaged(what)
        elif self._many(place):
            self._findings.drop("nonfinite_isolated", "norm_overflow")
            self._again_and_again(what)
        elif loss:
            self._findings.hold(
                "nonfinite_isolated", step,
                f"The {what}{at} is not finite; nothing shows that it reached the weights.",
                "Keep it running, and look at the data of that step if it comes again.",
            )  # fmt: skip
        else:
            self._overflow(step)

    def _overflow(self, step: int | None) -> None:
        at = f" of step {step}" if step is not None else ""
        self._findings.hold(
            "norm_overflow", step,
            f"The gradient norm{at} is not finite; the loss scaling of fp16 skips such a step.",
            "Keep it running; it counts only when it happens three times in a row, or again and again.",
        )  # fmt: skip

    def _recovered(self) -> None:
        """Damaged weights never give a sound step again."""
        step = self.streak_start
        at = f" at step {step}" if step is not None else ""
        self._findings.drop("nonfinite")
        self._findings.hold(
            "nonfinite_isolated", step,
            f"The loss or gradient norm was not finite{at}; the next step was sound again, and so are the weights.",
            "Keep it running, and look at the data of that step if it comes again.",
        )  # fmt: skip

    def _damaged(self, what: str) -> None:
        if self._findings.is_held("nonfinite"):
            return
        self._findings.drop("nonfinite")  # an earlier streak, that ended
        since = f" since step {self.streak_start}" if self.streak_start is not None else ""
        self._findings.hold(
            "nonfinite", self.streak_start,
            f"The {what} is NaN or infinite{since}{self._circumstances()}: the weights are damaged.",
            f"Stop it. Resume from a checkpoint before that step with {self._remedy()}.",
        )  # fmt: skip

    def _again_and_again(self, what: str) -> None:
        """Many in a window: not one of them need have reached the weights."""
        (first, step), (last, _) = self._places[0], self._places[-1]
        unit = "steps" if self._training.sees_each_step else "logs"
        self._findings.hold(
            "nonfinite", step,
            f"The {what} was NaN or infinite in {len(self._places)} of the last {last - first + 1} {unit}"
            f"{self._circumstances()}.",
            f"Stop it, and look at the data; resume from a checkpoint before with {self._remedy()}.",
        )  # fmt: skip

    def _circumstances(self) -> str:
        known = [self._training.precision] if self._training.precision else []
        if self._rate is not None:
            known.append(f"learning rate {self._rate:.3g}")
        return f" ({', '.join(known)})" if known else ""

    def _remedy(self) -> str:
        lower = "a lower learning rate"
        match self._training.precision:
            case "fp16":
                return f"bf16 instead of fp16, or {lower}"
            case None:
                return f"{lower} or bf16"
        return lower


class ScalerSkips:
    """`fp16_overflow`, `fp16_skips`: steps that the fp16 scaler skipped, from the count that logs carry.

    The first skips are its search for a scale, a note. Bad when more than `skipped_share` (20 %) of the steps are
    skipped: first over the session's first `scaler_search_steps` (50), of which `scaler_search_skips` (25 halvings,
    from 2^32 to 128) are free, then over windows of at least 20 steps.
    Source: torch's and DeepSpeed's scalers, which halve their scale at each overflow.
    Can not see: a scaler of DeepSpeed, which skips without a word.
    """

    WINDOW = 20

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._step, self._skipped = training.step, 0.0
        self._seen = 0.0
        self._searching = True
        self.skipping = False
        """Whether steps were skipped since the log before."""

    def more_in(self, reading: Reading) -> bool:
        """Whether steps were skipped between the log before and this one."""
        return reading.skipped is not None and reading.skipped > self._seen

    def log(self, reading: Reading) -> None:
        step, skipped = reading.step, reading.skipped
        if skipped is None or step is None:
            self.skipping = False
            return
        self.skipping = skipped > self._seen
        self._seen = skipped
        if self.skipping:
            self._findings.note(
                "fp16_skips", step,
                f"The fp16 loss scaling has skipped {skipped:.0f} steps of this session so far.",
                "Keep it running; some skips at the start are usual.",
            )  # fmt: skip
        steps = step - self._step
        if steps < (self._limits.scaler_search_steps if self._searching else self.WINDOW):
            return
        free = self._limits.scaler_search_skips if self._searching else 0
        share = min(1.0, max(0.0, skipped - self._skipped - free) / steps)
        self._judge(step, steps, skipped - self._skipped, share)
        self._step, self._skipped, self._searching = step, skipped, False

    def _judge(self, step: int, steps: int, skipped: float, share: float) -> None:
        if share > self._limits.skipped_share:
            self._findings.hold(
                "fp16_overflow", step,
                f"The fp16 loss scaling skipped {skipped:.0f} of the last {steps} steps: the model hardly learns.",
                "Stop it, and restart with bf16 or a lower learning rate.",
            )  # fmt: skip
        else:
            self._findings.release("fp16_overflow")

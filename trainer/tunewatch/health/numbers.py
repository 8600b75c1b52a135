"""Numbers that are none: NaN and infinity in the steps, and the steps that an fp16 scaler skips."""

from __future__ import annotations

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
    harm by themselves and take `nonfinite_streak` (3) in a row:
    - fp16, or a precision that is not known: a scaler that looks for its scale may have skipped the step
      (`norm_overflow`, a note). Healthy public logs have one to three such lines, at most two in a row. A loss logged
      as 0.0 beside it leaves no doubt, unless the training optimizes a reward, where 0.0 is usual.
    - a loss that is not finite although the gradients stayed so (the user zeroes them): `nonfinite_isolated`.
    Where each step is seen, a sound one after fewer than three takes `nonfinite` back to `nonfinite_isolated`: somebody
    dropped the gradients in time.
    Where each step is seen (events `nonfinite`, `finite`) the logs are not judged a second time.
    Can not see: a damaged step between two logs when only the logs are seen.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._training = Training()
        self._streak = 0
        self._last_bad = -1
        self._skipped = 0.0
        self.streak_start: int | None = None

    def begin(self, training: Training) -> None:
        self._training = training
        self._end_streak()
        self._last_bad, self._skipped = -1, 0.0

    def step(self, event: Mapping[str, Any]) -> None:
        """A `nonfinite` event: one step."""
        loss, norm = bool(event.get("loss")), bool(event.get("grad_norm"))
        harmless = loss and not norm and bool(event.get("norm_seen", True))
        self._bad(
            whole(event.get("step")), loss=loss, norm=norm,
            tolerant=harmless or self._training.precision == "fp16",
        )  # fmt: skip

    def sound(self) -> None:
        """A `finite` event: the first sound step after such."""
        if self._findings.is_held("nonfinite") and 0 < self._streak < self._limits.nonfinite_streak:
            self._recovered()
        self._end_streak()

    def log(self, reading: Reading) -> None:
        skipped = reading.skipped is not None and reading.skipped > self._skipped
        self._skipped = reading.skipped if reading.skipped is not None else self._skipped
        if self._training.sees_each_step or not (reading.train or reading.norm_bad):
            return
        loss, norm = reading.loss_bad is not None, reading.norm_bad is not None
        if not (loss or norm):
            if self._streak:
                self._end_streak()
            return
        zero = norm and reading.loss == 0.0 and not reading.preference
        made_up = zero and not skipped
        harmless = loss and reading.norm is not None
        precision = self._training.precision
        scaled = precision == "fp16" or (precision is None and not loss)
        self._bad(reading.step, loss=loss or zero, norm=norm, tolerant=(harmless or scaled) and not made_up)

    def tick(self, step: int | None) -> None:
        sound = self._training.sees_each_step and not self._streak
        if sound and step is not None and step - self._last_bad >= CLEAN_STEPS:
            self._findings.drop("nonfinite", "nonfinite_isolated", "norm_overflow")

    @property
    def since(self) -> int | None:
        return self.streak_start if self._streak and "nonfinite" in self._findings else None

    def _end_streak(self) -> None:
        self._streak, self.streak_start = 0, None
        for signal in ("nonfinite", "nonfinite_isolated", "norm_overflow"):
            self._findings.release(signal)

    def _bad(self, step: int | None, *, loss: bool, norm: bool, tolerant: bool) -> None:
        """One step or log that is not finite. Several ranks may report the same step."""
        if not self._streak:
            self.streak_start = step
        if not self._streak or step is None or step != self._last_bad:
            self._streak += 1
        self._last_bad = step if step is not None else self._last_bad
        what = "loss and gradient norm" if loss and norm else "loss" if loss else "gradient norm"
        at = f" of step {step}" if step is not None else ""
        if not tolerant or self._streak >= self._limits.nonfinite_streak:
            self._findings.drop("nonfinite_isolated", "norm_overflow")
            self._damaged(what)
        elif loss:
            self._findings.hold(
                "nonfinite_isolated", step,
                f"The {what}{at} is not finite; nothing shows that it reached the weights.",
                "Keep it running, and look at the data of that step if it comes again.",
            )  # fmt: skip
        else:
            self._findings.hold(
                "norm_overflow", step,
                f"The gradient norm{at} is not finite; the loss scaling of fp16 skips such a step.",
                "Keep it running; it counts only when it happens three times in a row.",
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
            f"The {what} is NaN or infinite{since}: the weights are damaged.",
            "Stop it. Resume from a checkpoint before that step with a lower learning rate or bf16.",
        )  # fmt: skip


class ScalerSkips:
    """`fp16_overflow`, `fp16_skips`: steps that the fp16 scaler skipped, from the count that logs carry.

    The first skips are its search for a scale, a note. Bad when more than `skipped_share` (20 %) of the steps are
    skipped: first over the session's first `scaler_search_steps` (50), of which `scaler_search_skips` (25 halvings,
    from 2^32 to 128) are free, then over windows of at least 20 steps.
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

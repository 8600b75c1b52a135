"""A loss that does not come down."""

from __future__ import annotations

import math

from tunewatch.health.baseline import Smooth
from tunewatch.health.evaluation import Evaluation
from tunewatch.health.reading import Reading
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

EXPLAINED_BY = (
    "diverging", "nonfinite", "zero_loss", "labels_masked", "nothing_trainable", "no_gradient", "lr_zero",
)  # fmt: skip
"""What says better why nothing is learned, and what to do."""

JAGGED = 0.1
"""Noise of a log, as a share of the loss, from which a curve is called jagged."""


class Flat:
    """`flat`: the loss has not come down since the start. L0 is the mean of the first ten logs.

    - still: the first `still_logs` (10) losses lie within `still_spread` (0.3 %) of each other, as they do at chance
      level (ln of the number of classes or tokens), where a model that learns varies with its batches.
    - level: after `flat_logs` (30) logs the quick mean f is above `flat_ratio` (0.99) of L0, and has never been more
      than 3 % (`flat_best_ratio` 0.97) below it.
    - level in noise that hides 3 %: after twice as many logs the slow mean (EWMA of 1/20) is not below L0 by more than
      `flat_sigma` (0.3) times the noise, and has never been by more than twice that.
    Silent while a signal of EXPLAINED_BY holds, in the warm-up (which train_begin tells or the rising rate shows), and
    in the first 2 % of a rate that decays: a long training with frequent logs begins flat. Over for good once the loss
    has plainly come down (by a fifth of L0 and by three times the noise). Off where a reward or a preference is
    optimized.
    Source: plateau rules, with limits chosen on public logs, and on healthy ones whose trend was taken out.
    Can not see: a run that starts at its optimum and is fine; it looks the same.
    """

    SLOW = 0.05
    BEGINS = 0.98
    """Share of its peak above which a falling rate has hardly begun to fall."""
    LEARNED = 0.8

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._warmup = training.warmup_steps or 0
        self._lowest, self._highest = math.inf, -math.inf
        self._slow, self._slow_best = 0.0, math.inf
        self._logs = self._peak_log = 0
        self._rate = self._peak = 0.0
        self._learned = self._flat = False

    def log(self, reading: Reading, smooth: Smooth, noise: float, evaluation: Evaluation) -> None:
        """`noise` is that of one log around its neighbours."""
        if self._learned or reading.loss is None:
            return
        self._follow(reading.loss, reading.lr)
        start, best = smooth.start, smooth.best
        if start is None or best is None or start <= 0.0 or reading.preference or reading.loss == 0.0:
            self._release()
            return
        self._learned = best < min(self.LEARNED * start, start - 3.0 * noise)
        if reading.step is not None and reading.step <= self._warmup:
            return
        if any(signal in self._findings for signal in EXPLAINED_BY):
            self._findings.drop("flat")
            return
        still = smooth.count >= self._limits.still_logs and self._is_still(start)
        if still or (not self._is_early() and self._is_level(smooth.count, smooth.fast, best, start, noise)):
            jagged = not still and noise > JAGGED * start
            self._hold(reading, smooth, start, evaluation.fall, still=still, jagged=jagged)
        else:
            self._release()

    def _follow(self, loss: float, rate: float | None) -> None:
        self._logs += 1
        self._lowest, self._highest = min(self._lowest, loss), max(self._highest, loss)
        self._slow += max(self.SLOW, 1.0 / self._logs) * (loss - self._slow)
        if self._logs >= 1.0 / self.SLOW:
            self._slow_best = min(self._slow_best, self._slow)
        if rate is None:
            return
        self._rate = rate
        if rate > self._peak:
            self._peak, self._peak_log = rate, self._logs

    def _is_early(self) -> bool:
        """Whether the learning rate still rises, or has hardly begun to fall."""
        rises = self._peak_log == self._logs > 1
        return rises or self.BEGINS * self._peak < self._rate < self._peak

    def _is_still(self, start: float) -> bool:
        return self._highest - self._lowest < self._limits.still_spread * start

    def _is_level(self, count: int, fast: float, best: float, start: float, noise: float) -> bool:
        limits = self._limits
        slack = (1.0 - limits.flat_best_ratio) * start
        if count >= limits.flat_logs and fast > limits.flat_ratio * start and best > start - slack:
            return True
        if count < 2 * limits.flat_logs:
            return False
        hidden = limits.flat_sigma * noise
        now = start - max((1.0 - limits.flat_ratio) * start, hidden)
        return self._slow > now and self._slow_best > start - max(slack, 2.0 * hidden)

    def _hold(
        self,
        reading: Reading,
        smooth: Smooth,
        start: float,
        fall: tuple[float, float] | None,
        *,
        still: bool,
        jagged: bool,
    ) -> None:
        numbers = f"{start:.4g} at the start, {smooth.fast:.4g} now"
        if still:
            message = f"The loss has not moved at all in {smooth.count} logs ({numbers})."
            advice = "Stop it, and check the labels (masking, chat template), the data and what is trainable."
        elif fall is not None and fall[1] > self._limits.flat_ratio * fall[0]:
            message = (
                f"Neither loss has come down: {numbers}; the evaluation loss {fall[0]:.4g} at first, "
                f"{fall[1]:.4g} at its best."
            )
            advice = "The learning rate is too low, or the labels do not reach the loss; restart with other settings."
        elif jagged:
            message = f"The loss jumps up and down and has not come down in {smooth.count} logs: {numbers}."
            advice = "Restart with more gradient accumulation steps (a larger batch), and look at the learning rate."
        else:
            message = f"The loss has not come down in {smooth.count} logs: {numbers}."
            advice = "Check the learning rate and what is trainable, then restart with other settings."
        self._flat = True
        self._findings.hold("flat", reading.step, message, advice)

    def _release(self) -> None:
        if self._flat:
            self._flat = False
            self._findings.release("flat")

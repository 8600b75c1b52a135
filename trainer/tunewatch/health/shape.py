"""The shape of the loss and of the gradient norm: spikes, bursts, divergence.

Absolute limits are of no use here: the medians of healthy gradient norms range from 0.005 to 200,000, single healthy
logs jump by a factor of 60, and a batch of one row makes any curve jagged. So all is measured in the run's own noise.
"""

from __future__ import annotations

import math
from collections import deque

from tunewatch.health.baseline import Baseline, Smooth
from tunewatch.health.reading import Reading
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings

WARM = 5
"""Values before a baseline is trusted."""

BURST = 5
"""Logs whose mean is compared with the baseline before them."""

EARLY_FACTOR = 3.0
"""What counts as a jump while the noise is not known yet, from the third log on."""

FIRST_LOGS = 3
"""Logs that are the start of a run; the first one is often of an odd window."""


class Window:
    """The last BURST values against the baseline that held before them, in O(BURST).

    rise = mean of min(x - m, max(3 s, cap)) with m, s of before the first of them: one outlier alone does not lift it,
    and a cluster can not raise the baseline it is measured with.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[tuple[float, float, float, int]] = deque(maxlen=BURST)

    def add(self, value: float, base: Baseline) -> None:
        """Take in `value`, before the baseline does."""
        self._last.append((value, base.mean, base.noise, base.count))

    @property
    def before(self) -> tuple[float, float] | None:
        """Mean and noise of before the window; None while they are not to be trusted."""
        if len(self._last) < BURST:
            return None
        _, mean, noise, count = self._last[0]
        return (mean, noise) if count >= WARM else None

    def rise(self, mean: float, cap: float) -> float:
        total = 0.0
        for value, _, _, _ in self._last:
            total += min(value - mean, cap)
        return total / BURST


class Loss:
    """`spike`, `spikes`, `diverging`, `loss_huge`; off where a reward or a preference is optimized.

    With the baseline (m, s) and the quick mean f of `baseline.py`, x the new loss, floor = min(`spike_least` 0.1,
    `spike_floor` 0.05 of the mean of the first ten):
    - `spike`, a note: x - m > max(`spike_sigma` (5) s, `spike_ratio` (0.5) |m|, floor); x > 3 m in logs 3 to 5.
    - `spikes`: two such with `spikes_sigma` (6) in the last `spike_window` logs; or no recovery: the last five logs on
      average rise above the baseline of before by max(`burst_sigma` (2) s, 0.5 |m|, min(0.1, `burst_floor` (0.02) of
      the first ten)).
    - `diverging`: f - best > max(`diverging_ratio` (0.3) |best|, min(`diverging_least` 0.15, 0.15 of the first ten))
      and f - best > `diverging_sigma` (4) s / 3 for `diverging_logs` (10) logs; 1/3 = sqrt(0.2/1.8) is the noise of f.
    - `loss_huge`: above `huge_loss` (100) in the first three logs; a guess among 260,000 words has ln 260,000 = 12.5.
    Can not see: a burst within the run's own noise. A loss on another scale (summed over tokens) looks huge.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._hit_mask = (1 << limits.spike_window) - 1
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._hits = self._above = 0
        if not training.step:
            self.smooth, self._base, self._window = Smooth(), Baseline(), Window()

    @property
    def noise(self) -> float:
        """Standard deviation of one log around its neighbours."""
        return self._base.noise

    def log(self, reading: Reading) -> None:
        loss, base, smooth = reading.loss, self._base, self.smooth
        if loss is None or loss == 0.0:  # a filter made it up, or there is nothing left to judge
            return
        if reading.preference:
            smooth.add(loss)
            return
        if reading.norm_bad is not None:  # the mean of a damaged window: too good to compare others with
            self._spike(reading.step, loss)
            return
        self._window.add(loss, base)
        self._spike(reading.step, loss)
        base.add(loss)
        smooth.add(loss)
        self._diverging(reading.step)
        if smooth.count <= FIRST_LOGS and loss > self._limits.huge_loss:
            self._findings.note(
                "loss_huge", reading.step,
                f"The loss starts at {loss:.6g}; a guess among all words of a large vocabulary has about 12.",
                "Stop it, and check the precision, the labels and whether the weights were loaded.",
            )  # fmt: skip

    def _spike(self, step: int | None, loss: float) -> None:
        limits, base = self._limits, self._base
        self._hits = (self._hits << 1) & self._hit_mask
        rise, mean = loss - base.mean, abs(base.mean)
        floor = min(limits.spike_least, limits.spike_floor * abs(self.smooth.first))
        if base.count < WARM:
            if base.count >= 2 and loss > EARLY_FACTOR * mean and rise > floor:
                self._note(step, loss)
            return
        if rise > floor and rise > limits.spike_ratio * mean and rise > limits.spike_sigma * base.noise:
            self._note(step, loss)
            if rise > limits.spikes_sigma * base.noise:
                self._hits |= 1
        if self._hits & 1 and self._hits.bit_count() >= limits.spike_hits:
            self._findings.hold(
                "spikes", step,
                f"The loss jumped again, from about {base.mean:.4g} to {loss:.4g} at {_step(step)}.",
                "Watch it; if the jumps go on, resume from a checkpoint before them with a lower learning rate.",
            )  # fmt: skip
        elif not self._burst(step, loss):
            self._findings.release("spikes")

    def _burst(self, step: int | None, loss: float) -> bool:
        before = self._window.before
        if before is None:
            return False
        limits, (mean, noise) = self._limits, before
        if loss <= mean:
            return False
        least = max(
            limits.burst_sigma * noise,
            limits.spike_ratio * abs(mean),
            min(limits.spike_least, limits.burst_floor * abs(self.smooth.first)),
        )
        rise = self._window.rise(mean, max(3.0 * noise, abs(mean)))
        if rise <= least:
            return False
        self._findings.hold(
            "spikes", step,
            f"The loss jumped from about {mean:.4g} and has not come back in {BURST} logs, at {_step(step)}.",
            "Watch it; if it stays up, resume from a checkpoint before the jump with a lower learning rate.",
        )  # fmt: skip
        return True

    def _note(self, step: int | None, loss: float) -> None:
        self._findings.note(
            "spike", step,
            f"The loss jumped from about {self._base.mean:.4g} to {loss:.4g} at {_step(step)}.",
            "Keep it running; a single jump that comes back does no harm.",
        )  # fmt: skip

    def _diverging(self, step: int | None) -> None:
        limits, smooth = self._limits, self.smooth
        best = smooth.best
        if best is None:
            return
        rise = smooth.fast - best
        least = max(limits.diverging_ratio * abs(best), limits.diverging_sigma / 3.0 * self._base.noise)
        if rise <= least or rise <= min(limits.diverging_least, limits.diverging_least * abs(smooth.first)):
            self._above = 0
            self._findings.release("diverging")
            return
        self._above += 1
        if self._above >= limits.diverging_logs:
            self._findings.hold(
                "diverging", step,
                f"The loss rises and stays up: about {smooth.fast:.4g} at {_step(step)}, {best:.4g} at its best.",
                "Stop it, and resume from a checkpoint before the rise with a lower learning rate.",
            )  # fmt: skip


class GradientNorm:
    """`grad_spike`, `grad_explosion`: the gradient norm against the run's own, on u = ln(norm) with a baseline of 20
    logs.

    One log with u - m > max(`grad_sigma` (6) s, ln `grad_factor` (10)) is a note; `grad_hits` (3) of the last five, or
    a mean of the last five above max(`grad_burst_sigma` (2.5) s, ln 10) over the baseline before them, is an explosion.
    Can not see: a norm that is too large from the first step on (that is a matter of scale).
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._least = math.log(limits.grad_factor)
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._hits = 0
        if not training.step:
            self._base, self._window = Baseline(weight=0.05), Window()

    def log(self, reading: Reading) -> None:
        norm, base, limits = reading.norm, self._base, self._limits
        if norm is None or norm <= 0.0:
            return
        value = math.log(norm)
        self._window.add(value, base)
        self._hits = (self._hits << 1) & (1 << BURST) - 1
        if base.count >= WARM:
            rise = value - base.mean
            if rise > self._least and rise > limits.grad_sigma * base.noise:
                self._hits |= 1
                self._findings.note(
                    "grad_spike", reading.step,
                    f"The gradient norm jumped to {norm:.4g} at {_step(reading.step)} from about "
                    f"{math.exp(base.mean):.4g}.",
                    "Keep it running; clipping (max_grad_norm) takes most of a single jump away.",
                )  # fmt: skip
            self._explosion(reading.step, norm, high=rise > 0.0)
        base.add(value)

    def _explosion(self, step: int | None, norm: float, *, high: bool) -> None:
        limits = self._limits
        exploded = self._hits.bit_count() >= limits.grad_hits
        before = self._window.before if high and not exploded else None
        if before is not None:
            mean, noise = before
            rise = self._window.rise(mean, max(3.0 * noise, 2.0 * self._least))
            exploded = rise > self._least and rise > limits.grad_burst_sigma * noise
        if exploded:
            self._findings.hold(
                "grad_explosion", step,
                f"The gradient norm stays far above its usual size: {norm:.4g} at {_step(step)}.",
                "Stop it when the loss follows, and resume from a checkpoint before with a lower learning rate.",
            )  # fmt: skip
        else:
            self._findings.release("grad_explosion")


def _step(step: int | None) -> str:
    return "an unknown step" if step is None else f"step {step}"

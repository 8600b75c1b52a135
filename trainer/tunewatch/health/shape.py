"""The shape of the loss and of the gradient norm: spikes, bursts, divergence.

Absolute limits are of no use here: the medians of healthy gradient norms range from 0.005 to 200,000, single healthy
logs jump by a factor of 60, and a batch of one row makes any curve jagged. So all is measured in the run's own noise.
"""

from __future__ import annotations

import math
from collections import deque

from tunewatch.health.baseline import Level, LogLevel, Smooth
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

_LAST = (1 << BURST) - 1

FIRST_LOGS = 3
"""Logs that are the start of a run; the first one is often of an odd window."""


class Window:
    """The last BURST values and the baseline that held before them.

    rise = mean of min(x - m, max(3 s, cap)) with m, s of before the first of them: one outlier alone does not lift it,
    and a cluster can not raise the baseline it is measured with.
    """

    __slots__ = ("_baselines", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=BURST)
        self._baselines: deque[tuple[float, float]] = deque(maxlen=BURST)

    def add(self, value: float, base: Level | LogLevel) -> None:
        """Take in `value`, before the baseline does. Values that come before the baseline is warm are left out."""
        if base.count >= WARM:
            self._values.append(value)
            self._baselines.append((base.mean, base.noise))

    @property
    def before(self) -> tuple[float, float] | None:
        """Mean and noise of before the window; None while they are not to be trusted."""
        return self._baselines[0] if len(self._baselines) == BURST else None

    def mean_above(self, mean: float) -> float:
        """How far the values lie above `mean`, outliers and all: never less than `rise`."""
        return sum(self._values) / BURST - mean

    def rise(self, mean: float, cap: float) -> float:
        return sum([min(value - mean, cap) for value in self._values]) / BURST


class Loss:
    """`spike`, `spikes`, `diverging`, `loss_huge`; off where a reward or a preference is optimized.

    With the baseline (m, s) and the quick mean f of `baseline.py`, x the new loss, L0 the mean of the first ten:
    - `spike`, a note: x - m > max(`spike_sigma` (4.5) s, `spike_ratio` (0.5) |m|, min(`spike_least` 0.1,
      `spike_floor` (0.02) L0)); x > 3 m in logs 3 to 5.
    - `spikes`: `spike_hits` (2) such in the last `spike_window` (10) logs, of `spikes_sigma` (6) times the noise or the
      swing, whichever is larger; or no recovery: the last five logs on average rise above the baseline of before by
      max(`burst_sigma` (2.8) s, 0.5 |m|, min(0.1, `burst_floor` (0.002) L0)). Bursts of healthy logs in heavy noise
      reach 2.6 s.
    - `diverging`: for `diverging_logs` (10) logs in a row f - best > min(`diverging_least` (0.15), `diverging_floor`
      (0.01) L0), and either > max(`diverging_ratio` (0.3) |best|, `diverging_sigma` (4.5) s / 3), or, for curves with
      little noise, > max(`diverging_clear_ratio` (0.2) |best|, `diverging_clear_sigma` (8) s / 3); 1/3 = sqrt(0.2/1.8)
      is the noise of f. f takes each x as at most m + max(3 s, |m|): one huge spike is no rise. The first loss counts
      as `best` only while f is above `diverging_of_first` (2.5) times it (a learning rate that is too high from the
      first step on): it is often that of an odd window, half of what follows.
    - `loss_huge`: above `huge_loss` (1000) in the first three logs. A guess among 260,000 words has ln 260,000 = 12.5,
      and a loss summed over 64 micro-batches 800; some healthy losses (squared errors, sums) begin at 100 to 200.
    Source: the usual formulas, with limits chosen on public logs and on faults put into them
    (benchmarks/injected_faults.py). Can not see: a burst within the run's own noise, such as a doubling where logs
    differ by a third from each other; a rise of less than a fifth.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._logs = self._above = 0
        self._rose = False
        self._jumps: deque[int] = deque(maxlen=max(1, int(self._limits.spike_hits)))
        if not training.step:
            self.smooth, self._level, self._window = Smooth(), Level(), Window()
            self._first = math.inf

    @property
    def noise(self) -> float:
        """Standard deviation of one log around its neighbours."""
        return self._level.noise

    def log(self, reading: Reading) -> None:
        loss, level, smooth = reading.loss, self._level, self.smooth
        if loss is None or loss == 0.0:  # a filter made it up, or there is nothing left to judge
            return
        if reading.preference:
            smooth.add(loss)
            return
        self._logs += 1
        damaged = reading.norm_bad is not None
        if not damaged:
            self._window.add(loss, level)
        rises = self._rises(reading.step, loss, damaged)
        if self._rose and not rises:
            self._findings.release("spikes")
        self._rose = rises
        if damaged:  # the mean of a damaged window is too good to compare others with
            return
        mean = level.mean
        smooth.add(
            loss
            if loss <= mean or level.count < WARM
            else min(loss, mean + max(3.0 * level.noise, abs(mean)))
        )
        level.add(loss)
        if smooth.count == 1:
            self._first = loss
        if smooth.best is not None:
            self._diverging(reading.step, smooth.fast, self._best(smooth.fast, smooth.best))
        if smooth.count <= FIRST_LOGS and loss > self._limits.huge_loss:
            self._findings.note(
                "loss_huge", reading.step,
                f"The loss starts at {loss:.6g}; a guess among all words of a large vocabulary has about 12.",
                "Stop it, and check the precision, the labels and whether the weights were loaded.",
            )  # fmt: skip

    def _rises(self, step: int | None, loss: float, damaged: bool) -> bool:
        """Whether `spikes` holds at this log."""
        level = self._level
        again = loss > level.mean and level.count >= 2 and self._jumped(step, loss)
        return again or (not damaged and self._burst(step, loss))

    def _jumped(self, step: int | None, loss: float) -> bool:
        """Notes a jump; whether it is one of several."""
        limits, level = self._limits, self._level
        rise, size, noise = loss - level.mean, abs(level.mean), level.noise
        if rise <= limits.spike_ratio * size:
            return False
        if rise <= min(limits.spike_least, limits.spike_floor * abs(self.smooth.first)):
            return False
        if level.count < WARM:
            if loss > EARLY_FACTOR * size:
                self._note(step, loss)
            return False
        if rise <= limits.spike_sigma * noise:
            return False
        self._note(step, loss)
        if rise <= limits.spikes_sigma * max(noise, level.swing):
            return False
        jumps = self._jumps
        jumps.append(self._logs)
        if len(jumps) < limits.spike_hits or self._logs - jumps[0] >= limits.spike_window:
            return False
        self._findings.hold(
            "spikes", step,
            f"The loss jumped again, from about {level.mean:.4g} to {loss:.4g} at {_step(step)}.",
            "Watch it; if the jumps go on, resume from a checkpoint before them with a lower learning rate.",
        )  # fmt: skip
        return True

    def _burst(self, step: int | None, loss: float) -> bool:
        window, limits = self._window, self._limits
        before = window.before
        if before is None:
            return False
        mean, noise = before
        size = abs(mean)
        if loss <= mean or window.mean_above(mean) <= limits.spike_ratio * size:
            return False
        rise = window.rise(mean, max(3.0 * noise, size))
        least = min(limits.spike_least, limits.burst_floor * abs(self.smooth.first))
        if rise <= max(limits.burst_sigma * noise, limits.spike_ratio * size, least):
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
            f"The loss jumped from about {self._level.mean:.4g} to {loss:.4g} at {_step(step)}.",
            "Keep it running; a single jump that comes back does no harm.",
        )  # fmt: skip

    def _best(self, fast: float, best: float) -> float:
        first = self._first
        return first if 0.0 < first < best and fast > self._limits.diverging_of_first * first else best

    def _diverging(self, step: int | None, fast: float, best: float) -> None:
        limits, rise = self._limits, fast - best
        ratio = rise / abs(best) if best else math.inf
        if ratio <= limits.diverging_clear_ratio or not self._clearly_above(rise, ratio):
            if self._above:
                self._above = 0
                self._findings.release("diverging")
            return
        self._above += 1
        if self._above >= limits.diverging_logs:
            self._findings.hold(
                "diverging", step,
                f"The loss rises and stays up: about {fast:.4g} at {_step(step)}, {best:.4g} at its best.",
                "Stop it, and resume from a checkpoint before the rise with a lower learning rate.",
            )  # fmt: skip

    def _clearly_above(self, rise: float, ratio: float) -> bool:
        limits, noise = self._limits, self._level.noise / 3.0
        if rise <= min(limits.diverging_least, limits.diverging_floor * abs(self.smooth.first)):
            return False
        if ratio > limits.diverging_ratio and rise > limits.diverging_sigma * noise:
            return True
        return rise > limits.diverging_clear_sigma * noise


class GradientNorm:
    """`grad_spike`, `grad_explosion`: the gradient norm against the run's own, on u = ln(norm) with the baseline (m, s)
    of `LogLevel`.

    One log with u - m > max(`grad_sigma` (6) s, ln `grad_factor` (10)) is a note; `grad_hits` (3) of the last five, or
    a mean of the last five above max(`grad_burst_sigma` (2.5) s, ln 10) over the baseline before them, is an explosion.
    Source: the same measure as for the loss, taken of the logarithm. Can not see: a norm that is too large from the
    first step on (that is a matter of scale), nor what happens between two logs.
    """

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self._least = math.log(limits.grad_factor)
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._hits = 0
        self._exploded = False
        if not training.step:
            self._level, self._window = LogLevel(), Window()

    def log(self, reading: Reading) -> None:
        norm, level = reading.norm, self._level
        if norm is None or norm <= 0.0:
            return
        value = math.log(norm)
        self._window.add(value, level)
        self._hits = (self._hits << 1) & _LAST
        if value > level.mean and level.count >= WARM:
            self._above(reading.step, norm, value - level.mean)
        elif self._exploded and self._hits.bit_count() < self._limits.grad_hits:
            self._release()
        level.add(value)

    def _above(self, step: int | None, norm: float, rise: float) -> None:
        limits = self._limits
        if rise > self._least and rise > limits.grad_sigma * self._level.noise:
            self._hits |= 1
            self._findings.note(
                "grad_spike", step,
                f"The gradient norm jumped to {norm:.4g} at {_step(step)} from about "
                f"{math.exp(self._level.mean):.4g}.",
                "Keep it running; clipping (max_grad_norm) takes most of a single jump away.",
            )  # fmt: skip
        if self._hits.bit_count() >= limits.grad_hits or self._burst():
            self._exploded = True
            self._findings.hold(
                "grad_explosion", step,
                f"The gradient norm stays far above its usual size: {norm:.4g} at {_step(step)}.",
                "Keep it while the loss stays down; if that rises too, resume from a checkpoint before it.",
            )  # fmt: skip
        elif self._exploded:
            self._release()

    def _release(self) -> None:
        self._exploded = False
        self._findings.release("grad_explosion")

    def _burst(self) -> bool:
        before = self._window.before
        if before is None:
            return False
        mean, noise = before
        if self._window.mean_above(mean) <= self._least:
            return False
        rise = self._window.rise(mean, max(3.0 * noise, 2.0 * self._least))
        return rise > self._least and rise > self._limits.grad_burst_sigma * noise


def _step(step: int | None) -> str:
    return "an unknown step" if step is None else f"step {step}"

"""Running means that a spike can not raise."""

from __future__ import annotations

GAUSS = 0.886
"""Standard deviation of a normal variable over the mean distance of two of its draws (sqrt(pi)/2)."""


class Baseline:
    """Mean and noise of a series, each of memory 1/`weight`.

    m += a (x - m), s += a (0.886 |x - x_prev| - s), a = max(weight, 1/n). The noise comes from successive differences,
    so a trend does not count as noise (on real logs with injected faults this found more than the deviation from the
    mean does, at the same number of false alarms). x is cut at m + max(3 s, 0.25 |m|) first: a spike can not raise its
    own baseline, a lasting rise is followed in some ten logs.
    """

    __slots__ = ("_noise_weight", "_previous", "_weight", "count", "mean", "noise")

    def __init__(self, weight: float = 0.2, noise_weight: float = 0.05) -> None:
        self._weight, self._noise_weight = weight, noise_weight
        self.count = 0
        self.mean = 0.0
        self.noise = 0.0
        self._previous = 0.0

    def add(self, value: float) -> None:
        self.count = n = self.count + 1
        if n == 1:
            self.mean = self._previous = value
            return
        mean = self.mean
        limit = mean + max(3.0 * self.noise, 0.25 * abs(mean))
        if value > limit and n > 2:
            value = limit
        self.noise += max(self._noise_weight, 1.0 / (n - 1)) * (
            GAUSS * abs(value - self._previous) - self.noise
        )
        self.mean = mean + max(self._weight, 1.0 / n) * (value - mean)
        self._previous = value


class Smooth:
    """A quick mean (memory of five logs), its lowest value, and the mean of the first ten values.

    f += max(0.2, 1/n)(x - f); `best` counts from the fifth value; `start` is None before the tenth.
    """

    __slots__ = ("_first", "best", "count", "fast")

    def __init__(self) -> None:
        self.count = 0
        self.fast = 0.0
        self.best: float | None = None
        self._first = 0.0

    def add(self, value: float) -> None:
        self.count = n = self.count + 1
        self.fast += max(0.2, 1.0 / n) * (value - self.fast)
        if n <= 10:
            self._first += (value - self._first) / n
        if n >= 5 and (self.best is None or self.fast < self.best):
            self.best = self.fast

    @property
    def start(self) -> float | None:
        return self._first if self.count >= 10 else None

    @property
    def first(self) -> float:
        """Mean of the first values so far, at most ten."""
        return self._first

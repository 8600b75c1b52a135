"""Running means that a spike can not raise."""

from __future__ import annotations

GAUSS = 0.886
"""Standard deviation of a normal variable over the mean distance of two of its draws (sqrt(pi)/2)."""


class Level:
    """Mean of a loss, of a memory of four to five logs, and its noise: the standard deviation of one log.

    m += a (x - m), a = 1/5 upwards and 1/4 downwards, so that it keeps up with a curve that falls. The noise is learned
    as a share of m, q += b (0.886 |x - x_prev| / |m| - q), b = 1/20, and is q |m|: it shrinks with the loss, as it does
    in real logs, where an absolute one would remember the wide swings of the start for a hundred logs. It comes from
    successive differences, so that a trend does not count as noise. x is cut at m + c first, c = max(3 noise, |m| / 4),
    and a difference at 2 c: a spike can not raise its own baseline; a lasting rise is followed in some ten logs.
    Where m passes through 0, the share is taken of 0.2 % of the first value. `swing` is the absolute noise, which
    remembers those swings; where it is the larger, a jump has to be larger than it to count as one of several.
    """

    UP, DOWN, NOISE = 0.2, 0.25, 0.05
    SMALLEST = 0.002

    __slots__ = ("_floor", "_previous", "_share", "count", "mean", "noise", "swing")

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.noise = self.swing = 0.0
        self._share = self._previous = self._floor = 0.0

    def add(self, value: float) -> None:
        self.count = n = self.count + 1
        if n == 1:
            self.mean = self._previous = value
            self._floor = self.SMALLEST * abs(value)
            return
        mean = self.mean
        size = mean if mean >= 0.0 else -mean
        cut = 3.0 * self.noise
        if cut < 0.25 * size:
            cut = 0.25 * size
        if n > 2 and value > mean + cut:
            value = mean + cut
        distance = abs(value - self._previous)
        if n > 2 and distance > 2.0 * cut:
            distance = 2.0 * cut
        distance *= GAUSS
        learns = self.NOISE if n > 20 else 1.0 / (n - 1)
        self.swing += learns * (distance - self.swing)
        scale = size if size > self._floor else self._floor
        share = self._share
        if scale > 0.0:
            share += learns * (distance / scale - share)
            self._share = share
        weight = self.UP if value > mean else self.DOWN
        if n * weight < 1.0:
            weight = 1.0 / n
        self.mean = mean = mean + weight * (value - mean)
        self._previous = value
        size = mean if mean >= 0.0 else -mean
        self.noise = share * (size if size > self._floor else self._floor)


class LogLevel:
    """Mean and noise of a logarithm, of a memory of twenty logs.

    m += a (u - m), s += a (0.886 |u - u_prev| - s), a = max(1/20, 1/n); u is cut at m + max(3 s, 1/2) first.
    """

    WEIGHT = 0.05
    CUT = 0.5

    __slots__ = ("_previous", "count", "mean", "noise")

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.noise = 0.0
        self._previous = 0.0

    def add(self, value: float) -> None:
        self.count = n = self.count + 1
        if n == 1:
            self.mean = self._previous = value
            return
        mean, noise = self.mean, self.noise
        cut = mean + (3.0 * noise if 3.0 * noise > self.CUT else self.CUT)
        if value > cut and n > 2:
            value = cut
        self.noise = noise + (self.WEIGHT if n > 20 else 1.0 / (n - 1)) * (
            GAUSS * abs(value - self._previous) - noise
        )
        self.mean = mean + (self.WEIGHT if n > 20 else 1.0 / n) * (value - mean)
        self._previous = value


class Smooth:
    """A quick mean (memory of five logs), its lowest value, and the mean of the first ten values.

    f += max(0.2, 1/n)(x - f); `best` counts from the fifth value; `start` is None before the tenth.
    """

    __slots__ = ("best", "count", "fast", "first")

    def __init__(self) -> None:
        self.count = 0
        self.fast = 0.0
        self.best: float | None = None
        self.first = 0.0
        """Mean of the first values so far, at most ten."""

    def add(self, value: float) -> None:
        self.count = n = self.count + 1
        if n <= 10:
            self.first += (value - self.first) / n
            if n < 5:
                self.fast += (value - self.fast) / n
                return
        self.fast = fast = self.fast + 0.2 * (value - self.fast)
        if self.best is None or fast < self.best:
            self.best = fast

    @property
    def start(self) -> float | None:
        return self.first if self.count >= 10 else None

"""Published-style detectors in their simplest form, to measure ours against.

They were tuned on the same kind of logs: one baseline with a winsorised mean and noise from successive differences, and
a plain rule for each fault. Signals carry our names, so that both columns of a table mean the same.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from tunewatch.health.reading import Reader, Reading

NOTES = {"spike", "grad_spike"}
WARM = 5


class _Baseline:
    def __init__(self) -> None:
        self.n, self.m, self.s, self._previous = 0, 0.0, 0.0, 0.0

    def add(self, x: float) -> None:
        self.n += 1
        if self.n == 1:
            self.m = self._previous = x
            return
        a = max(0.05, 1.0 / self.n)
        x = min(x, self.m + max(3.0 * self.s, 0.25 * abs(self.m)))
        self.m += a * (x - self.m)
        self.s += a * (0.886 * abs(x - self._previous) - self.s)
        self._previous = x


class Reference:
    """The rules; `active` holds the signals whose condition is true at the newest log (a note: was true at it)."""

    def __init__(self) -> None:
        self.active: set[str] = set()
        self._reader = Reader()
        self._loss, self._norm = _Baseline(), _Baseline()
        self._fast, self._best, self._first = 0.0, math.inf, 0.0
        self._spikes: deque[bool] = deque(maxlen=5)
        self._jumps: deque[bool] = deque(maxlen=5)
        self._logs = self._norm_bad = self._zeros = self._above = self._no_gradient = self._dead_gradient = 0
        self._alive: float | None = None
        self._evals = 0
        self._best_eval, self._fast_at_best = math.inf, math.inf
        self._peak, self._trough = 0.0, math.inf
        self._step: int | None = None
        self._back = 0.0

    def event(self, event: dict[str, Any]) -> None:
        """Take in one `log` event."""
        reading = self._reader.read(event)
        self.active -= {"spike", "grad_spike", "lr_restarted"}
        self._nonfinite(reading)
        if reading.train:
            self._logs += 1
            self._zero(reading)
            self._gradient(reading)
            self._rate(reading)
            self._writers(reading)
            self._explosion(reading)
            if reading.loss is not None and not reading.preference:
                self._shape(reading.loss)
        for key, value, _ in reading.evals:
            if key == "eval_loss" and value is not None and not reading.preference:
                self._evaluation(value)

    def _set(self, signal: str, active: bool) -> None:
        (self.active.add if active else self.active.discard)(signal)

    def _nonfinite(self, reading: Reading) -> None:
        if reading.train:
            self._norm_bad = self._norm_bad + 1 if reading.norm_bad else 0
        bad_eval = any(spelled for key, _, spelled in reading.evals if key == "eval_loss")
        dead = reading.norm_bad is not None and reading.loss == 0.0
        if reading.loss_bad or bad_eval or self._norm_bad >= 3 or dead:
            self.active.add("nonfinite")

    def _zero(self, reading: Reading) -> None:
        if reading.loss != 0.0:
            self._zeros = 0
            self._alive = reading.loss if reading.loss is not None else self._alive
            return
        self._zeros += 1
        early = self._logs - self._zeros < 2
        if self._zeros >= 2 and not reading.preference:
            large = self._alive is not None and self._alive > 0.05
            self._set("zero_loss", reading.norm == 0.0 or early or large)

    def _gradient(self, reading: Reading) -> None:
        zero = reading.norm == 0.0
        self._no_gradient = self._no_gradient + 1 if zero else 0
        dead = zero and (reading.lr == 0.0 or reading.loss == 0.0)
        self._dead_gradient = self._dead_gradient + 1 if dead else 0
        self._set("no_gradient", self._dead_gradient >= 3 or self._no_gradient >= 30)

    def _rate(self, reading: Reading) -> None:
        rate = reading.lr
        if rate is None:
            return
        peak, trough = self._peak, self._trough
        if trough < 0.8 * peak and rate > 1.25 * trough and rate - trough > 0.1 * peak:
            self.active.add("lr_restarted")
            self._peak, self._trough = rate, math.inf
        elif rate >= peak:
            self._peak, self._trough = rate, math.inf
        else:
            self._trough = min(trough, rate)

    def _writers(self, reading: Reading) -> None:
        self._back *= 0.95
        if reading.step is not None:
            self._back += self._step is not None and reading.step < self._step
            self._step = reading.step
        self._set("two_writers", self._back >= 2.4)

    def _explosion(self, reading: Reading) -> None:
        if reading.norm is None or reading.norm <= 0.0:
            return
        u, base = math.log(reading.norm), self._norm
        jump = base.n >= WARM and u - base.m > max(6.0 * base.s, math.log(10.0))
        self._jumps.append(jump)
        self._set("grad_spike", jump)
        self._set("grad_explosion", sum(self._jumps) >= 3)
        base.add(u)

    def _shape(self, x: float) -> None:
        base = self._loss
        spike = base.n >= WARM and x - base.m > max(6.0 * base.s, 0.5 * abs(base.m), 0.1)
        self._spikes.append(spike)
        self._set("spike", spike)
        self._set("spikes", sum(self._spikes) >= 2)
        base.add(x)
        n = base.n
        self._fast += max(0.2, 1.0 / n) * (x - self._fast)
        if n <= 10:
            self._first += (x - self._first) / n
        if n >= 5:
            self._best = min(self._best, self._fast)
        rise = self._fast - self._best
        above = n >= 5 and rise > max(
            0.3 * abs(self._best), min(0.15, 0.15 * self._first), 4.0 * base.s / 3.0
        )
        self._above = self._above + 1 if above else 0
        self._set("diverging", self._above >= 10)
        self._set("flat", n >= 30 and self._fast > 0.99 * self._first and self._best > 0.97 * self._first)

    def _evaluation(self, value: float) -> None:
        if value < self._best_eval:
            self._best_eval, self._fast_at_best, self._evals = value, self._fast, 0
        elif value > 1.10 * self._best_eval and value > self._best_eval + 0.01:
            self._evals += 1
        else:
            self._evals = 0
        rising = self._evals >= 2
        fell = self._fast <= self._fast_at_best
        self._set("overfitting", rising and fell)
        self._set("eval_rising", rising and not fell)

"""How fast a session goes, and when it will be done."""

from __future__ import annotations

from collections import deque

WINDOW = 50
"""Steps that count as recent."""


class Pace:
    """Seconds per step of this session's recent past, and the time left.

    The time left is `remaining steps * (mean of the last WINDOW step durations + pauses per step)`; pauses are
    the evaluations and saves of this session spread over its steps. Only this session counts: dividing its
    time by the steps of the whole run makes an estimate ten times too short after a resume. The first step
    (compilation, warm caches) is left out as soon as three others are known.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: the batch size or the data changed."""
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._first: float | None = None
        self._steps = 0
        self._pauses = 0.0

    def step(self, seconds: float, count: int = 1) -> None:
        """Note `count` steps that took `seconds` each, evaluation and saving taken out."""
        for _ in range(min(count, WINDOW)):
            if self._first is None:
                self._first = seconds
            else:
                self._recent.append(seconds)
        self._steps += count

    def pause(self, seconds: float) -> None:
        """Note time spent in an evaluation or a save; one before the first step (`eval_on_start`) does not recur."""
        if self._steps:
            self._pauses += max(0.0, seconds)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean duration of the recent steps without pauses; None before the first step."""
        if self._first is None:
            return None
        values = list(self._recent)
        if len(values) < 3:
            values.append(self._first)
        return sum(values) / len(values)

    def eta(self, step: float | None, max_steps: float | None) -> float | None:
        """Seconds until `max_steps`; None while it can not be known, never negative."""
        per_step = self.seconds_per_step
        if per_step is None or step is None or max_steps is None or not max_steps > 0 or step != step:
            return None
        return max(0.0, max_steps - step) * (per_step + self._pauses / self._steps)

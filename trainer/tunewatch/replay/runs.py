"""Runs of a stream: where one ends, and what the detectors say of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunewatch.health import Health, Thresholds, Verdict
from tunewatch.health.reading import finite, is_eval_loss
from tunewatch.replay.entries import is_summary, is_train_log

HEALTH = ("unknown", "ok", "attention", "bad")
"""What is said of a run, weakest first."""

NEXT_RUN: dict[str, Any] = {"event": "next_run"}
"""Stands between the events of two runs of one stream."""


@dataclass(frozen=True)
class Raised:
    """A verdict as it was first raised, and at which log of its run (counted from 1; 0 before the first)."""

    verdict: Verdict
    log: int


@dataclass(frozen=True)
class Report:
    """What is known of one run of a file; `problem` says why nothing is, or what could not be read of it."""

    file: str
    run: int | str | None = None
    format: str | None = None
    raised: tuple[Raised, ...] = ()
    logs: int = 0
    losses: int = 0
    evals: int = 0
    steps: int | None = None
    """The highest step of its logs."""
    step_source: str = "none"
    problem: str | None = None

    @property
    def health(self) -> str:
        """The worst that was ever raised. A run of which neither a loss nor an evaluation is known is unknown."""
        worst = max((raised.verdict.level for raised in self.raised), key=_RANK.__getitem__, default="info")
        if worst != "info":
            return worst
        return "ok" if self.losses or self.evals else "unknown"

    @property
    def readable(self) -> bool:
        """Whether there is anything to judge."""
        return self.losses > 0 or self.evals > 0 or bool(self.raised)


_NOTHING: Mapping[str, Any] = {}
_RANK = {"info": 0, "attention": 1, "bad": 2}


@dataclass
class Notes:
    """What a reader finds out about its source beside the events."""

    malformed: int = 0
    cut_short: bool = False
    step_source: str = "none"
    nothing: str | None = None
    """Why there may be no run in it."""

    def problem(self) -> str | None:
        parts = []
        if self.malformed:
            parts.append(
                f"{self.malformed} malformed or oversized {'entry' if self.malformed == 1 else 'entries'} left out"
            )
        if self.cut_short:
            parts.append("it ends in the middle of an entry or list")
        return "; ".join(parts) or None


class Judged:
    """One run, fed to the detectors; keeps each signal as it was first raised, for a healed one still happened."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._health = Health(thresholds=thresholds)
        self._raised: dict[str, Raised] = {}
        self._eval_keys: set[str] = set()
        self._known_keys: set[str] = set()
        self.logs = self.losses = self.evals = 0
        self.steps: int | None = None

    def event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "log":
            self._count(event)
        self._health.event(event)
        if self._health.signals <= self._raised.keys():
            return
        for verdict in self._health.verdicts:
            if verdict.signal not in self._raised:
                self._raised[verdict.signal] = Raised(verdict, self.logs)

    def _count(self, event: Mapping[str, Any]) -> None:
        self.logs += 1
        step = event.get("step")
        if step is not None and (self.steps is None or step > self.steps):
            self.steps = step
        values, nonfinite = event.get("values") or _NOTHING, event.get("nonfinite") or _NOTHING
        self._count_keys(values)
        if nonfinite:
            self._count_keys(nonfinite)

    def _count_keys(self, keys: Mapping[str, Any]) -> None:
        if not keys.keys() <= self._known_keys:
            self._known_keys.update(keys)
            self._eval_keys.update(key for key in keys if is_eval_loss(key))
        if "loss" in keys:
            self.losses += 1
        if self._eval_keys and not self._eval_keys.isdisjoint(keys):
            self.evals += 1

    def report(self, file: str, run: int | str, form: str, notes: Notes) -> Report:
        worst_first = sorted(self._raised.values(), key=lambda raised: -_RANK[raised.verdict.level])
        return Report(
            file, run, form, tuple(worst_first), self.logs, self.losses, self.evals, self.steps,
            notes.step_source if self.steps is not None else "none", notes.problem(),
        )  # fmt: skip


def judge(events: Iterable[Mapping[str, Any]], thresholds: Thresholds) -> Iterator[Judged]:
    """Each run of a stream, judged."""
    run = Judged(thresholds)
    for event in events:
        if event is not NEXT_RUN:
            run.event(event)
        else:
            yield run
            run = Judged(thresholds)
    yield run


@dataclass
class Boundary:
    """Where a stream begins another run.

    After the summary that ends a training, at the next training log. Else where the position (step, or epoch) goes back
    to where runs begin: to about the smallest distance of two logs. Any other way back is left to the detectors:
    two processes that write one log go back and forth, but to the start only once each.
    """

    _ended: bool = False
    _last: dict[str, float] = field(default_factory=dict)
    _least: dict[str, float] = field(default_factory=dict)

    def close(self) -> None:
        """The stream says that a training begins or ended."""
        self._ended = bool(self._last)

    def passed(self, values: Mapping[str, Any], step: int | None) -> bool:
        """Take in one log; whether it is the first of another run."""
        if not is_train_log(values):
            self._ended = self._ended or (is_summary(values) and bool(self._last))
            return False
        name, position = ("step", step) if step is not None else ("epoch", finite(values.get("epoch")))
        begins = self._ended or self._restarts(name, position)
        if begins:
            self._last, self._ended = {}, False
        if position is None:
            self._last.setdefault("log", 0.0)
        else:
            self._follow(name, position)
        return begins

    def _restarts(self, name: str, position: float | None) -> bool:
        last = self._last.get(name)
        if position is None or last is None or position >= last:
            return False
        return position < 1.5 * self._least.get(name, 0.0)

    def _follow(self, name: str, position: float) -> None:
        distance = position - self._last.get(name, 0.0)
        if distance > 0.0:
            self._least[name] = min(distance, self._least.get(name, distance))
        self._last[name] = position

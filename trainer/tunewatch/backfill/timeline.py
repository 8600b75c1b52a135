"""When the events of a past run happened: as recorded, from the time that had elapsed, or spread."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunewatch.health.reading import finite
from tunewatch.replay.entries import is_train_log
from tunewatch.replay.runs import NEXT_RUN

RECORDED, ELAPSED, SPREAD = "recorded", "elapsed", "spread"
"""The history has Unix times; it has durations, counted back from when the file was last written; it has neither."""

OLDEST = 946_684_800.0
"""The year 2000, Unix time: what lies before it is no time of a training."""
SECONDS_PER_LOG = 10.0
"""How far apart logs are spread, where nobody says it and the history does not tell how long the training took."""
HEAD_SECONDS = 3 * 3600.0
"""The time before now that Prometheus may still hold in memory, where no block may be put."""

_CLOCK = re.compile(r"(?:(\d+) days?, )?(\d+):(\d{2}):(\d{2})(?:\.\d+)?")
_UNITS = re.compile(r"(?:(\d+)d\s*)?(?:(\d+)h\s*)?(?:(\d+)m\s*)?(?:(\d+)s)?")


@dataclass(frozen=True)
class Span:
    """Where the user puts a run that has no times of its own, in Unix seconds; None is not said."""

    start: float | None = None
    end: float | None = None
    seconds_per_log: float | None = None


@dataclass
class Survey:
    """What one pass over a run finds out: the second one writes its samples."""

    number: int = 1
    logs: int = 0
    judged: bool = False
    """Whether there is a loss, or an evaluation loss."""
    first: float | None = None
    last: float | None = None
    elapsed: float | None = None
    runtime: float | None = None
    """Seconds that the training took, by the trainer's own summary."""
    _digest: Any = field(default_factory=hashlib.sha256)
    _watch: Stopwatch | None = None

    def event(self, event: Mapping[str, Any], now: float) -> None:
        moment = recorded(event, now)
        if moment is not None:
            self.first = moment if self.first is None else min(self.first, moment)
            self.last = moment if self.last is None else max(self.last, moment)
        if event["event"] != "log":
            return
        self.logs += 1
        values = event.get("values") or {}
        self.judged = self.judged or is_train_log(values) or any(key.startswith("eval_") for key in values)
        self.runtime = finite(values.get("train_runtime")) or self.runtime
        self._digest.update(repr((event.get("step"), values, event.get("nonfinite") or None)).encode())
        if (elapsed := event.get("elapsed_time")) is not None:
            self._watch = self._watch or Stopwatch()
            self.elapsed = self._watch.read(elapsed)

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of the logs, alike wherever the file lies."""
        return str(self._digest.hexdigest()[:8])

    @property
    def time(self) -> str:
        """Where the times come from: RECORDED, ELAPSED or SPREAD."""
        if self.first is not None:
            return RECORDED
        return ELAPSED if self.elapsed else SPREAD


def survey(events: Iterable[Mapping[str, Any]], now: float) -> Iterator[Survey]:
    """The runs of a stream, in order."""
    run = Survey()
    for event in events:
        if event is NEXT_RUN:
            yield run
            run = Survey(number=run.number + 1)
        else:
            run.event(event, now)
    yield run


def recorded(event: Mapping[str, Any], now: float) -> float | None:
    """The Unix time of an event, where it has one that can be."""
    moment = finite(event.get("t"))
    return moment if moment is not None and OLDEST <= moment <= now + 86_400.0 else None


class Stopwatch:
    """Reads `elapsed_time` of the logs of a run: a resumed one begins again at 0, and its time comes on top."""

    def __init__(self) -> None:
        self._before = self._last = 0.0

    def read(self, text: Any) -> float:
        """Seconds since the run began; what can not be read stands still."""
        seconds = elapsed_seconds(text)
        if seconds is not None:
            if seconds < self._last:
                self._before += self._last
            self._last = seconds
        return self._before + self._last


def elapsed_seconds(text: Any) -> float | None:
    """Seconds of `0:01:30`, `1 day, 2:03:04` (LLaMA-Factory) or `1h 2m 3s` (ms-swift); None for anything else."""
    if not isinstance(text, str):
        return finite(text)
    found = _CLOCK.fullmatch(text.strip()) or _UNITS.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 86_400.0 * days + 3600.0 * hours + 60.0 * minutes + seconds


class Timeline:
    """Gives each event of one run its Unix time; never an earlier one than the event before."""

    def __init__(self, run: Survey, start: float, end: float, now: float) -> None:
        self.start, self.end = start, end
        self._run, self._now = run, now
        self._watch = Stopwatch()
        self._logs = 0
        self._last = start

    def at(self, event: Mapping[str, Any]) -> float:
        moment: float | None = None
        if self._run.time == RECORDED:
            moment = recorded(event, self._now)
        elif event["event"] == "log":
            self._logs += 1
            if self._run.time == SPREAD:
                moment = self.start + (self.end - self.start) * min(1.0, self._logs / self._run.logs)
            elif (elapsed := event.get("elapsed_time")) is not None:
                moment = self.start + self._watch.read(elapsed)
        if moment is not None:
            self._last = max(self._last, moment)
        return self._last


def timelines(runs: Sequence[Survey], span: Span, written: float, now: float) -> list[Timeline]:
    """The times of each run of a stream that was last written at `written` (Unix time).

    Runs without times of their own lie one after the other: up to the end that is asked for, else up to when the file
    was written. Where no time is known at all they end before what Prometheus still holds in memory.
    """
    unknown = [run for run in runs if run.time != RECORDED]
    lasted = {run.number: _lasted(run, span) for run in unknown}
    whole = sum(lasted.values())
    invented = any(run.time == SPREAD for run in unknown)
    end = span.end if span.end is not None else min(written, now - HEAD_SECONDS) if invented else written
    start = span.start if span.start is not None else end - whole
    scale = 1.0
    if span.start is not None and span.end is not None:
        scale = (span.end - span.start) / whole if whole else 1.0
    found = []
    for run in runs:
        if run.time == RECORDED:
            assert run.first is not None and run.last is not None
            found.append(Timeline(run, run.first, run.last, now))
        else:
            until = start + lasted[run.number] * scale
            found.append(Timeline(run, start, until, now))
            start = until
    return found


def _lasted(run: Survey, span: Span) -> float:
    """Seconds that a run without times of its own is given."""
    if run.time == ELAPSED:
        return run.elapsed or 0.0
    if span.seconds_per_log is None and run.runtime:
        return run.runtime
    return run.logs * (span.seconds_per_log or SECONDS_PER_LOG)

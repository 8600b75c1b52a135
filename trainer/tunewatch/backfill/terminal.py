"""`tunewatch import`: what the user asked for, and what became of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

from tunewatch.backfill.command import INTERVAL, LOOKBACK_SECONDS, ImportRefused, Outcome, Target, import_runs
from tunewatch.backfill.timeline import Span
from tunewatch.durations import parse_duration, parse_time
from tunewatch.replay.report import printable

ALL_DONE, SOME_NOT, NOTHING_DONE = 0, 1, 3
"""Exit codes: all runs were imported, some were not, none was."""

RETENTION = 15 * 86_400.0
"""How long Prometheus keeps samples, unless it is told otherwise."""


def run_import(
    files: Sequence[str],
    *,
    into: Path | None,
    openmetrics: str | None,
    run_id: str | None,
    name: str | None,
    start: str | None,
    end: str | None,
    seconds_per_log: float | None,
    interval: str | None,
) -> int:
    """Import and report, a line a run; returns the exit code. ImportRefused, DurationError for a wrong option."""
    span = _span(start, end, seconds_per_log)
    every = INTERVAL if interval is None else parse_duration(interval)
    if every >= LOOKBACK_SECONDS:
        raise ImportRefused(
            f"--interval {interval}: it must be below 5m, after which Prometheus calls a series stale"
        )
    target = _target(into, openmetrics)
    report = sys.stderr if openmetrics == "-" else sys.stdout
    outcomes = []
    for outcome in import_runs(files, target, run_id=run_id, name=name, span=span, interval=every):
        outcomes.append(outcome)
        print(_line(outcome), file=report, flush=True)
    if into is not None:
        for line in _afterwards(outcomes):
            print(line, file=report)
    done = sum(outcome.done for outcome in outcomes)
    return NOTHING_DONE if not done else ALL_DONE if done == len(outcomes) else SOME_NOT


def _span(start: str | None, end: str | None, seconds_per_log: float | None) -> Span:
    begin, until = (None if text is None else _moment(text) for text in (start, end))
    if begin is not None and until is not None and begin >= until:
        raise ImportRefused(f"--start {start} is not before --end {end}")
    if seconds_per_log is not None and not 0 < seconds_per_log < float("inf"):
        raise ImportRefused(f"--seconds-per-log {seconds_per_log}: expected a number above 0")
    return Span(begin, until, seconds_per_log)


def _moment(text: str) -> float:
    """Unix seconds of a point in time; a time of day is one of today."""
    try:
        return float(text)
    except ValueError:
        return parse_time(text, datetime.now().astimezone()).timestamp()


def _target(into: Path | None, openmetrics: str | None) -> Target:
    if (into is None) == (openmetrics is None):
        raise ImportRefused(
            "import: say where to, with either --into DIR (the data folder of a Prometheus) or --openmetrics FILE"
        )
    if into is not None:
        if not into.is_dir():
            raise ImportRefused(
                f"--into {into}: no such folder; it is what Prometheus' --storage.tsdb.path names"
            )
        return Target(data=into)
    if openmetrics == "-":
        return Target(out=lambda: nullcontext(sys.stdout.buffer))
    path = Path(str(openmetrics))
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ImportRefused(f"--openmetrics {path}: it can not be written")
    return Target(out=lambda: path.open("wb"))


def _line(outcome: Outcome) -> str:
    run = f", run {outcome.run}" if outcome.run != 1 else ""
    return (
        f"{printable(outcome.file)}{run}: {'' if outcome.done else 'not imported: '}{printable(outcome.text)}"
    )


def _afterwards(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """What is to be known for the runs to be seen."""
    oldest = min((outcome.oldest for outcome in outcomes if outcome.oldest is not None), default=None)
    if oldest is None:
        return
    yield "A running Prometheus sees new blocks within two minutes, and when it is started again."
    if (age := time.time() - oldest) > RETENTION:
        yield (
            f"The oldest sample is {age / 86_400:.0f} days old: a Prometheus whose --storage.tsdb.retention.time is "
            "less deletes these blocks at once (its default is 15d, that of `tunewatch stack` 30d)."
        )

"""What a replay found, for people and for programs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tunewatch.replay.runs import HEALTH, Report

NOTHING_READ = 3
"""Exit code when no file could be read."""

_CODES = {"unknown": 0, "ok": 0, "attention": 1, "bad": 2}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Also half surrogates: bytes of a file name that are no text."""

_STEPS = {
    "bar": "; steps as the progress bar showed them",
    "epoch": "; steps from the epochs",
    "counted": "; steps are numbers of training logs",
}


def exit_code(reports: Iterable[Report]) -> int:
    """0 ok or unknown, 1 attention, 2 bad: the worst of them; 3 when nothing could be read at all."""
    reports = list(reports)
    if not any(report.readable for report in reports):
        return NOTHING_READ
    return max(_CODES[report.health] for report in reports)


def to_json(report: Report) -> dict[str, Any]:
    """One run of one file as strict JSON."""
    return {
        "file": printable(report.file),
        "run": report.run,
        "format": report.format,
        "health": report.health,
        "signals": [raised.verdict.to_json() for raised in report.raised],
        "logs": report.logs,
        "losses": report.losses,
        "evals": report.evals,
        "steps": report.steps,
        "step_source": report.step_source,
        "problem": report.problem,
    }


def json_list(reports: Iterable[Report]) -> Iterator[str]:
    """The lines of a JSON list, as the reports come in."""
    before = "["
    for report in reports:
        yield before + json.dumps(to_json(report), allow_nan=False)
        before = ","
    yield "]" if before == "," else "[]"


def text_lines(report: Report) -> Iterator[str]:
    """A line about the run, and one for each signal."""
    run = f", run {report.run}" if report.run not in (None, 1) else ""
    about = [_counts(report)] if report.readable else []
    if report.problem:
        about.append(report.problem)
    yield f"{printable(report.file)}{run}: {report.health} ({'; '.join(about)})"
    for verdict in (raised.verdict for raised in report.raised):
        at = f"step {verdict.step}" if verdict.step is not None else "step unknown"
        yield f"  {verdict.level:9} {verdict.signal}, {at}: {verdict.message} {verdict.advice}"


def _counts(report: Report) -> str:
    parts = [_many(report.logs, "log"), _many(report.losses, "loss"), _many(report.evals, "evaluation")]
    last = f", up to step {report.steps}" if report.steps is not None else ""
    return f"{report.format}: {', '.join(parts)}{last}{_STEPS.get(report.step_source, '')}"


def _many(count: int, what: str) -> str:
    plural = "losses" if what == "loss" else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


def summary(reports: Iterable[Report]) -> str:
    """How many runs there were of each health."""
    reports = list(reports)
    read = [report for report in reports if report.readable]
    counts = Counter(report.health for report in read)
    shown = ", ".join(f"{counts[health]} {health}" for health in reversed(HEALTH) if counts[health])
    files = len({report.file for report in read})
    unread = len(reports) - len(read)
    line = f"{_many(len(read), 'run')} in {_many(files, 'file')}" + (f": {shown}" if shown else "")
    return line + (f"; nothing to judge in {unread} more" if unread else "")


def printable(text: str) -> str:
    """The text without what a terminal or a JSON reader would choke on."""
    return _CONTROL.sub("?", text)

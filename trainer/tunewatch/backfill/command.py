"""From the paths of histories to samples in Prometheus."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from tunewatch import states
from tunewatch.backfill.blocks import WINDOW_MS, BlocksError, add_blocks, holds
from tunewatch.backfill.openmetrics import Families, RunSamples, write_families
from tunewatch.backfill.series import PastRun
from tunewatch.backfill.timeline import (
    HEAD_SECONDS,
    RECORDED,
    SPREAD,
    Span,
    Survey,
    Timeline,
    survey,
    timelines,
)
from tunewatch.binaries import find_binary
from tunewatch.metrics import MAX_LABEL, label_value
from tunewatch.replay.places import Place, Unreadable, places, why
from tunewatch.replay.runs import NEXT_RUN
from tunewatch.replay.sources import NO_LOG, Stream
from tunewatch.runfolder import RUN_ID, RunFolder, RunFolderError
from tunewatch.supervisor.ending import Ending

INTERVAL = 60.0
"""Seconds after which an unchanged value is written again."""
LOOKBACK_SECONDS = 300.0
"""How long Prometheus shows a value after its sample, unless it is told otherwise."""
GAP_SECONDS = 3600.0
"""A silence up to this is drawn as a line; a longer one as far as it is not GAP_FACTOR times the longest before it."""
GAP_FACTOR = 10.0

TOO_NEW = "it ended less than 3 h ago, a time that Prometheus still holds in memory: import it later"

Event = Mapping[str, Any]

_GENERIC = re.compile(
    r"(trainer_state|trainer_log|logging|events|train|output|log|console|nohup|stdout|stderr|checkpoint-\d+)"
)
"""File and folder names that say nothing about the run: the folder above does."""


class ImportRefused(Exception):
    """The import can not be done as asked; nothing was written. The text is for the user."""


@dataclass(frozen=True)
class Target:
    """Where samples go: into a data folder of Prometheus, or as text into what `out` opens."""

    data: Path | None = None
    out: Callable[[], AbstractContextManager[IO[bytes]]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one run of one file, or of a file: one line for a person."""

    file: str
    done: bool
    text: str
    run: int = 1
    oldest: float | None = None
    """Unix time of the first sample."""


@dataclass(frozen=True)
class _Run:
    """A run that is to be imported."""

    place: Place
    form: str
    survey: Survey
    timeline: Timeline
    run_id: str
    name: str
    facts: Mapping[str, Any]
    ending: Ending | None
    probed: bool


def import_runs(
    paths: Iterable[str],
    target: Target,
    *,
    run_id: str | None = None,
    name: str | None = None,
    span: Span = Span(),
    interval: float = INTERVAL,
) -> Iterator[Outcome]:
    """Import all runs at these paths; each outcome as it is known.

    Raises ImportRefused, before anything is written, for a run id that is none or is given to several runs.
    """
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise ImportRefused(
            f"--run-id {run_id!r}: letters, digits, '.', '_' and '-' only, at most 64 of them"
        )
    now = time.time()
    found = [_look(place, run_id, name, span, now) for path in paths for place in places(path)]
    count = sum(len(runs) for runs in found if not isinstance(runs, Outcome))
    if run_id is not None and count > 1:
        raise ImportRefused(f"--run-id {run_id}: it is the id of one run, and there are {count}")
    importer = _Blocks(target.data, now, interval) if target.data is not None else _Text(target.out, interval)
    with closing(importer):
        for runs in found:
            if isinstance(runs, Outcome):
                yield runs
            else:
                yield from _import_place(runs, importer)
        importer.finish()


def _look(place: Place, run_id: str | None, name: str | None, span: Span, now: float) -> list[_Run] | Outcome:
    """The runs at a place, or why there is none."""
    try:
        with Stream(place) as stream:
            runs = [run for run in survey(stream.events, now) if run.judged]
            nothing, problem = stream.notes.nothing or NO_LOG, stream.notes.problem()
            folder, form = stream.folder, stream.form
        written = max(path.stat().st_mtime for path in place.files)
    except Unreadable as error:
        return Outcome(place.name, False, str(error))
    except OSError as error:
        return Outcome(place.name, False, why(error))
    if not runs:
        return Outcome(place.name, False, "; ".join(filter(None, (nothing, problem))))
    facts, ending = _told(folder)
    called = name or facts.get("name") or _name(place)
    found = []
    for run, timeline in zip(runs, timelines(runs, span, written, now), strict=True):
        title = label_value(called if len(runs) == 1 else f"{called[: MAX_LABEL - 8]} {run.number}")
        own = run_id or (folder.name if folder is not None else _id(title, run))
        found.append(_Run(place, form, run, timeline, own, title, facts, ending, form == "events"))
    return found


def _import_place(runs: Sequence[_Run], importer: _Importer) -> Iterator[Outcome]:
    """Read a place a second time, all its runs in one pass."""
    waiting = list(runs)
    try:
        with Stream(runs[0].place) as stream:
            for number, events in groupby(_numbered(stream.events), key=itemgetter(0)):
                if waiting and number == waiting[0].survey.number:
                    yield importer.take(waiting.pop(0), (event for _, event in events))
    except (Unreadable, OSError) as error:
        text = why(error) if isinstance(error, OSError) else str(error)
        yield from (_refused(run, text) for run in waiting)


def _numbered(events: Iterable[Event]) -> Iterator[tuple[int, Event]]:
    """The events with the number of their run in the stream."""
    number = 1
    for event in events:
        if event is NEXT_RUN:
            number += 1
        else:
            yield number, event


def _told(folder: Path | None) -> tuple[Mapping[str, Any], Ending | None]:
    """run.json of a run folder, and the supervisor's word about the end."""
    if folder is None:
        return {}, None
    try:
        facts = RunFolder(folder).read("run.json") or {}
        verdict = RunFolder(folder).read("verdict.json") or {}
    except RunFolderError:
        return {}, None
    ending = verdict.get("ending")
    if not isinstance(ending, Mapping) or ending.get("state") not in states.TERMINAL:
        return facts, None
    reason, when = (label_value(ending.get(key) or "") for key in ("reason", "when"))
    return facts, Ending(ending["state"], reason, when, "", "")


def _name(place: Place) -> str:
    """What a run is called after: the file, or the nearest folder whose name says something."""
    path = place.files[0].absolute()
    if "tfevents" in path.name:
        path = path.parent
    for part in (path, *path.parents):
        if part.name and not _GENERIC.fullmatch(part.stem if part == path else part.name):
            return part.stem if part == path and len(place.files) == 1 else part.name
    return path.stem


def _id(name: str, run: Survey) -> str:
    """The same for the same logs under the same name. It begins with the date of the run, where the logs tell it."""
    if run.time == RECORDED:
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(run.first))}-{run.digest}"
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40]
    return f"00000000-{slug or 'run'}-{run.digest}"


class _Importer(ABC):
    """Plays the events of a run, and gives its samples on."""

    def __init__(self, interval: float) -> None:
        self._interval = round(interval * 1000)
        self._samples = RunSamples(self._interval)

    def close(self) -> None:
        self._samples.close()

    def finish(self) -> None:  # noqa: B027 - blocks are done when each run is
        """All runs were taken."""

    @abstractmethod
    def take(self, run: _Run, events: Iterable[Event]) -> Outcome:
        """Import a run; its events may be left unread."""

    def _window(self, run: _Run, at: int) -> bool:
        """The samples that come are of that time (Unix ms); whether they begin something new."""
        return False

    def _play(self, run: _Run, events: Iterable[Event]) -> None:
        past = PastRun(
            run.run_id,
            run.name,
            source=(run.form, run.survey.time),
            probed=run.probed,
            start=run.timeline.start if run.survey.time != SPREAD else None,
            facts=run.facts,
            ending=run.ending,
        )
        at: int | None = None
        whole_at = longest = 0
        for event in events:
            moment = round(run.timeline.at(event) * 1000)
            if at is not None and moment > at:
                if past.is_changed or at - whole_at >= self._interval:
                    whole_at = at
                self._put(run, past, at, whole=whole_at == at)
                silence = moment - at
                if event["event"] != "session" and silence <= max(GAP_SECONDS * 1000, GAP_FACTOR * longest):
                    longest = max(longest, silence)
                    while whole_at + self._interval < moment:
                        whole_at += self._interval
                        self._put(run, past, whole_at, whole=True)
                elif silence > LOOKBACK_SECONDS * 1000 and event["event"] == "session":
                    past.begin_session()
            at = moment
            past.event(event)
        if at is not None:
            past.end(at / 1000)
            self._put(run, past, at, whole=True, last=True)

    def _put(self, run: _Run, past: PastRun, at: int, *, whole: bool, last: bool = False) -> None:
        if self._window(run, at):
            whole = True
        self._samples.put(past.samples(at / 1000, whole=whole), at, last=last)


class _Text(_Importer):
    """All runs as one text, written when all were taken."""

    def __init__(self, out: Callable[[], AbstractContextManager[IO[bytes]]] | None, interval: float) -> None:
        super().__init__(interval)
        assert out is not None
        self._out = out
        self._families = Families()
        self._taken: set[str] = set()

    def take(self, run: _Run, events: Iterable[Event]) -> Outcome:
        if run.run_id in self._taken:
            return _refused(run, f"run {run.run_id} is in the text already")
        self._taken.add(run.run_id)
        self._play(run, events)
        count = self._samples.samples
        self._families.add(self._samples)
        self._samples.close()
        return _done(run, f"{count} samples")

    def finish(self) -> None:
        with self._out() as out:
            self._families.write(out)

    def close(self) -> None:
        self._families.close()
        super().close()


class _Blocks(_Importer):
    """Each run as blocks, a day of it at a time."""

    def __init__(self, data: Path, now: float, interval: float) -> None:
        super().__init__(interval)
        self._data, self._now = data, now
        self._promtool = find_binary("promtool", report=partial(print, file=sys.stderr))
        self._until: int | None = None
        self._blocks = self._count = 0

    def take(self, run: _Run, events: Iterable[Event]) -> Outcome:
        if run.timeline.end > self._now - HEAD_SECONDS:
            return _refused(run, TOO_NEW)
        try:
            if holds(self._data, run.run_id):
                return Outcome(
                    run.place.name,
                    True,
                    f"run {run.run_id} is there already: nothing done",
                    run.survey.number,
                )
            self._until, self._blocks, self._count = None, 0, 0
            self._play(run, events)
            self._flush()
        except (BlocksError, OSError) as error:
            return _refused(run, str(error))
        finally:
            self._samples.close()
        return _done(run, f"{self._count} samples in {self._blocks} block{'' if self._blocks == 1 else 's'}")

    def _window(self, run: _Run, at: int) -> bool:
        if self._until is not None and at < self._until:
            return False
        self._flush()
        self._until = at - at % WINDOW_MS + WINDOW_MS
        return True

    def _flush(self) -> None:
        if not self._samples.samples:
            return
        with tempfile.NamedTemporaryFile(prefix="tunewatch-import-", suffix=".om") as file:
            write_families(file, self._samples.drain())
            file.flush()
            self._blocks += add_blocks(self._promtool, Path(file.name), self._data)
        self._count += self._samples.samples
        self._samples.close()


def _refused(run: _Run, text: str) -> Outcome:
    return Outcome(run.place.name, False, text, run.survey.number)


def _done(run: _Run, text: str) -> Outcome:
    begin, end = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (run.timeline.start, run.timeline.end)
    )
    how = {RECORDED: "recorded", SPREAD: "spread evenly"}.get(run.survey.time, "by the time elapsed")
    return Outcome(
        run.place.name,
        True,
        f"run {run.run_id} ({run.name}), {run.survey.logs} logs from {begin} to {end}, times {how}: {text}",
        run.survey.number,
        run.timeline.start,
    )

"""What a path holds, told by its content and not by its name, and the runs in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from tunewatch.health import Thresholds
from tunewatch.replay.console import console_events, unwrapped, wrapped
from tunewatch.replay.eventlog import event_log_events
from tunewatch.replay.history import LOG_HISTORY, facts_behind, line_events, list_events
from tunewatch.replay.pieces import encoding_of, pieces
from tunewatch.replay.places import HEAD, Place, Unreadable, open_file, places, why
from tunewatch.replay.runs import Notes, Report, judge
from tunewatch.replay.tensorboard import is_record, tensorboard_events

MAX_CONTROL = 0.05
"""Share of control characters in the head of a file from which it is no text."""

_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\b\x07\x1b"))
"""What stands in no text."""
_PACKED = (
    (b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\xfd7zXZ", "xz"), (b"BZh", "bzip2"),
    (b"PK\x03\x04", "zip"),
)  # fmt: skip
"""How compressed files begin."""

Events = Iterator[dict[str, Any]]
Reader = Callable[[Iterator[str], Notes], Events]


def replay(path: str, thresholds: Thresholds) -> Iterator[Report]:
    """The runs at a path: a file, a folder of files, a run folder, or the id of a run; each with what was raised.

    Never raises for what a file holds or is: then there is one report with a `problem`.
    """
    for place in places(path):
        yield from _judged(place, thresholds)


def _judged(place: Place, thresholds: Thresholds) -> Iterator[Report]:
    number = 0
    form = None
    try:
        with Stream(place) as stream:
            form, notes = stream.form, stream.notes
            for run in judge(stream.events, thresholds):
                report = run.report(place.name, stream.run_id or number + 1, form, notes)
                if report.readable:
                    number += 1
                    yield report
            nothing = notes.nothing or NO_LOG
            problem = "; ".join(filter(None, (nothing, notes.problem())))
    except Unreadable as error:
        problem = str(error)
    except OSError as error:
        problem = why(error)
    else:
        if number:
            return
    yield Report(place.name, format=form, problem=problem)


NO_LOG = "no log of a training in it"


class Stream:
    """The events at a place, with NEXT_RUN between those of two runs; open while it is entered.

    Entering it raises Unreadable or OSError where there is nothing to read, and so does reading.
    """

    form: str
    events: Events

    def __init__(self, place: Place) -> None:
        self.notes = Notes()
        self._place = place
        self._stack = ExitStack()

    def __enter__(self) -> Stream:
        if self._place.problem is not None:
            raise Unreadable(self._place.problem)
        with self._stack:
            files = [self._stack.enter_context(open_file(path)) for path in self._place.files]
            self.form, self.events = _events(files, self.notes)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def folder(self) -> Path | None:
        """The run folder it is read from."""
        folder = self._place.files[0].absolute().parent
        return folder if self.form == "events" and (folder / "run.json").is_file() else None

    @property
    def run_id(self) -> str | None:
        """The id of the run, where its folder is at hand."""
        return self.folder.name if self.folder is not None else None


def _events(files: list[BufferedReader], notes: Notes) -> tuple[str, Events]:
    """Form and events of what was opened."""
    head = files[0].peek(HEAD)[:HEAD]
    if is_record(head) or len(files) > 1:
        return "tensorboard", tensorboard_events(files, notes)
    encoding = encoding_of(head)
    if not head:
        raise Unreadable("an empty file")
    if packed := next((name for mark, name in _PACKED if head.startswith(mark)), None):
        raise Unreadable(f"a compressed file ({packed})")
    if encoding.startswith("utf-8") and _is_binary(head):
        raise Unreadable("a binary file that is no event file of TensorBoard")
    form, reader = _form(head.decode(encoding, "replace").lstrip("\ufeff").lstrip(), len(head) < HEAD)
    return form, _read(files[0], encoding, reader, notes)


def _is_binary(head: bytes) -> bool:
    return len(head) - len(head.translate(None, _CONTROLS)) > MAX_CONTROL * len(head)


def _form(text: str, whole: bool) -> tuple[str, Reader]:
    """Which of the text forms it is; console output is what is no other."""
    if text.startswith("{"):
        if LOG_HISTORY.search(text):
            return "trainer_state", _state
        first, _, rest = text.partition("\n")
        try:
            entry = json.loads(first)
        except (ValueError, RecursionError):
            # Written over several lines: log_history may come later.
            return (
                ("trainer_state", _state)
                if first.strip() == "{" or not (rest or whole)
                else ("console", _console)
            )
        if isinstance(entry, dict) and isinstance(entry.get("event"), str) and "t" in entry:
            return "events", event_log_events
        if isinstance(entry, dict) and "current_steps" in entry:
            return "trainer_log", line_events
        if isinstance(entry, dict) and wrapped(entry) is not None:
            return "console", _wrapped_console
        return "jsonl", line_events
    if text.startswith("[") and text[1:].lstrip().startswith(('{"', "{\n", "{ ", "{\r", "]")):
        return "trainer_state", _bare_list
    return "console", _console


def _state(texts: Iterator[str], notes: Notes) -> Events:
    return list_events(texts, notes, bare=False)


def _bare_list(texts: Iterator[str], notes: Notes) -> Events:
    return list_events(texts, notes, bare=True)


def _console(texts: Iterator[str], notes: Notes) -> Events:
    return console_events(texts, notes)


def _wrapped_console(texts: Iterator[str], notes: Notes) -> Events:
    return console_events(unwrapped(texts), notes)


def _read(file: BinaryIO, encoding: str, reader: Reader, notes: Notes) -> Events:
    """The events; what looked like a JSON history and has no entry may still be console output."""
    some = False
    if reader is _state and encoding.startswith("utf-8") and (begin := facts_behind(_tail(file))) is not None:
        yield begin
    for event in reader(pieces(file, encoding), notes):
        some = True
        yield event
    if not some and reader in (_state, _bare_list) and notes.nothing:
        file.seek(0)
        notes.nothing = None
        yield from console_events(pieces(file, encoding), notes)


def _tail(file: BinaryIO) -> str:
    """The last bytes of a file, which is read from where it stands afterwards."""
    at = file.tell()
    file.seek(max(0, file.seek(0, os.SEEK_END) - HEAD))
    tail = file.read(HEAD)
    file.seek(at)
    return tail.decode("utf-8", "replace")

"""What a path holds, told by its content and not by its name, and the runs in it."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from tunewatch.health import Thresholds
from tunewatch.probe.writer import EVENTS
from tunewatch.replay.console import console_events
from tunewatch.replay.eventlog import event_log_events
from tunewatch.replay.history import LOG_HISTORY, line_events, list_events
from tunewatch.replay.pieces import encoding_of, pieces
from tunewatch.replay.runs import Notes, Report, judge
from tunewatch.replay.tensorboard import is_record, tensorboard_events
from tunewatch.runfolder import RUN_ID, RunFolderError, open_run

HEAD = 1 << 16
"""Bytes from which the form of a file is told."""
MAX_CONTROL = 0.05
"""Share of control characters in them from which it is no text."""
MAX_FILES = 100_000
"""Files of a folder that are looked at."""

_TEXT_CONTROLS = frozenset(b"\t\n\r\f\b\x07\x1b")

Events = Iterator[dict[str, Any]]
Reader = Callable[[Iterator[str], Notes], Events]


class Unreadable(Exception):
    """Nothing can be read there; the text says why."""


def replay(path: str, thresholds: Thresholds) -> Iterator[Report]:
    """The runs at a path: a file, a folder of files, a run folder, or the id of a run; each with what was raised.

    Never raises for what a file holds or is: then there is one report with a `problem`.
    """
    try:
        found = list(_files(path))
    except Unreadable as error:
        yield Report(path, problem=str(error))
        return
    for name, files in found:
        yield from _replay_files(name, files, thresholds)


def _files(path: str) -> Iterator[tuple[str, list[Path]]]:
    """Name and files of each source; only event files of TensorBoard are several."""
    here = Path(path)
    try:
        mode = here.stat().st_mode
    except (OSError, ValueError) as error:
        run = _run(path) if isinstance(error, FileNotFoundError) else None
        if run is None:
            raise Unreadable(_why(error)) from error
        yield path, [run]
        return
    if not stat.S_ISDIR(mode):
        yield path, [here]
    elif (here / EVENTS).is_file():
        yield path, [here / EVENTS]
    else:
        yield from _folder(here)


def _run(run: str) -> Path | None:
    """The events of the run with that id."""
    try:
        return open_run(run).events if RUN_ID.fullmatch(run) else None
    except RunFolderError:
        return None


def _folder(folder: Path) -> Iterator[tuple[str, list[Path]]]:
    """The files of a folder in order of their names, and event files of TensorBoard also of the folders in it."""
    found = False
    try:
        for parent, folders, names in os.walk(folder, onerror=_refuse):
            folders.sort()
            together: list[Path] = []
            for name in sorted(names)[:MAX_FILES]:
                path = Path(parent, name)
                if "tfevents" in name:
                    together.append(path)
                elif Path(parent) == folder and not name.startswith("."):
                    found = True
                    yield str(path), [path]
            if together:
                found = True
                yield str(together[0] if len(together) == 1 else parent), together
    except OSError as error:
        raise Unreadable(_why(error)) from error
    if not found:
        raise Unreadable("a folder without files of a training in it")


def _refuse(error: OSError) -> None:
    raise error


def _replay_files(name: str, files: list[Path], thresholds: Thresholds) -> Iterator[Report]:
    notes = Notes()
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(_open(path)) for path in files]
            form, events = _events(opened, notes)
            number = 0
            for run in judge(events, thresholds):
                report = run.report(name, _run_name(files[0], form) or number + 1, form, notes)
                if report.readable:
                    number += 1
                    yield report
        except Unreadable as error:
            yield Report(name, problem=str(error))
            return
        except OSError as error:
            yield Report(name, problem=_why(error))
            return
    if not number:
        nothing = notes.nothing or "no log of a training in it"
        yield Report(name, format=form, problem="; ".join(filter(None, (nothing, notes.problem()))))


def _run_name(path: Path, form: str) -> str | None:
    """The id of a run, where its folder is at hand."""
    return path.absolute().parent.name if form == "events" and (path.parent / "run.json").is_file() else None


def _open(path: Path) -> BufferedReader:
    """Open a regular file. Never waits: a pipe without a writer is refused before."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unreadable(_kind(path.stat().st_mode))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Unreadable("no regular file")
    return BufferedReader(FileIO(handle, "rb"), HEAD)


def _kind(mode: int) -> str:
    for is_kind, name in (
        (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"),
        (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
    ):  # fmt: skip
        if is_kind(mode):
            return f"{name}, no regular file"
    return "no regular file"


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file, folder or run"
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "a symbolic link that leads to itself"
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def _events(files: list[BufferedReader], notes: Notes) -> tuple[str, Events]:
    """Form and events of what was opened."""
    head = files[0].peek(HEAD)[:HEAD]
    if is_record(head) or len(files) > 1:
        return "tensorboard", tensorboard_events(files, notes)
    encoding = encoding_of(head)
    if not head:
        raise Unreadable("an empty file")
    if encoding.startswith("utf-8") and _is_binary(head):
        raise Unreadable("a binary file that is no event file of TensorBoard")
    form, reader = _form(head.decode(encoding, "replace").lstrip("\ufeff").lstrip(), len(head) < HEAD)
    return form, _read(files[0], encoding, reader, notes)


def _is_binary(head: bytes) -> bool:
    controls = sum(byte < 32 and byte not in _TEXT_CONTROLS for byte in head)
    return controls > MAX_CONTROL * len(head)


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
        if isinstance(entry, dict) and isinstance(entry.get("event"), str):
            return "events", event_log_events
        if isinstance(entry, dict) and "current_steps" in entry:
            return "trainer_log", line_events
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


def _read(file: BinaryIO, encoding: str, reader: Reader, notes: Notes) -> Events:
    """The events; what looked like a JSON history and has no entry may still be console output."""
    some = False
    for event in reader(pieces(file, encoding), notes):
        some = True
        yield event
    if not some and reader in (_state, _bare_list) and notes.nothing:
        file.seek(0)
        notes.nothing = None
        yield from console_events(pieces(file, encoding), notes)

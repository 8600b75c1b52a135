"""Which files a path stands for, and how they are opened: never a pipe that is waited for, never a file twice."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path

from tunewatch.probe.writer import EVENTS
from tunewatch.runfolder import RUN_ID, RunFolderError, open_run

HEAD = 1 << 16
"""Bytes from which the form of a file is told."""


class Unreadable(Exception):
    """Nothing can be read there; the text says why."""


@dataclass(frozen=True)
class Place:
    """What is read as one: a file, or all event files of TensorBoard in a folder. `problem` says why it can not be."""

    name: str
    files: tuple[Path, ...] = ()
    problem: str | None = None


def places(path: str) -> Iterator[Place]:
    """The files at a path: a file, those of a folder and of the folders below it, or the events of a run by its id."""
    here = Path(path)
    try:
        mode = here.stat().st_mode
    except (OSError, ValueError) as error:
        run = _run(path) if isinstance(error, FileNotFoundError) else None
        yield Place(path, problem=why(error)) if run is None else Place(path, (run,))
        return
    if not stat.S_ISDIR(mode):
        yield Place(path, (here,))
    elif (here / EVENTS).is_file():
        yield Place(path, (here / EVENTS,))
    else:
        found = False
        for place in _Walk(here).places():
            found = True
            yield place
        if not found:
            yield Place(path, problem="a folder without files in it")


def _run(run: str) -> Path | None:
    """The events of the run with that id."""
    try:
        return open_run(run).events if RUN_ID.fullmatch(run) else None
    except RunFolderError:
        return None


@dataclass
class _Walk:
    """A folder and the folders below it, in order of their names. What links lead to comes once."""

    root: Path
    _linked: set[Path] = field(default_factory=set)

    def places(self) -> Iterator[Place]:
        open_folders = [self._folder(self.root)]
        while open_folders:
            found = next(open_folders[-1], None)
            if found is None:
                open_folders.pop()
            elif isinstance(found, Place):
                yield found
            else:
                open_folders.append(self._folder(found))

    def _folder(self, folder: Path) -> Iterator[Place | Path]:
        """What is in a folder: places, and the folders in it."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            yield Place(str(folder), problem=why(error))
            return
        if any(entry.name == EVENTS and entry.is_file() for entry in entries):
            yield Place(str(folder), (folder / EVENTS,))
            return
        together: list[Path] = []
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith(".") or (entry.is_symlink() and self._comes_anyway(path)):
                continue
            if _is_folder(entry):
                yield path
            elif "tfevents" in entry.name:
                together.append(path)
            else:
                yield Place(str(path), (path,))
        if together:
            yield Place(str(together[0] if len(together) == 1 else folder), tuple(together))

    def _comes_anyway(self, link: Path) -> bool:
        """Whether what a link leads to is found without it, or was found by another link."""
        try:
            target = link.resolve(strict=True)
        except (OSError, RuntimeError):
            return False  # it leads nowhere, which opening it will say
        below = target.is_relative_to(self.root.resolve()) or self.root.resolve().is_relative_to(target)
        if below or target in self._linked:
            return True
        self._linked.add(target)
        return False


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads to itself


def open_file(path: Path) -> BufferedReader:
    """Open a regular file. Never waits: a pipe without a writer is refused before. Unreadable, OSError."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise Unreadable(f"{_kind(mode)}no regular file")
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
            return f"{name}, "
    return ""


def why(error: OSError | ValueError) -> str:
    """Why a path can not be read."""
    if isinstance(error, FileNotFoundError):
        return "no such file, folder or run"
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "a symbolic link that leads to itself"
    return str((error.strerror if isinstance(error, OSError) else None) or error)

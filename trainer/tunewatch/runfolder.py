"""The layout of a run folder and its reading side; docs/run-folder.md is the contract."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tunewatch.probe.pulse import read_pulse
from tunewatch.probe.writer import EVENTS

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class RunFolderError(Exception):
    """A run folder can not be made, found or used; the text says which and why."""


def tunewatch_home() -> Path:
    """`$TUNEWATCH_HOME`, else `$XDG_STATE_HOME/tunewatch`, else `~/.local/state/tunewatch`."""
    if home := os.environ.get("TUNEWATCH_HOME"):
        return Path(home).absolute()
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state).absolute() / "tunewatch"


def new_run_id() -> str:
    """Return a fresh id, `YYYYMMDD-HHMMSS-xxxx` in local time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def choose_run_id(requested: str | None = None) -> str:
    """The id of a run: as requested, else `TUNEWATCH_RUN_ID`, else of the Slurm job, else a new one."""
    inherited = None if os.environ.get("TUNEWATCH_RUN_FOLDER") else os.environ.get("TUNEWATCH_RUN_ID")
    run_id = requested or inherited or _slurm_run_id() or new_run_id()
    if not RUN_ID.fullmatch(run_id):
        raise RunFolderError(
            f"run id {run_id!r} is not allowed: letters, digits, '.', '_' and '-' only, at most 64 of them, "
            "beginning with a letter or digit"
        )
    return run_id


def _slurm_run_id() -> str | None:
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    name = f"{array}_{task}" if array and task else job
    return f"slurm-{name}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


@dataclass(frozen=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def child_log(self) -> Path:
        return self.path / "child.log"

    @property
    def target_file(self) -> Path:
        return self.path.parent.parent / "targets" / f"{self.run_id}.json"

    def pulses(self) -> dict[int, Mapping[str, float]]:
        """The pulse of each rank of this node that has one."""
        found = {}
        for path in self.path.glob("pulse.*"):
            if path.suffix[1:].isdecimal() and (values := read_pulse(str(path))) is not None:
                found[int(path.suffix[1:])] = values
        return found

    def read(self, name: str) -> dict[str, Any] | None:
        """Read one of the folder's JSON files; None where it is missing, RunFolderError where it is broken."""
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} can not be read: {error}") from error
        if not isinstance(value, dict):
            raise RunFolderError(f"{path} does not hold a JSON object")
        return value

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one of the folder's JSON files in one step, so that a reader never sees half of it."""
        write_json(self.path / name, value)


def write_json(path: Path, value: Any, *, mode: int = 0o600) -> None:
    """Write strict JSON to a temporary file beside `path` and rename it."""
    text = json.dumps(value, allow_nan=False, indent=1, ensure_ascii=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        # A file name of another encoding is no UTF-8; it must not cost the whole file.
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def create_run(*, run_id: str | None = None, name: str | None = None, way: str, **facts: Any) -> RunFolder:
    """Make (or, for an id that exists, open) a run's folder and its run.json.

    Raises RunFolderError where the home can not be written.
    """
    home = tunewatch_home()
    folder = RunFolder(home / "runs" / choose_run_id(run_id))
    try:
        (home / "targets").mkdir(mode=0o755, parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = folder.read("run.json") or {
            "run_id": folder.run_id,
            "created": time.time(),
            "host": os.uname().nodename,
            "sessions": 0,
            "info": {},
            "environment": {},
        }
        known.update({"way": way, "name": name or known.get("name") or folder.run_id})
        known.update({key: fact for key, fact in facts.items() if fact is not None})
        known["sessions"] += 1
        folder.write("run.json", known)
    except OSError as error:
        raise RunFolderError(
            f"TUNEWATCH_HOME {home} can not be written: {error.strerror or error}. "
            "Set TUNEWATCH_HOME to a folder on a local disk that you may write to."
        ) from error
    return folder


def open_run(run: str) -> RunFolder:
    """Find a run by its id or by a path to its folder; RunFolderError names the runs there are."""
    path = Path(run)
    copied = _run_id_in(path)  # output_dir holds a copy of run.json
    if copied != path.absolute().name:
        path = tunewatch_home() / "runs" / (copied or run)
    if not (path / "run.json").is_file():
        known = [folder.run_id for folder in list_runs()][-5:]
        there = f"the latest are {', '.join(known)}" if known else "there are none"
        raise RunFolderError(f"no run {run!r} below {tunewatch_home() / 'runs'}; {there}")
    return RunFolder(path.absolute())


def _run_id_in(path: Path) -> str | None:
    facts = RunFolder(path).read("run.json") if path.is_dir() else None
    return str(facts["run_id"]) if facts and "run_id" in facts else None


def list_runs() -> list[RunFolder]:
    """All runs of this home, oldest first."""
    runs = tunewatch_home() / "runs"
    if not runs.is_dir():
        return []
    found = [RunFolder(path.parent) for path in runs.glob("*/run.json")]
    return sorted(found, key=lambda folder: (folder.path / "run.json").stat().st_mtime)


def write_target(folder: RunFolder, address: str) -> None:
    """Tell Prometheus' file_sd where this run is served. Readable by others: Prometheus is another user."""
    folder.target_file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_json(folder.target_file, [{"targets": [address], "labels": {}}], mode=0o644)


def remove_target(folder: RunFolder) -> None:
    folder.target_file.unlink(missing_ok=True)


class EventReader:
    """Reads a growing events.jsonl: each complete line once, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self.position = 0
        """Bytes up to the end of the last line that was yielded or skipped."""
        self.malformed = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the events appended since the last call. A torn or foreign line is counted and skipped.

        A file that was replaced or cut short is read from its beginning.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self.position:
                self._inode, self.position = stat.st_ino, 0
            file.seek(self.position)
            rest = b""
            while data := file.read(_CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.position += len(line) + 1
                    yield from self._parse(line)

    def _parse(self, line: bytes) -> Iterator[dict[str, Any]]:
        if not line:
            return
        try:
            event = json.loads(line, parse_constant=_not_json)
        except ValueError:
            self.malformed += 1
            # Another process may have written on behind a line that a full disk had torn.
            if (again := line.rfind(_LINE_START)) > 0:
                yield from self._parse(line[again:])
            return
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            yield event
        else:
            self.malformed += 1


_CHUNK = 1 << 20
_LINE_START = b'{"t": '


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")

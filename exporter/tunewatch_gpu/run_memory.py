"""Whose memory it is: the processes of a GPU, grouped by the training run in their environment.

Nothing of a process but its run's id leaves this module: no command line, no name, no process id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tunewatch_gpu.readings import NOT_SUPPORTED, OUT_OF_RANGE

NOBODYS = ""
"""The run of a process that belongs to none, or that may not be looked into."""

_VARIABLE = b"TUNEWATCH_RUN_ID="
_RUN_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENVIRONMENT_LIMIT = 1 << 20  # bytes
_MOST_ANCESTORS = 16
_MOST_RUNS = 16  # of one GPU; more are strangers to us
_HIGHEST_PID = 4_194_304  # PID_MAX_LIMIT of 64-bit Linux

Process = tuple[int, int | None]
"""Process id and its device memory in bytes, None where the driver does not tell it."""


class Impossible(Exception):
    """A list of processes that can not be one; `reason` as in `readings`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RunFinder:
    """Finds the run of a process, and remembers it while the process lives: an environment is read once."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._found: dict[int, tuple[int, str]] = {}
        self._earlier: dict[int, tuple[int, str]] = {}

    def begin_round(self) -> None:
        """All GPUs are looked at once more: who is not asked for again has ended, and is forgotten."""
        self._earlier, self._found = self._found, {}

    def run_of(self, pid: int) -> str:
        """The run in the environment of `pid` or of its nearest ancestor that has one; `NOBODYS` without."""
        if pid not in self._found:
            self._found[pid] = self._find(pid)
        return self._found[pid][1]

    def _find(self, pid: int) -> tuple[int, str]:
        """When `pid` began and its run: as known, if it is the process that was known by this number."""
        status = self._status(pid)
        if status is None:
            return 0, NOBODYS  # gone, or known under another number in the container it runs in
        parent, began = status
        known = self._earlier.get(pid)
        if known is not None and known[0] == began:
            return known
        run = self._read_run(pid)
        for _ in range(_MOST_ANCESTORS):
            if run or parent <= 1 or (status := self._status(parent)) is None:
                break
            run, parent = self._read_run(parent), status[0]
        return began, run

    def _status(self, pid: int) -> tuple[int, int] | None:
        """The parent of a process and its start time in clock ticks, None if it can not be seen."""
        try:
            # The name in parentheses may hold anything, also blanks and parentheses.
            fields = (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
            return int(fields[1]), int(fields[19])
        except (OSError, ValueError, IndexError):
            return None

    def _read_run(self, pid: int) -> str:
        with suppress(OSError), (self._proc / str(pid) / "environ").open("rb") as environ:
            for entry in environ.read(_ENVIRONMENT_LIMIT).split(b"\0"):
                value = entry.removeprefix(_VARIABLE)
                if value != entry and _RUN_ID.fullmatch(value):
                    return value.decode("ascii")
        return NOBODYS


def memory_by_run(processes: Iterable[Process], total: float | None, finder: RunFinder) -> dict[str, float]:
    """Device memory in bytes by run, for one GPU of `total` bytes (None: unknown).

    A process that computes and draws is listed twice with the same memory. A run of which one process does
    not tell its memory is left out: a part would pass for the whole. Impossible on numbers that are no
    process ids and on more memory than there is: some drivers hand out a list in another layout than the
    one asked for, or garbage.
    """
    by_pid: dict[int, int | None] = {}
    for pid, used in processes:
        if not 0 < pid <= _HIGHEST_PID or (used is not None and total is not None and used > total):
            raise Impossible(OUT_OF_RANGE)
        known = by_pid.get(pid)
        by_pid[pid] = used if known is None else max(known, used or 0)
    memory: dict[str, float | None] = {}
    for pid, used in by_pid.items():
        run = finder.run_of(pid)
        if run not in memory and len(memory) >= _MOST_RUNS:
            run = NOBODYS
        before = memory.get(run, 0.0)
        memory[run] = None if before is None or used is None else before + used
    told = {run: used for run, used in memory.items() if used is not None}
    if memory and not told:
        raise Impossible(NOT_SUPPORTED)
    return told

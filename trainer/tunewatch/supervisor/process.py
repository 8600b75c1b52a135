"""The processes of a run: starting, adopting, signalling, and leaving none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from tunewatch.lifeline import die_with_parent
from tunewatch.probe.writer import process_start

_PR_SET_CHILD_SUBREAPER = 36
_ENGINES = ("SLURM_JOB_ID", "RAY_JOB_ID", "KUBERNETES_SERVICE_HOST")


def uptime() -> float:
    """Seconds since the machine started, suspended ones included: what its clock can be checked against."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Process(Protocol):
    """The training process as the supervisor sees it."""

    pid: int

    def poll(self) -> bool:
        """Whether it has ended."""

    @property
    def returncode(self) -> int | None:
        """Popen's return code (-N for signal N); None while it lives, and for ever if it is not our child."""

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal; a process that is gone already is no error."""


class Child:
    """A command that we started, in a session of its own."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None
    ) -> None:
        """Start it. stdout and stderr go to `log`, or are passed on as they are; never through a pipe.

        Raises OSError (FileNotFoundError, PermissionError) where the command can not be run.
        """
        inside_engine = any(name in environment for name in _ENGINES)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log.open("ab")) if log is not None else None
            self._popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL if log is not None else None,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
                # Inside an allocation nothing may stay on a GPU that the engine believes to be free.
                preexec_fn=die_with_parent() if inside_engine else None,
            )
        self.pid = self._popen.pid

    def poll(self) -> bool:
        return self._popen.poll() is not None

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def send(self, number: int, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.pid, number)
            else:
                self._popen.send_signal(number)


class Adopted:
    """A process that somebody else started: its death can be seen, its exit code can not."""

    returncode = None

    def __init__(self, pid: int, start: int | None) -> None:
        self.pid = pid
        self._start = start if start is not None else process_start(pid)

    def poll(self) -> bool:
        if self._start is None or process_start(self.pid) != self._start:
            return True
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def send(self, number: int, *, group: bool = False) -> None:
        if not self.poll():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def become_subreaper() -> None:
    """Let orphaned descendants become our children: torchrun gives each rank a session of its own, so that killing
    a process group leaves them alive."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Every live process below this one."""
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def suspend() -> None:
    """Stop every process below this one and then this one itself; returns once somebody continues it, and with it
    the others.

    SIGTSTP would not do for them: the kernel drops it where nobody of the same session could continue the process.
    """
    for process in descendants():
        _send(process, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for process in descendants():
        _send(process, signal.SIGCONT)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def end_descendants(grace: float) -> int:
    """End every process below this one: SIGTERM, `grace` seconds, SIGKILL; returns how many there were."""
    first = descendants()
    for process in first:
        _send(process, signal.SIGTERM)
    give_up = time.monotonic() + grace
    while descendants() and time.monotonic() < give_up:
        reap_orphans()
        time.sleep(0.05)
    for _ in range(100):  # a process may fork while it is killed
        left = descendants()
        if not left:
            break
        for process in left:
            _send(process, signal.SIGKILL)
        reap_orphans()
        time.sleep(0.05)
    reap_orphans()
    return len(first)


def reap_orphans(*, keep: int | None = None) -> None:
    """Collect ended children that were handed to us, except the one whose exit code is still wanted."""
    while hasattr(os, "waitid"):  # macOS has it from Python 3.13 on, and no subreaper either
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == keep:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):  # gone, or of another user (sudo)
        process.send_signal(number)


def resident_bytes(pid: int) -> float | None:
    """Resident memory of a process in bytes; None where it is gone or not ours to see."""
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


class OomKills:
    """Counts how often the kernel killed in our memory cgroup since this object was made (cgroup v1 and v2).

    A kill is counted in the group of its victim, wherever the limit sits (Slurm sets it two levels up): so our own
    group is read. Version 2 also adds it to every group above, which therefore tell of other people's processes.
    """

    def __init__(
        self, cgroup_file: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._file = _oom_file(cgroup_file, root)
        self._before = self._read()

    def count(self) -> int:
        return max(0, self._read() - self._before)

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # the group was removed
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _oom_file(cgroup_file: Path, root: Path) -> Path | None:
    """The file that counts for this process: of its own group, or of the nearest above that has a memory controller.

    In a container the path in /proc is often that of the host, while the own group is mounted as the root.
    """
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, name = root / "memory", "memory.oom_control"
        elif controllers == "":
            base, name = (root / "unified" if (root / "unified").is_dir() else root), "memory.events"
        else:
            continue
        own = Path(group.lstrip("/"))
        for level in (own, *own.parents):
            if (base / level / name).is_file():
                return base / level / name
    return None

"""Children that can not outlive us, and commands that can not hold us up."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_OUTPUT_LIMIT = 1 << 20
_POLL = 0.05


def _prctl(option: int, value: int) -> None:
    """Linux's prctl(2); elsewhere there is none, and nothing happens."""
    try:
        _libc.prctl(option, value, 0, 0, 0)
    except AttributeError:
        pass


_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none is lost sight of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Process ids of our children, zombies included; empty where the kernel does not tell."""
    found: set[int] = set()
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def reap_orphans(reader: int) -> None:
    """Take leave of adopted processes that have ended; the reader itself is its owner's business."""
    for pid in children() - {reader}:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_children(patience: float) -> set[int]:
    """Kill and reap all children and what they leave behind; those that still live after `patience` seconds.

    A process in uninterruptible sleep inside a driver survives even SIGKILL.
    """
    deadline = time.monotonic() + patience
    while True:
        remaining = children()
        for pid in remaining:
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Completed:
    """What a command left: exit `code` (negative for a signal), or `timed_out` with the output so far."""

    code: int
    stdout: str
    stderr: str
    timed_out: bool = False


def run(command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> Completed:
    """Run `command` for at most `timeout` seconds, then kill its whole process group and close its pipes.

    Returns as soon as the command itself has ended: a grandchild that keeps the pipes open does not matter.
    Raises OSError when the command can not be started.
    """
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=die_with_parent,  # no thread but ours: NVML's is stopped before nvidia-smi is used
    )
    deadline = time.monotonic() + timeout
    ended = False
    try:
        output = {stream: bytearray() for stream in (child.stdout, child.stderr) if stream is not None}
        with selectors.DefaultSelector() as selector:
            for stream in output:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while not ended and time.monotonic() < deadline:
                ended = _has_ended(child.pid)  # before the read, which then gets all of the output
                if selector.get_map():
                    selector.select(0 if ended else _POLL)
                else:
                    time.sleep(0 if ended else _POLL)
                for stream, buffer in output.items():
                    if not _drain(stream.fileno(), buffer) and stream in selector.get_map():
                        selector.unregister(stream)
    finally:
        # Not reaped yet, so the group still is the child's own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
    texts = [buffer.decode(errors="replace") for buffer in output.values()]
    code = child.returncode if child.returncode is not None else -signal.SIGKILL
    return Completed(code, texts[0], texts[1], timed_out=not ended)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _drain(descriptor: int, buffer: bytearray) -> bool:
    """Move what is there to read into `buffer` (up to the limit); False at the end of the stream."""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        buffer += data[: max(0, _OUTPUT_LIMIT - len(buffer))]

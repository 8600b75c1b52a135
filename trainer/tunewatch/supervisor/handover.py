"""One supervisor after the other: a run whose next session begins while that of the session before still lingers."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import Any

from tunewatch.probe.writer import process_start
from tunewatch.runfolder import RunFolder

WAIT_SECONDS = 20.0
_LOOK_SECONDS = 0.1


def relieve(folder: RunFolder, pid: int, *, seconds: float = WAIT_SECONDS) -> None:
    """Have the supervisor of an earlier session of the run leave, and wait until it has, or for `seconds`.

    One that watches another process, which still lives, is left alone: that is another training under the same id.
    """
    asked: int | None = None
    give_up = time.monotonic() + seconds
    while _is_held(folder) and time.monotonic() < give_up:
        known = folder.read("supervisor.json") or {}
        supervisor = known.get("pid")
        if supervisor != asked and _is_alive(supervisor, known.get("process_start")):
            if not _is_done(folder, known, pid):
                return
            os.kill(int(str(supervisor)), signal.SIGTERM)
            asked = supervisor
        time.sleep(_LOOK_SECONDS)


def _is_done(folder: RunFolder, known: dict[str, Any], pid: int) -> bool:
    """Whether its session is over: it has ended, or the process that it watches begins another one."""
    if known.get("child_pid") == pid:
        return True
    verdict = folder.read("verdict.json") or {}
    return verdict.get("ending") is not None or not _is_alive(
        known.get("child_pid"), known.get("child_process_start")
    )


def _is_alive(pid: object, start: object) -> bool:
    return isinstance(pid, int) and start is not None and process_start(pid) == start


def _is_held(folder: RunFolder) -> bool:
    descriptor = os.open(folder.path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)

"""Running a supervisor in the foreground of this process: what `exec`, `train` and `adopt` have in common."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from tunewatch.runfolder import RunFolder
from tunewatch.supervisor.watch import Supervisor

ATTACH = Path(__file__).parent / "probe" / "attach"


def child_environment(folder: RunFolder, way: str, *, attach: bool) -> dict[str, str]:
    """The environment of a training: ours, the run folder, and for `exec` the hook first on PYTHONPATH."""
    environment = dict(os.environ)
    environment.update(
        TUNEWATCH_RUN_FOLDER=str(folder.path), TUNEWATCH_RUN_ID=folder.run_id, TUNEWATCH_WAY=way
    )
    if attach:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ATTACH), environment.get("PYTHONPATH")])
        )
    return environment


def supervise(supervisor: Supervisor, begin: Callable[[], None]) -> int:
    """Begin and watch a run to its end, passing signals on; returns the exit code of the training.

    The handlers are set before the child is started and reset in it by exec; SIGHUP is ignored, so that a closed
    terminal ends neither the watching nor the training.
    """
    previous: Mapping[int, object] = {
        number: signal.signal(number, lambda received, _frame: supervisor.request(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    hangup = signal.signal(signal.SIGHUP, _ignore)
    try:
        begin()
        supervisor.run()
    finally:
        signal.signal(signal.SIGHUP, hangup)
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    return supervisor.exit_code


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, not SIG_IGN: a child would inherit that one."""


def report_start(supervisor: Supervisor) -> None:
    """One line on stderr: which run this is and where it can be scraped."""
    say(f"run {supervisor.folder.run_id}, metrics at http://{supervisor.endpoint.address}/metrics")


def report_end(supervisor: Supervisor) -> None:
    """The supervisor's word on stderr."""
    ending = supervisor.ending
    if ending is None:
        return
    reason = f" ({ending.reason}, {ending.when})" if ending.reason and ending.reason != "cancelled" else ""
    say(f"run {supervisor.folder.run_id} {ending.state}{reason}: {ending.message} {ending.advice}".rstrip())


def say(text: str) -> None:
    print(f"tunewatch: {text}", file=sys.stderr, flush=True)

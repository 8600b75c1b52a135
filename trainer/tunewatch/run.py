"""Running a supervisor in the foreground of this process: what `exec`, `train` and `adopt` have in common."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tunewatch.runfolder import RunFolder, choose_run_id, tunewatch_home
from tunewatch.supervisor.process import Adopted
from tunewatch.supervisor.watch import AlreadyWatched, Supervisor

ATTACH = Path(__file__).parent / "probe" / "attach"


def run_id_not_watched(requested: str | None) -> str:
    """The id of a run that is about to be started; raises AlreadyWatched before anything of a live run is changed."""
    run_id = choose_run_id(requested)
    folder = RunFolder(tunewatch_home() / "runs" / run_id)
    known = folder.read("supervisor.json") or {}
    here = known.get("pid") and known.get("host") == os.uname().nodename
    if here and not Adopted(known["pid"], known.get("process_start")).poll():
        raise AlreadyWatched(
            f"run {run_id} is watched already, by process {known['pid']} at {known.get('address')}"
        )
    return run_id


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


_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_OF_THE_TERMINAL = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGWINCH)


def supervise(supervisor: Supervisor, begin: Callable[[], None], *, shares_terminal: bool = False) -> int:
    """Begin and watch a run to its end, passing signals on; returns the exit code of the training.

    The handlers are set before the child is started and reset in it by exec. A signal that is ignored already stays
    so, here and in the child: `nohup` means both. What the terminal sends is the training's where it
    `shares_terminal`, for it is in a session of its own, which the terminal does not know; elsewhere a closed terminal
    ends neither the watching nor the training.
    """

    def request(number: int, frame: FrameType | None) -> None:
        supervisor.request(number)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = dict.fromkeys(
        (*_PASSED_ON, *(_OF_THE_TERMINAL if shares_terminal else ())), request
    )
    handlers.setdefault(signal.SIGHUP, _ignore)
    previous = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        begin()
        supervisor.run()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
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


def report_unseen(supervisor: Supervisor) -> None:
    """Why a command that may well have trained something shows no steps."""
    if supervisor.snapshot is not None and not supervisor.snapshot.attached:
        say(_NOT_ATTACHED)


_NOT_ATTACHED = (
    "it was watched from outside only: either no transformers Trainer ran in it, or its Python does not read "
    "PYTHONPATH (python -I, -E, -S) or was started with another environment (env -i, sudo)."
)


def say(text: str) -> None:
    """One line on stderr; a terminal or pipe that is gone costs the run neither its end nor its exit code."""
    try:
        print(f"tunewatch: {text}", file=sys.stderr, flush=True)
    except OSError:
        # What is left in the old stream's buffer would fail again when the interpreter ends.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115

"""The runs of a process that watches itself (a script or a notebook with our callback): one run for each training.

The first run begins when its trainer is built. The next `train()` that does not resume is another run, with an id, a
folder and a supervisor of its own, so that the word about the end of the first stays true. One that resumes goes on
in its trainer's run, as another session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .writer import RunWriter, process_globals

_MAX_ID = 64


class Tuning(NamedTuple):
    """What the verdicts go by, where it is not the default: signals switched off, and limits by name."""

    off: tuple[str, ...] = ()
    thresholds: tuple[tuple[str, float], ...] = ()


class Asked(NamedTuple):
    """What the user asked for."""

    name: str | None
    run_id: str | None
    supervise: bool
    tuning: Tuning = Tuning()


def tuning(off: Iterable[str], thresholds: Mapping[str, float]) -> Tuning:
    """What a user set; ValueError for a signal or a limit that there is not, or that can not be."""
    if isinstance(off, str):
        off = (off,)
    asked = Tuning(tuple(off), tuple(thresholds.items()))
    if any(asked):
        try:
            from tunewatch.health import Thresholds
        except ImportError:
            return asked  # the probe alone, in a run that somebody else watches: it is theirs to tune
        Thresholds.chosen(thresholds, asked.off)
    return asked


class OwnRun:
    """One run of this process. `used` says that a training of it has begun: another training is not its own.

    `output_dir` is where that training writes its checkpoints.
    """

    def __init__(self, asked: Asked, writer: RunWriter) -> None:
        self.asked, self.writer = asked, writer
        self.used = False
        self.output_dir: str | None = None


def waiting_run(asked: Asked, output_dir: str | None = None) -> OwnRun | None:
    """The run of a trainer that is built: one that was asked for alike and waits for its training, or a new one.

    None while that can not be told: a trainer that writes where a run of this process did may be about to go on with
    that one. `output_dir` is None where it is not known yet.
    """
    used = [run for run in _runs() if run.used]
    if used and (output_dir is None or _of_folder(output_dir) is not None):
        return None
    for run in _runs():
        if run.asked == asked and not run.used:
            return run
    return _begin(asked, _fresh_id(asked.run_id))


def run_of_training(
    run: OwnRun | None, asked: Asked, output_dir: str, resume_from_checkpoint: str | bool | None
) -> OwnRun:
    """The run of a training that begins now, on a trainer whose run so far is `run`."""
    origin = output_dir
    if isinstance(resume_from_checkpoint, (str, os.PathLike)):
        origin = os.path.dirname(os.path.realpath(resume_from_checkpoint))
    before = _of_folder(output_dir) if resume_from_checkpoint and _same(origin, output_dir) else None
    if before is not None:
        before.writer.close()
        run = _begin(before.asked, before.writer.run_id)
    elif run is not None and not run.used:
        _make_current(run)
    else:
        run = _begin(asked, _fresh_id(asked.run_id))
    run.used, run.output_dir = True, output_dir
    return run


def _runs() -> list[OwnRun]:
    """The runs of this process (not of the one it was forked from), the oldest first."""
    runs: dict[int, list[OwnRun]] = process_globals().setdefault("own_runs", {})
    return runs.setdefault(os.getpid(), [])


def _of_folder(output_dir: str) -> OwnRun | None:
    """The last run of this process that trained into `output_dir`."""
    found = [run for run in _runs() if run.used and run.output_dir and _same(run.output_dir, output_dir)]
    return found[-1] if found else None


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _begin(asked: Asked, run_id: str) -> OwnRun:
    from tunewatch.runfolder import create_run

    from .hook import install_excepthook

    folder = create_run(run_id=run_id, name=asked.name or _script_name(), way="callback")
    run = OwnRun(asked, RunWriter(str(folder.path), way="callback"))
    _make_current(run)
    _runs().append(run)
    install_excepthook()
    if asked.supervise:
        _start_supervisor(run.writer, asked.tuning)
    return run


def _make_current(run: OwnRun) -> None:
    """From here on this process speaks for `run`: trainings that are over have nothing to add to theirs."""
    for other in _runs():
        if other is not run and other.used:
            other.writer.close()
    process_globals()["writer"] = run.writer


def _fresh_id(asked: str | None) -> str:
    """The id that was asked for, with -2, -3 and so on once this process has used it."""
    from tunewatch.runfolder import choose_run_id, tunewatch_home

    used = {run.writer.run_id for run in _runs()}
    first = run_id = choose_run_id(asked)
    number = 2
    while run_id in used or (run_id != first and (tunewatch_home() / "runs" / run_id).exists()):
        ending = f"-{number}"
        run_id = first[: _MAX_ID - len(ending)] + ending
        number += 1
    return run_id


def _script_name() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.splitext(os.path.basename(main))[0] if main else "notebook"


def _start_supervisor(writer: RunWriter, tuned: Tuning) -> None:
    """Start `tunewatch adopt RUN` as a process of its own, which outlives this one."""
    import tunewatch

    source = os.path.dirname(os.path.dirname(os.path.abspath(tunewatch.__file__)))
    environment: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    subprocess.Popen(
        [sys.executable, "-m", "tunewatch", "adopt", writer.run_id, "--pid", str(os.getpid()),
         "--session", writer.session, "--quiet", *(f"--off={signal}" for signal in tuned.off),
         *(f"--threshold={name}={float(limit)!r}" for name, limit in tuned.thresholds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )  # fmt: skip

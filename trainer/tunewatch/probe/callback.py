"""The transformers callback through which a training reports."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback

from .progress import Listener, ProgressTracker
from .reporter import Reporter, claim
from .tap import install
from .writer import RunWriter, process_globals


class TunewatchCallback(TrainerCallback):
    """Watch a `transformers.Trainer` (and everything derived from it, like TRL's SFTTrainer).

    ```python
    trainer = SFTTrainer(..., callbacks=[TunewatchCallback()])
    trainer.train()
    ```

    In a process that `tunewatch train` or `tunewatch exec` started, it reports to their run. Anywhere else (a script, a
    notebook) it makes a run of its own when the trainer is built, and starts a supervisor process that watches this
    one; `name` and `run_id` name that run, and `supervise=False` leaves the watching out.

    Nothing it does raises into the training, blocks it or slows it: hooks take tens of microseconds, and faults
    are counted and written to `probe-errors.log` in the run folder.
    """

    is_tunewatch = True
    """What the copies of this class (the hook loads one under a name of its own) know each other by."""

    def __init__(self, name: str | None = None, *, run_id: str | None = None, supervise: bool = True) -> None:
        self.tracker = ProgressTracker()
        self._name, self._run_id, self._supervise = name, run_id, supervise
        self._reporter: Any = None  # a Reporter, once the trainer is known
        self._active = False
        install(sys.modules["transformers"].Trainer)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (of a trainer that is handed to another process, say) starts anew, without threads and files."""
        return functools.partial(type(self), run_id=self._run_id, supervise=self._supervise), (self._name,)

    def add_progress_callback(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(TrainingProgress)` after each change, on a thread of its own; returns what removes it."""
        return self.tracker.add_progress_callback(listener)

    def remove_progress_callback(self, listener: Listener) -> None:
        self.tracker.remove_progress_callback(listener)

    @property
    def run_id(self) -> str | None:
        """The run's id, known from the moment the trainer is built."""
        return self._reporter.writer.run_id if self._reporter else self._run_id

    # -- transformers' events; each returns None, so that the training's control is never touched ----------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ready(state, control):
            self._reporter.init_end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ready(state, control):
            self._reporter.train_begin(args, state, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.step_begin()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.substep_end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.step_end(args, state, control, optimizer=kwargs.get("optimizer"))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._active:
            self._reporter.log(args, state, logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.prediction_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.evaluate(state, control)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if self._active:
            self._reporter.predict()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.save(args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.epoch_end(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.train_end(state, control)

    # -- inside -------------------------------------------------------------------------------------------

    def _ready(self, state: Any, control: Any) -> bool:
        try:
            if self._reporter is None:
                self._reporter = Reporter(self._open_writer(state), self.tracker)
            training = process_globals().get("training")
            self._active = (
                not self._reporter.writer.inert
                and training in (None, self._reporter)
                and claim(self._reporter, control)
            )
        except Exception as error:
            self._active = False
            print(f"tunewatch: not watching this training: {error}", file=sys.stderr)
        return self._active

    def _open_writer(self, state: Any) -> RunWriter:
        if os.environ.get("TUNEWATCH_RUN_FOLDER"):
            return RunWriter.from_environment()
        # Way 3: nobody watches this process yet.
        from tunewatch.runfolder import create_run

        if not getattr(state, "is_world_process_zero", True):
            return RunWriter(None)
        folder = create_run(run_id=self._run_id, name=self._name or _script_name(), way="callback")
        writer = RunWriter(str(folder.path), way="callback")
        process_globals()["writer"] = writer
        _report_exceptions()
        if self._supervise:
            _start_supervisor(folder.run_id)
        return writer


def _script_name() -> str:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.splitext(os.path.basename(main))[0] if main else "notebook"


def _report_exceptions() -> None:
    from .hook import install_excepthook

    install_excepthook()


def _start_supervisor(run_id: str) -> None:
    """Start `tunewatch adopt RUN` as a process of its own, which outlives this one."""
    import tunewatch

    source = os.path.dirname(os.path.dirname(os.path.abspath(tunewatch.__file__)))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    subprocess.Popen(
        [sys.executable, "-m", "tunewatch", "adopt", run_id, "--pid", str(os.getpid()), "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )

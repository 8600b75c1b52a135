"""The transformers callback through which a training reports."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from .hook import watch_bars
from .ownruns import Asked, OwnRun, run_of_training, tuning, waiting_run
from .progress import Listener, ProgressTracker
from .reporter import Reporter, claim, owner_of, release
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
    one; `name` and `run_id` name that run, and `supervise=False` leaves the watching out. `off` names signals that are
    not to be raised, `thresholds` limits other than the defaults (docs/health.md lists both); a name that there is not
    is a ValueError. Each further `train()` that does not resume is a run of its own, too (with `run_id` "mine": mine-2,
    mine-3 and so on).

    Nothing it does raises into the training, blocks it or slows it: hooks take tens of microseconds, and faults
    are counted and written to `probe-errors.log` in the run folder.
    """

    is_tunewatch = True
    """What the copies of this class (the hook loads one under a name of its own) know each other by."""

    def __init__(
        self,
        name: str | None = None,
        *,
        run_id: str | None = None,
        supervise: bool = True,
        off: Iterable[str] = (),
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        self.tracker = ProgressTracker()
        self._asked = Asked(name, run_id, supervise, tuning(off, thresholds or {}))
        self._reporter: Any = None  # a Reporter, once the trainer is known
        self._active = False
        self._run: OwnRun | None = None  # where nobody else started one
        self._ended = False
        install(sys.modules["transformers"].Trainer)
        watch_bars()
        if not _is_supervised():
            # TRL tokenizes before it builds the trainer: the run may begin with a bar.
            process_globals()["open_run"] = functools.partial(_open_run, weakref.ref(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy (of a trainer that is handed to another process, say) starts anew, without threads and files."""
        name, run_id, supervise, tuned = self._asked
        chosen: dict[str, Any] = (
            {"off": tuned.off, "thresholds": dict(tuned.thresholds)} if any(tuned) else {}
        )
        return functools.partial(type(self), run_id=run_id, supervise=supervise, **chosen), (name,)

    def add_progress_callback(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(TrainingProgress)` after each change, on a thread of its own; returns what removes it."""
        return self.tracker.add_progress_callback(listener)

    def remove_progress_callback(self, listener: Listener) -> None:
        self.tracker.remove_progress_callback(listener)

    @property
    def run_id(self) -> str | None:
        """The run's id, known from the moment the trainer is built."""
        if self._run is not None:
            return self._run.writer.run_id
        return self._reporter.writer.run_id if self._reporter else self._asked.run_id

    # -- transformers' events; each returns None, so that the training's control is never touched ----------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ready(args, state, control):
            self._reporter.init_end()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ready = self._ready(args, state, control)
        fresh = self._run is not None and not self._run.used
        if not process_globals().get("training") and (self._ended or fresh or not ready):
            # Nobody told of this train(), for it does not call transformers'. Without an end before it, it is a
            # search for the batch size that tries again.
            self.train_is_called(args, state, control, state.global_step > 0)
        self._ended = False
        if self._active:
            self._reporter.train_begin(args, state, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.step_begin()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._active:
            self._reporter.substep_end()

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self._active:
            self._reporter.step_end(args, state, control, optimizer)

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
            self._ended = True
            self._reporter.train_end(state, control)

    def train_is_called(self, args: Any, state: Any, control: Any, resume_from_checkpoint: Any) -> None:
        """`train()` begins; the tap says so, transformers has no such event. Where nobody else gave this process a run,
        the training gets one of its own, or goes on in that of the checkpoint that it resumes from."""
        if _is_supervised() or not _is_main(state) or owner_of(control) is not self._reporter:
            return
        try:
            self._run = run_of_training(self._run, self._asked, args.output_dir, resume_from_checkpoint)
            if self._reporter is None or self._reporter.writer is not self._run.writer:
                release(control)
                self._reporter = Reporter(self._run.writer, self.tracker)
            self._active = claim(self._reporter, control)
        except Exception as error:
            self._give_up(error)

    # -- inside -------------------------------------------------------------------------------------------

    def _ready(self, args: Any, state: Any, control: Any) -> bool:
        try:
            training = process_globals().get("training")
            if self._reporter is None and (training is not None or owner_of(control) is not None):
                return False  # a trainer within another's training, or one that another callback reports on
            writer = self._reporter.writer if self._reporter else self._open_writer(args, state)
            if writer is None:
                return False
            self._reporter = self._reporter or Reporter(writer, self.tracker)
            self._active = (
                not writer.inert and training in (None, self._reporter) and claim(self._reporter, control)
            )
        except Exception as error:
            self._give_up(error)
        return self._active

    def _open_writer(self, args: Any, state: Any) -> RunWriter | None:
        """The writer of the trainer's run; None while that one can not be told."""
        if _is_supervised():
            return RunWriter.from_environment()
        process_globals()["open_run"] = None
        if not _is_main(state):
            return RunWriter(None)
        self._run = self._run or waiting_run(self._asked, args.output_dir)
        return self._run.writer if self._run else None

    def _open_early(self) -> None:
        process_globals()["open_run"] = None
        if os.environ.get("RANK", "0") == "0":
            self._run = waiting_run(self._asked)
        if self._run is not None:
            self._run.writer.phase("prepare")

    def _give_up(self, error: Exception) -> None:
        self._active = False
        print(f"tunewatch: not watching this training: {error}", file=sys.stderr)


def _is_main(state: Any) -> bool:
    return bool(getattr(state, "is_world_process_zero", True))


def _is_supervised() -> bool:
    return bool(os.environ.get("TUNEWATCH_RUN_FOLDER"))


def _open_run(callback: weakref.ref[TunewatchCallback]) -> None:
    alive = callback()
    if alive is None:
        process_globals()["open_run"] = None
    else:
        alive._open_early()

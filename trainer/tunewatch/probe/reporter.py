"""Turns the events of a transformers training loop into the run folder's events and pulse.

Knows the loop's order of events (transformers 4.56 to 5.x) but imports nothing of it: what it is handed, it reads by
attribute. The batches of a step are fetched *before* `on_step_begin`, so waiting for data is the time from the end
of one step to the beginning of the next, less evaluation, logging and saving.
"""

from __future__ import annotations

import functools
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from . import facts
from .nonfinite import NonFiniteWatch, StepFinding
from .pace import Pace
from .progress import ProgressTracker
from .pulse import INDEX, STEP_BUCKETS, Pulse
from .values import split_finite
from .writer import RunWriter, process_globals

_Method = TypeVar("_Method", bound=Callable[..., None])
_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS knows no threads there
_FIRST_BUCKET = INDEX["step_bucket_0"]


def _quiet(method: _Method) -> _Method:
    """Run a hook of the training thread so that no fault of ours gets out, and measure what it costs.

    `hook_seconds` is wall time. For `hook_max_seconds`, the longest single call, only what we caused counts: the
    time a call was blocked, or the CPU time it took; not the time in which the scheduler ran somebody else.
    """

    @functools.wraps(method)
    def hook(self: Reporter, *args: Any, **kwargs: Any) -> None:
        began, cpu_before = time.perf_counter(), time.thread_time()
        before = resource.getrusage(_THREAD)
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.writer.error()
        pulse = self.writer.pulse
        if pulse is None:
            return
        spent, cpu = time.perf_counter() - began, time.thread_time() - cpu_before
        pulse.add("hook_calls")
        pulse.add("hook_seconds", spent)
        if spent <= pulse.get("hook_max_seconds"):
            return
        after = resource.getrusage(_THREAD)
        cost = spent if after.ru_nvcsw > before.ru_nvcsw else cpu
        if after.ru_nivcsw == before.ru_nivcsw and cost > pulse.get("hook_max_seconds"):
            pulse.update(hook_max_seconds=cost)

    return hook  # type: ignore[return-value]


class Reporter:
    """One training's reporting, on one rank. Every public method is quiet and quick."""

    def __init__(self, writer: RunWriter, tracker: ProgressTracker | None = None) -> None:
        self.writer = writer
        self.tracker = tracker or ProgressTracker()
        self.pace = Pace()
        self.watch = NonFiniteWatch()
        self._main = writer.rank == 0
        self._training = False
        self._trainer: Any = None
        self._resume_from: Any = None
        self._tapped = False
        self._began = 0.0
        self._step_end: float | None = None  # perf_counter of the last step's end
        self._pauses = 0.0  # evaluation and saving since then
        self._pause_began: float | None = None
        self._busy = self._outside = "prepare"  # the phase now, and the one when no training runs
        self._busy_since = 0.0
        self._eval_batches = 0
        self._bad_steps = 0
        self._streak = 0
        self._first_loss: float | None = None

    # -- from the tap -------------------------------------------------------------------------------------

    @_quiet
    def training_begins(self, trainer: Any, resume_from_checkpoint: Any) -> None:
        self._trainer, self._resume_from, self._tapped = trainer, resume_from_checkpoint, True
        detail = "restoring the checkpoint" if resume_from_checkpoint else "starting the training"
        self.writer.phase("prepare", detail)

    @_quiet
    def micro_batch(self, loss: Any, inputs: Any) -> None:
        self.watch.loss(loss)
        pulse = self.writer.pulse
        ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
        if pulse is not None and ids is not None and hasattr(ids, "numel"):
            pulse.add("tokens_all_total", ids.numel())
            pulse.add("samples_total", ids.shape[0])

    @_quiet
    def gradient_norm(self, norm: Any) -> None:
        self.watch.grad_norm(norm)

    @_quiet
    def training_returned(self) -> None:
        self._findings(self.watch.flush())
        self.writer.event("train_return")
        self._leave_training()

    @_quiet
    def training_raised(self, error: BaseException) -> None:
        self.writer.exception(error, during="train")
        self._leave_training()

    # -- from the callback --------------------------------------------------------------------------------

    @_quiet
    def init_end(self) -> None:
        self.writer.phase("prepare", "trainer ready")

    @_quiet
    def train_begin(self, args: Any, state: Any, **objects: Any) -> None:
        pulse = self.writer.open_pulse(take=True)
        restart = self._training  # no on_train_end since: auto_find_batch_size tries a smaller batch
        if pulse is not None and restart:
            pulse.add("batch_size_restarts_total")
        self._training = True
        self._began = time.monotonic()
        self._step_end, self._pauses, self._pause_began = None, 0.0, None
        self.pace.reset()
        self.watch = NonFiniteWatch()  # what the attempt before left behind is not of this one
        step = int(state.global_step)
        if pulse is not None:
            pulse.update(step=step, max_steps=facts.or_nan(facts.limit(state.max_steps)), first_step=1.0)
        gpus = facts.gpu_uuids(args)
        if gpus:
            self.writer.event("device", gpus=gpus)
        if self._main:
            model = objects.get("model")
            self._provenance(args, state, model)
            self.writer.event(
                "train_begin",
                step=step,
                max_steps=facts.limit(state.max_steps),
                num_train_epochs=facts.limit(getattr(state, "num_train_epochs", None)),
                effective=facts.effective_arguments(args, state),
                nan_visibility="each step" if self._tapped else "logs only",
                nan_filter=bool(getattr(args, "logging_nan_inf_filter", False)),
                **facts.parameters(model),
                restored=facts.restored(args, step, objects, self._resume_from),
                output_dir=os.path.abspath(args.output_dir) if args.output_dir else None,
                save_total_limit=getattr(args, "save_total_limit", None),
                gpus=gpus,
                restart=restart,
            )
        skipping = step > 0 and not getattr(args, "ignore_data_skip", False)
        self._enter("data")
        self.writer.event(
            "phase", phase="data", detail="skipping data" if skipping else "first batch", ratio=None
        )
        self.tracker.update(
            run_id=self.writer.run_id, state="training", step=step, max_steps=facts.limit(state.max_steps)
        )

    @_quiet
    def step_begin(self) -> None:
        if self._step_end is None:
            # The first step counts from here, not from the imports or an evaluation on start.
            self._step_end, self._pauses = time.perf_counter(), 0.0
        self._enter("compute")

    @_quiet
    def substep_end(self) -> None:
        self.writer.alive()

    @_quiet
    def step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        now = time.perf_counter()
        seconds = max(0.0, now - (self._step_end if self._step_end is not None else now) - self._pauses)
        self._step_end, self._pauses, self._pause_began = now, 0.0, None
        self.pace.step(seconds)
        step = int(state.global_step)
        skipped = bool(getattr(objects.get("optimizer"), "step_was_skipped", False))
        self._findings(self.watch.step_end(step, skipped=skipped))
        pulse = self.writer.open_pulse()
        if pulse is not None:
            self._publish_step(pulse, state, step, seconds, skipped)
        if getattr(control, "should_evaluate", False):
            self._begin_pause("evaluate", "")
        elif getattr(control, "should_save", False):
            self._begin_pause("save", f"checkpoint-{step}")
        else:
            self._enter("data")
        elapsed = time.monotonic() - self._began
        self.tracker.update(
            step=step, max_steps=facts.limit(state.max_steps), epoch=state.epoch,
            elapsed_seconds=elapsed, eta_seconds=self.pace.eta(step, facts.limit(state.max_steps)),
        )  # fmt: skip

    @_quiet
    def log(self, args: Any, state: Any, logs: Any) -> None:
        if not self.watch.asynchronous:
            self._findings(self.watch.flush())
        if not self._main:
            return
        values, nonfinite = split_finite(logs or {})
        self.writer.event(
            "log", step=int(state.global_step), epoch=facts.finite(state.epoch), values=values, nonfinite=nonfinite,
            tokens_seen=getattr(state, "num_input_tokens_seen", None) or None,
        )  # fmt: skip
        self._memory()
        logged = {**values, **{key: float(text) for key, text in nonfinite.items()}}
        if "num_tokens" in logged:
            logged["tokens_seen"] = logged["num_tokens"]
        self.tracker.update(**{key: logged[key] for key in _TRACKED if key in logged})

    @_quiet
    def prediction_step(self) -> None:
        self._find_pause("evaluate", "")
        self._eval_batches += 1
        pulse = self.writer.pulse
        if pulse is not None:
            pulse.add("eval_batches")
        self.writer.alive()

    @_quiet
    def evaluate(self, state: Any, control: Any) -> None:
        seconds = self._end_pause()
        pulse = self.writer.pulse
        if pulse is not None:
            pulse.add("evaluations")
        if self._main:
            self.writer.event(
                "evaluate", step=int(state.global_step), seconds=seconds, batches=self._eval_batches
            )
        self._eval_batches = 0
        if getattr(control, "should_save", False):
            self._begin_pause("save", f"checkpoint-{int(state.global_step)}")
        else:
            self._rest()

    @_quiet
    def predict(self) -> None:
        self._end_pause()
        self._eval_batches = 0
        self._rest()

    @_quiet
    def save(self, args: Any, state: Any) -> None:
        self._find_pause("save", f"checkpoint-{int(state.global_step)}")
        seconds = self._end_pause()
        pulse = self.writer.pulse
        if pulse is not None:
            pulse.add("saves")
        if self._main:
            step = int(state.global_step)
            self.writer.event("save", step=step, checkpoint=f"checkpoint-{step}", seconds=seconds)
        self._rest()

    @_quiet
    def epoch_end(self, state: Any, control: Any) -> None:
        if self._main:
            self.writer.event("epoch", step=int(state.global_step), epoch=facts.finite(state.epoch))
        if getattr(control, "should_evaluate", False):
            self._begin_pause("evaluate", "")
        elif getattr(control, "should_save", False):
            self._begin_pause("save", f"checkpoint-{int(state.global_step)}")

    @_quiet
    def train_end(self, state: Any, control: Any) -> None:
        self._findings(self.watch.flush())
        self._training = False
        if self._main:
            self.writer.event(
                "train_end", step=int(state.global_step), max_steps=facts.limit(state.max_steps),
                requested_stop=bool(getattr(control, "should_training_stop", False)),
            )  # fmt: skip
        self._end_pause()
        self._busy = self._outside = "package"
        self.writer.phase("package", "after the training")
        self.tracker.update(state="packaging", eta_seconds=None)

    # -- inside -------------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._busy, self._busy_since = phase, time.perf_counter()
        self.writer.enter(phase)

    def _rest(self) -> None:
        """An evaluation or a save is over: back to what goes on without them."""
        self._enter("data" if self._training else self._outside)

    def _find_pause(self, phase: str, detail: str) -> None:
        """Find that an evaluation or a save goes on which was not announced.

        A later callback asked for it, or this is the second of several evaluation sets. Between two steps nothing else
        happens but waiting for data, so it began where that (or what was announced instead) seemed to begin.
        """
        if self._busy == phase:
            return
        since = self._busy_since if self._busy == "data" else self._pause_began
        self._pause_began = None
        self._begin_pause(phase, detail, since=since)

    def _begin_pause(self, phase: str, detail: str, *, since: float | None = None) -> None:
        if self._busy == phase:
            return
        self._end_pause()
        self._pause_began = time.perf_counter() if since is None else since
        self._busy = phase
        if self._main:
            self.writer.phase(phase, detail)
        else:
            self.writer.enter(phase)

    def _end_pause(self) -> float | None:
        if self._pause_began is None:
            return None
        seconds = time.perf_counter() - self._pause_began
        self._pauses += seconds
        self._pause_began = None
        self.pace.pause(seconds)
        return seconds

    def _leave_training(self) -> None:
        self._training, self._trainer, self._tapped = False, None, False

    @_quiet
    def _provenance(self, args: Any, state: Any, model: Any) -> None:
        self.writer.event("provenance", info=facts.info(args, state, model), environment=facts.environment())

    def _publish_step(self, pulse: Pulse, state: Any, step: int, seconds: float, skipped: bool) -> None:
        bucket = next((i for i, bound in enumerate(STEP_BUCKETS) if seconds <= bound), len(STEP_BUCKETS))
        pulse.values[_FIRST_BUCKET + bucket] += 1
        pulse.add("step_seconds_sum", seconds)
        pulse.add("step_seconds_count")
        pulse.add("steps_total")
        pulse.add("steps_skipped_total", float(skipped))
        wall, monotonic = time.time(), time.monotonic()
        pulse.update(
            step=step, max_steps=facts.or_nan(facts.limit(state.max_steps)), first_step=0.0,
            epoch=facts.or_nan(facts.finite(state.epoch)),
            step_time=wall, step_monotonic=monotonic, activity_time=wall, activity_monotonic=monotonic,
            grad_norm_seen=float(self.watch.norms_seen > 0),
        )  # fmt: skip

    def _findings(self, findings: list[StepFinding]) -> None:
        pulse = self.writer.open_pulse() if findings else None
        for found in findings:
            if not found.bad:
                if self._streak and not (found.loss or found.grad_norm):
                    self.writer.event("finite", step=found.step)
                    self._streak = 0
                    if pulse is not None:
                        pulse.update(nonfinite_streak=0.0)
                continue
            self._streak += 1
            self._bad_steps += 1
            if pulse is not None:
                pulse.add("nonfinite_loss_steps", float(found.loss))
                pulse.add("nonfinite_grad_norm_steps", float(found.grad_norm))
                if math.isnan(pulse.get("first_nonfinite_step")):
                    pulse.update(first_nonfinite_step=float(found.step))
                pulse.update(nonfinite_streak=float(self._streak))
            if self._bad_steps <= 50 or self._bad_steps & (self._bad_steps - 1) == 0:
                self.writer.event(
                    "nonfinite",
                    step=found.step,
                    loss=found.loss,
                    grad_norm=found.grad_norm,
                    norm_seen=self.watch.norms_seen > 0,
                )

    def _memory(self) -> None:
        torch, pulse = sys.modules.get("torch"), self.writer.pulse
        if torch is None or pulse is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
            return
        pulse.update(
            memory_allocated_bytes=float(torch.cuda.memory_allocated()),
            memory_reserved_bytes=float(torch.cuda.memory_reserved()),
            memory_peak_bytes=float(torch.cuda.max_memory_allocated()),
        )


_TRACKED = ("loss", "learning_rate", "grad_norm", "eval_loss", "tokens_seen")


def claim(reporter: Reporter, control: Any) -> bool:
    """Make `reporter` the one that reports on the trainer of `control`; False when another one does already.

    A script with our callback that runs under `tunewatch exec` has two of them on one trainer. The trainer's control
    object stands for the trainer: it is its own, and every callback is handed it.
    """
    owners: dict[int, tuple[Any, Reporter]] = process_globals().setdefault("owners", {})
    held, owner = owners.setdefault(id(control), (control, reporter))
    if held is not control:
        owners[id(control)] = (control, reporter)
        return True
    while len(owners) > 8:
        del owners[next(iter(owners))]
    return owner is reporter

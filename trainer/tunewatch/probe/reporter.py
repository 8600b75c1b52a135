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
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import arguments, facts, sigterm, tokens
from .nonfinite import NonFiniteWatch, StepFinding
from .pace import Pace
from .progress import ProgressTracker
from .pulse import INDEX, STEP_BUCKETS
from .pushes import Pushes
from .values import split_finite
from .writer import RunWriter, process_globals

_Method = TypeVar("_Method", bound=Callable[..., None])
_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # macOS knows no threads there
_FIRST_BUCKET = INDEX["step_bucket_0"]
_HOOK_CALLS, _HOOK_SECONDS, _HOOK_MAX = INDEX["hook_calls"], INDEX["hook_seconds"], INDEX["hook_max_seconds"]
_STEPS, _SKIPPED, _STEP_SUM, _STEP_COUNT = (
    INDEX[name] for name in ("steps_total", "steps_skipped_total", "step_seconds_sum", "step_seconds_count")
)
_STEP, _MAX_STEPS, _EPOCH, _FIRST_STEP, _NORM_SEEN = (
    INDEX[name] for name in ("step", "max_steps", "epoch", "first_step", "grad_norm_seen")
)
_STEP_TIME, _STEP_MONOTONIC = INDEX["step_time"], INDEX["step_monotonic"]
_SAMPLES, _STAGE = INDEX["samples_total"], INDEX["step_stage"]
_TOKENS = tuple(INDEX[f"tokens_{kind}_total"] for kind in tokens.KINDS)

_UNDER_WAY = -1

_QUICK = (
    "batches_are_here",
    "advances",
    "micro_batch",
    "gradient_norm",
    "step_begin",
    "substep_end",
    "step_end",
    "log",
)
"""The hooks of a step: each notes what happened, and the background thread makes of it what it is.

A function call costs there several times what it costs elsewhere (see background.py): hence no wrapper around them,
and whether the background thread runs, or this is a forked child, is looked at in `step_end` alone.
"""
SAMPLED = 61
"""Of as many steps, one has its hooks measured: that costs as much as they. A prime, to fall in with no interval."""


def _quiet(method: _Method) -> _Method:
    """A hook that comes seldom: what was noted before it is done first, and all of it is done when it returns."""

    @functools.wraps(method)
    def hook(self: Reporter, *args: Any, **kwargs: Any) -> None:
        def settled(self: Reporter, *args: Any, **kwargs: Any) -> None:
            with self.writer.settled():
                method(self, *args, **kwargs)
                self.count_hooks()

        self.session.calls += 1
        self.session.seconds += self._measure(settled, args, kwargs)

    return hook  # type: ignore[return-value]


class _Sample:
    """One call of a hook, measured with what others did meanwhile taken out."""

    def __init__(self) -> None:
        self._before = resource.getrusage(_THREAD)
        self._cpu, self._began = time.thread_time(), time.perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Wall time of the call, and what of it was our fault: 0 where that can not be told from what others did."""
        spent, cpu = time.perf_counter() - self._began, time.thread_time() - self._cpu
        after = resource.getrusage(_THREAD)
        if after.ru_nivcsw != self._before.ru_nivcsw:
            return spent, 0.0
        return spent, spent if after.ru_nvcsw > self._before.ru_nvcsw else cpu


class _Session:
    """The sums of this process's session, whichever of its trainings they come from."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = tokens.TokenTotals()
        self.calls, self.seconds, self.longest = 0.0, 0.0, 0.0  # of the hooks
        self._per_step: tuple[float, float] | None = None  # calls and seconds, the mean of the samples
        self._samples, self._sampled_calls, self._sampled_seconds = 0, 0, 0.0
        self._counted_steps = 1  # the first step's hooks are counted as they are

    def add_steps(self) -> None:
        """Add the hooks of the steps since the last time: as much as the sampled ones took on average."""
        if self._per_step is not None:
            more, self._counted_steps = self.steps - self._counted_steps, self.steps
            self.calls += more * self._per_step[0]
            self.seconds += more * self._per_step[1]

    def sample(self, seconds: float, *, last: bool) -> None:
        """Note a call of a sampled step, the last of them or not."""
        self._sampled_calls += 1
        self._sampled_seconds += seconds
        if last:
            self._samples += 1
            self._per_step = self._sampled_calls / self._samples, self._sampled_seconds / self._samples


class Reporter:
    """One training's reporting, on one rank. Every public method is quiet and quick."""

    def __init__(self, writer: RunWriter, tracker: ProgressTracker | None = None) -> None:
        self.writer = writer
        self.tracker = tracker or ProgressTracker()
        self.tracker.before_read = writer.deliver
        self.pace = Pace()
        self.watch = NonFiniteWatch()
        self.pushes = Pushes(writer)
        self.session: _Session = writer.shared.setdefault("session", _Session())
        self.in_company = writer.world_size > 1
        self._note, self._clock = writer.note, time.monotonic
        self._sampling = False
        self._sample_steps(True)
        self._main = writer.rank == 0
        self._training = False
        self._trainer: Any = None
        self._resume_from: Any = None
        self._tapped = False
        self._began = 0.0
        self._on_accelerator = False  # whether losses are looked at there
        self._step_end: float | None = None  # monotonic seconds of the last step's end
        self._pauses = 0.0  # evaluation and saving since then
        self._pause_began: float | None = None
        self._busy = self._outside = "prepare"  # the phase now, and the one when no training runs
        self._busy_since = 0.0
        self._eval_batches = 0
        self._bad_steps = 0
        self._streak = 0
        self._memory_device: int | None = None

    def _measure(self, method: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Run a hook so that no fault of ours gets out; returns its seconds of wall time.

        For `hook_max_seconds`, the longest single call of those that come seldom and of the sampled steps, only what we
        caused counts: the time a call was blocked, or the CPU time it took; not the time in which the scheduler ran
        somebody else.
        """
        sample = _Sample()
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.writer.error()
        spent, caused = sample.seconds()
        self.session.longest = max(self.session.longest, caused)
        return spent

    def _sample_steps(self, sampling: bool) -> None:
        """Begin or end to measure the hooks of a step, by something put before them."""
        self._sampling = sampling
        for name in _QUICK:
            if sampling:
                setattr(self, name, functools.partial(self._sampled, getattr(type(self), name)))
            else:
                delattr(self, name)

    def _sampled(self, method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.session.steps > 0:
            seconds = self._measure(method, args, kwargs)
            self.session.sample(seconds, last=not self._sampling)
        else:  # the first step takes longer and stands for no other
            self.session.calls += 1
            self.session.seconds += self._measure(method, args, kwargs)

    def count_hooks(self) -> None:
        """Put what the hooks cost into the pulse."""
        pulse = self.writer.pulse
        if pulse is not None:
            pulse.values[_HOOK_CALLS], pulse.values[_HOOK_SECONDS] = self.session.calls, self.session.seconds
            pulse.values[_HOOK_MAX] = self.session.longest

    # -- from the tap -------------------------------------------------------------------------------------

    @_quiet
    def training_begins(self, trainer: Any, resume_from_checkpoint: Any) -> None:
        self._trainer, self._resume_from, self._tapped = trainer, resume_from_checkpoint, True
        detail = "restoring the checkpoint" if resume_from_checkpoint else "starting the training"
        self.writer.phase("prepare", detail, activity="restore" if resume_from_checkpoint else None)
        sigterm.watch(trainer)
        if resume_from_checkpoint and self._main:  # it may die of loading it, before any other event
            output = getattr(getattr(trainer, "args", None), "output_dir", None)
            self.writer.event("resume", output_dir=os.path.abspath(output) if output else None)

    def batches_are_here(self) -> None:
        self._note((self._clock(), self._begin_step, ()))

    def advances(self) -> None:
        self._note((self._clock(), self._advances, ()))

    def micro_batch(self, loss: Any, inputs: Any) -> None:
        try:
            if not getattr(loss, "is_cpu", True):
                self._micro_batch_there(loss, inputs)
                return
            if getattr(loss, "requires_grad", False):
                loss = loss.detach()  # the graph behind it is large
            self._note((self._clock(), self._micro_batch, (loss, inputs)))
        except Exception:
            self.writer.error()

    def gradient_norm(self, norm: Any) -> None:
        try:
            if getattr(norm, "is_cpu", True):
                self._note((self._clock(), self._gradient_norm, (norm,)))
            else:
                self._look_there(self.watch.grad_norm, norm)
        except Exception:
            self.writer.error()

    @_quiet
    def training_returned(self) -> None:
        self._findings(self.watch.flush())
        self._take_counts()
        self._look_at_pushes()
        self.writer.event("train_return")
        self._leave_training()

    @_quiet
    def training_raised(self, error: BaseException) -> None:
        self.writer.exception(error, during="train")
        self._look_at_pushes()
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
        self._training = self.writer.attended = True
        self._began = self.writer.now()[1]
        self._step_end, self._pauses, self._pause_began = None, 0.0, None
        self.pace.reset()
        self._leave_attempt()
        step = int(state.global_step)
        if pulse is not None:
            pulse.update(step=step, max_steps=facts.or_nan(facts.limit(state.max_steps)), first_step=1.0)
        self._memory_device = _current_gpu()
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
                trainer=facts.trainer_name(self._trainer),
                effective=facts.effective_arguments(args, state, self._trainer),
                requested=facts.requested_arguments(args, state),
                checkpoint=facts.checkpoint_name(args, state, self._resume_from),
                nan_visibility="each step" if self._tapped else "logs only",
                nan_filter=bool(getattr(args, "logging_nan_inf_filter", False)),
                **facts.parameters(model),
                restored=facts.restored(args, state, objects, self._resume_from),
                output_dir=os.path.abspath(args.output_dir) if args.output_dir else None,
                save_total_limit=getattr(args, "save_total_limit", None),
                gpus=gpus,
                restart=restart,
            )
            self._tell_memory("train_begin")
        skipping = step > 0 and not getattr(args, "ignore_data_skip", False)
        self._enter("data")
        detail, activity = ("skipping data", "skip_data") if skipping else ("first batch", "first_batch")
        self.writer.event("phase", phase="data", detail=detail, ratio=None, activity=activity)
        self.tracker.update(
            run_id=self.writer.run_id, state="training", step=step, max_steps=facts.limit(state.max_steps)
        )
        self.writer.keep_up()  # from here on what is noted calls nobody

    def step_begin(self) -> None:
        self._note((self._clock(), self._step_begins, ()))

    def substep_end(self) -> None:
        self._note((self._clock(), self.writer.alive, ()))

    def step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None) -> None:
        try:
            now, session, writer = self._clock(), self.session, self.writer
            if not writer.keep_up():
                return
            step = state.global_step
            session.steps = steps = session.steps + 1
            if writer.pulse is not None:
                writer.pulse.mark(step, time.time(), now, steps)
            skipped = getattr(optimizer, "step_was_skipped", False)
            evaluates = getattr(control, "should_evaluate", False)
            saves = getattr(control, "should_save", False)
            findings = self.watch.step_end(step, skipped=skipped) if self._on_accelerator else None
            self._note((
                now, self._step_ends,
                (step, steps, state.max_steps, state.epoch, skipped, evaluates, saves, findings),
            ))  # fmt: skip
            if self._sampling or steps % SAMPLED == 0:
                self._choose_sample(steps)
            if evaluates or saves:
                writer.deliver()
        except Exception:
            self.writer.error()

    def log(self, args: Any, state: Any, logs: Any) -> None:
        try:
            now, logs = self._clock(), dict(logs or ())
            findings: Sequence[StepFinding] = ()
            if self._on_accelerator:
                findings, logs = self._look_at_logs(logs)
            seen = getattr(state, "num_input_tokens_seen", None)
            self._note((now, self._logs, (state.global_step, state.epoch, logs, seen, findings)))
        except Exception:
            self.writer.error()

    def prediction_step(self) -> None:
        began = self._clock()
        self.writer.later(began, self._predicts)
        self.session.calls += 1
        self.session.seconds += self._clock() - began

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
            self._tell_memory("evaluate")
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
            self.writer.event(
                "save",
                step=step,
                checkpoint=f"checkpoint-{step}",
                seconds=seconds,
                tokens=self.session.tokens.known(),
            )
            self._tell_memory("save")
            self.pushes.look(self._trainer, step)
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
        self._take_counts()
        self._training = self.writer.attended = False
        if self._main:
            self.writer.event(
                "train_end", step=int(state.global_step), max_steps=facts.limit(state.max_steps),
                requested_stop=bool(getattr(control, "should_training_stop", False)),
                terminated=sigterm.ended(self._trainer),
            )  # fmt: skip
            self._tell_memory("train_end")
        self._end_pause()
        self._busy = self._outside = "package"
        self.writer.phase("package", "after the training")
        self.tracker.update(state="packaging", eta_seconds=None)

    # -- inside -------------------------------------------------------------------------------------------

    def _look_there(self, look: Callable[[Any], None], value: Any) -> None:
        """Look at a loss or a norm on the accelerator that holds it."""
        if not self._on_accelerator:
            self.writer.deliver()
            self._on_accelerator = True
        look(value)

    def _count_there(self, batch: tokens.Batch) -> list[int | None]:
        """Count a micro-batch on the accelerator that holds it; returns what is known without it, 0 for the rest."""
        known: list[int | None] = []
        for kind, number in enumerate(batch.counts()):
            if number is None or isinstance(number, int):
                known.append(number)
            else:
                self._look_there(functools.partial(self.watch.count, kind - 1), number)
                known.append(_UNDER_WAY)
        return known

    def _micro_batch_there(self, loss: Any, inputs: Any) -> None:
        """A micro-batch whose loss is on an accelerator; its batch may be here or there."""
        self._look_there(self.watch.loss, loss)
        batch = tokens.batch_of(inputs)
        now = self._clock()
        if batch is None or getattr(batch.ids, "is_cpu", True):
            self._note((now, self._count, (batch,)))
        else:
            self._note((now, self._add_tokens, (self._count_there(batch), batch.ids.shape[0])))

    def _look_at_logs(self, logs: dict[str, Any]) -> tuple[list[StepFinding], dict[str, Any]]:
        """What is known at a log: the trainer has just waited for the accelerator, so what was under way is here."""
        findings = self.watch.arrived() if self.watch.asynchronous else self.watch.flush()
        if any(map(_is_tensor, logs.values())):
            finite, nonfinite = split_finite(logs)  # here: it may wait for the accelerator
            logs = {**finite, **{key: float(text) for key, text in nonfinite.items()}}
        return findings, logs

    def _choose_sample(self, steps: int) -> None:
        """Measure the hooks of the next step, or not. The second step of a session is the first one sampled."""
        sampling = steps == 1 or steps % SAMPLED == 0
        if sampling is not self._sampling:
            self._sample_steps(sampling)

    def _micro_batch(self, loss: Any, inputs: Any) -> None:
        self.watch.loss(loss)
        self._count(tokens.batch_of(inputs))

    def _count(self, batch: tokens.Batch | None) -> None:
        if batch is None:
            self._add_tokens([None] * len(tokens.KINDS), math.nan)  # from here on nobody knows
        else:
            self._add_tokens(
                [None if number is None else int(number) for number in batch.counts()], batch.ids.shape[0]
            )

    def _gradient_norm(self, norm: Any) -> None:
        self.watch.grad_norm(norm)

    def _step_begins(self) -> None:
        if self._step_end is None:
            # The first step counts from here, not from the imports or an evaluation on start.
            self._step_end, self._pauses = self.writer.now()[1], 0.0
        self._begin_step()

    def _begin_step(self) -> None:
        if self.writer.pulse is not None:
            self.writer.pulse.values[_STAGE] = 0.0
        self._enter("compute")

    def _advances(self) -> None:
        if self.writer.pulse is not None:
            self.writer.pulse.values[_STAGE] += 1
        self.writer.alive()

    def _step_ends(
        self, step: Any, steps: int, max_steps: Any, epoch: Any, skipped: Any, evaluates: bool, saves: bool,
        findings: list[StepFinding] | None,
    ) -> None:  # fmt: skip
        wall, now = self.writer.now()
        seconds = max(0.0, now - (self._step_end if self._step_end is not None else now) - self._pauses)
        self._step_end, self._pauses, self._pause_began = now, 0.0, None
        self.pace.step(seconds)
        step, max_steps, skipped = int(step), facts.limit(max_steps), bool(skipped)
        self._findings(self.watch.step_end(step, skipped=skipped) if findings is None else findings)
        self._take_counts()
        pulse = self.writer.open_pulse()
        if pulse is not None:
            values = pulse.values
            values[_FIRST_BUCKET + bisect_left(STEP_BUCKETS, seconds)] += 1
            values[_STEP_SUM] += seconds
            values[_STEP_COUNT] += 1
            values[_STEPS] = steps
            values[_SKIPPED] += skipped
            values[_STEP], values[_MAX_STEPS] = step, facts.or_nan(max_steps)
            values[_EPOCH], values[_FIRST_STEP] = facts.or_nan(facts.finite(epoch)), 0.0
            values[_STEP_TIME], values[_STEP_MONOTONIC] = wall, now
            values[_NORM_SEEN] = float(self.watch.norms_seen > 0)
            self.session.add_steps()
            self.count_hooks()
        if evaluates:
            self._begin_pause("evaluate", "")
        elif saves:
            self._begin_pause("save", f"checkpoint-{step}")
        else:
            self._enter("data")
        self.tracker.update(
            changed_at=wall, step=step, max_steps=max_steps, epoch=epoch, elapsed_seconds=now - self._began,
            eta_seconds=self.pace.eta(step, max_steps),
        )  # fmt: skip

    def _logs(
        self, step: Any, epoch: Any, logs: dict[str, Any], seen: Any, findings: Sequence[StepFinding]
    ) -> None:
        self._findings(findings)
        self._take_counts()
        self._memory()
        if not self._main:
            return
        values, nonfinite = split_finite(logs)
        pulse = self.writer.pulse
        self.writer.event(
            "log", step=int(step), epoch=facts.finite(epoch), values=values, nonfinite=nonfinite,
            tokens_seen=seen or None, tokens=self.session.tokens.known(),
            skipped=None if pulse is None else int(pulse.values[_SKIPPED]),
        )  # fmt: skip
        tracked = {key: logs[key] for key in _TRACKED if key in logs}
        if "num_tokens" in logs:
            tracked["tokens_seen"] = logs["num_tokens"]
        self.tracker.update(changed_at=self.writer.now()[0], **tracked)

    def _predicts(self) -> None:
        self._find_pause("evaluate", "")
        self._eval_batches += 1
        pulse = self.writer.pulse
        if pulse is not None:
            pulse.add("eval_batches")
        self.writer.alive()

    def _enter(self, phase: str) -> None:
        self._busy, self._busy_since = phase, self.writer.now()[1]
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
        self._pause_began = self.writer.now()[1] if since is None else since
        self._busy = phase
        if self._main:
            self.writer.phase(phase, detail)
        else:
            self.writer.enter(phase)

    def _end_pause(self) -> float | None:
        if self._pause_began is None:
            return None
        seconds = max(0.0, self.writer.now()[1] - self._pause_began)
        self._pauses += seconds
        self._pause_began = None
        self.pace.pause(seconds)
        return seconds

    @_quiet
    def _leave_attempt(self) -> None:
        """The tokens of an attempt that is given up were given all the same; its findings are not of the next one."""
        self.watch, watch = NonFiniteWatch(), self.watch
        watch.flush()
        self._take_counts(watch)

    @_quiet
    def _look_at_pushes(self) -> None:
        """The last time: a checkpoint on SIGTERM is saved, and pushed, without a word."""
        state = getattr(self._trainer, "state", None)
        self.pushes.look(self._trainer, int(getattr(state, "global_step", 0)))

    def _leave_training(self) -> None:
        self._training = self.writer.attended = self._tapped = False
        self._trainer = None

    @_quiet
    def _provenance(self, args: Any, state: Any, model: Any) -> None:
        self.writer.event(
            "provenance", info=facts.info(args, state, model, self._trainer), environment=facts.environment(),
            arguments=arguments.recorded(args),
        )  # fmt: skip

    def _take_counts(self, watch: NonFiniteWatch | None = None) -> None:
        """Take over what has arrived of the counts on an accelerator."""
        counts = (watch or self.watch).take_counts()
        if any(counts):
            self._add_tokens([_UNDER_WAY, *(number or _UNDER_WAY for number in counts)], 0)

    def _add_tokens(self, counts: Sequence[int | None], rows: float) -> None:
        pulse = self.writer.pulse
        for kind, number in enumerate(counts):
            if number != _UNDER_WAY:
                self.session.tokens.add(kind, number)
        if pulse is not None:
            pulse.values[_SAMPLES] += rows
            for index, total in zip(_TOKENS, self.session.tokens.counted, strict=True):
                pulse.values[index] = total
            pulse.stale = True

    def _findings(self, findings: Sequence[StepFinding]) -> None:
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
        pulse = self.writer.pulse
        if pulse is None or self._memory_device is None:
            return
        for name, number in self._device_memory().items():
            pulse.values[INDEX[f"memory_{name}_bytes"]] = number
        pulse.stale = True

    def _device_memory(self) -> dict[str, float]:
        if self._memory_device is None:
            return {}
        stats = sys.modules["torch"].cuda.memory_stats(self._memory_device)
        return {name: float(stats[key]) for name, key in _MEMORY.items()}

    @_quiet
    def _tell_memory(self, context: str) -> None:
        """What this process holds at a turn of its life, in bytes: an out-of-memory error is easier to place by it."""
        self.writer.event(
            "memory", context=context, memory={**self._device_memory(), "rss": float(_resident())}
        )


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "is_cpu")


_TRACKED = ("loss", "learning_rate", "grad_norm", "eval_loss", "tokens_seen")
_MEMORY = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak": "allocated_bytes.all.peak",
}


def _resident() -> int:
    """Bytes of this process in the host's memory; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _current_gpu() -> int | None:
    """The GPU of this thread; another thread would see another one."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


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


def owner_of(control: Any) -> Reporter | None:
    """Who reports on the trainer of `control`."""
    held, owner = process_globals().get("owners", {}).get(id(control), (None, None))
    return owner if held is control else None


def release(control: Any) -> None:
    """Give the trainer of `control` free for another reporter."""
    process_globals().get("owners", {}).pop(id(control), None)

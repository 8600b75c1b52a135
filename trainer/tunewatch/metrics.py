"""The one place where the names of training metrics live.

`RunCollector` builds metric families from a `Snapshot` on each scrape; nothing is kept between two scrapes, so what is
unknown now is absent now. METRICS is the table that docs/metrics.md, rules and dashboards are checked against.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tunewatch import __version__
from tunewatch.health import ACTS
from tunewatch.probe.pulse import STEP_BUCKETS
from tunewatch.states import STATES
from tunewatch.supervisor.snapshot import RankSnapshot, Snapshot

PREFIX = "tunewatch_"
MAX_LABEL = 128

INFO_LABELS = (
    "name", "base_model", "base_model_revision", "dataset", "dataset_hash", "method", "lora_r", "lora_alpha",
    "batch_size", "learning_rate", "max_length", "precision", "seed", "resumed_from",
)  # fmt: skip
ENVIRONMENT_LABELS = ("python", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "cuda")

Sample = tuple[tuple[str, ...], float]
"""Values of the labels after `run_id`, and the number."""


@dataclass(frozen=True)
class MetricDefinition:
    """One metric: `name` without prefix, Prometheus type, its labels after `run_id`, help, and where it comes from."""

    name: str
    kind: str
    help: str
    values: Callable[[Snapshot], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def label_value(value: object) -> str:
    """Make a label value of bounded length without control characters; a whole float loses its ".0".

    What UTF-8 can not spell (a file name of another encoding) becomes "?".
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    text = str(value).encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x1f\x7f]", "", text)[:MAX_LABEL]


def _one(get: Callable[[Snapshot], float | int | bool | None]) -> Callable[[Snapshot], Iterable[Sample]]:
    def values(snapshot: Snapshot) -> Iterator[Sample]:
        value = get(snapshot)
        if value is not None:
            yield (), float(value)

    return values


def _each(get: Callable[[Snapshot], Mapping[str, float | bool]]) -> Callable[[Snapshot], Iterable[Sample]]:
    def values(snapshot: Snapshot) -> Iterator[Sample]:
        # Two keys may become the same label value, and a series twice would make the whole scrape invalid.
        labelled = {label_value(key): float(value) for key, value in get(snapshot).items()}
        yield from (((label,), value) for label, value in labelled.items())

    return values


def _states(snapshot: Snapshot) -> Iterator[Sample]:
    return (((state,), float(state == snapshot.state)) for state in STATES)


def _info(snapshot: Snapshot) -> Iterator[Sample]:
    yield tuple(label_value(snapshot.info.get(label, "")) for label in INFO_LABELS), 1.0


def _environment(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.environment:
        yield tuple(label_value(snapshot.environment.get(label, "")) for label in ENVIRONMENT_LABELS), 1.0


def _end(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.ending is not None:
        yield (snapshot.ending.state, snapshot.ending.reason, snapshot.ending.when), 1.0


def _signals(snapshot: Snapshot) -> Iterator[Sample]:
    active = {verdict.signal for verdict in snapshot.verdicts}
    yield from (((signal,), float(signal in active)) for signal in snapshot.judged)


def _acts(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.health != "unknown":
        yield from (((act,), float(act == snapshot.glance.act)) for act in ACTS)


def _level(snapshot: Snapshot) -> float | None:
    return {"ok": 0.0, "attention": 1.0, "bad": 2.0}.get(snapshot.health)


def _last_steps(snapshot: Snapshot) -> Iterator[Sample]:
    for rank, values in snapshot.ranks.items():
        if values.last_step_time is not None:
            yield (str(rank),), values.last_step_time


def _memory(snapshot: Snapshot) -> Iterator[Sample]:
    for rank, values in snapshot.ranks.items():
        for kind, amount in values.memory_bytes.items():
            yield (str(rank), "host" if kind == "rss" else "gpu", kind), amount


def _phase(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.ending is None and snapshot.phase is not None:
        yield (snapshot.phase, snapshot.activity or ""), 1.0


def _intervals(snapshot: Snapshot) -> Iterator[Sample]:
    yield from snapshot.intervals.items()


def _rank_steps(snapshot: Snapshot) -> Iterator[Sample]:
    for rank, values in _several_ranks(snapshot):
        if values.step is not None:
            yield (str(rank),), float(values.step)


def _rank_phases(snapshot: Snapshot) -> Iterator[Sample]:
    for rank, values in _several_ranks(snapshot):
        yield from (((str(rank), phase), seconds) for phase, seconds in values.phase_seconds.items())


def _several_ranks(snapshot: Snapshot) -> Iterable[tuple[int, RankSnapshot]]:
    """The ranks, where there is something to compare."""
    return snapshot.ranks.items() if len(snapshot.ranks) > 1 else ()


def _gpus(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.ending is None:
        for rank, values in snapshot.ranks.items():
            yield from (((str(rank), uuid), 1.0) for uuid in dict.fromkeys(map(label_value, values.gpus)))


D = MetricDefinition
METRICS: tuple[MetricDefinition, ...] = (
    D("run_info", "info", "What runs: name, model, data and the settings that matter. Join it by max by (run_id, ...).", _info, INFO_LABELS),
    D("run_environment_info", "info", "Versions of the libraries of the training process.", _environment, ENVIRONMENT_LABELS),
    D("run_state", "gauge", "1 for the state the run is in, 0 for the others.", _states, ("state",)),
    D("run_state_timestamp_seconds", "gauge", "When the run entered its state, Unix time.", _one(lambda s: s.state_since)),
    D("run_start_timestamp_seconds", "gauge", "When the run was first started, Unix time.", _one(lambda s: s.run_start)),
    D("session_start_timestamp_seconds", "gauge", "When this session of the run was started, Unix time.", _one(lambda s: s.session_start)),
    D("run_end_timestamp_seconds", "gauge", "When the run ended, Unix time; absent while it lives.", _one(lambda s: s.run_end)),
    D("run_end_info", "info", "How the run ended and why; reason is empty for a completed run, when is early or late.", _end, ("state", "reason", "when")),
    D("attached", "gauge", "1 when a probe reports from inside the training, 0 when only the process is seen.", _one(lambda s: s.attached)),
    D("phase_info", "info", "What a live run is busy with; activity says what it prepares (import, download, load, tokenize, restore, skip_data, first_batch).", _phase, ("phase", "activity")),
    D("phase_progress_ratio", "gauge", "How much of that is done (tokenizing, downloading, generating samples), 0-1; absent while unknown.", _one(lambda s: s.phase_ratio if s.ending is None else None)),
    D("step", "gauge", "Optimizer step of the whole run.", _one(lambda s: s.step)),
    D("max_steps", "gauge", "Optimizer steps of the whole run; absent while unknown.", _one(lambda s: s.max_steps)),
    D("epoch", "gauge", "Epoch as the trainer reports it.", _one(lambda s: s.epoch)),
    D("progress_ratio", "gauge", "Steps done of all steps, 0-1.", _one(lambda s: s.progress_ratio)),
    D("tokens_seen", "gauge", "Tokens of the whole run; kind all counts padding, non_padding does not.", _each(lambda s: s.tokens_seen), ("kind",)),
    D("samples_seen", "gauge", "Rows (packed rows count once) of the whole run.", _one(lambda s: s.samples_seen)),
    D("steps", "counter", "Optimizer steps of this session.", _one(lambda s: s.steps_total)),
    D("steps_redone", "counter", "Steps that had to be done again because this session went on from a checkpoint behind them.", _one(lambda s: s.steps_redone_total)),
    D("tokens", "counter", "Tokens of this session; kind all counts padding, non_padding does not.", _each(lambda s: s.tokens_total), ("kind",)),
    D("samples", "counter", "Rows of this session (packed rows count once).", _one(lambda s: s.samples_total)),
    D("optimizer_steps_skipped", "counter", "Optimizer steps that the fp16 loss scaler skipped in this session.", _one(lambda s: s.steps_skipped_total)),
    D("batch_size_restarts", "counter", "Times that auto_find_batch_size started again with a smaller batch in this session.", _one(lambda s: s.batch_size_restarts_total)),
    D("resumes", "counter", "Times that this session resumed from a checkpoint.", _one(lambda s: s.resumes_total)),
    D("batch_size", "gauge", "Rows per optimizer step over all ranks, as in effect.", _one(lambda s: s.batch_size)),
    D("interval_steps", "gauge", "Steps between logs, evaluations and saves: requested by the arguments, effective in the trainer (a resume takes them from the checkpoint).", _intervals, ("what", "kind")),
    D("parameters", "gauge", "Parameters of the model; kind trainable or total.", _each(lambda s: s.parameters), ("kind",)),
    D("loss", "gauge", "Training loss as last logged; NaN when it was, and when the trainer's filter hid a NaN in it.", _one(lambda s: s.loss)),
    D("learning_rate", "gauge", "Learning rate as last logged (first parameter group).", _one(lambda s: s.learning_rate)),
    D("grad_norm", "gauge", "Gradient norm before clipping, of the last step of the logging window.", _one(lambda s: s.grad_norm)),
    D("train_loss_mean", "gauge", "Mean training loss of the session, from its end summary only.", _one(lambda s: s.train_loss_mean)),
    D("eval_loss", "gauge", "Evaluation loss as last logged, by evaluation set.", _each(lambda s: s.eval_loss), ("dataset",)),
    D("best_eval_loss", "gauge", "Lowest finite evaluation loss of the run (first evaluation set).", _one(lambda s: s.best_eval_loss)),
    D("best_step", "gauge", "Step of the lowest evaluation loss.", _one(lambda s: s.best_step)),
    D("evals_since_best", "gauge", "Evaluations since the lowest evaluation loss.", _one(lambda s: s.evals_since_best)),
    D("metric", "gauge", "Other numeric keys of the trainer's logs, at most 64.", _each(lambda s: s.other_metrics), ("name",)),
    D("metrics_dropped", "counter", "Values of log keys beyond the 64 that are exported.", _one(lambda s: s.metrics_dropped_total)),
    D("elapsed_seconds", "gauge", "Time since the run was first started.", _one(lambda s: s.elapsed)),
    D("session_elapsed_seconds", "gauge", "Time since this session was started.", _one(lambda s: s.session_elapsed)),
    D("eta_seconds", "gauge", "Time left, from this session's recent pace only, evaluation and saving included.", _one(lambda s: s.eta)),
    D("phase_seconds", "counter", "Time of this session by what the training was busy with.", _each(lambda s: s.phase_seconds), ("phase",)),
    D("wasted_seconds", "counter", "Estimated time of steps that had to be done again after a restart.", _one(lambda s: s.wasted_seconds)),
    D("last_step_timestamp_seconds", "gauge", "When the rank last finished a step, Unix time.", _last_steps, ("rank",)),
    D("rank_step", "gauge", "Optimizer step of each rank of this node; only where there are several.", _rank_steps, ("rank",)),
    D("rank_phase_seconds", "counter", "Time of this session by rank and phase; only where there are several. A rank that waits for data while the others compute is the slow one.", _rank_phases, ("rank", "phase")),
    D("last_activity_timestamp_seconds", "gauge", "Last sign of life (step, micro-batch, evaluation batch, phase), Unix time.", _one(lambda s: s.last_activity)),
    D("progress_deadline_timestamp_seconds", "gauge", "When silence will be called a stall, learned from the run's pace and phase.", _one(lambda s: s.deadline)),
    D("walltime_deadline_timestamp_seconds", "gauge", "When the run's time is over, Unix time: the earliest of deadline, walltime and the end of the Slurm job.", _one(lambda s: s.walltime_deadline)),
    D("nonfinite_steps", "counter", "Steps of this session whose value was NaN or infinite and that were not skipped.", _each(lambda s: s.nonfinite_steps), ("what",)),
    D("nonfinite_streak", "gauge", "Such steps in a row, up to now.", _one(lambda s: s.nonfinite_streak)),
    D("first_nonfinite_step", "gauge", "First such step of this session.", _one(lambda s: s.first_nonfinite_step)),
    D("nonfinite_last_timestamp_seconds", "gauge", "When such a step was last seen, Unix time; absent until one comes while the run is watched.", _each(lambda s: s.nonfinite_times), ("what",)),
    D("nan_filter_active", "gauge", "1 when the trainer replaces a non-finite loss in what it logs (logging_nan_inf_filter).", _one(lambda s: s.nan_filter)),
    D("health", "gauge", "1 while the signal holds for the run, else 0; a signal that is switched off for the run is absent.", _signals, ("signal",)),
    D("health_level", "gauge", "The run at one glance: 0 ok, 1 attention, 2 bad (also a run that failed); absent while unknown.", _one(_level)),
    D("suggested_act", "gauge", "1 for what to do about the run (keep, stop, restart, resume), 0 for the others; absent while its health is unknown.", _acts, ("act",)),
    D("checkpoints_saved", "counter", "Checkpoints saved in this session.", _one(lambda s: s.checkpoints_saved_total)),
    D("checkpoints_present", "gauge", "Complete checkpoints on the disk.", _one(lambda s: s.checkpoints_present)),
    D("checkpoints_broken", "gauge", "Checkpoint folders on the disk that are incomplete or damaged.", _one(lambda s: s.checkpoints_broken)),
    D("checkpoint_last_step", "gauge", "Step of the newest complete checkpoint.", _one(lambda s: s.checkpoint_last_step)),
    D("checkpoint_last_timestamp_seconds", "gauge", "When the newest complete checkpoint was written, Unix time.", _one(lambda s: s.checkpoint_last_time)),
    D("checkpoint_size_bytes", "gauge", "Size of the newest complete checkpoint.", _one(lambda s: s.checkpoint_size)),
    D("checkpoint_duration_seconds", "gauge", "How long the last save took.", _one(lambda s: s.checkpoint_duration)),
    D("checkpoint_interval_steps", "gauge", "Steps between saves, as in effect.", _one(lambda s: s.checkpoint_interval_steps)),
    D("checkpoint_best_step", "gauge", "Step of the best evaluation whose checkpoint still exists.", _one(lambda s: s.checkpoint_best_step)),
    D("checkpoint_resumable_step", "gauge", "Step of the newest checkpoint that a resume can trust: complete, with optimizer, scheduler and RNG state, and older than the first step of a NaN streak.", _one(lambda s: s.checkpoint_resumable_step)),
    D("checkpoints_that_fit", "gauge", "How many more checkpoints of the newest one's size fit on the disk.", _one(lambda s: s.checkpoints_that_fit)),
    D("work_at_risk_steps", "gauge", "Steps since the newest checkpoint that a resume can trust: lost if the run ended now.", _one(lambda s: s.work_at_risk_steps)),
    D("work_at_risk_seconds", "gauge", "Training time of those steps, by the recent pace.", _one(lambda s: s.work_at_risk_seconds)),
    D("output_free_bytes", "gauge", "Free space where output_dir lies.", _one(lambda s: s.output_free_bytes)),
    D("resume_lost", "gauge", "1 for a part of the training state that the resume did not restore.", _each(lambda s: s.resume_lost), ("part",)),
    D("hub_push_failures", "counter", "Pushes to the hub that failed in this session.", _one(lambda s: s.hub_push_failures_total)),
    D("hub_push_last_success_timestamp_seconds", "gauge", "When a push to the hub last succeeded, Unix time.", _one(lambda s: s.hub_push_last_success)),
    D("hub_push_last_failure_timestamp_seconds", "gauge", "When a push to the hub last failed, Unix time.", _one(lambda s: s.hub_push_last_failure)),
    D("samples_generated", "gauge", "Generations written for a person to review.", _one(lambda s: s.samples_generated)),
    D("samples_reviewed", "gauge", "Of those, how many a person has marked as read (tunewatch samples review).", _one(lambda s: s.samples_reviewed)),
    D("eval_overlap_rows", "gauge", "Evaluation rows that also occur in the training data; absent where that can not be told.", _one(lambda s: s.eval_overlap_rows)),
    D("run_gpu_info", "info", "The GPUs of a live run, by uuid in NVML's spelling.", _gpus, ("rank", "uuid")),
    D("process_memory_bytes", "gauge", "Memory of the training process: allocated, reserved, peak on its GPU, rss on the host.", _memory, ("rank", "device", "kind")),
    D("probe_seconds", "counter", "Time that the probe took on the training threads of this session, estimated from one step in 61.", _one(lambda s: s.probe_seconds_total)),
    D("probe_errors", "counter", "Faults of the monitoring itself: hook (in the training process), append (events the disk did not take at once), malformed (lines that could not be read), evidence (files that could not be written).", _each(lambda s: s.probe_errors), ("kind",)),
    D("probe_error_last_timestamp_seconds", "gauge", "When the count of such a fault was last seen to grow, Unix time; absent until it does while the run is watched.", _each(lambda s: s.probe_error_times), ("what",)),
    D("clock_jumps", "counter", "Times that the clock of this machine was set while the run was watched.", _one(lambda s: s.clock_jumps_total)),
)  # fmt: skip

STEP_DURATION = "tunewatch_step_duration_seconds"
STEP_DURATION_HELP = "Step end to step end, evaluation and saving taken out."
BUILD_INFO = "tunewatch_build_info"
TIME = "tunewatch_time_seconds"

SUFFIXES = {"counter": "_total", "info": "", "gauge": ""}


def exposed_names() -> frozenset[str]:
    """Every metric name as Prometheus stores it (the histogram by its base name)."""
    names = {definition.full_name + SUFFIXES[definition.kind] for definition in METRICS}
    return frozenset(names | {STEP_DURATION, BUILD_INFO, TIME})


METRIC_NAMES = exposed_names()


class RunCollector(Collector):
    """Exposes the latest snapshots of one or several runs."""

    def __init__(self, snapshots: Callable[[], Iterable[Snapshot]], clock: Callable[[], float]) -> None:
        self._snapshots = snapshots
        self._clock = clock

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        snapshots = list(self._snapshots())
        yield _gauge(BUILD_INFO, "Version of tunewatch.", ("version",), [((__version__,), 1.0)])
        yield _gauge(TIME, "The exporter's clock, Unix time.", (), [((), self._clock())])
        for definition in METRICS:
            labels = ("run_id", *definition.labels)
            samples = [
                ((snapshot.run_id, *values), value)
                for snapshot in snapshots
                for values, value in definition.values(snapshot)
            ]
            if not samples:
                continue
            if definition.kind == "counter":
                yield _counter(definition.full_name, definition.help, labels, samples)
            else:
                yield _gauge(definition.full_name, definition.help, labels, samples)
        yield from _step_durations(snapshots)


def _gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        if math.isfinite(value) and value >= 0:  # one NaN would poison every rate over it
            family.add_metric(values, value)
    return family


def _step_durations(snapshots: Iterable[Snapshot]) -> Iterator[Metric]:
    family = HistogramMetricFamily(STEP_DURATION, STEP_DURATION_HELP, labels=("run_id",))
    for snapshot in snapshots:
        if not snapshot.step_buckets:
            continue
        total, buckets = 0.0, []
        for bound, count in zip((*map(str, STEP_BUCKETS), "+Inf"), snapshot.step_buckets, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric((snapshot.run_id,), buckets, snapshot.step_seconds_sum)
    if family.samples:
        yield family

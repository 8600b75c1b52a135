"""One past run as the metrics that a live one has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tunewatch import states
from tunewatch.health import SIGNALS, Glance, Health, Thresholds
from tunewatch.health.reading import finite
from tunewatch.metrics import INFO_LABELS, METRICS, PREFIX, label_value
from tunewatch.probe.values import as_number
from tunewatch.replay.entries import STEP_KEYS, is_summary
from tunewatch.supervisor.ending import EARLY_STEPS, Ending
from tunewatch.supervisor.record import Record
from tunewatch.supervisor.snapshot import Snapshot

IMPORT_INFO = f"{PREFIX}import_info"
IMPORT_INFO_HELP = (
    "A past run that was imported: the form of its source, and whether the times of its samples were recorded, "
    "follow from the time that had elapsed, or are spread evenly because nobody knows them."
)

_FROM_LOGS = frozenset(
    {
        "run_info", "run_environment_info", "run_state", "run_end_info", "step", "max_steps", "epoch", "progress_ratio",
        "tokens_seen", "batch_size", "parameters", "loss", "learning_rate", "grad_norm",
        "train_loss_mean", "eval_loss", "best_eval_loss", "best_step", "evals_since_best", "metric", "health",
        "health_level",
    }
)  # fmt: skip
_FROM_TIMES = frozenset({"run_start_timestamp_seconds", "run_end_timestamp_seconds", "elapsed_seconds"})
"""Of runs whose times are known."""
_FROM_EVENTS = frozenset({"nan_filter_active", "resume_lost", "samples_generated", "eval_overlap_rows"})
"""Of runs that a probe reported from."""

_NOT_JUDGED = frozenset(
    {
        "stalled", "checkpoint_broken", "work_at_risk", "checkpoint_overdue", "will_not_fit", "slow", "data_starved",
        "slow_rank", "settings_without_effect",
    }
)  # fmt: skip
"""Signals of time, disk and other runs: a history does not tell them, so they are unknown."""
_ONLY_EVENTS = frozenset(
    {
        "labels_masked", "nothing_trainable", "data_not_consumed", "resume_lost", "schedule_reshaped",
        "arguments_overridden", "fp16_overflow", "fp16_skips", "hub_push_failed", "never_logs",
    }
)  # fmt: skip
"""Signals that take more than logs."""

_PLACES = frozenset({*STEP_KEYS, "total_steps", "percentage", "_timestamp", "_runtime", "timestamp"})
"""Keys of a log that say where and when it is."""

_OFTEN = frozenset(
    {"step", "epoch", "progress_ratio", "tokens_seen", "loss", "learning_rate", "grad_norm", "metric"}
)
"""What a training log changes; all else is looked at when something else happens, and once an interval."""

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]
"""Family, labels with their names, and value."""


class PastRun:
    """The state of a run as its events tell it, one after the other; the detectors are those of a live run."""

    def __init__(
        self,
        run_id: str,
        name: str,
        *,
        source: tuple[str, str],
        probed: bool,
        start: float | None,
        facts: Mapping[str, Any] | None = None,
        ending: Ending | None = None,
        thresholds: Thresholds | None = None,
    ) -> None:
        """`source`: the form of the history, and where its times come from. `probed`: its events are our own. `start`
        is None where its times are invented. `facts` is run.json."""
        self.run_id, self.name = run_id, name
        self._facts = facts or {}
        self._record = Record()
        self._record.begin_session()
        self._health = Health(thresholds=thresholds)
        self._start = start
        self._end: float | None = None
        self._ending = ending
        self._state = states.PREPARING
        self._since = start or 0.0
        self._epoch: float | None = None
        self._finished = False
        """The trainer's summary was the last it said."""
        self._source = (("run_id", run_id), ("source", source[0]), ("time", source[1]))
        self._changed = True
        self._shown: set[str] = set()
        self._all = [
            definition
            for definition in METRICS
            if definition.name in _FROM_LOGS
            or (definition.name in _FROM_TIMES and start is not None)
            or (definition.name in _FROM_EVENTS and probed)
        ]
        self._often = [definition for definition in self._all if definition.name in _OFTEN]
        unknown = _NOT_JUDGED if probed else _NOT_JUDGED | _ONLY_EVENTS
        off = thresholds.off if thresholds is not None else frozenset()
        self._judged = tuple(signal for signal in SIGNALS if signal not in unknown and signal not in off)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in one event."""
        if event["event"] == "log":
            event = self._log(event)
            self._changed = self._changed or "loss" not in event["values"]
        else:
            self._changed = True
        self._record.event(event)
        self._health.event(event)

    def _log(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """A log as the probe would have written it: with a step, and without what only places it."""
        values = {key: value for key, value in (event.get("values") or {}).items() if key not in _PLACES}
        if (rate := values.pop("lr", None)) is not None:
            values.setdefault("learning_rate", rate)
        if is_summary(values):
            self._finished = True
        elif "loss" in values or "loss" in (event.get("nonfinite") or {}):
            self._finished = False
        epoch = finite(event.get("epoch"))
        epoch = epoch if epoch is not None else finite(values.get("epoch"))
        self._epoch = epoch if epoch is not None else self._epoch
        step = event.get("step")
        return {**event, "step": step if step is not None else self._record.step, "values": values}

    def begin_session(self) -> None:
        """It was away: what it logged before is not what it does now."""
        self._changed = True
        self._record.begin_session()

    def end(self, moment: float) -> None:
        """There is no other event; how it ended is told where that is known."""
        self._end = moment
        if self._ending is None and self._finished:
            early = (self._record.step or 0) < EARLY_STEPS
            self._ending = Ending(states.COMPLETED, "", "early" if early else "late", "", "")

    @property
    def is_changed(self) -> bool:
        """Whether something else than numbers of training logs has changed since the last look at all of it."""
        return self._changed or self._signals() != self._shown

    def samples(self, moment: float, *, whole: bool) -> Iterator[Sample]:
        """What a scrape at that Unix time would have seen, or only what every training log changes."""
        snapshot = self._snapshot(moment)
        if whole:
            self._changed, self._shown = False, self._signals()
            yield IMPORT_INFO, self._source, 1.0
        for definition in self._all if whole else self._often:
            own = (("run_id", self.run_id),)
            for values, value in definition.values(snapshot):
                labels = (*own, *zip(definition.labels, values, strict=True)) if values else own
                yield definition.full_name, labels, value

    def _signals(self) -> set[str]:
        return {verdict.signal for verdict in self._health.verdicts}

    def _snapshot(self, moment: float) -> Snapshot:
        record, health = self._record, self._health
        ending = self._ending if self._end is not None else None
        self._follow(ending.state if ending is not None else None, moment)
        level = health.level
        if ending is not None and ending.state == states.FAILED:
            level = "bad"
        return Snapshot(
            run_id=self.run_id,
            state=self._state,
            info=self._info(),
            environment=record.environment,
            state_since=self._since,
            run_start=self._start or 0.0,
            session_start=self._start or 0.0,
            now=moment,
            ending=ending,
            run_end=self._end if ending is not None else None,
            step=record.step,
            max_steps=record.max_steps,
            epoch=self._epoch,
            tokens_seen=record.tokens_seen,
            batch_size=as_number(record.effective.get("batch_size")),
            parameters=record.parameters,
            loss=record.loss,
            learning_rate=record.learning_rate,
            grad_norm=record.grad_norm,
            train_loss_mean=record.train_loss_mean,
            eval_loss=record.eval_loss,
            best_eval_loss=record.best_eval_loss,
            best_step=record.best_step,
            evals_since_best=record.evals_since_best,
            other_metrics=record.other,
            elapsed=moment - self._start if self._start is not None else None,
            nan_filter=record.nan_filter,
            glance=Glance(health=level),
            judged=self._judged if health.level != "unknown" else (),
            verdicts=tuple(health.verdicts),
            resume_lost={part: lost is False for part, lost in record.restored.items() if lost is not None},
            samples_generated=record.samples_generated,
            eval_overlap_rows=as_number(record.info.get("eval_overlap_rows")),
        )

    def _follow(self, ended: str | None, moment: float) -> None:
        record = self._record
        state = ended or (states.TRAINING if record.training or record.losses else self._state)
        if state != self._state:
            self._state, self._since = state, moment

    def _info(self) -> dict[str, str]:
        known = {**self._facts.get("info", {}), **self._record.info, "name": self.name}
        known.setdefault("resumed_from", self._facts.get("resumed_from") or "")
        return {label: label_value(known[label]) for label in INFO_LABELS if known.get(label) is not None}

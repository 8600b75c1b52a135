"""Signs of life: stalls, two writers at one log, hub pushes, and what would be lost if the run died now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tunewatch.health.duration import human_duration
from tunewatch.health.reading import Reading, whole
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, a run may show no sign of life before it is called stalled.

    `step` and `step_factor`: after the first step the limit is the larger of `step` and `step_factor` times the
    run's own recent step time. Evaluation and saving have the larger of their limit and three times the longest
    one so far. Sources of the defaults: on real logs a limit of 10 x the usual gap (at least 300 s) never fired on
    a healthy run, while evaluations of 1800 s and more are common.
    """

    prepare: float = 3600.0
    imports: float | None = None
    download: float | None = None
    load: float | None = None
    tokenize: float | None = None
    restore: float | None = None
    skip_data: float | None = None
    first_batch: float | None = None
    first_step: float = 1800.0
    step: float = 300.0
    step_factor: float = 10.0
    evaluate: float = 1800.0
    save: float = 1800.0
    package: float = 1800.0

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def preparing(self, activity: str | None) -> float:
        """Seconds of silence allowed while it prepares, by what it is busy with."""
        name = "imports" if activity == "import" else activity
        if name not in IMPATIENCE:
            return self.prepare
        own = getattr(self, name)
        return min(self.prepare, IMPATIENCE[name]) if own is None else float(own)


IMPATIENCE = {"imports": 900.0, "download": 900.0, "load": 1800.0, "tokenize": 900.0, "restore": 1800.0}
"""Seconds without a row, a byte, a shard or a module, unless the user says otherwise. Nobody has measured hangs of
these; they are long against the gaps of what moves (a progress bar does several times a second)."""


@dataclass(frozen=True)
class Moment:
    """What the detectors need to know of the present; times are CLOCK_MONOTONIC seconds.

    `unsaved_seconds`: time of steps since the last complete checkpoint; `save_seconds_apart`: the usual time between
    two of them; `free_bytes` of the output folder's disk; `checkpoint_bytes`: size of the newest complete checkpoint;
    `broken_checkpoint`: name of the newest checkpoint folder when it is not complete and is not being written, and
    `good_checkpoint` that of the newest complete one. None is unknown, and raises nothing. `behind` says which rank the
    others wait for, "" where none does. `activity` is what it prepares, as in a phase event.
    """

    now: float
    phase: str
    detail: str
    last_activity: float
    step: int | None
    first_step: bool
    seconds_per_step: float | None
    unsaved_seconds: float | None = None
    save_seconds_apart: float | None = None
    free_bytes: float | None = None
    checkpoint_bytes: float | None = None
    broken_checkpoint: str | None = None
    good_checkpoint: str | None = None
    behind: str = ""
    activity: str | None = None


class Life:
    """`stalled`: no sign of life for longer than the phase and the run's own pace excuse (see Patience).

    Can not see: a run that reports steps and does nothing useful in them.
    """

    def __init__(self, findings: Findings, patience: Patience) -> None:
        self._findings, self._patience = findings, patience
        self._longest = {"evaluate": 0.0, "save": 0.0}
        self.deadline: float | None = None

    def remember(self, phase: str, seconds: float | None) -> None:
        """An evaluation or a save took that long."""
        if seconds is not None:
            self._longest[phase] = max(self._longest[phase], seconds)

    def tick(self, moment: Moment) -> None:
        allowed = self.allowed(moment)
        self.deadline = moment.last_activity + allowed
        silent = moment.now - moment.last_activity
        if silent > allowed:
            self._findings.hold("stalled", moment.step, _stall_message(moment, silent), _stall_advice(moment))
        else:
            self._findings.drop("stalled")

    def allowed(self, moment: Moment) -> float:
        patience = self._patience
        match moment.phase:
            case "prepare":
                return patience.preparing(moment.activity)
            case "evaluate":
                return max(patience.evaluate, 3 * self._longest["evaluate"])
            case "save":
                return max(patience.save, 3 * self._longest["save"])
            case "package":
                return patience.package
        if moment.phase == "data" and moment.first_step:
            if moment.activity == "skip_data":
                return patience.prepare if patience.skip_data is None else patience.skip_data
            return patience.first_step if patience.first_batch is None else patience.first_batch
        if moment.first_step or moment.seconds_per_step is None:
            return patience.first_step
        return max(patience.step, patience.step_factor * moment.seconds_per_step)

    def silence(self) -> None:
        self.deadline = None
        self._findings.drop("stalled")


class Safety:
    """`work_at_risk`, `will_not_fit`, `checkpoint_broken`, from what a moment says of the disk.

    `work_at_risk`: more than RISK_FACTOR (2.5) times the usual time between two checkpoints, and more than RISK_SECONDS
    (30 min), have passed in steps since the last complete one. `will_not_fit`: the next checkpoint, as large as the newest,
    does not fit. `checkpoint_broken`: the newest checkpoint folder is not complete.
    """

    RISK_FACTOR = 2.5
    RISK_SECONDS = 1800.0

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def tick(self, moment: Moment) -> None:
        self._at_risk(moment)
        self._disk(moment)
        self._checkpoint(moment)

    def _at_risk(self, moment: Moment) -> None:
        unsaved, usual = moment.unsaved_seconds, moment.save_seconds_apart
        if unsaved is None or usual is None or unsaved <= max(self.RISK_SECONDS, self.RISK_FACTOR * usual):
            self._findings.drop("work_at_risk")
            return
        self._findings.hold(
            "work_at_risk", moment.step,
            f"The last complete checkpoint is {human_duration(unsaved)} of work old; usual is {human_duration(usual)}.",
            "Look why no checkpoint is written; do not stop the run before there is one.",
        )  # fmt: skip

    def _disk(self, moment: Moment) -> None:
        free, size = moment.free_bytes, moment.checkpoint_bytes
        if free is None or size is None or free >= size:
            self._findings.drop("will_not_fit")
            return
        self._findings.hold(
            "will_not_fit", moment.step,
            f"The next checkpoint needs about {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free.",
            "Free space in the output folder's disk, or lower save_total_limit, before the next save.",
        )  # fmt: skip

    def _checkpoint(self, moment: Moment) -> None:
        if moment.broken_checkpoint is None:
            self._findings.drop("checkpoint_broken")
            return
        good = moment.good_checkpoint
        resume = f"the newest complete one is {good}" if good else "there is no complete one"
        self._findings.hold(
            "checkpoint_broken", moment.step,
            f"A resume would pick {moment.broken_checkpoint}, which is not complete; {resume}.",
            f"Keep it running, and resume from {good} if it dies." if good else "Keep it running to the next save.",
        )  # fmt: skip


class Settings:
    """`settings_without_effect`: the first losses equal those of another run with other settings, to four digits.

    Then a learning rate, a dataset or an adapter does not reach the training. Can not see: runs of other machines.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def same_as(self, twin: str, differs: tuple[str, ...], step: int | None) -> None:
        """The run `twin` has the same losses, although it differs in these settings."""
        names = ", ".join(differs)
        self._findings.hold(
            "settings_without_effect", step,
            f"The first losses are those of run {twin}, although {names} differ{'' if ',' in names else 's'}.",
            "Look whether these settings and the data reach the trainer before you compare results.",
        )  # fmt: skip


class Writers:
    """`step_back`, `two_writers`: the step of a log is lower than that of the log before.

    Once, it is a rollback or a resume without a new session: a note. The decayed count of such logs (each counts 1, all
    lose 5 % a log) reaches `writers_score` (2.4) when two processes append to one log. Two steps back or so stay a
    note.
    """

    DECAY = 0.95

    def __init__(self, findings: Findings, limits: Thresholds) -> None:
        self._findings, self._limits = findings, limits
        self.begin(Training())

    def begin(self, training: Training) -> None:
        self._step: int | None = None
        self._score = 0.0

    def log(self, reading: Reading) -> None:
        step, last = reading.step, self._step
        if step is None:
            return
        self._step = step
        self._score *= self.DECAY
        if last is not None and step < last:
            self._score += 1.0
            self._findings.note(
                "step_back", step, f"The step went back from {last} to {step}.",
                "Keep it running; steps after a rollback are done again.",
            )  # fmt: skip
        if self._score >= self._limits.writers_score:
            self._findings.hold(
                "two_writers", step,
                "The step keeps going back and forth: two processes write the log of one run.",
                "Look for a second copy of the training, and stop one of them.",
            )  # fmt: skip
        else:
            self._findings.release("two_writers")


class HubPushes:
    """`hub_push_failed`: the last push to the hub failed (transformers swallows the error); a later good one takes it
    back."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def event(self, event: Mapping[str, Any]) -> None:
        if event.get("ok") is True:
            self._findings.drop("hub_push_failed")
        elif event.get("ok") is False:
            kind = event.get("type")
            why = f" ({kind})" if isinstance(kind, str) and kind.isidentifier() else ""
            self._findings.hold(
                "hub_push_failed", whole(event.get("step")),
                f"A push to the hub failed{why}; the training goes on without it.",
                "Keep it running; check token, network and quota, and push the checkpoint by hand.",
            )  # fmt: skip


WAITING = {
    "prepare": "while preparing",
    "data": "waiting for the next batch",
    "compute": "inside a step",
    "evaluate": "in an evaluation",
    "save": "saving a checkpoint",
    "package": "after the training",
}


def _stall_message(moment: Moment, silent: float) -> str:
    where = WAITING.get(moment.phase, moment.phase)
    if moment.detail and moment.phase in ("prepare", "data", "save"):
        where += f" ({moment.detail})"
    if moment.behind:
        where += f"; {moment.behind}"
    if moment.phase in ("data", "compute") and moment.first_step:
        return f"No first step yet: no sign of life for {human_duration(silent)}, {where}."
    after = f" after step {moment.step}" if moment.step is not None else ""
    return f"No sign of life for {human_duration(silent)}{after}, {where}."


def _stall_advice(moment: Moment) -> str:
    if moment.behind:
        return "Look at that rank: its log, its data, its GPU (py-spy dump). The others wait for it."
    match moment.phase:
        case "prepare":
            return "Look at the log; a hanging tokenization often goes away with dataset_num_proc=1."
        case "data":
            return "Look at the data loader: slow storage, dead workers, or ranks with unequal data."
        case "save":
            return "Look at the disk of output_dir: full, slow, or a network mount that hangs."
        case "evaluate":
            return "Look at the GPU and at compute_metrics; a smaller evaluation set helps."
    return "Look at the GPU and the ranks (py-spy dump); if it does not come back, stop it and resume."

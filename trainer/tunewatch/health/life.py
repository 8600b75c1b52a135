"""Signs of life: stalls, two writers at one log, hub pushes, and settings without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tunewatch.health.duration import human_duration
from tunewatch.health.moment import Moment
from tunewatch.health.reading import Reading, whole
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.training import Training
from tunewatch.health.verdict import Findings


@dataclass(frozen=True)
class Patience:
    """How long, in seconds, a run may show no sign of life before it is called stalled.

    `step` and `step_factor`: after the first step the limit is the larger of `step` and `step_factor` times the
    run's own recent step time. Evaluation and saving have the larger of their limit and three times the longest
    one so far; so has waiting for a batch, up to `first_step`: a shuffle buffer that took minutes to fill takes them
    again in the next epoch. An evaluation is alive with each of its batches, a save with each byte it writes. Skipping
    data after a resume gives no sign of life, and has all of `prepare` unless `skip_data` is set. Sources of the
    defaults: on real logs a limit of 10 x the usual gap (at least 300 s) never fired on a healthy run, while
    evaluations of 1800 s and more are common.
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


class Life:
    """`stalled`: no sign of life for longer than the phase and the run's own pace excuse (see Patience).

    Can not see: a run that reports steps and does nothing useful in them.
    """

    def __init__(self, findings: Findings, patience: Patience) -> None:
        self._findings, self._patience = findings, patience
        self._longest = {"evaluate": 0.0, "save": 0.0, "data": 0.0}
        self._wait = (0.0, 0.0)
        """When the last sign of life before a batch was, and how long that has been."""
        self.deadline: float | None = None

    def remember(self, phase: str, seconds: float | None) -> None:
        """An evaluation or a save took that long."""
        if seconds is not None:
            self._longest[phase] = max(self._longest[phase], seconds)

    def tick(self, moment: Moment) -> None:
        self._follow_waiting(moment)
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
        usual = max(patience.step, patience.step_factor * moment.seconds_per_step)
        if moment.phase == "data":
            return max(usual, min(patience.first_step, 3 * self._longest["data"]))
        return usual

    def _follow_waiting(self, moment: Moment) -> None:
        """Remember the longest wait for a batch that ended well; no sign of life comes in such a wait."""
        began, waited = self._wait
        if moment.phase == "data" and moment.last_activity == began:
            waited = moment.now - began
        else:
            if not self._findings.is_held("stalled"):  # a hang that went away excuses no other one
                self.remember("data", waited)
            began, waited = moment.last_activity, 0.0
        self._wait = (began, 0.0 if moment.activity == "skip_data" else waited)

    def silence(self) -> None:
        self.deadline = None
        self._findings.drop("stalled")


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
        if not self._score and (last is None or step >= last):
            return
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

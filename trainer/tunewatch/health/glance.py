"""One glance at a run: how it stands, why, and what to do about it. Decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tunewatch.health.duration import human_duration
from tunewatch.health.thresholds import Thresholds
from tunewatch.health.verdict import LEVELS, Verdict

ACTS = ("keep", "stop", "restart", "resume")
"""keep: let it run, or leave it as it ended. stop: end it, what it has so far is the result. restart: begin anew, with
other settings where the old ones failed. resume: go on from a checkpoint that can be trusted."""

ACT_OF: dict[str, str] = {
    "nonfinite": "resume",
    "nonfinite_isolated": "keep",
    "norm_overflow": "keep",
    "fp16_overflow": "restart",
    "fp16_skips": "keep",
    "zero_loss": "restart",
    "labels_masked": "restart",
    "nothing_trainable": "restart",
    "no_gradient": "restart",
    "lr_zero": "resume",
    "lr_zero_expected": "keep",
    "flat": "restart",
    "collapsed_loss": "keep",
    "data_not_consumed": "restart",
    "settings_without_effect": "keep",
    "loss_huge": "restart",
    "loss_scale": "keep",
    "spike": "keep",
    "spikes": "keep",
    "diverging": "resume",
    "grad_spike": "keep",
    "grad_explosion": "keep",
    "eval_nonfinite": "keep",
    "no_best_checkpoint": "keep",
    "overfitting": "stop",
    "eval_rising": "resume",
    "resume_lost": "resume",
    "lr_restarted": "resume",
    "schedule_reshaped": "keep",
    "arguments_overridden": "keep",
    "never_logs": "keep",
    "step_back": "keep",
    "two_writers": "stop",
    "stalled": "resume",
    "hub_push_failed": "keep",
    "checkpoint_broken": "keep",
    "work_at_risk": "keep",
    "checkpoint_overdue": "keep",
    "will_not_fit": "keep",
    "slow": "keep",
    "data_starved": "keep",
    "slow_rank": "keep",
}
"""What each signal asks for while the run lives. A resume without a sound checkpoint becomes a restart."""

NEEDS_CHANGE = frozenset(
    {"nan", "oom_gpu", "oom_host", "shm", "config", "data", "missing_file", "auth", "nothing_trainable", "disk_full"}
)  # fmt: skip
"""Reasons of an end that come again unless something is changed first."""

FAILS_AGAIN = frozenset(
    {"oom_gpu", "config", "data", "missing_file", "auth", "hub", "nothing_trainable", "unknown", "exited_early"}
)  # fmt: skip
"""Reasons for which a run that failed early would fail again: its settings are the suspect, no resume helps."""

FROM_OUTSIDE = frozenset(
    {
        "preempted", "hangup", "gpu_lost", "nccl_timeout", "rank_killed", "stalled", "hub", "packaging",
        "checkpoint_corrupt", "killed_signal_9", "killed_signal_15",
    }
)  # fmt: skip
"""Reasons that lie outside of the settings: the same run may well succeed."""

ONLY_WARNS = frozenset({"preempted", "hangup"})
"""Somebody else ended the run: attention, and nothing bad about the run itself."""

_RISE = 2
"""The rise of the smoothed loss is called diverging after `diverging_logs`; it began up to as many before that."""


class End(Protocol):
    """How a run ended, as the supervisor judged it."""

    @property
    def state(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def when(self) -> str: ...
    @property
    def message(self) -> str: ...


@dataclass(frozen=True)
class Glance:
    """`health` is ok, attention, bad or unknown; `reason` one sentence; `act` one of ACTS, and `act_text` the same in
    words; `resume_from` the name of the checkpoint where `act` is resume, else None."""

    health: str = "unknown"
    reason: str = "Nothing was heard of it yet."
    act: str = "keep"
    act_text: str = "keep it running"
    resume_from: str | None = None


@dataclass(frozen=True)
class Standing:
    """What a glance is made of. `level` is the worst of `verdicts`, or unknown; `checkpoints` are those that a resume
    can trust, as (step, name) in order; `steps_per_log` and `best_step` (of the lowest evaluation loss) are None where
    unknown; `best_checkpoint` is the whole checkpoint of that step, None where there is none; `eta` is in seconds;
    `doing` says what it prepares."""

    state: str
    level: str
    verdicts: Sequence[Verdict] = ()
    ending: End | None = None
    checkpoints: Sequence[tuple[int, str]] = ()
    step: int | None = None
    max_steps: int | None = None
    eta: float | None = None
    doing: str = ""
    steps_per_log: int | None = None
    best_step: int | None = None
    best_checkpoint: str | None = None
    limits: Thresholds = field(default_factory=Thresholds)


def at_a_glance(run: Standing) -> Glance:
    """How the run stands now, or how it ended."""
    if run.ending is not None:
        return _ended(run, run.ending)
    worst = _worst(run.verdicts)
    if run.level == "unknown":
        return Glance()
    if worst is None:
        return Glance("ok", _calm(run))
    act, checkpoint = _act(run, worst)
    words = {
        "keep": "keep it running",
        "stop": "stop it" + _best(run, worst),
        "restart": f"stop it and {_anew(other_settings=worst.signal != 'stalled')}",
        "resume": f"stop it and resume from {checkpoint}",
    }
    return Glance(run.level, worst.message, act, words[act], checkpoint)


def worth_resuming(reason: str, when: str) -> bool:
    """Whether a failed run may go on from a checkpoint, rather than begin anew with other settings."""
    return when == "late" or reason not in FAILS_AGAIN


def _worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    """The verdict to act on: of the highest level, one that asks for something before one that does not, and of those
    the first that was raised."""
    serious = [verdict for verdict in verdicts if verdict.level != "info"]
    return max(
        serious,
        key=lambda verdict: (LEVELS.index(verdict.level), ACT_OF[verdict.signal] != "keep"),
        default=None,
    )


def _act(run: Standing, verdict: Verdict) -> tuple[str, str | None]:
    """What a verdict asks for, and the checkpoint of a resume."""
    act = ACT_OF[verdict.signal]
    if act != "resume":
        return act, None
    checkpoint = _before(run, verdict)
    return ("resume", checkpoint) if checkpoint else ("restart", None)


def _before(run: Standing, verdict: Verdict) -> str | None:
    """The newest checkpoint that the trouble has not reached; None where there is none, or where that is unknown."""
    at = verdict.step
    match verdict.signal:
        case "stalled" | "lr_zero":
            at = None  # they damage nothing
        case "resume_lost":
            # The checkpoint that it began with may hold what was not restored.
            at = None if at is None else at + 1
        case "eval_rising":
            if run.best_step is None:
                return None
            at = run.best_step + 1
        case "diverging":
            if at is None or run.steps_per_log is None:
                return None
            at -= _RISE * run.limits.diverging_logs * run.steps_per_log
    names = [name for step, name in run.checkpoints if at is None or step < at]
    return names[-1] if names else None


def _best(run: Standing, verdict: Verdict) -> str:
    """What an overfitted run leaves: the checkpoint of the best evaluation, if it is there still."""
    if verdict.signal != "overfitting" or run.best_step is None:
        return ""
    if run.best_checkpoint is None:
        return f"; of the best step {run.best_step} there is no checkpoint"
    return f" and keep {run.best_checkpoint}"


def _ended(run: Standing, ending: End) -> Glance:
    worst = _worst(run.verdicts)
    newest = run.checkpoints[-1][1] if run.checkpoints else None
    if ending.state == "completed":
        if worst is None:
            return Glance(run.level, ending.message, "keep", "keep the result")
        act, checkpoint = _act(run, worst) if worst.level == "bad" else ("keep", None)
        words = {"restart": _anew(other_settings=True), "resume": f"resume from {checkpoint}"}
        if worst.signal == "overfitting" and run.best_checkpoint:
            words["keep"] = f"keep {run.best_checkpoint}"
        return Glance(run.level, worst.message, act, words.get(act, "keep the result"), checkpoint)
    if ending.state == "cancelled":
        text = f"nothing to do; it can go on from {newest}" if newest else "nothing to do"
        return Glance(run.level, ending.message, "keep", text)
    health = "attention" if ending.reason in ONLY_WARNS and run.level != "bad" else "bad"
    change = ending.reason in NEEDS_CHANGE
    if newest is not None and worth_resuming(ending.reason, ending.when):
        text = f"change what stopped it, then resume from {newest}" if change else f"resume from {newest}"
        return Glance(health, ending.message, "resume", text, newest)
    other_settings = change or (ending.when == "early" and ending.reason not in FROM_OUTSIDE)
    return Glance(health, ending.message, "restart", _anew(other_settings=other_settings))


def _anew(*, other_settings: bool) -> str:
    return "restart with other settings" if other_settings else "start it again"


def _calm(run: Standing) -> str:
    """Where a run is that nothing is wrong with."""
    match run.state:
        case "queued":
            return "It waits for its turn."
        case "preparing":
            return f"It prepares: {run.doing}." if run.doing else "It prepares."
        case "packaging":
            return "The training is done; its result is being written."
    at = ""
    if run.step is not None:
        at = f" step {run.step}" + (f" of {run.max_steps}" if run.max_steps else "")
    if run.state == "validating":
        return f"It evaluates at{at}." if at else "It evaluates."
    left = f", {human_duration(run.eta)} left" if run.eta is not None else ""
    return f"It trains:{at}{left}." if at else "It trains."

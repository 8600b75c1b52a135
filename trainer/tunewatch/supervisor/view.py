"""All that is known of one run, in memory: its record, its health, its state and what its disk holds.

No process, no file and no clock of its own: the supervisor feeds it, and so can a test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunewatch import states
from tunewatch.durations import earliest
from tunewatch.events import checked
from tunewatch.health import (
    SIGNALS,
    Glance,
    Health,
    Moment,
    Patience,
    Standing,
    Thresholds,
    at_a_glance,
)
from tunewatch.metrics import INFO_LABELS, label_value
from tunewatch.probe.pulse import PHASES
from tunewatch.probe.values import as_number
from tunewatch.supervisor import checkpoints
from tunewatch.supervisor.ending import Ending
from tunewatch.supervisor.evidence import Points
from tunewatch.supervisor.present import SettledDisk, interval, saves_of, work_by_rank
from tunewatch.supervisor.ranks import laggard, last_in_step
from tunewatch.supervisor.record import Record
from tunewatch.supervisor.snapshot import RankSnapshot, Snapshot
from tunewatch.supervisor.twins import Twin


class RunView:
    """What is known of a run. Wall times are Unix seconds, `now` is CLOCK_MONOTONIC seconds.

    `facts` is the content of run.json; `resident` tells a process's memory on the host by its pid.
    """

    def __init__(
        self,
        run_id: str,
        facts: dict[str, Any],
        patience: Patience,
        *,
        now: float,
        wall: float,
        walltime: float | None = None,
        deadline: float | None = None,
        resident: Callable[[int], float | None] = lambda pid: None,
        limits: Thresholds | None = None,
    ) -> None:
        self.run_id = run_id
        self.facts = facts
        self.way = str(facts.get("way", "exec"))
        self.record = Record()
        self.patience, self.limits = patience, limits or Thresholds()
        self.health = Health(patience, self.limits)
        self.points = Points()
        self.evidence: tuple[str, ...] = ()
        """Names of the evidence files beside the run."""
        self.evidence_errors = 0
        """Those that could not be written."""
        self.state, self.state_since = states.QUEUED, wall
        self.session_start, self.session_monotonic = wall, now
        self.ending: Ending | None = None
        self.run_end: float | None = None
        self.checkpoints: Sequence[checkpoints.Checkpoint] | None = None
        """Of output_dir, by step; None while nobody has looked."""
        self.free_bytes: float | None = None
        self.free_inodes: int | None = None
        self.reviewed: int | None = None
        self.malformed = 0
        """Lines of events.jsonl that are no events."""
        self.clock_jumps = 0
        self._walltime, self._deadline = walltime, deadline
        self._resident = resident
        self._end_monotonic: float | None = None
        self._phase_stalled: dict[str, float] = {}
        self._looked = 0
        self._unfinished = _Unfinished()
        self._settled = SettledDisk()
        self._errors, self._nonfinite = _Growth(), _Growth()

    def event(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the run folder; those before the record's session begins are history.

        What a field can not hold is left out, whatever the line says.
        """
        event = checked(event)
        self.record.event(event)
        self.points.event(event, self.record)
        if self.record.history:
            self.health.past(event)
        else:
            self.health.event(event)

    def disk(
        self,
        look: int,
        found: Sequence[checkpoints.Checkpoint] | None,
        free_bytes: float | None,
        free_inodes: int | None,
        now: float,
    ) -> None:
        """Take in what lies in the output folder, as of the look of that number."""
        self.checkpoints, self.free_bytes, self.free_inodes = found, free_bytes, free_inodes
        if look != self._looked:
            self._looked = look
            newest = checkpoints.would_resume(found or ())
            self._unfinished.look(newest, now, saving=self.record.phase == "save")
        writing = self.record.phase == "save" or self._unfinished.is_written(now)
        self._settled.look(look, found, free_bytes, free_inodes, writing=writing)

    def tick(
        self, now: float, wall: float, *, since: float | None = None, excused: float = -math.inf
    ) -> None:
        """Judge the time that has passed.

        `since` is when this was last done: a stall between is counted as such. The run's silence before `excused`
        proves nothing: it was the one who watches that was away.
        """
        self._judge(now, wall, since, excused)
        self._follow(wall)
        self._errors.look(self._probe_errors(), wall)
        self._nonfinite.look(self._nonfinite_steps(), wall)

    def found_twin(self, twin: Twin) -> None:
        """Take in that another run has the same losses."""
        self.health.same_as(twin.run_id, twin.differs, self.record.step)

    def end(self, ending: Ending, now: float, wall: float) -> None:
        self.ending, self.run_end, self._end_monotonic = ending, wall, now
        self.health.silence()
        self.enter(ending.state, wall)

    def enter(self, state: str, wall: float) -> None:
        """Change the state, if there is such a step."""
        if state != self.state and states.may_follow(self.state, state):
            self.state, self.state_since = state, wall

    @property
    def deadline(self) -> float | None:
        """When the run's time is over, Unix seconds; None where nothing limits it."""
        return earliest(
            None if self._walltime is None else self.session_start + self._walltime, self._deadline
        )

    def newest_sound(self) -> checkpoints.Checkpoint | None:
        """The checkpoint that a resume of this run should take."""
        return checkpoints.newest_resumable([item for item in self.checkpoints or () if self._is_sound(item)])

    def snapshot(self, now: float, wall: float) -> Snapshot:
        record, main = self.record, self.record.main
        alive = self.ending is None
        to_wall = wall - now
        complete = [item for item in self.checkpoints or () if item.complete]
        newest = complete[-1] if complete else None
        started = float(self.facts.get("created", self.session_start))
        in_session = max(0.0, (self._end_monotonic or now) - self.session_monotonic)
        sound = self.newest_sound()
        at_risk = self._steps_at_risk(sound)
        deadline = self.health.deadline
        return Snapshot(
            run_id=self.run_id,
            state=self.state,
            info=self._info(),
            environment=record.environment,
            state_since=self.state_since,
            run_start=started,
            session_start=self.session_start,
            now=wall,
            attached=record.attached,
            ending=self.ending,
            run_end=self.run_end,
            step=record.step,
            max_steps=record.max_steps,
            epoch=_known(main, "epoch"),
            tokens_seen=record.tokens_seen,
            samples_seen=record.samples_seen,
            steps_total=main["steps_total"] if main else 0.0,
            steps_redone_total=record.steps_redone,
            tokens_total=record.session_tokens,
            samples_total=_json_number(record.rank_sum("samples_total")) if main else None,
            steps_skipped_total=main["steps_skipped_total"] if main else 0.0,
            batch_size_restarts_total=main["batch_size_restarts_total"] if main else 0.0,
            resumes_total=record.resumes,
            batch_size=as_number(record.effective.get("batch_size")),
            intervals=self._intervals(),
            parameters=record.parameters,
            loss=record.loss,
            learning_rate=record.learning_rate,
            grad_norm=record.grad_norm,
            train_loss_mean=record.train_loss_mean,
            eval_loss=dict(record.eval_loss),
            best_eval_loss=record.best_eval_loss,
            best_step=record.best_step,
            evals_since_best=record.evals_since_best,
            other_metrics=dict(record.other),
            metrics_dropped_total=record.dropped_total,
            elapsed=max(0.0, self.session_start - started) + in_session,
            session_elapsed=in_session,
            eta=record.pace.eta(record.step, record.max_steps) if alive else None,
            step_seconds_sum=main["step_seconds_sum"] if main else 0.0,
            step_buckets=record.step_buckets,
            phase=record.phase,
            phase_detail=record.phase_detail,
            activity=record.activity,
            phase_ratio=record.phase_ratio,
            phase_seconds=self._phase_seconds(self._end_monotonic or now),
            wasted_seconds=record.wasted_seconds,
            last_activity=main["activity_time"] if main else None,
            deadline=deadline + to_wall if deadline is not None else None,
            walltime_deadline=self.deadline,
            nonfinite_steps=self._nonfinite_steps(),
            nonfinite_streak=record.rank_max("nonfinite_streak") if main else None,
            first_nonfinite_step=_known(main, "first_nonfinite_step"),
            nan_filter=record.nan_filter,
            nonfinite_times=dict(self._nonfinite.seen),
            glance=self._glance(),
            judged=()
            if self.health.level == "unknown"
            else tuple(signal for signal in SIGNALS if signal not in self.limits.off),
            verdicts=tuple(self.health.verdicts),
            checkpoints_saved_total=record.rank_max("saves"),
            checkpoints_present=len(complete) if self.checkpoints is not None else None,
            checkpoints_broken=len(self.checkpoints) - len(complete)
            if self.checkpoints is not None
            else None,
            checkpoint_last_step=newest.step if newest else None,
            checkpoint_last_time=newest.saved_at if newest else None,
            checkpoint_size=newest.size_bytes if newest else None,
            checkpoint_duration=record.save_seconds,
            checkpoint_interval_steps=saves_of(record).every,
            checkpoint_best_step=record.best_step
            if record.best_step in {item.step for item in complete}
            else None,
            checkpoint_resumable_step=sound.step if sound else None,
            checkpoints_that_fit=self._that_fit(newest),
            work_at_risk_steps=at_risk,
            work_at_risk_seconds=_times(at_risk, record.pace.seconds_per_step),
            output_free_bytes=self.free_bytes,
            resume_lost={
                part: value is False for part, value in record.restored.items() if value is not None
            },
            hub_push_failures_total=record.hub_failures,
            hub_push_last_success=record.hub_last_success,
            hub_push_last_failure=record.hub_last_failure,
            samples_generated=record.samples_generated,
            samples_reviewed=self.reviewed,
            eval_overlap_rows=as_number(record.info.get("eval_overlap_rows")),
            probe_errors=self._probe_errors(),
            probe_error_times=dict(self._errors.seen),
            evidence=self.evidence,
            probe_seconds_total=record.rank_sum("hook_seconds") if main else None,
            clock_jumps_total=self.clock_jumps,
            ranks={rank: self._rank(rank, pulse) for rank, pulse in record.pulses.items()},
        )

    # -- inside -------------------------------------------------------------------------------------------

    def _glance(self) -> Glance:
        record = self.record
        return at_a_glance(
            Standing(
                state=self.state,
                level=self.health.level,
                verdicts=self.health.verdicts,
                ending=self.ending,
                checkpoints=self._trusted(),
                step=record.step,
                max_steps=record.max_steps,
                eta=record.pace.eta(record.step, record.max_steps),
                doing=record.phase_detail,
                steps_per_log=interval(record.effective.get("logging_steps")),
                best_step=record.best_step,
                best_checkpoint=next(
                    (
                        item.name
                        for item in self.checkpoints or ()
                        if item.complete and item.step == record.best_step
                    ),
                    None,
                ),
                limits=self.limits,
            )
        )

    def _trusted(self) -> list[tuple[int, str]]:
        """The checkpoints that a resume may take, by step."""
        there = self.checkpoints or ()
        if self.ending is not None and self.ending.reason == "checkpoint_corrupt":
            # It died before it began: nothing tells which of them are its own.
            newest = checkpoints.newest_complete(there)
            return [(newest.step, newest.name)] if newest else []
        return sorted((item.step, item.name) for item in there if item.resumable and self._is_sound(item))

    def _probe_errors(self) -> dict[str, float]:
        return {
            "hook": self.record.rank_sum("hook_errors"),
            "append": self.record.rank_sum("append_errors"),
            "malformed": float(self.malformed),
            "evidence": float(self.evidence_errors),
        }

    def _judge(self, now: float, wall: float, since: float | None, excused: float) -> None:
        record, main = self.record, self.record.main
        if main is None or self.ending is not None:
            return
        if self._is_idle():
            self.health.silence()
            return
        phase, pace = PHASES[int(main["phase"])], record.pace.seconds_per_step
        sound, unfinished, saves = self.newest_sound(), self._unfinished, saves_of(record)
        signs_of_life = [main["activity_monotonic"], excused]
        if phase == "save":
            signs_of_life.append(unfinished.grew_at)  # a slow disk is slow, not dead
        moment = Moment(
            now=now,
            phase=phase,
            detail=self._detail(phase, main),
            last_activity=max(signs_of_life),
            step=record.step,
            first_step=bool(main["first_step"]),
            seconds_per_step=pace,
            unsaved_seconds=_times(self._steps_at_risk(sound), pace),
            save_seconds_apart=_times(saves.every, pace),
            saved_step=self._saved_step(),
            writing=unfinished.name is not None,
            broken_checkpoint=unfinished.given_up(now),
            good_checkpoint=sound.name if sound else None,
            checkpoint_steps=self._complete_steps(),
            behind=str(laggard(record.pulses) or ""),
            last_in_step=last_in_step(record.pulses),
            activity=record.activity,
            max_steps=record.max_steps,
            session_steps=main["step_seconds_count"],
            left_seconds=record.pace.eta(record.step, record.max_steps),
            deadline=self._time_is_over(now, wall),
            saves=saves,
            disk=self._settled.disk,
            ranks=work_by_rank(record.pulses),
        )
        if since is not None and self.health.is_active("stalled"):
            self._phase_stalled[moment.phase] = self._phase_stalled.get(moment.phase, 0.0) + now - since
        self.health.tick(moment)

    def _complete_steps(self) -> frozenset[int] | None:
        """The steps whose checkpoints lie complete in output_dir; None while nobody has looked."""
        if self.checkpoints is None:
            return None
        return frozenset(item.step for item in self.checkpoints if item.complete)

    def _time_is_over(self, now: float, wall: float) -> float | None:
        """The deadline on the monotonic clock, which nobody sets."""
        return earliest(
            None if self._walltime is None else self.session_monotonic + self._walltime,
            None if self._deadline is None else now + self._deadline - wall,
        )

    def _saved_step(self) -> int | None:
        """The last step of which a save ended in this training, or a checkpoint of this run is there."""
        own = [item for item in self.checkpoints or () if item.complete and self._is_sound(item)]
        steps = [checkpoint.step for checkpoint in own[-1:]]
        if self.record.saved_step is not None:
            steps.append(self.record.saved_step)
        return max(steps, default=None)

    def _detail(self, phase: str, main: Mapping[str, float]) -> str:
        """A few words on what the phase is busy with."""
        detail, written = self.record.phase_detail, self._unfinished.bytes
        if phase == "save" and detail and written is not None:
            return f"{detail}, {written / 1e6:.1f} MB so far"
        if phase == "data" and not detail and _is_whole(main["epoch"]):
            return "at the end of an epoch"
        return detail

    def _follow(self, wall: float) -> None:
        record = self.record
        if record.job_state == states.PACKAGING:
            self.enter(states.PACKAGING, wall)
        elif not record.trained:
            return
        elif record.training:
            self.enter(states.VALIDATING if record.phase == "evaluate" else states.TRAINING, wall)
        elif record.phase == "package":  # even before train() returns: it waits for its pushes to the hub
            self.enter(states.PACKAGING, wall)

    def _is_idle(self) -> bool:
        """Whether silence is nobody's fault: a notebook waits for its user, a script goes on to things of its own."""
        record = self.record
        if self.way == "train" or record.training:
            return False
        return record.train_returned or (record.interactive and not record.trained)

    def _is_sound(self, checkpoint: checkpoints.Checkpoint) -> bool:
        """Whether a resume of this run may start there: not left by another run, and before the first NaN."""
        since = self.health.nonfinite_since
        if since is not None and checkpoint.step >= since:
            return False
        created = float(self.facts.get("created", 0.0))
        return checkpoint.saved_at >= created - 60.0 or checkpoint.step <= self.record.resumed_at

    def _steps_at_risk(self, sound: checkpoints.Checkpoint | None) -> int | None:
        """Steps that would be lost if the run ended now: since the checkpoint that a resume would take."""
        record = self.record
        completed = self.ending is not None and self.ending.state == states.COMPLETED
        if not record.trained or record.step is None or completed or self.checkpoints is None:
            return None
        return max(0, record.step - (sound.step if sound else record.resumed_at))

    def _that_fit(self, newest: checkpoints.Checkpoint | None) -> int | None:
        if newest is None or self.free_bytes is None:
            return None
        return checkpoints.how_many_fit(self.free_bytes, self.free_inodes, newest.size_bytes, newest.files)

    def _intervals(self) -> dict[tuple[str, str], float]:
        given = {"requested": self.record.requested, "effective": self.record.effective}
        found = {}
        for what, name in (("log", "logging_steps"), ("eval", "eval_steps"), ("save", "save_steps")):
            for kind, arguments in given.items():
                if (steps := interval(arguments.get(name))) is not None:
                    found[what, kind] = float(steps)
        return found

    def _info(self) -> dict[str, str]:
        known = {**self.facts.get("info", {}), **self.record.info}
        known["name"] = self.facts.get("name") or self.run_id
        known.setdefault("resumed_from", self.facts.get("resumed_from") or "")
        return {label: label_value(known[label]) for label in INFO_LABELS if known.get(label) is not None}

    def _nonfinite_steps(self) -> dict[str, float]:
        record = self.record
        if record.main is None:
            return {}
        return {
            "loss": record.rank_max("nonfinite_loss_steps"),
            "grad_norm": record.rank_max("nonfinite_grad_norm_steps"),
            "eval_loss": float(record.nonfinite_evals),
        }

    def _phase_seconds(self, until: float) -> dict[str, float]:
        """Time by phase; the last one counts up to now or to the end, less what was declared a stall."""
        main = self.record.main
        if main is None:
            return {}
        seconds = {phase: main[f"{phase}_seconds"] for phase in PHASES}
        seconds[PHASES[int(main["phase"])]] += max(0.0, until - main["phase_monotonic"])
        for phase, stalled in self._phase_stalled.items():
            seconds[phase] = max(0.0, seconds[phase] - stalled)
        seconds["stalled"] = sum(self._phase_stalled.values())
        return seconds

    def _rank(self, rank: int, pulse: Mapping[str, float]) -> RankSnapshot:
        memory = {}
        for kind in ("allocated", "reserved", "peak"):
            value = pulse[f"memory_{kind}_bytes"]
            if not math.isnan(value):
                memory[kind] = value
        if self.ending is None and (rss := self._resident(int(pulse["pid"]))) is not None:
            memory["rss"] = rss
        step = _known(pulse, "step")
        return RankSnapshot(
            last_step_time=_known(pulse, "step_time"),
            step=None if step is None else int(step),
            phase_seconds={phase: pulse[f"{phase}_seconds"] for phase in PHASES},
            memory_bytes=memory,
            gpus=self.record.gpus.get(rank, ()),
        )


def verdict_json(snapshot: Snapshot) -> dict[str, Any]:
    """The content of verdict.json: strict JSON, null for what is unknown or not finite."""
    return {
        "run_id": snapshot.run_id,
        "name": snapshot.info.get("name"),
        "state": snapshot.state,
        "health": snapshot.health,
        "reason": snapshot.glance.reason,
        "act": snapshot.glance.act,
        "act_text": snapshot.glance.act_text,
        "resume_from": snapshot.glance.resume_from,
        "signals": [verdict.to_json() for verdict in snapshot.verdicts],
        "step": snapshot.step,
        "max_steps": snapshot.max_steps,
        "progress_ratio": snapshot.progress_ratio,
        "loss": _json_number(snapshot.loss),
        "loss_nonfinite": snapshot.loss is not None and not math.isfinite(snapshot.loss),
        "eta_seconds": _json_number(snapshot.eta),
        "phase": snapshot.phase,
        "phase_detail": snapshot.phase_detail,
        "phase_ratio": _json_number(snapshot.phase_ratio),
        "activity": snapshot.activity,
        "samples": {"generated": snapshot.samples_generated, "reviewed": snapshot.samples_reviewed},
        "ending": snapshot.ending.to_json() if snapshot.ending else None,
        "evidence": list(snapshot.evidence),
        "updated": snapshot.now,
    }


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known(pulse: Mapping[str, float] | None, name: str) -> float | None:
    return None if pulse is None or math.isnan(pulse[name]) else pulse[name]


class _Unfinished:
    """Follows the newest checkpoint folder while it is not complete: being written, or left so."""

    GIVEN_UP_AFTER = 20.0
    """Seconds without a byte, outside of a save, after which it is not being written any more (by a thread, say)."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.bytes: int | None = None
        self.grew_at = -math.inf
        self._still_since: float | None = None

    def look(self, newest: checkpoints.Checkpoint | None, now: float, *, saving: bool) -> None:
        if newest is None or newest.complete:
            self.name = self.bytes = self._still_since = None
            return
        if (newest.name, newest.size_bytes) != (self.name, self.bytes):
            self.name, self.bytes, self.grew_at = newest.name, newest.size_bytes, now
            self._still_since = None
        if saving:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now

    def is_written(self, now: float) -> bool:
        """Whether there is one, and it may be that somebody writes it."""
        return self.name is not None and self.given_up(now) is None

    def given_up(self, now: float) -> str | None:
        """Its name, once nobody seems to write it."""
        if self._still_since is None or now - self._still_since < self.GIVEN_UP_AFTER:
            return None
        return self.name


class _Growth:
    """When counts were last seen to grow, by their names; of what a count was at the first look nobody knows when."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self._counts: dict[str, float] = {}

    def look(self, counts: Mapping[str, float], wall: float) -> None:
        for name, count in counts.items():
            if count > self._counts.get(name, count):
                self.seen[name] = wall
            self._counts[name] = count


def _is_whole(epoch: float) -> bool:
    return epoch >= 0.5 and abs(epoch - round(epoch)) < 1e-6


def _times(steps: int | None, seconds: float | None) -> float | None:
    return None if steps is None or seconds is None else steps * seconds

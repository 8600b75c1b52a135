"""The supervisor: one process per run that watches it from its start to its end."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.registry import CollectorRegistry

from tunewatch import states
from tunewatch.health import Health, Moment, Patience
from tunewatch.metrics import INFO_LABELS, RunCollector, label_value
from tunewatch.probe.pulse import PHASES
from tunewatch.probe.writer import process_start
from tunewatch.runfolder import EventReader, RunFolder, remove_target, write_json, write_target
from tunewatch.supervisor import checkpoints
from tunewatch.supervisor.ending import Ending, Evidence, judge
from tunewatch.supervisor.endpoint import DEFAULT_HOST, Endpoint
from tunewatch.supervisor.linger import Linger
from tunewatch.supervisor.process import (
    Adopted,
    Child,
    OomKills,
    Process,
    become_subreaper,
    end_descendants,
    reap_orphans,
    resident_bytes,
)
from tunewatch.supervisor.record import Record
from tunewatch.supervisor.snapshot import RankSnapshot, Snapshot

POLL_SECONDS = 0.2
DISK_SECONDS = 15.0
FULL_DISK_BYTES = 1_000_000


class AlreadyWatched(Exception):
    """Another supervisor holds the run."""


@dataclass
class Options:
    """What a user may set about the watching of a run."""

    host: str = DEFAULT_HOST
    port: int | None = None
    patience: Patience = field(default_factory=Patience)
    linger: bool = True
    grace: float = 60.0
    """Seconds between a request to end and SIGKILL."""
    target_file: bool = True
    walltime: float | None = None
    """Seconds after the session's start at which the allocation ends; None where nothing limits it."""


class Supervisor:
    """Watches one run. `run()` returns its ending when the process is gone and the linger is over."""

    def __init__(
        self, folder: RunFolder, options: Options, *, on_change: Callable[[Snapshot], None] | None = None
    ) -> None:
        """Take the run: raises AlreadyWatched when another supervisor lives, ListenError when there is no port."""
        self.folder = folder
        self.options = options
        self.ending: Ending | None = None
        self.snapshot: Snapshot | None = None
        self.exit_code = 0
        self._on_change = on_change
        self._lock = _take(folder)
        self._run_facts = folder.read("run.json") or {}
        self._way = str(self._run_facts.get("way", "exec"))
        self._record = Record()
        self._health = Health(options.patience)
        self._reader = EventReader(folder.events)
        self._oom = OomKills()
        self._process: Process | None = None
        self._state, self._state_since = states.QUEUED, time.time()
        self._session_start = time.time()
        self._session_monotonic = time.monotonic()
        self._history_bytes = 0  # of events.jsonl: what lies before is of earlier sessions
        self._adopted: tuple[int, int | None] | None = None
        self._run_end: float | None = None
        self._phase_stalled: dict[str, float] = {}
        self._last_tick: float | None = None
        self._excused = 0.0  # our own absence (we were stopped): the run's silence in it proves nothing
        self._cancel = self._terminate = False
        self._signals: list[int] = []
        self._kill_at: float | None = None
        self._dead_ranks: list[int] = []
        self._checkpoints: list[checkpoints.Checkpoint] | None = None  # not looked yet
        self._free_bytes: float | None = None
        self._disk: threading.Thread | None = None
        self._disk_due = 0.0
        self._saves_seen = 0.0
        registry = CollectorRegistry()
        self.endpoint = Endpoint(
            registry, host=options.host, port=options.port, title=f"tunewatch {folder.run_id}"
        )
        self._publish()
        registry.register(RunCollector(self._current, time.time))
        if options.target_file:
            write_target(folder, self.endpoint.address)

    # -- taking a run -------------------------------------------------------------------------------------

    def start(self, command: list[str], environment: Mapping[str, str], *, log: Path | None = None) -> None:
        """Start the training as our child. Raises OSError where the command can not be run."""
        become_subreaper()
        for path in self.folder.path.glob("pulse.*"):
            path.unlink()  # of an earlier session
        self._read()
        self._history_bytes = self._reader.position
        self._record.begin_session()
        try:
            self._process = Child(command, environment, log)
        except OSError:
            self._end(judge(Evidence(returncode=127, way=self._way)))
            self.close()
            raise
        self._begin()

    def adopt(self, pid: int, start: int | None = None) -> None:
        """Watch a process that somebody else started; its session may be under way."""
        if self._way == "callback":
            self._adopted = (pid, process_start(pid))
        else:
            known = self.folder.read("supervisor.json") or {}
            self._session_start = float(known.get("session_start", self._session_start))
            self._history_bytes = int(known.get("history_bytes", 0))
        self._process = Adopted(pid, start)
        self._begin()

    def _begins_session(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is the first of this session; by place, for clocks are set while trainings run."""
        if self._adopted is None:
            return self._reader.position > self._history_bytes
        if (event.get("pid"), event.get("process_start")) != self._adopted or event["event"] != "session":
            return False
        self._session_start = float(event["t"])
        return True

    def _begin(self) -> None:
        assert self._process is not None
        self._enter(states.PREPARING)
        with contextlib.suppress(OSError):  # a disk that just filled up must not cost the run its supervisor
            self._write_supervisor()
        self._tick()

    def _write_supervisor(self) -> None:
        assert self._process is not None
        self.folder.write(
            "supervisor.json",
            {
                "pid": os.getpid(),
                "process_start": process_start(os.getpid()),
                "host": os.uname().nodename,
                "address": self.endpoint.address,
                "way": self._way,
                "child_pid": self._process.pid,
                "child_process_start": process_start(self._process.pid),
                "session_start": self._session_start,
                "history_bytes": self._history_bytes,
                "patience": asdict(self.options.patience),
            },
        )

    # -- watching -----------------------------------------------------------------------------------------

    def request(self, number: int) -> None:
        """Take note of a signal; safe to call from a signal handler."""
        self._signals.append(number)

    def run(self) -> Ending:
        """Watch to the end, judge it, serve it until it was seen, and leave nothing behind."""
        try:
            while not self._over():
                self._wait()
                self._tick()
            self._finish()
            self._linger()
        finally:
            self.close()
        assert self.ending is not None
        return self.ending

    def close(self) -> None:
        if self.options.target_file:
            remove_target(self.folder)
        self.endpoint.close()
        os.close(self._lock)

    def _wait(self) -> None:
        # signal handlers end a sleep only in the main thread; a fifth of a second is short enough anyway
        if not self._signals:
            time.sleep(POLL_SECONDS)

    def _over(self) -> bool:
        assert self._process is not None
        if self._process.poll():
            return True
        # A notebook lives on when its training is over or has raised.
        record = self._record
        if self._way != "callback" or not record.interactive or not record.trained or record.training:
            return False
        return record.train_returned or bool(record.exceptions)

    def _tick(self) -> None:
        now = time.monotonic()
        self._pass_signals(now)
        self._read()
        self._excuse_absence(now)
        self._look_at_disk(now)
        self._judge_health(now)
        self._follow_state()
        self._watch_ranks()
        if isinstance(self._process, Child):
            reap_orphans(keep=self._process.pid)
        self._last_tick = now
        self._publish()

    def _read(self) -> None:
        for event in self._reader.new():
            if self._record.history and self._process is not None and self._begins_session(event):
                self._record.begin_session()
            self._record.event(event)
            if not self._record.history:
                self._health.event(event)
            if event["event"] in ("provenance", "train_begin"):
                self._write_provenance()
        pids = {facts.get("pid") for facts in self._record.sessions.values()}
        # A pulse of an earlier session may still lie there.
        self._record.pulse(
            {rank: pulse for rank, pulse in self.folder.pulses().items() if pulse["pid"] in pids}
        )

    def _excuse_absence(self, now: float) -> None:
        if self._last_tick is not None and now - self._last_tick > 5.0:
            self._excused = now

    def _judge_health(self, now: float) -> None:
        record = self._record
        main = record.main
        if main is None or self.ending is not None:
            return
        if self._is_idle():
            self._health.silence()
            return
        moment = Moment(
            now=now,
            phase=PHASES[int(main["phase"])],
            detail=record.phase_detail,
            last_activity=max(main["activity_monotonic"], self._excused),
            step=record.step,
            first_step=bool(main["first_step"]),
            seconds_per_step=record.pace.seconds_per_step,
        )
        if self._last_tick is not None and self._health.is_active("stalled"):
            self._phase_stalled[moment.phase] = (
                self._phase_stalled.get(moment.phase, 0.0) + now - self._last_tick
            )
        self._health.tick(moment)

    def _is_idle(self) -> bool:
        """Whether silence is nobody's fault: a notebook waits for its user, a script goes on to things of its own."""
        record = self._record
        if self._way == "train" or record.training:
            return False
        return record.train_returned or (record.interactive and not record.trained)

    def _follow_state(self) -> None:
        record = self._record
        if record.job_state == states.PACKAGING:
            self._enter(states.PACKAGING)
        elif not record.trained:
            return
        elif record.training:
            self._enter(states.VALIDATING if record.phase == "evaluate" else states.TRAINING)
        elif record.train_returned and record.phase == "package":
            self._enter(states.PACKAGING)

    def _enter(self, state: str) -> None:
        if state != self._state and states.may_follow(self._state, state):
            self._state, self._state_since = state, time.time()

    def _watch_ranks(self) -> None:
        """Notice a rank that died without an exception or an orderly exit while the others live."""
        record = self._record
        for session, facts in record.sessions.items():
            rank = int(facts.get("rank", 0))
            if int(facts.get("world_size") or 1) < 2:
                continue  # a helper, or the only process there is
            if session in record.exited_sessions or rank in self._dead_ranks:
                continue
            if any(error.get("session") == session for error in record.exceptions):
                continue
            if (
                facts.get("process_start") is not None
                and process_start(facts["pid"]) != facts["process_start"]
            ):
                self._dead_ranks.append(rank)

    # -- signals ------------------------------------------------------------------------------------------

    def _pass_signals(self, now: float) -> None:
        assert self._process is not None
        while self._signals:
            number = self._signals.pop(0)
            if self._way == "callback":
                raise SystemExit(128 + number)  # the notebook is not ours to end: only the watching ends
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._process.send(number)
            elif number == signal.SIGINT:
                self._interrupt(now)
            elif number == signal.SIGTERM and not self._terminate:
                self._terminate = (
                    True  # passed on once: a second one kills Python in the middle of its clean-up
                )
                self._kill_at = now + self.options.grace
                self._process.send(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._process.send(signal.SIGKILL)

    def _interrupt(self, now: float) -> None:
        """Ctrl-C: first the training's own SIGINT (to its group, as a terminal does), then TERM, then KILL."""
        assert self._process is not None
        if not self._cancel:
            self._cancel = True
            self._kill_at = now + self.options.grace
            self._process.send(signal.SIGINT, group=True)
        elif not self._terminate:
            self._terminate = True
            self._process.send(signal.SIGTERM)
        else:
            self._process.send(signal.SIGKILL)

    # -- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        assert self._process is not None
        self._read()
        self._watch_ranks()  # before those that are left are ended by us
        code = self._process.returncode
        if isinstance(self._process, Child):
            end_descendants(5.0 if code == 0 else 2.0)
            self._read()
        self._look_at_disk(time.monotonic(), wait=10.0)
        ending = judge(self._evidence(code))
        self.exit_code = (
            _shell_code(code) if code is not None else (0 if ending.state == states.COMPLETED else 1)
        )
        self._end(ending)
        self.endpoint.scrapes.run_ended()

    def _end(self, ending: Ending) -> None:
        self.ending = ending
        self._run_end = time.time()
        self._health.silence()
        self._enter(ending.state)
        self._publish()
        self._write_verdict()

    def _evidence(self, code: int | None) -> Evidence:
        record, main = self._record, self._record.main
        since = self._health.nonfinite_since
        resumable = checkpoints.newest_resumable(
            [item for item in self._checkpoints or () if self._is_sound(item)]
        )
        return Evidence(
            returncode=code,
            way=self._way,
            attached=record.attached,
            trained=record.trained,
            finished=record.train_returned
            or (record.trained and not record.training and not record.exceptions),
            exited=record.main_session in record.exited_sessions
            or (record.interactive and record.train_returned),
            requested_stop=record.requested_stop,
            step=record.step,
            max_steps=record.max_steps,
            session_steps=int(main["steps_total"]) if main else 0,
            phase=record.phase or "prepare",
            phase_detail=record.phase_detail,
            exceptions=sorted(record.exceptions, key=lambda event: event.get("t", 0.0)),
            package=record.package,
            nonfinite_since=since,
            oom_kills=self._oom.count(),
            cancel_requested=self._cancel,
            terminate_requested=self._terminate and not self._cancel,
            stalled=self._health.is_active("stalled"),
            dead_ranks=self._dead_ranks,
            disk_full=self._free_bytes is not None and self._free_bytes < FULL_DISK_BYTES,
            last_resumable=resumable.name if resumable else None,
            session_seconds=time.monotonic() - self._session_monotonic,
        )

    def _is_sound(self, checkpoint: checkpoints.Checkpoint) -> bool:
        """Whether a resume of this run may start there: not left by another run, and before the first NaN."""
        since = self._health.nonfinite_since
        if since is not None and checkpoint.step >= since:
            return False
        created = float(self._run_facts.get("created", 0.0))
        return checkpoint.saved_at >= created - 60.0 or checkpoint.step <= self._record.resumed_at

    def _linger(self) -> None:
        assert self.ending is not None
        if not self.options.linger:
            return
        linger = Linger(self.ending.state, time.monotonic())
        while not linger.over(time.monotonic(), self.endpoint.scrapes):
            if signal.SIGTERM in self._signals or signal.SIGINT in self._signals:
                return
            time.sleep(POLL_SECONDS)
            self._publish()

    # -- disk ---------------------------------------------------------------------------------------------

    def _look_at_disk(self, now: float, *, wait: float = 0.0) -> None:
        """Have output_dir looked at, off this thread: a hanging network mount must not stop the watching."""
        saves = self._record.rank_max("saves")
        if self._disk is not None:
            self._disk.join(wait)
        if self._record.output_dir is None or (self._disk is not None and self._disk.is_alive()):
            return
        if wait or now >= self._disk_due or saves != self._saves_seen:
            self._saves_seen, self._disk_due = saves, now + DISK_SECONDS
            self._disk = threading.Thread(target=self._refresh_disk, name="tunewatch-disk", daemon=True)
            self._disk.start()
            self._disk.join(wait)

    def _refresh_disk(self) -> None:
        folder = self._record.output_dir
        if folder is None:
            return
        try:
            stat = os.statvfs(folder)
            self._free_bytes = float(stat.f_bavail * stat.f_frsize)
            self._checkpoints = checkpoints.scan(folder, known=self._checkpoints or ())
        except OSError:
            self._free_bytes = None

    # -- what others see ----------------------------------------------------------------------------------

    def _current(self) -> list[Snapshot]:
        return [self.snapshot] if self.snapshot is not None else []

    def _publish(self) -> None:
        before = self.snapshot
        self.snapshot = self._build()
        changed = before is None or (before.state, before.verdicts) != (
            self.snapshot.state,
            self.snapshot.verdicts,
        )
        if changed or self.snapshot.now - self._verdict_written >= 2.0:
            self._write_verdict()
        if self._on_change is not None:
            self._on_change(self.snapshot)

    _verdict_written = 0.0

    def _write_verdict(self) -> None:
        snapshot = self.snapshot
        assert snapshot is not None
        self._verdict_written = snapshot.now
        try:
            self.folder.write("verdict.json", verdict_json(snapshot))
        except OSError:
            pass  # the disk of TUNEWATCH_HOME is full: the metrics still tell

    def _write_provenance(self) -> None:
        record, facts = self._record, self._run_facts
        facts.update(
            info={**facts.get("info", {}), **record.info},
            environment={**facts.get("environment", {}), **record.environment},
            effective=record.effective or facts.get("effective", {}),
            output_dir=record.output_dir or facts.get("output_dir"),
        )
        try:
            self.folder.write("run.json", facts)
            if record.output_dir and Path(record.output_dir).is_dir():
                write_json(Path(record.output_dir) / "run.json", facts, mode=0o644)
        except OSError:
            pass  # output_dir may be full or gone; the run folder has it

    def _build(self) -> Snapshot:
        record, main, now, wall = self._record, self._record.main, time.monotonic(), time.time()
        alive = self.ending is None
        to_wall = wall - now
        complete = [item for item in self._checkpoints or () if item.complete]
        newest = complete[-1] if complete else None
        started = float(self._run_facts.get("created", self._session_start))
        until = self._run_end or wall
        tokens = dict(record.session_tokens)
        if main is not None:
            tokens["all"] = record.rank_sum("tokens_all_total")
        deadline = self._health.deadline
        return Snapshot(
            run_id=self.folder.run_id,
            state=self._state,
            info=self._info(),
            environment=record.environment,
            state_since=self._state_since,
            run_start=started,
            session_start=self._session_start,
            now=wall,
            attached=record.attached,
            ending=self.ending,
            run_end=self._run_end,
            step=record.step,
            max_steps=record.max_steps,
            epoch=_known(main, "epoch"),
            tokens_seen=record.tokens_seen,
            samples_seen=self._samples_seen(),
            steps_total=main["steps_total"] if main else 0.0,
            tokens_total=tokens,
            samples_total=record.rank_sum("samples_total") if main else None,
            steps_skipped_total=main["steps_skipped_total"] if main else 0.0,
            batch_size_restarts_total=main["batch_size_restarts_total"] if main else 0.0,
            resumes_total=record.resumes,
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
            elapsed=max(0.0, until - started),  # the clock may have been set back
            session_elapsed=max(0.0, until - self._session_start),
            eta=record.pace.eta(record.step, record.max_steps) if alive else None,
            step_seconds_sum=main["step_seconds_sum"] if main else 0.0,
            step_buckets=record.step_buckets,
            phase=record.phase,
            phase_detail=record.phase_detail,
            phase_ratio=record.phase_ratio,
            phase_seconds=self._phase_seconds(now, alive),
            wasted_seconds=record.wasted_seconds,
            last_activity=main["activity_time"] if main else None,
            deadline=deadline + to_wall if deadline is not None else None,
            walltime_deadline=self._session_start + self.options.walltime if self.options.walltime else None,
            nonfinite_steps=self._nonfinite_steps(),
            nonfinite_streak=record.rank_max("nonfinite_streak") if main else None,
            first_nonfinite_step=_known(main, "first_nonfinite_step"),
            nan_filter=record.nan_filter,
            health=self._health.level,
            verdicts=tuple(self._health.verdicts),
            checkpoints_saved_total=record.rank_max("saves"),
            checkpoints_present=len(complete) if self._checkpoints is not None else None,
            checkpoint_last_step=newest.step if newest else None,
            checkpoint_last_time=newest.saved_at if newest else None,
            checkpoint_size=newest.size_bytes if newest else None,
            checkpoint_duration=record.save_seconds,
            checkpoint_interval_steps=_interval(record.effective.get("save_steps")),
            checkpoint_best_step=record.best_step
            if record.best_step in {item.step for item in complete}
            else None,
            output_free_bytes=self._free_bytes,
            resume_lost={
                part: value is False for part, value in record.restored.items() if value is not None
            },
            hub_push_failures_total=record.hub_failures,
            hub_push_last_success=record.hub_last_success,
            samples_generated=record.samples_generated,
            ranks={rank: self._rank(rank, pulse) for rank, pulse in record.pulses.items()},
        )

    def _info(self) -> dict[str, str]:
        known = {**self._run_facts.get("info", {}), **self._record.info}
        known["name"] = self._run_facts.get("name") or self.folder.run_id
        known.setdefault("resumed_from", self._run_facts.get("resumed_from") or "")
        return {label: label_value(known[label]) for label in INFO_LABELS if known.get(label) is not None}

    def _samples_seen(self) -> float | None:
        batch = self._record.effective.get("batch_size")
        return float(self._record.step * batch) if self._record.step is not None and batch else None

    def _nonfinite_steps(self) -> dict[str, float]:
        record = self._record
        if record.main is None:
            return {}
        return {
            "loss": record.rank_max("nonfinite_loss_steps"),
            "grad_norm": record.rank_max("nonfinite_grad_norm_steps"),
            "eval_loss": float(record.nonfinite_evals),
        }

    def _phase_seconds(self, now: float, alive: bool) -> dict[str, float]:
        """Time by phase; the phase under way counts up to now, less what was declared a stall."""
        main = self._record.main
        if main is None:
            return {}
        seconds = {phase: main[f"{phase}_seconds"] for phase in PHASES}
        if alive:
            seconds[PHASES[int(main["phase"])]] += max(0.0, now - main["phase_monotonic"])
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
        if self.ending is None and (rss := resident_bytes(int(pulse["pid"]))) is not None:
            memory["rss"] = rss
        step_time = pulse["step_time"]
        return RankSnapshot(
            last_step_time=None if math.isnan(step_time) else step_time,
            memory_bytes=memory,
            gpus=self._record.gpus.get(rank, ()),
        )


def verdict_json(snapshot: Snapshot) -> dict[str, Any]:
    """The content of verdict.json: strict JSON, null for what is unknown or not finite."""
    return {
        "run_id": snapshot.run_id,
        "name": snapshot.info.get("name"),
        "state": snapshot.state,
        "health": snapshot.health,
        "signals": [verdict.to_json() for verdict in snapshot.verdicts],
        "step": snapshot.step,
        "max_steps": snapshot.max_steps,
        "progress_ratio": snapshot.progress_ratio,
        "loss": _json_number(snapshot.loss),
        "loss_nonfinite": snapshot.loss is not None and not math.isfinite(snapshot.loss),
        "eta_seconds": _json_number(snapshot.eta),
        "phase": snapshot.phase,
        "phase_detail": snapshot.phase_detail,
        "ending": snapshot.ending.to_json() if snapshot.ending else None,
        "updated": snapshot.now,
    }


def _json_number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known(pulse: Mapping[str, float] | None, name: str) -> float | None:
    return None if pulse is None or math.isnan(pulse[name]) else pulse[name]


def _interval(value: Any) -> int | None:
    """Steps between saves; a share of the training (below 1) is resolved by the trainer, not by us."""
    return int(value) if isinstance(value, (int, float)) and value >= 1 else None


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _take(folder: RunFolder) -> int:
    """Take the run's lock; the file descriptor holds it for as long as we live."""
    descriptor = os.open(folder.path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        known = folder.read("supervisor.json") or {}
        raise AlreadyWatched(
            f"run {folder.run_id} is watched already, by process {known.get('pid')} at {known.get('address')}"
        ) from None
    return descriptor

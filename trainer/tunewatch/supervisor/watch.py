"""The supervisor: one process per run that watches it from its start to its end."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.registry import CollectorRegistry

from tunewatch import states
from tunewatch.durations import earliest
from tunewatch.health import Patience, Thresholds
from tunewatch.metrics import RunCollector
from tunewatch.probe.values import as_number
from tunewatch.probe.writer import process_start
from tunewatch.runfolder import (
    EventReader,
    RunFolder,
    RunFolderError,
    remove_target,
    write_json,
    write_target,
)
from tunewatch.supervisor import checkpoints
from tunewatch.supervisor.disk import OutputFolder
from tunewatch.supervisor.ending import Ending, Evidence, judge
from tunewatch.supervisor.endpoint import DEFAULT_HOST, Endpoint
from tunewatch.supervisor.evidence import FAILED, EvidenceFiles, evidence, watched_with
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
    suspend,
    uptime,
)
from tunewatch.supervisor.snapshot import Snapshot
from tunewatch.supervisor.twins import LOSSES, find_twin
from tunewatch.supervisor.view import RunView, verdict_json

POLL_SECONDS = 0.2
FULL_DISK_BYTES = 1_000_000
CLOCK_JUMP_SECONDS = 2.0
"""What the clock may move against the machine's uptime between two looks: NTP slews it by less."""


class AlreadyWatched(Exception):
    """Another supervisor holds the run."""


@dataclass
class Options:
    """What a user may set about the watching of a run."""

    host: str = DEFAULT_HOST
    port: int | None = None
    patience: Patience = field(default_factory=Patience)
    thresholds: Thresholds = field(default_factory=Thresholds)
    linger: bool = True
    grace: float = 60.0
    """Seconds between a request to end and SIGKILL."""
    target_file: bool = True
    walltime: float | None = None
    """Seconds after the session's start at which its time is over; None where nothing limits it."""
    deadline: float | None = None
    """Unix time by which it should have ended; the earliest of the three counts."""
    allocation_end: float | None = None
    """Unix time at which the engine that it runs in takes its machine away."""


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
        self._view = RunView(
            folder.run_id,
            folder.read("run.json") or {},
            options.patience,
            now=time.monotonic(),
            wall=time.time(),
            walltime=options.walltime,
            deadline=earliest(options.deadline, options.allocation_end),
            resident=resident_bytes,
            limits=options.thresholds,
        )
        self._record, self._health, self._way = self._view.record, self._view.health, self._view.way
        self._reader = EventReader(folder.events)
        self._oom = OomKills()
        self._process: Process | None = None
        self._history_bytes = 0  # of events.jsonl: what lies before is of earlier sessions
        self._adopted: tuple[int, int | None] | None = None
        self._session: str | None = None  # of a process that may have several, one for each training
        self._last_tick: float | None = None
        self._excused = 0.0  # our own absence (we were stopped): the run's silence in it proves nothing
        self._cancel = self._terminate = self._hung_up = False
        self._signals: list[int] = []
        self._kill_at: float | None = None
        self._dead_ranks: list[int] = []
        self._output = OutputFolder()
        self._clock_offset: float | None = None
        self._twin_sought = False
        self._files = EvidenceFiles(folder.path)
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
        reached = [pulse["step"] for pulse in self.folder.pulses().values() if not math.isnan(pulse["step"])]
        for path in self.folder.path.glob("pulse.*"):
            path.unlink()  # of an earlier session
        self._read()
        self._history_bytes = self._reader.position
        self._record.begin_session(int(max(reached)) if reached else None)
        try:
            self._process = Child(command, environment, log)
        except OSError as error:
            self._end(judge(Evidence(returncode=shell_code_of(error), way=self._way)))
            self.close()
            raise
        self._begin()

    def adopt(self, pid: int, start: int | None = None, session: str | None = None) -> None:
        """Watch a process that somebody else started; its session may be under way, or even over."""
        known = self.folder.read("supervisor.json") or {}
        if self._way == "callback":
            self._adopted = (pid, process_start(pid))
            same = (known.get("child_pid"), known.get("child_process_start")) == self._adopted
            self._session = session or (known.get("session") if same else None)
        else:
            self._view.session_start = float(known.get("session_start", self._view.session_start))
            self._view.session_monotonic = float(known.get("session_monotonic", self._view.session_monotonic))
            self._history_bytes = int(known.get("history_bytes", 0))
        self._process = Adopted(pid, start)
        self._begin()

    def _begins_session(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is the first of this session; by place, for clocks are set while trainings run."""
        if self._adopted is None:
            return self._reader.position > self._history_bytes
        if event["event"] != "session":
            return False
        if self._session is not None and event.get("session") != self._session:
            return False
        if self._session is None and (event.get("pid"), event.get("process_start")) != self._adopted:
            return False
        self._view.session_start, self._view.session_monotonic = float(event["t"]), float(event["m"])
        return True

    def _begin(self) -> None:
        assert self._process is not None
        self._view.enter(states.PREPARING, time.time())
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
                "session": self._session,
                "session_start": self._view.session_start,
                "session_monotonic": self._view.session_monotonic,
                "history_bytes": self._history_bytes,
                "deadline": self._view.deadline,
                **watched_with(self.options.patience, self.options.thresholds),
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
        record = self._record
        if self._way != "callback":
            return False
        if self._said_goodbye():
            return True
        # A notebook lives on when its training is over or has raised.
        if not record.interactive or not record.trained or record.training:
            return False
        return record.train_returned or bool(record.exceptions)

    def _said_goodbye(self) -> bool:
        """Whether the session is over although its process may live: it goes on with another training."""
        return self._way == "callback" and self._record.main_session in self._record.exited_sessions

    def _tick(self) -> None:
        now = time.monotonic()
        self._pass_signals(now)
        self._watch_clock()
        self._read()
        self._excuse_absence(now)
        self._look_at_output(now)
        self._look_for_twin()
        self._view.tick(now, time.time(), since=self._last_tick, excused=self._excused)
        self._watch_ranks()
        if isinstance(self._process, Child):
            reap_orphans(keep=self._process.pid)
        self._last_tick = now
        self._publish()

    def _read(self) -> None:
        for event in () if self._said_goodbye() else self._reader.new():
            if self._record.history and self._process is not None and self._begins_session(event):
                self._record.begin_session()
            self._view.event(event)
            if event["event"] in ("provenance", "train_begin"):
                self._write_provenance()
            if self._said_goodbye():
                break  # what follows is of the process's next session, and of its supervisor
        self._view.malformed = self._reader.malformed
        pids = {facts.get("pid") for facts in self._record.sessions.values()}
        # A pulse of an earlier session may still lie there.
        self._record.pulse(
            {rank: pulse for rank, pulse in self.folder.pulses().items() if pulse["pid"] in pids}
        )

    def _look_at_output(self, now: float, *, wait: float = 0.0) -> None:
        output, view = self._output, self._view
        output.look(
            self._record.output_dir,
            now,
            saves=self._record.rank_max("saves"),
            world_size=len(self._record.pulses) or None,
            wait=wait,
        )
        view.disk(output.looked, output.checkpoints, output.free_bytes, output.free_inodes, now)

    def _look_for_twin(self) -> None:
        if not self._twin_sought and self._record.losses >= LOSSES:
            self._twin_sought = True
            if (twin := find_twin(self.folder)) is not None:
                self._view.found_twin(twin)

    def _watch_clock(self) -> None:
        offset = time.time() - uptime()
        if self._clock_offset is not None and abs(offset - self._clock_offset) > CLOCK_JUMP_SECONDS:
            self._view.clock_jumps += 1
        self._clock_offset = offset

    def _excuse_absence(self, now: float) -> None:
        if self._last_tick is not None and now - self._last_tick > 5.0:
            self._excused = now

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
            elif number in (signal.SIGWINCH, signal.SIGQUIT):
                self._process.send(number, group=True)
            elif number == signal.SIGTSTP:
                suspend()
            elif number == signal.SIGHUP and not self._hung_up:  # the shell and the kernel may both send it
                self._hung_up = True
                self._process.send(signal.SIGHUP, group=True)
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
            end_descendants(self._grace_left(5.0 if code == 0 else 2.0))
            self._read()
        self._look_for_twin()  # a short run may have logged its tenth loss only now
        self._look_at_output(time.monotonic(), wait=10.0)
        ending = judge(self._evidence(code))
        self.exit_code = (
            _shell_code(code) if code is not None else (0 if ending.state == states.COMPLETED else 1)
        )
        self._end(ending)
        self.endpoint.scrapes.run_ended()

    def _grace_left(self, at_least: float) -> float:
        """Seconds that what is left below a command gets; the training itself may be below a shell that ended first."""
        if not self._terminate or self._cancel or self._kill_at is None:
            return at_least
        return max(at_least, self._kill_at - time.monotonic())

    def _end(self, ending: Ending) -> None:
        self.ending = ending
        self._view.end(ending, time.monotonic(), time.time())
        self._publish()
        self._write_verdict()

    def _evidence(self, code: int | None) -> Evidence:
        record, main = self._record, self._record.main
        since = self._health.nonfinite_since
        resumable = self._view.newest_sound()
        newest = checkpoints.would_resume(self._view.checkpoints or ())
        complete = checkpoints.newest_complete(self._view.checkpoints or ())
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
            terminate_requested=(self._terminate or record.terminated) and not self._cancel,
            hung_up=self._hung_up
            or signal.SIGHUP in self._signals,  # its output may have failed before we looked
            stalled=self._health.is_active("stalled"),
            dead_ranks=self._dead_ranks,
            disk_full=self._view.free_bytes is not None and self._view.free_bytes < FULL_DISK_BYTES,
            last_resumable=resumable.name if resumable else None,
            resume_pick=newest.name if newest and not newest.complete else None,
            newest_complete=complete.name if complete else None,
            session_seconds=time.monotonic() - self._view.session_monotonic,
        )

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

    # -- what others see ----------------------------------------------------------------------------------

    def _current(self) -> list[Snapshot]:
        return [self.snapshot] if self.snapshot is not None else []

    def _publish(self) -> None:
        before = self.snapshot
        self.snapshot = self._view.snapshot(time.monotonic(), time.time())
        changed = before is None or (before.state, before.verdicts) != (
            self.snapshot.state,
            self.snapshot.verdicts,
        )
        if changed:
            self.snapshot = self._with_evidence(self.snapshot)
        if changed or self.snapshot.now - self._verdict_written >= 2.0:
            self._view.reviewed = self._read_review()
            self._write_verdict()
        if self._on_change is not None:
            self._on_change(self.snapshot)

    _verdict_written = 0.0

    def _with_evidence(self, snapshot: Snapshot) -> Snapshot:
        """Keep what led to each verdict that counts, when it is first raised, and to a failure."""
        view, files = self._view, self._files
        for verdict in snapshot.verdicts:
            if verdict.level != "info":
                content = partial(evidence, view, snapshot, verdict)
                files.tell(verdict.signal, verdict.step, snapshot.session_start, content)
        if snapshot.ending is not None and snapshot.ending.state == states.FAILED:
            files.tell(FAILED, snapshot.step, snapshot.session_start, partial(evidence, view, snapshot, None))
        view.evidence, view.evidence_errors = files.names, files.errors
        return replace(snapshot, evidence=files.names)

    def _write_verdict(self) -> None:
        snapshot = self.snapshot
        assert snapshot is not None
        self._verdict_written = snapshot.now
        try:
            self.folder.write("verdict.json", verdict_json(snapshot))
        except OSError:
            pass  # the disk of TUNEWATCH_HOME is full: the metrics still tell

    def _read_review(self) -> int | None:
        """How many samples a person has read (`tunewatch samples review` writes it); None while there are none."""
        try:
            reviewed = as_number((self.folder.read("review.json") or {}).get("reviewed"))
        except RunFolderError:
            return self._view.reviewed
        if reviewed is None:
            return 0 if self._record.samples_generated else None
        return int(reviewed)

    def _write_provenance(self) -> None:
        record, facts = self._record, self._view.facts
        facts.update(
            info={**facts.get("info", {}), **record.info},
            environment={**facts.get("environment", {}), **record.environment},
            effective=record.effective or facts.get("effective", {}),
            output_dir=record.output_dir or facts.get("output_dir"),
        )
        try:
            known = self.folder.read("run.json") or {}  # a next session may have been counted since
            facts["sessions"] = max(known.get("sessions", 0), facts.get("sessions", 0))
            self.folder.write("run.json", facts)
            if record.output_dir and Path(record.output_dir).is_dir():
                write_json(Path(record.output_dir) / "run.json", facts, mode=0o644)
        except (OSError, RunFolderError):
            pass  # output_dir may be full or gone; the run folder has it


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def shell_code_of(error: OSError) -> int:
    """The exit code that a shell gives for a command that can not be run: 127 not found, 126 not executable."""
    return 127 if isinstance(error, FileNotFoundError) else 126


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

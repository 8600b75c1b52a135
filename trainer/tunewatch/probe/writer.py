"""The writing side of a run folder: events, and the pulse of this process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .background import Background
from .pulse import INDEX, PHASES, Pulse, read_pulse

EVENTS = "events.jsonl"
ERRORS = "probe-errors.log"
ACTIVITIES = ("import", "download", "load", "tokenize", "restore", "skip_data", "first_batch")
"""What a process that prepares, or waits for its first batch, may be busy with."""
MAX_PENDING = 1000
"""Lines kept in memory while the disk takes none; the oldest logs are dropped first, and all of it is counted."""


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), or None.

    Together with the pid it names a process for good: pids are used again.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def process_age(pid: int) -> float:
    """Seconds since a process was started; 0 where that can not be told."""
    start = process_start(pid)
    if start is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK"))


Note = tuple[float, Callable[..., None], tuple[Any, ...]]
"""What is deferred: monotonic seconds, what to do then, and its arguments."""
MAX_LATER = 1000
"""Deferred pieces of work; when more have gathered (the background thread does not run), they are done at once."""


class RunWriter:
    """Writes what happens in this process into a run folder; inert where there is no folder.

    What is deferred (`later`) is done on a background thread within a tenth of a second, in the order it came, and
    always before the next event that is written at once. A SIGKILL loses no more than that.

    No method raises into its caller, whatever the disk does: a line that could not be written is kept and
    tried again with the next one, and counted in the pulse (`append_errors`).
    """

    def __init__(self, folder: str | None, *, way: str = "callback") -> None:
        self.folder = folder
        self.run_id = os.path.basename(folder.rstrip("/")) if folder else ""
        self.way = way
        self.rank = _environment_int("RANK", 0)
        self.world_size = _environment_int("WORLD_SIZE", 1)
        self.session = uuid.uuid4().hex[:12]
        self.pulse: Pulse | None = None
        self.errors = 0
        self.shared: dict[str, Any] = {}
        """What those who report through this writer have in common: the sums of the session."""
        self._pid = os.getpid()
        self._forks = _forks
        self._closed = False
        self._lock = threading.RLock()
        self._later: deque[Note] = deque()
        self.note = self._later.append
        """Defer a Note as `later` does, and look at nothing: whoever uses it calls `keep_up` now and then."""
        self.attended = False
        """Whether a training is under way: the background thread stays awake for what is noted."""
        self._then: tuple[float, float] | None = None  # when that was deferred which is being done now
        self._background = Background(self._work)
        self._fd: int | None = None
        self._hello: bytes | None = None
        self._torn = False
        self._pending: list[bytes] = []
        self._last_phase: tuple[str, str, str | None] | None = None
        self._last_phase_time = 0.0
        self._shown_errors = 0

    # -- the process's one writer -------------------------------------------------------------------------

    @classmethod
    def from_environment(cls) -> RunWriter:
        """Return this process's writer for `TUNEWATCH_RUN_FOLDER`, or an inert one when it is not set."""
        shared = process_globals()
        writer = shared.get("writer")
        if writer is None or writer._pid != os.getpid():
            writer = cls(
                os.environ.get("TUNEWATCH_RUN_FOLDER"), way=os.environ.get("TUNEWATCH_WAY", "callback")
            )
            shared["writer"] = writer
        return writer

    @property
    def inert(self) -> bool:
        # A forked child (a dataloader worker) inherits the object but is not the training process.
        return self.folder is None or self._closed or self._forks != _forks

    # -- events -------------------------------------------------------------------------------------------

    def event(self, event: str, **fields: Any) -> None:
        """Append one event. `fields` hold JSON values; a number that is not finite becomes null."""
        if self.inert:
            return
        try:
            with self._lock:
                if self._then is None:
                    self._do_later()
                t, m = self.now()
                self._keep(event, fields, t, m)
                if self._then is None:
                    self._flush()
        except Exception:
            self.error()

    def later(self, monotonic: float, work: Callable[..., None], *arguments: Any) -> None:
        """Do `work(*arguments)` soon, on the background thread; for it, and the events it writes, it is `now` then."""
        self.note((monotonic, work, arguments))
        self.keep_up()

    def keep_up(self) -> bool:
        """See to it that what was deferred will be done; False where nothing is to be told (any more)."""
        if self.folder is None or self._closed or self._forks != _forks:
            self._later.clear()
            return False
        if self._background.asleep or len(self._later) > MAX_LATER:
            self._hurry()
        return True

    def _hurry(self) -> None:
        try:
            if self._background.asleep:
                self._background.wake()
        except RuntimeError:  # no more threads: this process, or the interpreter, is at its end
            self.deliver()
        if len(self._later) > MAX_LATER:
            self.deliver()

    def _work(self) -> bool:
        had = bool(self._later)
        if had:
            self.deliver()
        return (had or self.attended) and not self.inert

    def deliver(self) -> None:
        """Do now what was deferred."""
        with self.settled():
            pass

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Do what was deferred, and hold the background thread back meanwhile. Raises nothing of its own."""
        if self.inert:
            yield
            return
        with self._lock:
            if self._then is None:
                try:
                    self._do_later()
                    if self._pending:
                        self._flush()
                    if self.pulse is not None and self.pulse.stale:
                        self.pulse.publish()
                except Exception:
                    self.error()
            yield

    def now(self) -> tuple[float, float]:
        """Unix and monotonic seconds of what is told: of now, or of when it was deferred. For use in `settled`."""
        return self._then or (time.time(), time.monotonic())

    def phase(
        self, phase: str, detail: str = "", ratio: float | None = None, activity: str | None = None
    ) -> None:
        """Say what the process is busy with: a name of PHASES, a few words, and how much of it is done (0-1).

        `activity` names what is done while preparing: a name of ACTIVITIES, or None for anything else. Repeats of
        the same phase, detail and activity are written at most twice a second, and always keep the pulse alive.
        """
        if self.inert:
            return
        try:
            with self.settled():
                self.enter(phase)
                _, now = self.now()
                this = (phase, detail, activity)
                changed = this != self._last_phase
                if not changed and now - self._last_phase_time < 0.5 and ratio != 1.0:
                    return
                self._last_phase, self._last_phase_time = this, now
                self.event("phase", phase=phase, detail=detail, ratio=ratio, activity=activity)
        except Exception:
            self.error()

    # -- pulse --------------------------------------------------------------------------------------------

    def open_pulse(self, *, take: bool = False) -> Pulse | None:
        """Return the pulse of this rank, made on first use; None where the disk does not allow one.

        While another live process reports as this rank (the training that started this program, say an evaluation),
        there is none either, unless `take` says that this process is the one that trains.
        """
        if self.pulse is None and not self.inert:
            try:
                if not take and self._rank_is_taken():
                    return None
                os.makedirs(str(self.folder), mode=0o700, exist_ok=True)
                self.pulse = Pulse(os.path.join(str(self.folder), f"pulse.{self.rank}"), rank=self.rank)
                if self.way != "callback":  # "prepare" began with the process: interpreter, imports
                    self.pulse.update(phase_monotonic=time.monotonic() - process_age(self._pid))
            except OSError:
                self.error()
        return self.pulse

    def _rank_is_taken(self) -> bool:
        pulse = read_pulse(os.path.join(str(self.folder), f"pulse.{self.rank}"))
        return (
            pulse is not None and pulse["pid"] != self._pid and process_start(int(pulse["pid"])) is not None
        )

    def enter(self, phase: str) -> None:
        """Begin a phase in the pulse: the time since the last mark is counted for the phase that ends."""
        with self.settled():
            pulse = self.open_pulse()
            if pulse is None or self.inert:
                return
            values, (wall, now) = pulse.values, self.now()
            before = int(values[_PHASE])
            values[_FIRST_SECONDS + before] += max(0.0, now - values[_PHASE_MONOTONIC])
            values[_PHASE], values[_PHASE_MONOTONIC] = float(_PHASE_INDEX[phase]), now
            values[_ACTIVITY_TIME], values[_ACTIVITY_MONOTONIC] = wall, now
            self._show(pulse)

    def alive(self) -> None:
        """Mark a sign of life within the phase."""
        with self.settled():
            if self.pulse is not None and not self.inert:
                values = self.pulse.values
                values[_ACTIVITY_TIME], values[_ACTIVITY_MONOTONIC] = self.now()
                self._show(self.pulse)

    def _show(self, pulse: Pulse) -> None:
        if self._then is None:
            pulse.publish()
        else:
            pulse.stale = True  # one publishing for all that was deferred

    # -- the end ------------------------------------------------------------------------------------------

    def exception(self, error: BaseException, *, during: str) -> None:
        """Report an exception that leaves the program or the trainer, once, without its message."""
        if self.inert or getattr(error, "_tunewatch_reported", False):
            return
        from .failure import describe

        try:
            try:
                error._tunewatch_reported = True  # type: ignore[attr-defined]
            except AttributeError:
                pass  # exceptions with __slots__; a second report does no harm
            self.event("exception", during=during, **describe(error))
        except Exception:
            self.error()

    def error(self) -> None:
        """Note the fault of our own that is being handled: the first few with their place, for the maintainers.

        Without messages and source lines: they may quote data, and the user's exception may be among the causes.
        """
        self.errors += 1
        if self.pulse is not None:
            self.pulse.add("hook_errors")
            self.pulse.stale = True
        if self._shown_errors < 3 and self.folder:
            self._shown_errors += 1
            kind, _, trace = sys.exc_info()
            frames = [
                f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)
            ]
            try:
                with open(os.path.join(self.folder, ERRORS), "a", encoding="utf-8") as file:
                    file.write("\n  ".join([getattr(kind, "__name__", "?"), *frames]) + "\n")
            except OSError:
                pass

    # -- inside -------------------------------------------------------------------------------------------

    def _do_later(self) -> None:
        if not self._later:
            return
        offset = time.time() - time.monotonic()
        while self._later:
            monotonic, work, arguments = self._later.popleft()
            self._then = monotonic + offset, monotonic
            try:
                work(*arguments)
            except Exception:
                self.error()
            finally:
                self._then = None

    def _keep(self, event: str, fields: dict[str, Any], t: float, m: float) -> None:
        """Make the line of an event, to be written by the next `_flush`."""
        if self._hello is None:
            self._hello = self._line("session", self._session_facts(), t, m)
        self._pending.append(self._line(event, fields, t, m))

    def _line(self, event: str, fields: dict[str, Any], t: float, m: float) -> bytes:
        record = {
            "t": round(t, 6),
            "m": round(m, 6),
            "event": event,
            "rank": self.rank,
            "session": self.session,
            **fields,
        }
        try:
            text = json.dumps(record, allow_nan=False, ensure_ascii=True, default=str)
        except ValueError:
            text = json.dumps(_strict(record), allow_nan=False, ensure_ascii=True, default=str)
        return text.encode("ascii") + b"\n"

    def _open(self) -> None:
        path = os.path.join(str(self.folder), EVENTS)
        try:
            os.makedirs(str(self.folder), mode=0o700, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self._lost()
            raise
        self._torn = _ends_torn(
            path
        )  # by a process that was killed, or out of space, in the middle of a line
        atexit.register(self._goodbye)
        if self._hello is not None:
            self._pending.insert(0, self._hello)

    def _session_facts(self) -> dict[str, Any]:
        return {
            "pid": self._pid,
            "process_start": process_start(self._pid),
            "world_size": self.world_size,
            "way": self.way,
            "interactive": hasattr(sys, "ps1") or "ipykernel" in sys.modules,
            "python": platform.python_version(),
        }

    def _flush(self) -> None:
        if self._fd is None:
            self._open()
        assert self._fd is not None
        while self._pending:
            data = b"\n" + self._pending[0] if self._torn else self._pending[0]
            try:
                written = os.write(self._fd, data)
            except OSError:
                self._lost()
                return
            if written < len(data):  # the disk filled up in the middle: end the torn line before the next try
                self._torn = True
                self._lost()
                return
            self._torn = False
            del self._pending[0]
            if self.pulse is not None:
                self.pulse.add("events_written")

    def _lost(self) -> None:
        if self.pulse is not None:
            self.pulse.add("append_errors")
            self.pulse.publish()
        excess = len(self._pending) - MAX_PENDING
        if excess > 0:  # how a run went and ended is worth more than its curve
            logs = [index for index, line in enumerate(self._pending) if _LOG in line[:100]][:excess]
            for index in reversed(logs or range(excess)):
                del self._pending[index]

    def close(self) -> None:
        """End this session of the run: what the process does from here on is not of it."""
        if self.inert:
            return
        self._goodbye()
        self._closed = True
        atexit.unregister(self._goodbye)
        if self._fd is not None:
            os.close(self._fd)
        if self.pulse is not None:
            self.pulse.publish()
            self.pulse.close()
        self._fd = self.pulse = None

    def _goodbye(self) -> None:
        if not self.inert:
            self._background.end()
        self.event("exit")


def _ends_torn(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


_LOG = b'"event": "log"'
_ACTIVITY_TIME, _ACTIVITY_MONOTONIC = INDEX["activity_time"], INDEX["activity_monotonic"]
_PHASE, _PHASE_MONOTONIC = INDEX["phase"], INDEX["phase_monotonic"]
_FIRST_SECONDS = INDEX[f"{PHASES[0]}_seconds"]
_PHASE_INDEX = {name: index for index, name in enumerate(PHASES)}

_forks = 0
"""How often the process has become another one since this module was loaded (asking for the pid is a system call)."""


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def process_globals() -> dict[str, Any]:
    """Return what is shared by every copy of the probe in this process.

    The hook loads the probe under a name of its own, a script may import it as `tunewatch.probe`: two module
    objects, one process, one run folder.
    """
    return sys.__dict__.setdefault("_tunewatch_probe", {})


def _environment_int(name: str, default: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return default


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value

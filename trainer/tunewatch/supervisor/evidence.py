"""What was seen up to an anomaly, kept beside the run: evidence/<step>-<signal>.json, described in docs/run-folder.md.

Numbers, names and settings only: no text of the data, no path, no secret.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewatch import __version__
from tunewatch.health import Patience, Thresholds, Verdict
from tunewatch.health.reading import is_eval_loss
from tunewatch.metrics import label_value
from tunewatch.probe.arguments import clean
from tunewatch.probe.pulse import PHASES
from tunewatch.probe.values import as_number, spell_nonfinite
from tunewatch.provenance import masked
from tunewatch.runfolder import write_json
from tunewatch.supervisor.record import Record
from tunewatch.supervisor.snapshot import Snapshot

if TYPE_CHECKING:
    from tunewatch.supervisor.view import RunView

POINTS = 50
"""Points of each series that are kept."""

MAX_FILES = 20
"""Evidence files of a run; beyond them those of earlier sessions go, the oldest first."""

MAX_SETS = 8
"""Evaluation sets whose losses are kept."""

MAX_RANKS = 64
MAX_CHECKPOINTS = 20

FAILED = "failed"
"""Stands in a file's name where it is the end of the run that is told, and no signal."""

_TURNS = frozenset({"train_begin", "evaluate", "save", "train_end"})
_MEMORY = ("rss", "allocated", "reserved", "peak")


class Points:
    """The last points of a run's series, in constant memory; those of an earlier session of the run stand before."""

    def __init__(self) -> None:
        self._train: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._memory: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self._evals: dict[str, deque[dict[str, Any]]] = {}
        self._last: tuple[str, float, float, float | None] | None = None
        """Session, step, `m` and tokens of the training log before."""

    def event(self, event: Mapping[str, Any], record: Record) -> None:
        """Take in an event, after the record has."""
        if event["event"] == "log":
            self._log(event, record)
        elif event["event"] == "memory" and event.get("context") in _TURNS:
            numbers = {kind: event.get("memory", {}).get(kind) for kind in _MEMORY}
            self._memory.append({**_row(record.step, event, numbers), "context": event["context"]})

    def to_json(self) -> dict[str, Any]:
        return {
            "train": list(self._train),
            "evaluation": [row for rows in self._evals.values() for row in rows],
            "memory": list(self._memory),
        }

    def _log(self, event: Mapping[str, Any], record: Record) -> None:
        values = {**event.get("values", {})}
        values.update({key: float(text) for key, text in event.get("nonfinite", {}).items()})
        if "loss" in values:
            seconds, tokens = self._speed(event, values)
            numbers = {
                "loss": record.loss,  # NaN where the trainer's filter hid one
                "learning_rate": values.get("learning_rate"),
                "grad_norm": values.get("grad_norm"),
                "seconds_per_step": seconds,
                "tokens_per_second": tokens,
            }
            self._train.append(_row(event.get("step"), event, numbers))
        for key in filter(is_eval_loss, values):
            name = label_value(key[len("eval_") : -len("loss")].rstrip("_") or "eval")
            if name in self._evals or len(self._evals) < MAX_SETS:
                rows = self._evals.setdefault(name, deque(maxlen=POINTS))
                rows.append({"dataset": name, **_row(event.get("step"), event, {"loss": values[key]})})

    def _speed(
        self, event: Mapping[str, Any], values: Mapping[str, float]
    ) -> tuple[float | None, float | None]:
        """Seconds a step and tokens a second since the log before, evaluation and saving included."""
        step, at = event.get("step"), event.get("m")
        tokens = event.get("tokens", {}).get("all", values.get("num_tokens"))
        before, session = self._last, str(event.get("session"))
        if step is None or at is None:
            return None, None
        self._last = (session, step, at, tokens)
        if before is None or before[0] != session or step <= before[1] or at <= before[2]:
            return None, None
        seconds = at - before[2]
        more = None if tokens is None or before[3] is None or tokens < before[3] else tokens - before[3]
        return seconds / (step - before[1]), None if more is None else more / seconds


def _row(step: int | None, event: Mapping[str, Any], numbers: Mapping[str, float | None]) -> dict[str, Any]:
    """A point: what is not finite is null, and spelled in `nonfinite`."""
    row: dict[str, Any] = {"step": step, "time": event.get("t")}
    bad = {}
    for name, value in numbers.items():
        row[name] = _finite(value)
        if value is not None and row[name] is None:
            bad[name] = spell_nonfinite(value)
    return {**row, "nonfinite": bad} if bad else row


def evidence(view: RunView, snapshot: Snapshot, verdict: Verdict | None) -> dict[str, Any]:
    """The content of a file, strict JSON: of a verdict, or of the run's end where that is None."""
    record = view.record
    return {
        "run_id": snapshot.run_id,
        "name": snapshot.info.get("name"),
        "signal": verdict.signal if verdict else FAILED,
        "verdict": verdict.to_json() if verdict else None,
        "ending": snapshot.ending.to_json() if snapshot.ending else None,
        "glance": asdict(snapshot.glance),
        "signals": [one.to_json() for one in snapshot.verdicts],
        "seen_at": snapshot.now,
        "session_start": snapshot.session_start,
        "state": snapshot.state,
        "phase": snapshot.phase,
        "phase_detail": snapshot.phase_detail,
        "activity": snapshot.activity,
        "step": snapshot.step,
        "max_steps": snapshot.max_steps,
        "epoch": _finite(snapshot.epoch),
        "first_nonfinite_step": _finite(snapshot.first_nonfinite_step),
        "nan_filter": record.nan_filter,
        "points": view.points.to_json(),
        "ranks": {str(rank): _rank(snapshot, rank, record.pulses[rank]) for rank in _some(record.pulses)},
        "checkpoints": [
            {"name": item.name, "step": item.step, "kind": item.kind, "bytes": item.size_bytes}
            for item in (view.checkpoints or ())[-MAX_CHECKPOINTS:]
        ],
        "config": {
            "info": _public({**view.facts.get("info", {}), **record.info}),
            "effective": _public(record.effective or view.facts.get("effective", {})),
            "requested": _public(record.requested),
            "arguments": _public(record.arguments),
        },
        "watched_with": watched_with(view.patience, view.limits),
        "versions": {"tunewatch": __version__, **_public({**view.facts.get("environment", {}), **record.environment})},
    }  # fmt: skip


def watched_with(patience: Patience, limits: Thresholds) -> dict[str, Any]:
    """What a user may set about the watching, as supervisor.json and evidence hold it."""
    return {"patience": asdict(patience), "off": sorted(limits.off), "thresholds": limits.set_by_user()}


def _rank(snapshot: Snapshot, rank: int, pulse: Mapping[str, float]) -> dict[str, Any]:
    known = snapshot.ranks.get(rank)
    return {
        "step": known.step if known else None,
        "phase": PHASES[int(pulse["phase"])],
        "last_step_time": _finite(pulse["step_time"]),
        "last_activity_time": _finite(pulse["activity_time"]),
        "phase_seconds": {phase: _finite(pulse[f"{phase}_seconds"]) for phase in PHASES},
        "memory_bytes": {kind: _finite(value) for kind, value in (known.memory_bytes if known else {}).items()},
    }  # fmt: skip


def _some(pulses: Mapping[int, Any]) -> list[int]:
    return sorted(pulses)[:MAX_RANKS]


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without secrets and paths; what is neither a number nor a short text is left out."""
    found = {}
    for name, value in masked(settings).items():
        if isinstance(value, str):
            found[str(name)] = clean(value)
        elif isinstance(value, bool) or _finite(value) is not None:
            found[str(name)] = value
    return found


def _finite(value: Any) -> float | None:
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


class EvidenceFiles:
    """The evidence files of a run: one for each subject (a signal, or the failure) and session, a bounded number.

    What can not be written is counted in `errors` and said once; nothing raises.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "evidence"
        self._sessions: dict[str, float | None] = {}
        """Session start by file name, oldest file first."""
        self._told: set[str] = set()
        self.errors = 0
        with contextlib.suppress(OSError):
            self._sessions = self._read()

    @property
    def names(self) -> tuple[str, ...]:
        """The files that there are, the oldest first."""
        return tuple(self._sessions)

    def tell(
        self, subject: str, step: int | None, session: float, content: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Write the evidence of a subject, unless this session has: a supervisor before us may have done so."""
        if subject in self._told:
            return
        self._told.add(subject)
        stem = f"{'start' if step is None else step}-{subject}"
        if any(self._sessions[name] == session and _subject(name) == subject for name in self._sessions):
            return
        try:
            if not self._make_room(session):
                return
            self._folder.mkdir(mode=0o700, exist_ok=True)
            name = self._free_name(stem)
            write_json(self._folder / name, content())
            self._sessions[name] = session
        except (OSError, ValueError) as error:
            self.errors += 1
            self._complain(error)

    def _read(self) -> dict[str, float | None]:
        files = [path for path in self._folder.glob("*.json") if path.is_file()]
        return {path.name: _session_of(path) for path in sorted(files, key=lambda path: path.stat().st_mtime)}

    def _make_room(self, session: float) -> bool:
        """Whether another file may be written; the oldest of an earlier session goes for it."""
        while len(self._sessions) >= MAX_FILES:
            earlier = [name for name, its in self._sessions.items() if its != session]
            if not earlier:
                return False
            (self._folder / earlier[0]).unlink(missing_ok=True)
            del self._sessions[earlier[0]]
        return True

    def _free_name(self, stem: str) -> str:
        name, number = f"{stem}.json", 2
        while name in self._sessions:
            name, number = f"{stem}-{number}.json", number + 1
        return name

    def _complain(self, error: Exception) -> None:
        if self.errors == 1:
            why = getattr(error, "strerror", None) or type(error).__name__
            with contextlib.suppress(OSError):
                print(f"tunewatch: evidence can not be written: {why}", file=sys.stderr, flush=True)


def _subject(name: str) -> str:
    """The signal in a file's name: `40-nonfinite.json`, `40-nonfinite-2.json`."""
    return name.removesuffix(".json").split("-")[1] if "-" in name else ""


def _session_of(path: Path) -> float | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return as_number(content.get("session_start")) if isinstance(content, dict) else None

"""A run told by hand: its events, its pulse and its clock, in front of a real supervisor that adopts this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.exposition import generate_latest

from tunewatch.health import Patience, Thresholds
from tunewatch.metrics import RunCollector
from tunewatch.probe.pulse import INDEX, PHASES, STEP_BUCKETS, Pulse
from tunewatch.probe.writer import process_start
from tunewatch.runfolder import RunFolder
from tunewatch.supervisor import disk, watch
from tunewatch.supervisor.watch import Options, Supervisor

START = 1_700_000_000.0
"""Unix time at which every story begins; the monotonic clock begins at 1000."""

EFFECTIVE = {
    "batch_size": 8,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 20,
    "eval_steps": 20,
    "precision": "bf16",
}
RESTORED = {"optimizer": True, "scheduler": True, "rng": True, "data_order": True}


class Clock:
    """Stands for the time module in the supervisor."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.set_by = 0.0
        """What somebody has set the wall clock forward by, seconds."""

    def time(self) -> float:
        return START + self.passed + self.set_by

    def monotonic(self) -> float:
        return 1000.0 + self.passed

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class Story:
    def __init__(
        self, folder: Path, monkeypatch: Any, *, way: str = "exec", patience: Patience | None = None,
        thresholds: Thresholds | None = None, walltime: float | None = 7200.0, deadline: float | None = None,
    ) -> None:  # fmt: skip
        self.clock = Clock()
        monkeypatch.setattr(watch, "time", self.clock)
        monkeypatch.setattr(watch, "uptime", self.clock.monotonic)
        monkeypatch.setattr(watch, "resident_bytes", lambda pid: 5e8)
        space = SimpleNamespace(f_bavail=1000, f_frsize=4096, f_files=1000, f_favail=500)
        monkeypatch.setattr(disk.os, "statvfs", lambda path: space)
        self.output = folder / "out"
        self.output.mkdir(parents=True)
        self.folder = RunFolder(folder / "home" / "runs" / "story-1")
        self.folder.path.mkdir(parents=True)
        self.folder.write(
            "run.json",
            {
                "run_id": "story-1",
                "name": "a story",
                "way": way,
                "created": START,
                "info": {},
                "environment": {},
            },
        )
        self.patience, self.thresholds = patience or Patience(), thresholds or Thresholds()
        self.walltime, self.deadline = walltime, deadline
        self.pulse: Pulse | None = None
        self.session = "s1"
        self.max_steps = 100
        self.watch()

    def watch(self, *, new_session: bool = False) -> None:
        """A supervisor begins, of which this process is the training: the same one still, or a new session's."""
        if new_session:
            history = {
                "session_start": self.clock.time(),
                "session_monotonic": self.clock.monotonic(),
                "history_bytes": self.folder.events.stat().st_size,
            }
            self.folder.write("supervisor.json", history)
        options = Options(
            port=0, target_file=False, patience=self.patience, thresholds=self.thresholds,
            walltime=self.walltime, deadline=self.deadline,
        )  # fmt: skip
        self.supervisor = Supervisor(self.folder, options)
        self.supervisor.adopt(os.getpid(), process_start(os.getpid()))

    def close(self) -> None:
        self.supervisor.close()

    # -- what the training writes -------------------------------------------------------------------------

    def event(self, event: str, *, rank: int = 0, session: str | None = None, **fields: Any) -> None:
        line = {
            "t": self.clock.time(), "m": self.clock.monotonic(), "event": event, "rank": rank,
            "session": session or self.session, **fields,
        }  # fmt: skip
        with self.folder.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def open_session(self, session: str = "s1", **fields: Any) -> None:
        self.session = session
        self.pulse = None
        pid = os.getpid()
        self.event("session", **{"pid": pid, "process_start": process_start(pid), "world_size": 1, **fields})

    def train_begin(self, step: int = 0, max_steps: int = 100, **fields: Any) -> None:
        self.max_steps = max_steps
        self.event(
            "train_begin",
            **{
                "step": step, "max_steps": max_steps, "effective": EFFECTIVE, "nan_visibility": "each step",
                "nan_filter": True, "restored": RESTORED if step else {}, "output_dir": str(self.output),
                "restart": False, **fields,
            },
        )  # fmt: skip

    def log(self, step: int, nonfinite: dict[str, str] | None = None, **values: float) -> None:
        self.event("log", step=step, epoch=step / 50, values=values, nonfinite=nonfinite or {})

    def beat(self, phase: str = "compute", **values: float) -> None:
        """A sign of life now, with these numbers in the pulse."""
        if self.pulse is None:
            self.pulse = Pulse(str(self.folder.path / "pulse.0"), rank=0)
            self.pulse.update(phase_monotonic=self.clock.monotonic())
        if phase != PHASES[int(self.pulse.get("phase"))]:
            self.pulse.update(phase=float(PHASES.index(phase)), phase_monotonic=self.clock.monotonic())
        self.pulse.update(
            activity_time=self.clock.time(), activity_monotonic=self.clock.monotonic(), **values
        )

    def steps(
        self,
        first: int,
        last: int,
        *,
        seconds: float = 2.0,
        rows: int = 8,
        tokens: int = 160,
        wait: float = 0.25,
    ) -> None:
        """Optimizer steps `first` to `last`, each of this duration, of which the share `wait` is waiting for data."""
        assert self.pulse is not None
        bucket = next(i for i, bound in enumerate(STEP_BUCKETS) if seconds <= bound)
        for step in range(first, last + 1):
            self.clock.passed += seconds
            for name, amount in (
                ("steps_total", 1), (f"step_bucket_{bucket}", 1), ("step_seconds_sum", seconds),
                ("step_seconds_count", 1), ("samples_total", rows), ("tokens_all_total", tokens),
                ("compute_seconds", seconds * (1 - wait)), ("data_seconds", seconds * wait),
            ):  # fmt: skip
                self.pulse.values[INDEX[name]] += amount
            self.beat(
                "data", step=float(step), max_steps=float(self.max_steps), epoch=step / 50, first_step=0.0,
                step_time=self.clock.time(), step_monotonic=self.clock.monotonic(),
                phase_monotonic=self.clock.monotonic(),
            )  # fmt: skip

    def checkpoint(self, step: int, *, ranks: int = 1) -> None:
        """A checkpoint as transformers leaves it, as far as it is looked at, written now."""
        folder = self.output / f"checkpoint-{step}"
        folder.mkdir()
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        weights = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
        (folder / "model.safetensors").write_bytes(weights)
        generators = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
        for name in ("optimizer.pt", "scheduler.pt", *generators):
            (folder / name).write_bytes(b"an old pickle.")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        for file in folder.iterdir():
            os.utime(file, (self.clock.time(), self.clock.time()))
        assert self.pulse is not None
        self.pulse.add("saves")
        self.pulse.publish()
        self.event("save", step=step, checkpoint=folder.name, seconds=1.5)

    # -- what the supervisor makes of it ------------------------------------------------------------------

    def tick(self) -> watch.Snapshot:
        self.supervisor._tick()
        self.supervisor._output.join(10)
        self.supervisor._look_at_output(self.clock.monotonic())
        self.supervisor._publish()
        assert self.supervisor.snapshot is not None
        return self.supervisor.snapshot

    def wait(self, seconds: float) -> watch.Snapshot:
        """Let time pass under the eyes of the supervisor: its own absence would excuse the training's silence."""
        end = self.clock.passed + seconds
        while (left := end - self.clock.passed) > 0:
            self.clock.passed += min(4.0, left)
            self.supervisor._tick()
        return self.tick()

    def finish(self) -> watch.Snapshot:
        """The process is gone."""
        self.supervisor._finish()
        assert self.supervisor.snapshot is not None
        return self.supervisor.snapshot

    def exposition(self) -> str:
        collector = RunCollector(self.supervisor._current, self.clock.time)
        return generate_latest(collector).decode()  # type: ignore[arg-type]

"""What the tests share: a home of their own, the command, and real small trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tunewatch.probe.writer import process_start

TESTS = Path(__file__).parent
TINY = TESTS / "scripts" / "tiny_train.py"


def wait_for(condition: Callable[[], Any], *, seconds: float = 60.0, what: str = "") -> Any:
    """Return the first true value of `condition`; fail after a deadline."""
    give_up = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.05)


def parse_metrics(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples of an exposition by name and labels (run_id left out)."""
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "run_id")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return response.read().decode()


class Samples:
    """Samples of one scrape, by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = parse_metrics(text)

    def get(self, name: str, /, **labels: str) -> float | None:
        return self._samples.get((f"tunewatch_{name}", frozenset(labels.items())))

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for (known, labels) in self._samples if known == f"tunewatch_{name}"]


class Command:
    """A `tunewatch` command that runs in the background."""

    def __init__(self, arguments: list[str], environment: dict[str, str], cwd: Path) -> None:
        self.stderr_path = cwd / f"stderr.{time.monotonic_ns()}"
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tunewatch", *arguments],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                process_group=0,
            )

    @property
    def output(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {seconds} s; it said:\n{self.output[-4000:]}"
            ) from None

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Machine:
    """One test's machine: a home, and what runs in it."""

    def __init__(self, folder: Path, home: Path | None = None, run_id: str | None = None) -> None:
        self.folder = folder
        self.home = home or folder / "home"
        self.run_id = run_id
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TUNEWATCH_", "SLURM_", "XDG_"))},
            "TUNEWATCH_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._commands: list[Command] = []

    def start(self, *arguments: str, **environment: str) -> Command:
        command = Command(list(arguments), {**self.environment, **environment}, self.folder)
        self._commands.append(command)
        return command

    def run(self, *arguments: str, seconds: float = 120.0, **environment: str) -> tuple[int, str]:
        command = self.start(*arguments, **environment)
        return command.wait(seconds), command.output

    def exec_tiny(
        self, *flags: str, options: tuple[str, ...] = (), output: str = "out", **environment: str
    ) -> Command:
        """Start `tunewatch exec` on the tiny training."""
        target = [sys.executable, str(TINY), str(self.folder / output), *flags]
        if self.run_id is not None:
            options = ("--run-id", self.run_id, *options)
        return self.start("exec", *options, "--", *target, **environment)

    def run_folder(self, seconds: float = 30.0) -> Path:
        """The folder of this machine's run, once it is watched."""
        pattern = f"{self.run_id or '*'}/supervisor.json"
        return wait_for(
            lambda: next(iter((self.home / "runs").glob(pattern)), None),
            seconds=seconds,
            what="a watched run",
        ).parent

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_folder() / name).read_text())

    def verdict(self) -> dict[str, Any]:
        return self.json("verdict.json")

    def scrape(self) -> Samples:
        return Samples(scrape(self.json("supervisor.json")["address"]))

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = (self.run_folder() / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["event"])]

    def wait_step(self, step: int, seconds: float = 90.0) -> None:
        """Wait until the training has finished a step, as the supervisor sees it."""
        wait_for(lambda: (self.verdict().get("step") or 0) >= step, seconds=seconds, what=f"step {step}")

    def close(self) -> None:
        """End what the test left running, by pid."""
        for command in self._commands:
            if command.process.poll() is None:
                command.send(signal.SIGKILL)
                command.process.wait()
        for path in self.home.glob(f"runs/{self.run_id or '*'}/supervisor.json"):
            known = json.loads(path.read_text())
            for key in ("child_pid", "pid"):
                _kill_tree(known[key], known[key.replace("pid", "process_start")])


def _kill_tree(pid: int, start: int | None) -> None:
    if start is None or process_start(pid) != start:
        return
    process = psutil.Process(pid)
    for victim in [*process.children(recursive=True), process]:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue

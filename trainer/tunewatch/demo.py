"""`tunewatch demo`: the main job on one machine, with real parts, whole or broken on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml
from rich.console import Console

from tunewatch.finetune.errors import ConfigError, nearest, require_train_extra
from tunewatch.inbox import Alert, Notification, format_notification
from tunewatch.lifeline import die_with_parent
from tunewatch.runfolder import new_run_id, tunewatch_home
from tunewatch.share import share_path
from tunewatch.stack import Stack, fetch, gpu_driver_is_here
from tunewatch_gpu.simulated import simulated_uuid

TIME_SCALE = 15.0
"""Intervals of the shipped files are divided by this: a scrape a second, alerts within seconds."""

ALERT_SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    """One way to break the demo: what happens, and the alert that has to come of it."""

    step: int
    story: str
    alert: str
    reason: str | None = None


FAULTS = {
    "nan": Fault(20, "one weight becomes NaN in step 20", "TunewatchRunNonFinite"),
    "stall": Fault(20, "step 20 never ends", "TunewatchRunStalled"),
    "kill": Fault(
        20, "the training is killed with SIGKILL in step 20", "TunewatchRunFailed", "killed_signal_9"
    ),
    "oom": Fault(
        20, "an allocation in step 20 asks for more memory than there is", "TunewatchRunFailed", "oom_host"
    ),
    "disk_full": Fault(
        30, "the disk is full when a checkpoint is written", "TunewatchRunFailed", "disk_full"
    ),
}
HEALTHY = Fault(0, "nothing is broken", "TunewatchRunFinished")


class _Stopped(Exception):
    """SIGTERM: end everything."""


def run_demo(fault: str | None, *, keep: bool | None = None) -> int:
    """Run the demo; returns 0 when the run ended as it should and the right alert arrived, else 1.

    Leaves no process behind, however it ends.
    """
    if fault is not None and fault not in FAULTS:
        raise ConfigError(
            "not known", key=f"--fault {fault}", allowed=", ".join(FAULTS), nearest=nearest(fault, FAULTS)
        )
    require_train_extra()
    console = Console(highlight=False)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return _Demo(console, fault, keep=sys.stdout.isatty() if keep is None else keep).run()
    except (KeyboardInterrupt, _Stopped):
        console.print("stopped")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


class _Demo:
    def __init__(self, console: Console, fault: str | None, *, keep: bool) -> None:
        self.console = console
        self.fault_name = fault
        self.fault = FAULTS[fault] if fault else HEALTHY
        self.keep = keep
        self.home = tunewatch_home() / "demo"
        self.run_id = new_run_id()
        self.output_dir = self.home / "outputs" / self.run_id
        self.has_gpu = gpu_driver_is_here()
        self.alerts: list[Alert] = []

    def run(self) -> int:
        self.say(f"Demo: a real fine-tune of a tiny model; {self.fault.story}.")
        stack = Stack(
            self.home,
            time_scale=TIME_SCALE,
            sidecar="auto" if self.has_gpu else "simulated",
            on_notification=self._received,
            report=self.say,
        )
        with stack:
            self.say(f"Prometheus    {stack.prometheus_url}\nAlertmanager  {stack.alertmanager_url}\n")
            with self._training() as training:
                right = self._wait_for_alert(stack, training)
            self._where_to_look(stack, right)
            if self.keep:
                self.say("Prometheus stays until you press Ctrl-C.")
                while True:
                    time.sleep(1.0)
                    stack.check()
        return 0 if right else 1

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _received(self, notification: Notification) -> None:
        if notification.path != "/alerts":
            return
        self.alerts += [alert for alert in notification.alerts if alert.labels.get("run_id") == self.run_id]
        self.say(f"\n{format_notification(notification)}\n")

    def _training(self) -> _Training:
        environment = {**os.environ, "TUNEWATCH_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        environment.pop("TUNEWATCH_FAULT", None)
        if not self.has_gpu:
            environment["TUNEWATCH_SIMULATED_GPU"] = simulated_uuid(0)
        if self.fault_name:
            environment["TUNEWATCH_FAULT"] = f"{self.fault_name}@{self.fault.step}"
        config = self._write_config()
        command = [
            sys.executable,
            "-m",
            "tunewatch",
            "train",
            str(config),
            "--run-id",
            self.run_id,
            "--grace",
            "10s",
        ]
        return _Training(command, environment)

    def _write_config(self) -> Path:
        """The shipped example, with its data where it is installed and its output in our home."""
        example = share_path("examples", "demo.yaml")
        config = yaml.safe_load(example.read_text(encoding="utf-8"))
        for key in ("path", "eval_path"):
            config["dataset"][key] = str(example.parent / config["dataset"][key])
        config["output_dir"] = str(self.output_dir)
        config["patience"] = {"first_step": "60s", "step": "5s", "evaluate": "30s"}
        path = self.home / "demo.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path

    def _wait_for_alert(self, stack: Stack, training: _Training) -> bool:
        """Wait until the right alert came, or the run is over and it did not come in time."""
        give_up: float | None = None
        while not self._came(self._is_right):
            stack.check()
            if training.over and give_up is None:
                give_up = time.monotonic() + ALERT_SECONDS
            if give_up is not None and time.monotonic() > give_up:
                self.say(f"The alert {self.fault.alert} did not arrive within {ALERT_SECONDS:.0f} s.")
                return False
            time.sleep(0.2)
        wrong = sorted({alert.name for alert in self.alerts if alert.status == "firing"} - self._expected())
        if wrong:
            self.say(f"Alerts that should not have come: {', '.join(wrong)}")
        if self.fault_name == "nan":
            training.wait()
        return not wrong

    def _expected(self) -> set[str]:
        return {self.fault.alert, "TunewatchRunFailed"} if self.fault_name == "nan" else {self.fault.alert}

    def _is_right(self, alert: Alert) -> bool:
        if alert.name != self.fault.alert or alert.status != "firing":
            return False
        reasons = {self.fault.reason, "oom_gpu"} if self.fault.reason == "oom_host" else {self.fault.reason}
        return self.fault.reason is None or alert.labels.get("reason") in reasons

    def _came(self, accept: Callable[[Alert], bool]) -> bool:
        return any(accept(alert) for alert in list(self.alerts))

    def _where_to_look(self, stack: Stack, right: bool) -> None:
        folder = self.home / "runs" / self.run_id
        graph = f"{stack.prometheus_url}/graph?g0.expr=tunewatch_loss&g0.tab=0&g0.range_input=5m"
        lines = [
            "As it should be." if right else "Not as it should be.",
            "Where to look:",
            f"  loss in Prometheus  {graph}",
            f"  alerts              {stack.alertmanager_url}/#/alerts",
            f"  the run             {folder} (verdict.json, events.jsonl, child.log)",
        ]
        lines += self._gpu_line(stack)
        if (self.output_dir / "final").is_dir():
            lines.append(f"  its adapter         {self.output_dir / 'final'}")
        if self.fault_name is None:
            lines.append(f"Break it for real: make demo FAULT={'|'.join(FAULTS)}")
        self.say("\n".join(lines))

    def _gpu_line(self, stack: Stack) -> list[str]:
        """What the run's GPU drew, by the join of run and sidecar in Prometheus; nothing where that is not known."""
        run = f'{{run_id="{self.run_id}"}}[10m]'
        watts = _ask(stack, f"max_over_time(run:tunewatch_gpu_power_watts:sum{run})")
        joules = _ask(stack, f"avg_over_time(run:tunewatch_gpu_energy_joules_per_token:rate5m{run})")
        if watts is None:
            return []
        kind = "its GPU" if self.has_gpu else "a simulated GPU"
        per_token = f", {joules:.3g} J per token" if joules is not None else ""
        return [f"  {kind:<18}  up to {watts:.0f} W{per_token} (metrics of tunewatch-gpu, joined by uuid)"]


def _ask(stack: Stack, query: str) -> float | None:
    """The one value of an instant query, None where there is none."""
    url = f"{stack.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    result = json.loads(fetch(url))["data"]["result"]
    return float(result[0]["value"][1]) if result else None


class _Training:
    """`tunewatch train` as a child that can not outlive us."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for us; we pass it on
            preexec_fn=die_with_parent(signal.SIGTERM),  # SIGTERM, so that the supervisor ends the training
        )

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait()

    def __enter__(self) -> _Training:
        return self

    def __exit__(self, *exception: object) -> None:
        """End it: SIGINT (the run is cancelled), then SIGTERM ends a linger, then SIGKILL."""
        for number, seconds in ((signal.SIGINT, 20.0), (signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            if self.over:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue

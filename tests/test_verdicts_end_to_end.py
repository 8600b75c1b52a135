"""Real trainings that are sick or well, watched as a user would, up to the message that a person gets or does not get.

The rules and routes are the shipped ones, faster. One Prometheus and one Alertmanager serve the file; the trainings run
side by side, some at a time, in the order of the tests, and each test waits for its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import TESTS, Command, Machine, wait_for
from pager import Pager

sys.path.append(str(TESTS / "gpu"))

from gpu_harness import RunningSidecar

from tunewatch.inbox import Alert
from tunewatch.stack import Stack
from tunewatch_gpu.simulated import simulated_uuid

pytestmark = pytest.mark.slow

TIME_SCALE = 15.0  # a scrape a second; "for: 2m" is eight seconds
AT_A_TIME = 3
LONG = 300.0  # seconds; three trainings begin at once on a machine that may have other work
SCRIPTS = TESTS / "scripts"

NOT_LEARNING = "TunewatchRunNotLearning"
ATTENTION = "TunewatchRunNeedsAttention"
STALLED = "TunewatchRunStalled"
RESUME_LOST = "TunewatchResumeLost"
FINISHED = "TunewatchRunFinished"
SEVERITY = {NOT_LEARNING: "critical", ATTENTION: "warning", STALLED: "critical", RESUME_LOST: "critical"}


@dataclass
class Outcome:
    """What came of one training: alerts by name and signal, as they reached the receiver, and the run's own words."""

    run_id: str
    told: dict[tuple[str, str], Alert]
    signals: dict[str, dict[str, Any]]
    code: int = 0
    logs: int = 0


class Scene:
    """One training under `tunewatch exec`, its machine, and the person who is told."""

    def __init__(self, machine: Machine, pager: Pager) -> None:
        self.machine, self.pager = machine, pager
        assert machine.run_id is not None
        self.run_id = machine.run_id

    def start(
        self, case: str, *flags: str, script: str = "verdict_train.py", options: tuple[str, ...] = ()
    ) -> Command:
        target = [sys.executable, str(SCRIPTS / script), str(self.output), case, *flags]
        return self.machine.start("exec", "--run-id", self.run_id, "--grace", "30s", *options, "--", *target)

    @property
    def output(self) -> Path:
        return self.machine.folder / "out"

    def interrupt(self, command: Command) -> None:
        command.send(signal.SIGINT)
        assert command.wait(LONG) == 130, command.output[-3000:]

    @property
    def told(self) -> dict[tuple[str, str], Alert]:
        return {
            (alert.name, alert.labels.get("signal", "")): alert
            for alert in self.pager.received(run_id=self.run_id)
        }

    def outcome(self, code: int = 0) -> Outcome:
        signals = {item["signal"]: item for item in self.machine.verdict()["signals"]}
        logs = sum("loss" in event["values"] for event in self.machine.events("log"))
        return Outcome(self.run_id, self.told, signals, code, logs)


@dataclass(frozen=True)
class Fault:
    """A sick training: the alerts it must bring, as name and signal, and what else follows from it and may be told."""

    play: Callable[[Scene], Command]
    alerts: tuple[tuple[str, str], ...]
    also: tuple[tuple[str, str], ...] = ()

    def run(self, scene: Scene) -> Outcome:
        """Play it until the alerts have come, and end it."""
        command = self.play(scene)
        for name, signal_name in self.alerts:
            labels = {"signal": signal_name} if signal_name else {}
            scene.pager.wait_for_alert(name, seconds=LONG, run_id=scene.run_id, **labels)
        outcome = scene.outcome()
        scene.interrupt(command)
        outcome.told = scene.told
        return outcome

    @property
    def allowed(self) -> set[tuple[str, str]]:
        return {*self.alerts, *self.also}


def simply(case: str, *options: str) -> Callable[[Scene], Command]:
    return lambda scene: scene.start(case, options=options)


def impatient(case: str, phase: str) -> Callable[[Scene], Command]:
    return simply(case, "--patience", f"{phase}=2s", "--patience", "step_factor=3")


def half(scene: Scene) -> None:
    """A training that is interrupted behind its first checkpoint."""
    command = scene.start("half")
    scene.machine.wait_step(45, seconds=LONG)
    scene.interrupt(command)


def resume_without_schedule(scene: Scene) -> Command:
    half(scene)
    (scene.output / "checkpoint-40" / "scheduler.pt").unlink()
    return scene.start("half", "--resume")


def save_into_a_pipe(scene: Scene) -> Command:
    """What the trainer writes last never gets through, as on a network mount that hangs."""
    checkpoint = scene.output / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    os.mkfifo(checkpoint / "trainer_state.json")
    return impatient("hanging-save", "save")(scene)


def save_on_a_small_disk(scene: Scene) -> Command:
    """A real file system with room for twelve of the forty checkpoints to come."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    scene.output.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4500k", "tmpfs", scene.output], check=True)
    return scene.start("saves")


FAULTS = {
    "masked": Fault(simply("masked"), ((NOT_LEARNING, "labels_masked"),)),
    "frozen": Fault(
        simply("frozen"),
        ((NOT_LEARNING, "nothing_trainable"), (NOT_LEARNING, "no_gradient")),
    ),
    "diverging": Fault(
        simply("diverging"),
        ((NOT_LEARNING, "diverging"),),
        also=((ATTENTION, "spikes"), (ATTENTION, "grad_explosion")),
    ),
    "overfitting": Fault(
        simply("overfitting"), ((ATTENTION, "overfitting"),), also=((ATTENTION, "collapsed_loss"),)
    ),
    "flat": Fault(simply("flat"), ((ATTENTION, "flat"),)),
    "restarted": Fault(resume_without_schedule, ((RESUME_LOST, ""), (ATTENTION, "lr_restarted"))),
    "hanging-data": Fault(impatient("hanging-data", "step"), ((STALLED, ""),)),
    "hanging-evaluation": Fault(impatient("hanging-evaluation", "evaluate"), ((STALLED, ""),)),
    "hanging-save": Fault(save_into_a_pipe, ((STALLED, ""),)),
    "small-disk": Fault(save_on_a_small_disk, ((ATTENTION, "will_not_fit"),)),
}


def lose_and_throttle_gpus(stack: Stack, pager: Pager, folder: Path) -> dict[tuple[str, str], Alert]:
    """Of two simulated cards one is lost and one is held down by heat; returns what is told of them, by alert and uuid.

    Both are well at first: what is never seen well is told in other words.
    """
    scenario = folder / "scenario.yml"
    scenario.write_text("events: []\n")
    arguments = ("--backend", "simulated", "--scenario", str(scenario), "--interval", "1")
    with RunningSidecar({"TUNEWATCH_GPU_SIMULATE": "2"}, arguments, folder / "sidecar.log") as sidecar:
        instance = sidecar.url.removeprefix("http://")
        target = stack.add_static_target("gpu", instance)
        wait_for(lambda: len(pager.query("tunewatch_gpu_up == 1")) == 2, seconds=LONG, what="two cards")
        scenario.write_text(
            "events:\n- {card: 0, throttle: {hw_thermal_slowdown: 0.4}}\n- {card: 1, lost: true}\n"
        )
        for name in ("TunewatchGpuLost", "TunewatchGpuThrottled"):
            pager.wait_for_alert(name, seconds=LONG, instance=instance)
        target.unlink()
    return {(alert.name, alert.labels["uuid"]): alert for alert in pager.received(instance=instance)}


def resumed(scene: Scene) -> Command:
    half(scene)
    return scene.start("half", "--resume")


HEALTHY: dict[str, Callable[[Scene], Command]] = {
    "jagged": simply("jagged"),
    "long-evaluation": simply("long-evaluation", "--patience", "step=3s", "--patience", "step_factor=5"),
    "preference": lambda scene: scene.start("80", script="dpo_train.py"),
    "packed": simply("packed"),
    "resumed": resumed,
    "streaming": simply("streaming"),
}


def run_healthy(play: Callable[[Scene], Command], scene: Scene) -> Outcome:
    """Play it to its end, until the message about that has come."""
    code = play(scene).wait(LONG)
    scene.pager.wait(scene.run_id, FINISHED, seconds=LONG)
    return scene.outcome(code)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), time_scale=TIME_SCALE) as stack:
        yield stack


@pytest.fixture(scope="module")
def pager(stack: Stack) -> Pager:
    return Pager(stack)


@pytest.fixture(scope="module")
def outcomes(
    stack: Stack, pager: Pager, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Outcome]]]:
    """What comes of each training that a test of this session asks for; some at a time."""
    wanted = {
        item.callspec.params["case"]: None
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    machines = {
        case: Machine(tmp_path_factory.mktemp(case), home=stack.home, run_id=f"e2e-{case}") for case in wanted
    }
    pool = ThreadPoolExecutor(AT_A_TIME)

    def start(case: str) -> Future[Outcome]:
        scene = Scene(machines[case], pager)
        if case in FAULTS:
            return pool.submit(FAULTS[case].run, scene)
        return pool.submit(run_healthy, HEALTHY[case], scene)

    yield {case: start(case) for case in wanted}
    pool.shutdown(wait=False, cancel_futures=True)
    for machine in machines.values():
        machine.close()
        if (machine.folder / "out").is_mount():
            subprocess.run(["umount", machine.folder / "out"], check=True)


@pytest.fixture
def outcome(outcomes: dict[str, Future[Outcome]], case: str) -> Outcome:
    return outcomes[case].result()


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_reaches_a_person(case: str, outcome: Outcome) -> None:
    fault = FAULTS[case]
    for name, signal_name in fault.alerts:
        alert = outcome.told[name, signal_name]
        assert alert.labels["run_id"] == outcome.run_id
        assert alert.labels["severity"] == SEVERITY[name]
        assert not signal_name or signal_name in outcome.signals
    assert set(outcome.told) <= fault.allowed


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("hanging-data", "waiting for the next batch"),
        ("hanging-evaluation", "in an evaluation"),
        ("hanging-save", "saving a checkpoint"),
    ],
)
def test_a_stall_says_where(case: str, words: str, outcome: Outcome) -> None:
    assert words in outcome.signals["stalled"]["message"]


def test_gpus_that_are_lost_and_throttled_reach_a_person(stack: Stack, pager: Pager, tmp_path: Path) -> None:
    told = lose_and_throttle_gpus(stack, pager, tmp_path)
    lost = told["TunewatchGpuLost", simulated_uuid(1)]
    throttled = told["TunewatchGpuThrottled", simulated_uuid(0)]
    assert lost.labels["severity"] == "critical"
    assert f"GPU 1, Simulated GPU 80GB ({simulated_uuid(1)})" in lost.annotations["description"]
    assert throttled.labels["severity"] == "warning"
    assert "hw_thermal_slowdown" in throttled.annotations["description"]
    assert set(told) == {
        ("TunewatchGpuLost", simulated_uuid(1)),
        ("TunewatchGpuThrottled", simulated_uuid(0)),
    }


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_training_tells_only_its_end(case: str, outcome: Outcome, pager: Pager) -> None:
    assert outcome.code == 0
    assert outcome.logs >= 60, "long enough for the detectors to have had their chance"
    assert set(outcome.told) == {(FINISHED, "")}
    assert pager.ever_fired(run_id=outcome.run_id) == {(FINISHED, "")}
    assert {item["level"] for item in outcome.signals.values()} <= {"info"}, outcome.signals
    worst = pager.query(f'max_over_time(tunewatch_health_level{{run_id="{outcome.run_id}"}}[1d])')
    assert {series["value"][1] for series in worst} == {"0"}


def test_nothing_else_was_ever_told(outcomes: dict[str, Future[Outcome]], pager: Pager) -> None:
    """Of no training, not even when they were all gone from Prometheus: waits longer than "vanished" has patience."""
    ended = [future.result() for future in outcomes.values() if future.exception() is None]
    since = time.monotonic()
    wait_for(lambda: time.monotonic() - since > 15, seconds=30)
    for outcome in ended:
        fault = FAULTS.get(outcome.run_id.removeprefix("e2e-"))
        allowed = fault.allowed if fault else {(FINISHED, "")}
        assert pager.ever_fired(run_id=outcome.run_id) <= allowed, outcome.run_id

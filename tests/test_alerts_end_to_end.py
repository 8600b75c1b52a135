"""From a real fault in a real training to the message a person gets: the shipped rules, faster.

One Prometheus and one Alertmanager serve all tests of the file; every run has an id of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Machine, wait_for
from pager import Pager

from tunewatch.stack import Stack

TIME_SCALE = 15.0  # a scrape a second; "for: 2m" is eight seconds


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), time_scale=TIME_SCALE) as stack:
        yield stack


@pytest.fixture
def pager(stack: Stack) -> Pager:
    return Pager(stack)


@pytest.fixture
def watched(stack: Stack, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine whose runs are scraped by the stack; the run is named after the test."""
    machine = Machine(tmp_path, home=stack.home, run_id=request.node.name.removeprefix("test_")[:60])
    yield machine
    machine.close()


def test_nan(watched, pager):
    command = watched.exec_tiny(
        "--steps", "400", "--poison-at", "5", "--step-seconds", "0.1", options=("--grace", "2s")
    )
    alert = pager.wait(watched.run_id, "TunewatchRunNonFinite")
    assert alert.labels["severity"] == "critical"
    assert "tiny_train (nan)" in alert.annotations["description"]
    assert set(pager.alerts(watched.run_id)) == {"TunewatchRunNonFinite"}
    command.send(signal.SIGINT)
    command.wait()


@pytest.mark.slow
def test_stall(watched, pager):
    command = watched.exec_tiny(
        "--hang-in", "step", options=("--grace", "1s", "--patience", "step=2s", "--patience", "step_factor=3")
    )
    alert = pager.wait(watched.run_id, "TunewatchRunStalled")
    assert alert.labels["severity"] == "critical"
    assert set(pager.alerts(watched.run_id)) == {"TunewatchRunStalled"}
    command.send(signal.SIGINT)
    command.wait()


@pytest.mark.slow
def test_kill_minus_nine_of_the_child(watched, pager):
    command = watched.exec_tiny("--steps", "400", "--step-seconds", "0.1")
    watched.wait_step(12)
    os.kill(watched.json("supervisor.json")["child_pid"], signal.SIGKILL)
    alert = pager.wait(watched.run_id, "TunewatchRunFailed")
    assert alert.labels["reason"] == "killed_signal_9"
    assert command.wait() == 137
    assert set(pager.alerts(watched.run_id)) == {"TunewatchRunFailed"}


@pytest.mark.slow
def test_kill_minus_nine_of_the_supervisor(watched, pager):
    """Vanished; and when a new supervisor takes over, it is over."""
    command = watched.exec_tiny("--steps", "2000", "--step-seconds", "0.1")
    watched.wait_step(3)
    wait_for(lambda: pager.scraped(watched.run_id), what="a scrape of the run")
    command.send(signal.SIGKILL)
    command.process.wait()
    alert = pager.wait(watched.run_id, "TunewatchRunVanished")
    assert alert.labels["severity"] == "critical"
    adopted = watched.start("adopt", watched.run_id)
    pager.wait(watched.run_id, "TunewatchRunVanished", status="resolved")
    adopted.send(signal.SIGTERM)
    adopted.wait()


@pytest.mark.slow
def test_sigterm(watched, pager):
    command = watched.exec_tiny("--steps", "2000", "--step-seconds", "0.1")
    watched.wait_step(6)
    command.send(signal.SIGTERM)
    alert = pager.wait(watched.run_id, "TunewatchRunPreempted")
    assert alert.labels["severity"] == "warning"
    assert command.wait() == 143
    assert set(pager.alerts(watched.run_id)) == {"TunewatchRunPreempted"}


def test_exception_before_step_one(watched, pager):
    command = watched.exec_tiny("--raise-early")
    alert = pager.wait(watched.run_id, "TunewatchRunFailed")
    assert "before its first step" in alert.annotations["description"]
    assert not any("CANARY" in text for text in (*alert.annotations.values(), *alert.labels.values()))
    assert command.wait() == 1


@pytest.fixture
def tiny_disk(watched: Machine) -> Iterator[Path]:
    """A real file system of 60 kB: the first checkpoint does not fit."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small tmpfs needs root")
    folder = watched.folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
def test_disk_full_in_a_save(watched, pager, tiny_disk):
    command = watched.exec_tiny("--steps", "40", output="small/out")
    alert = pager.wait(watched.run_id, "TunewatchRunFailed")
    assert alert.labels["reason"] == "disk_full", watched.verdict()
    assert command.wait() == 1


def test_a_run_shorter_than_a_scrape_raises_nothing(watched, pager, stack):
    """It may never be seen at all, or once by luck; then at most its completion is told, and nothing that wakes."""
    code, _ = watched.run("exec", "--run-id", watched.run_id, "--", "true")
    assert code == 0
    # As long as it takes another run's alert to come through, no alarm about this one came.
    other = Machine(watched.folder, home=stack.home, run_id=f"{watched.run_id[:40]}-other")
    try:
        assert other.exec_tiny("--raise-early").wait() == 1
        pager.wait(other.run_id, "TunewatchRunFailed")
    finally:
        other.close()
    assert set(pager.alerts(watched.run_id)) <= {"TunewatchRunFinished"}


@pytest.mark.slow
def test_a_completed_run_tells_only_that(watched, pager):
    command = watched.exec_tiny("--steps", "30", "--step-seconds", "0.2")
    alert = pager.wait(watched.run_id, "TunewatchRunFinished")
    assert alert.labels["severity"] == "info"
    assert command.wait() == 0  # it lingered until its end had been scraped
    before = time.monotonic()
    # Gone from Prometheus, it must not become "vanished": wait longer than that alert's scaled patience.
    wait_for(lambda: time.monotonic() - before > 15, seconds=30)
    assert set(pager.alerts(watched.run_id)) == {"TunewatchRunFinished"}

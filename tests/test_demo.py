"""`tunewatch demo` as a newcomer runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest
from harness import Machine, scrape, wait_for

ROOT = Path(__file__).parent.parent


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def left_over(home: Path) -> list[str]:
    """Live processes that work on a home: their environment or command line names it."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("TUNEWATCH_HOME", "")]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(" ".join(process.cmdline()))
    return found


def test_a_whole_run_raises_only_the_info_alert(machine: Machine):
    code, output = machine.run("demo", "--no-keep", seconds=240)
    assert code == 0, output
    assert "[FIRING] info      TunewatchRunFinished" in output
    assert output.count("[FIRING]") == 1
    assert "As it should be." in output
    # Run and GPU joined in Prometheus: the simulated card draws between 0 and its limit of 400 W.
    drawn = re.search(r"a simulated GPU +up to (\d+) W, ([\d.e-]+) J per token", output)
    assert drawn is not None, output
    assert 0 < int(drawn[1]) <= 400
    assert float(drawn[2]) > 0
    assert left_over(machine.home) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "alert"),
    [
        ("nan", "TunewatchRunNonFinite"),
        ("stall", "TunewatchRunStalled"),
        ("kill", "reason killed_signal_9"),
        ("oom", "reason oom_host"),
        ("disk_full", "reason disk_full"),
    ],
)
def test_each_fault_ends_with_its_alert(machine: Machine, fault: str, alert: str):
    code, output = machine.run("demo", "--no-keep", "--fault", fault, seconds=300)
    assert code == 0, output
    assert "[FIRING] critical" in output
    assert alert in output
    assert left_over(machine.home) == []


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(machine: Machine):
    command = machine.start("demo", "--no-keep")
    wait_for(lambda: "training " in command.output, seconds=120, what="the training in the demo")
    processes = family(command.process.pid)
    assert len(processes) >= 5  # demo, Prometheus, Alertmanager, supervisor, training, sidecar
    command.send(signal.SIGINT)
    assert command.wait(60) == 130
    _, alive = psutil.wait_procs(processes[1:], timeout=10)
    assert alive == []
    assert left_over(machine.home) == []


def test_an_unknown_fault_is_refused(machine: Machine):
    code, output = machine.run("demo", "--fault", "nann")
    assert code == 2
    assert "did you mean 'nan'?" in output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return next(folder.glob("*.whl"))


def fresh_venv(folder: Path, *requirements: str) -> Path:
    """An empty environment with these packages; returns its bin folder."""
    venv.create(folder, with_pip=True)
    pip = [
        folder / "bin" / "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    for requirement in requirements:
        subprocess.run([*pip, requirement], check=True)
    return folder / "bin"


@pytest.mark.slow
def test_without_the_train_extra_the_error_says_what_to_install(machine: Machine, wheel: Path):
    bin_folder = fresh_venv(machine.folder / "core", str(wheel))
    config = machine.folder / "run.yaml"
    config.write_text("model: x\n")
    for arguments in (["train", str(config)], ["demo"]):
        done = subprocess.run(
            [bin_folder / "tunewatch", *arguments],
            capture_output=True,
            text=True,
            env=machine.environment,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "pip install 'tunewatch[train]'" in done.stderr
        assert "Traceback" not in done.stderr
    # The core alone has the sidecar, too.
    sidecar = subprocess.Popen(
        [bin_folder / "tunewatch-gpu", "--backend", "simulated", "--web.listen-address", "127.0.0.1:0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert sidecar.stderr is not None
        address = next(
            found[1] for line in sidecar.stderr if (found := re.search(r"http://([\d.:]+)/", line))
        )
        wait_for(lambda: "tunewatch_gpu_up{" in scrape(address), what="a reading")
    finally:
        sidecar.terminate()
        sidecar.wait(10)
    # The core alone watches any command.
    done = subprocess.run(
        [bin_folder / "tunewatch", "exec", "--no-linger", "--", "true"],
        capture_output=True, text=True, env=machine.environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo(machine: Machine, wheel: Path):
    bin_folder = fresh_venv(machine.folder / "full", "torch", f"{wheel}[train]")
    empty = machine.folder / "empty"
    empty.mkdir()
    done = subprocess.run(
        [bin_folder / "tunewatch", "demo", "--no-keep"],
        cwd=empty, env=machine.environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TunewatchRunFinished" in done.stdout
    assert list(empty.iterdir()) == []

"""Trainings that die for real below `tunewatch exec`: the word about their end, and what it says to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from harness import TESTS, wait_for
from test_exec import free_port
from test_probe_pushes import Hub

DYING = TESTS / "scripts" / "dying_train.py"
MEMORY = 1_500_000_000
"""Bytes in which the training fits, but not what it takes when it is told to eat."""


def ending(machine):
    return machine.verdict()["ending"]


def dies(machine, death, *more, command=None, options=(), output=None, **environment):
    """Let the training die; returns its exit code. No row of its data gets anywhere."""
    target = command or [sys.executable, str(DYING), death, str(output or machine.folder / "out"), *more]
    started = machine.start("exec", "--no-linger", *options, "--", *target, **environment)
    code = started.wait(240)
    for path in machine.home.rglob("*"):
        assert not path.is_file() or b"CANARY" not in path.read_bytes(), path
    return code


# -- while preparing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("death", "reason", "kind"),
    [
        ("no_text", "data", "KeyError"),
        pytest.param("bad_template", "config", "TemplateSyntaxError", marks=pytest.mark.slow),
        pytest.param("wrong_modules", "config", "NoMatchingPeftModuleError", marks=pytest.mark.slow),
        pytest.param("no_bf16", "config", "ValueError", marks=pytest.mark.slow),
        pytest.param("from_the_hub", "config", "OSError", marks=pytest.mark.slow),
    ],
)
def test_before_the_first_callback(machine, death, reason, kind):
    assert dies(machine, death) == 1
    end = ending(machine)
    assert (end["state"], end["reason"], end["when"]) == ("failed", reason, "early")
    assert end["message"].startswith(f"{kind} while preparing")
    assert "Resume" not in end["advice"]


class Gate:
    """A hub that answers each question with one status."""

    def __init__(self, status, code):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [(403, "GatedRepo", "auth"), (401, "GatedRepo", "auth"), (401, "RepoNotFound", "config")],
)  # fmt: skip
def test_a_hub_that_does_not_give_the_model(machine, status, code, reason):
    gate = Gate(status, code)
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": gate.endpoint, "HF_HOME": str(machine.folder / "hf")}
    try:
        assert dies(machine, "from_the_hub", **online) == 1
    finally:
        gate.server.shutdown()
        gate.server.server_close()
    assert (ending(machine)["reason"], ending(machine)["when"]) == (reason, "early"), ending(machine)


# -- memory and disk ---------------------------------------------------------------------------------------


@pytest.fixture
def memory(machine):
    """A memory cgroup; returns the file that takes a pid."""
    first = Path("/sys/fs/cgroup/memory")
    root = first if (first / "memory.limit_in_bytes").exists() else first.parent
    group = root / f"tunewatch-deaths-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if root == first else "memory.max")).write_text(str(MEMORY))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group / "cgroup.procs"
    machine.close()
    wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), what="the cgroup to be empty")
    group.rmdir()


def in_group(machine, memory, death):
    """The supervisor itself is in the group, too, and smaller than its training: the kernel takes the larger one."""
    watch = [sys.executable, "-m", "tunewatch", "exec", "--no-linger", "--run-id", death, "--"]
    target = [sys.executable, str(DYING), death, str(machine.folder / "out")]
    shell = f'echo $$ > {memory} && exec "$@"'
    log = machine.folder / f"{death}.log"
    with log.open("wb") as output:
        return subprocess.run(
            ["sh", "-c", shell, "sh", *watch, *target], env=machine.environment, cwd=machine.folder,
            stdout=output, stderr=output, check=False, timeout=240,
        ).returncode  # fmt: skip


@pytest.mark.slow
def test_the_kernels_killer_while_saving_and_while_restoring(machine, memory):
    """Its second save eats the memory, then so does the resume."""
    machine.run_id = "eats_at_save"
    assert in_group(machine, memory, "eats_at_save") == 137
    end = ending(machine)
    assert (end["state"], end["reason"]) == ("failed", "oom_host"), end
    assert end["message"] == (
        "The kernel killed it: its memory cgroup was full while saving at step 4 of 8. "
        "2 steps after checkpoint-2 are lost."
    )
    assert end["advice"].endswith("Resume from checkpoint-2.")
    half = machine.folder / "out" / "checkpoint-4"
    assert not (half / "trainer_state.json").exists()
    if half.exists():
        half.rename(machine.folder / "half")

    machine.run_id = "eats_at_restore"
    assert in_group(machine, memory, "eats_at_restore") == 137
    end = ending(machine)
    assert (end["state"], end["reason"]) == ("failed", "oom_host"), end
    assert "while preparing (restoring the checkpoint)" in end["message"]
    assert "checkpoint-2" in end["advice"]


def test_a_disk_that_is_full_at_a_save(machine):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = machine.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", disk], check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        assert dies(machine, "none", "8", output=disk / "out") == 1
    finally:
        subprocess.run(["umount", disk], check=True)
    end = ending(machine)
    assert (end["state"], end["reason"]) == ("failed", "disk_full"), end
    assert "while saving" in end["message"]
    assert "Free space" in end["advice"]


# -- shapes of an exit -------------------------------------------------------------------------------------


def test_a_shell_that_tells_of_a_kill(machine):
    """137: the shell's word for a child that SIGKILL took, while it saved."""
    target = f"{sys.executable} {DYING} killed_at_save {machine.folder / 'out'}; exit $?"
    assert dies(machine, "", command=["sh", "-c", target]) == 137
    end = ending(machine)
    assert end["reason"] == "killed_signal_9"
    assert "while saving at step 4 of 8; most often the machine ran out of memory" in end["message"]
    assert end["advice"].endswith("Resume from checkpoint-2.")


@pytest.mark.slow
def test_a_launcher_that_tells_of_a_kill(machine):
    """CalledProcessError ... died with SIGKILL, as `accelerate launch` has it."""
    assert dies(machine, "launcher") == 1
    assert ending(machine)["reason"] == "killed_signal_9"
    assert "killed by signal 9 at step 3 of 8" in ending(machine)["message"]


@pytest.mark.slow
def test_torchrun_that_tells_of_a_kill(machine):
    """exitcode: -9 of a rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    target = [*torchrun, "--master-port", str(free_port()), str(DYING), "killed", str(machine.folder / "out")]
    assert dies(machine, "", command=target) == 1
    assert ending(machine)["reason"] in ("rank_killed", "killed_signal_9"), ending(machine)
    assert "at step 3 of 8" in ending(machine)["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "code", "state", "reason", "message"),
    [
        ("interrupt", 130, "cancelled", "cancelled", "Interrupted at step 3 of 8."),
        ("leave_0", 0, "failed", "exited_early", "The program ended at step 3 of 8 without finishing its training."),
        ("leave_3", 3, "failed", "unknown", "SystemExit at step 3 of 8."),
        ("os_exit", 0, "failed", "exited_early", "The program ended at step 3 of 8 without finishing its training."),
        ("segfault", 139, "failed", "killed_signal_11", "Killed by signal 11 (SIGSEGV) at step 3 of 8."),
        ("gpu_lost", 1, "failed", "gpu_lost", "AcceleratorError at step 3 of 8."),
        ("nccl", 1, "failed", "nccl_timeout", "RuntimeError at step 3 of 8."),
        ("worker_killed", 1, "failed", "oom_host", "RuntimeError at step 0 of 8."),
        ("worker_bus_error", 1, "failed", "shm", "RuntimeError at step 0 of 8."),
    ],
)  # fmt: skip
def test_in_the_training(machine, death, code, state, reason, message):
    assert dies(machine, death) == code
    end = ending(machine)
    assert (end["state"], end["reason"]) == (state, reason)
    assert end["message"].startswith(message)
    if death == "segfault":
        assert "out-of-memory" not in end["advice"]
    if death == "gpu_lost":
        assert "Do not retry on this GPU: go on elsewhere, from checkpoint-2." in end["advice"]


@pytest.mark.slow
def test_a_worker_that_raises_is_told_by_the_class_it_raised(machine):
    assert dies(machine, "worker_raises") == 1
    assert (ending(machine)["reason"], machine.events("exception")[0]["type"]) == ("data", "KeyError")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "when", "advice"),
    [
        ("3", "early", "Lower the batch size or max_length, or turn on gradient checkpointing."),
        (
            "15",
            "late",
            "Most likely one long sample: cap max_length or sort by length. Resume from checkpoint-14.",
        ),
    ],
)
def test_gpu_memory_early_and_late(machine, at, when, advice):
    assert dies(machine, "oom_gpu", "20", DIE_AT=at) == 1
    end = ending(machine)
    assert (end["reason"], end["when"], end["advice"]) == ("oom_gpu", when, advice)
    assert "tried to allocate 2.00 GiB" in end["message"]


# -- the hub, beside a training ----------------------------------------------------------------------------


class SlowHub(Hub):
    """Accepts an upload, and says nothing more until it is released."""

    def __init__(self):
        super().__init__()
        self.release = threading.Event()
        handler = self.server.RequestHandlerClass
        at_once = handler.answer

        def answer(request):
            if "preupload" in request.path:
                self.release.wait(120)
            at_once(request)

        handler.answer = answer


def pushing(machine, hub):
    return {
        "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_testtesttest", "PUSH": "1",
        "HF_HOME": str(machine.folder / "hf"),
    }  # fmt: skip


@pytest.mark.slow
def test_a_push_that_fails_unseen(machine):
    hub = Hub()
    try:
        assert dies(machine, "none", **pushing(machine, hub)) == 0
    finally:
        hub.server.shutdown()
        hub.server.server_close()
    assert ending(machine)["state"] == "completed"
    assert {(push["ok"], push["reason"]) for push in machine.events("hub_push")} == {(False, "auth")}
    verdict = machine.verdict()
    assert verdict["health"] == "attention"
    assert "hub_push_failed" in [one["signal"] for one in verdict["signals"]]


@pytest.mark.slow
def test_a_push_that_hangs_after_the_training(machine):
    """It is not the training that is late: the phase is packaging, with its own patience."""
    hub = SlowHub()
    options = ("--no-linger", "--grace", "1s", "--patience", "package=1s")
    command = machine.start(
        "exec", *options, "--", sys.executable, str(DYING), "none", str(machine.folder / "out"),
        **pushing(machine, hub),
    )  # fmt: skip
    try:
        signals = wait_for(
            lambda: [one for one in machine.verdict()["signals"] if one["signal"] == "stalled"],
            seconds=120,
            what="a stall",
        )
        assert "after the training" in signals[0]["message"]
        assert machine.scrape().get("run_state", state="packaging") == 1.0
        assert machine.verdict()["step"] == 8
    finally:
        command.send(signal.SIGINT)
        command.wait()
        hub.release.set()
        hub.server.shutdown()
        hub.server.server_close()

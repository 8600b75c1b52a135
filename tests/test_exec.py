"""`tunewatch exec` on real trainings: what is seen while they run, and the word about their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import TINY, wait_for


def ending(machine):
    verdict = machine.verdict()
    return verdict["state"], verdict["ending"]["reason"], verdict["ending"]["when"]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_healthy_run_equals_its_trainer_state(machine):
    command = machine.exec_tiny("--steps", "12")
    machine.run_folder()
    # Nobody scrapes until the end; then we do, once the terminal state is shown.
    samples = None

    def finished():
        nonlocal samples
        try:
            samples = machine.scrape()
        except OSError:
            return False
        return samples.get("run_state", state="completed") == 1.0

    wait_for(finished, seconds=90, what="the completed state in a scrape")
    assert command.wait() == 0
    state = json.loads((machine.folder / "out" / "checkpoint-12" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "loss" in entry]
    evals = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert samples.get("step") == state["global_step"] == 12
    assert samples.get("max_steps") == state["max_steps"] == 12
    assert samples.get("steps_total") == 12
    assert samples.get("loss") == logs[-1]["loss"]
    assert samples.get("learning_rate") == logs[-1]["learning_rate"]
    assert samples.get("grad_norm") == logs[-1]["grad_norm"]
    assert samples.get("eval_loss", dataset="eval") == evals[-1]["eval_loss"]
    assert samples.get("best_eval_loss") == min(entry["eval_loss"] for entry in evals)
    assert samples.get("tokens_seen", kind="non_padding") == logs[-1]["num_tokens"]
    assert samples.get("tokens_total", kind="non_padding") == logs[-1]["num_tokens"]
    # 12 steps of 2 micro-batches of 2 rows; each row has 19 words and the end mark.
    assert samples.get("samples_total") == 12 * 2 * 2
    assert samples.get("tokens_total", kind="all") == 12 * 2 * 2 * 20
    assert samples.get("epoch") == pytest.approx(1.5)
    assert samples.get("progress_ratio") == 1.0
    assert samples.get("checkpoints_saved_total") == 3
    assert samples.get("checkpoints_present") == 3
    assert samples.get("checkpoint_last_step") == 12
    assert samples.get("step_duration_seconds_count") == 12
    assert samples.get("nonfinite_steps_total", what="loss") == 0
    assert samples.get("health_level") == 0
    assert samples.get("attached") == 1
    assert samples.get("eta_seconds") is None
    assert samples.labels("run_end_info") == [{"state": "completed", "reason": "", "when": "late"}]
    assert samples.get("train_loss_mean") == pytest.approx(
        sum(entry["loss"] for entry in logs) / len(logs), rel=1e-4
    )


def test_exit_code_and_output_pass_through(machine):
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(7)"
    code, output = machine.run("exec", "--no-linger", "--", sys.executable, "-c", program)
    assert code == 7
    assert "to stdout" in output
    assert "to stderr" in output
    assert ending(machine) == ("failed", "unknown", "early")
    verdict = machine.verdict()
    assert (verdict["health"], verdict["act"]) == ("bad", "restart"), "nobody judged it, but it failed"
    assert verdict["reason"] == verdict["ending"]["message"]
    assert verdict["evidence"] == ["start-failed.json"]


def test_a_command_that_is_no_training_is_not_attached(machine):
    code, _ = machine.run("exec", "--no-linger", "--", sys.executable, "-c", "print('hello')")
    assert code == 0
    assert ending(machine)[:2] == ("completed", "")
    assert not (machine.run_folder() / "pulse.0").exists()


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (("--poison-at", "5"), 0, ("failed", "nan", "early")),
        (("--kill-at", "5"), 137, ("failed", "killed_signal_9", "early")),
        pytest.param(("--leave-at", "5"), 0, ("failed", "exited_early", "early"), marks=pytest.mark.slow),
        (("--steps", "20", "--raise-at", "15"), 1, ("failed", "unknown", "late")),
        (
            (
                "--raise-at",
                "3",
                "--raise-what",
                "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')",
            ),
            1,
            ("failed", "oom_gpu", "early"),
        ),
        (("--raise-at", "3", "--raise-what", "torch.empty(2**50)"), 1, ("failed", "oom_host", "early")),
        pytest.param(("--resume",), 1, ("failed", "config", "early"), marks=pytest.mark.slow),
        pytest.param(
            ("--raise-at", "3", "--swallow"), 0, ("failed", "exited_early", "early"), marks=pytest.mark.slow
        ),
    ],
    ids=["nan", "kill", "os_exit", "exception", "oom_gpu", "oom_host", "no_checkpoint", "swallowed"],
)
def test_endings(machine, flags, code, expected):
    command = machine.exec_tiny(*flags, options=("--no-linger",))
    assert command.wait() == code, command.output[-3000:]
    assert ending(machine) == expected, machine.verdict()


def test_an_exception_before_step_one_quotes_no_data(machine):
    command = machine.exec_tiny("--raise-early", options=("--no-linger",))
    assert command.wait() == 1
    assert "CANARY-ROW-TEXT" in command.output  # the user's own traceback is theirs
    assert ending(machine)[0] == "failed"
    for path in machine.home.rglob("*"):
        if path.is_file():
            assert b"CANARY-ROW-TEXT" not in path.read_bytes(), path
    error = machine.events("exception")[0]
    assert error["type"] == "KeyError"
    assert error["frames"][-1].startswith("tiny_train.py:")


def test_nan_is_known_before_the_next_log(machine):
    """With logging every 50 steps the trainer says nothing; the probe knows within two steps."""
    command = machine.exec_tiny(
        "--steps", "24", "--poison-at", "5", "--logging-steps", "50", "--eval-steps", "6", "--step-seconds", "0.2",
        options=("--no-linger",),
    )  # fmt: skip
    wait_for(
        lambda: any(signal["signal"] == "nonfinite" for signal in machine.verdict()["signals"]),
        what="the verdict nonfinite",
    )
    assert machine.verdict()["health"] == "bad"
    wait_for(lambda: machine.verdict()["resume_from"] == "checkpoint-4", what="the checkpoint before")
    live = machine.scrape()
    acts = {act: live.get("suggested_act", act=act) for act in ("keep", "stop", "restart", "resume")}
    assert acts == {"keep": 0.0, "stop": 0.0, "restart": 0.0, "resume": 1.0}
    assert live.get("nonfinite_last_timestamp_seconds", what="loss") == pytest.approx(time.time(), abs=30)
    command.wait()
    verdict = machine.verdict()
    assert ending(machine)[:2] == ("failed", "nan")
    assert (verdict["health"], verdict["act"], verdict["resume_from"]) == ("bad", "resume", "checkpoint-4")
    assert {"5-nonfinite.json", "24-failed.json"} <= set(verdict["evidence"])
    kept = json.loads((machine.run_folder() / "evidence" / "5-nonfinite.json").read_text())
    assert kept["verdict"]["signal"] == "nonfinite" and kept["state"] == "training"
    assert kept["config"]["arguments"]["max_steps"] == 24 and kept["config"]["info"]["method"] == "lora"
    assert str(machine.folder) not in json.dumps(kept), "no path"
    code, told = machine.run("runs")
    assert code == 0 and "change what stopped it, then resume from checkpoint-4" in told
    story = [
        (event["event"], event["step"])
        for event in machine.events()
        if event["event"] in ("nonfinite", "evaluate")
    ]
    assert story.index(("nonfinite", 5)) < story.index(("evaluate", 6))
    assert not any("loss" in event["values"] for event in machine.events("log"))


def test_one_nan_loss_with_sound_gradients_is_attention_and_counted(machine):
    """The trainer's filter shows nothing of it; the count is one, and the run completes."""
    command = machine.exec_tiny("--steps", "8", "--nan-loss-at", "3", options=("--no-linger",))
    assert command.wait() == 0
    assert [event["step"] for event in machine.events("nonfinite")] == [3]
    assert (
        machine.events("nonfinite")[0] | {"loss": True, "grad_norm": False} == machine.events("nonfinite")[0]
    )
    assert ending(machine)[:2] == ("completed", "")
    assert [signal["signal"] for signal in machine.verdict()["signals"]] == ["nonfinite_isolated"]
    assert all(not event["nonfinite"] for event in machine.events("log"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "words", "patience"),
    [
        ("step", "inside a step", "step=1s"),
        ("data", "waiting for the next batch", "step=1s"),
        ("evaluate", "in an evaluation", "evaluate=1s"),
        ("save", "saving a checkpoint", "save=1s"),
        ("prepare", "while preparing", "prepare=12s"),
    ],
)
def test_a_hang_is_called_a_stall_and_says_where(machine, where, words, patience):
    options = ("--no-linger", "--grace", "1s", "--patience", patience, "--patience", "step_factor=3")
    command = machine.exec_tiny("--hang-in", where, options=options)
    signals = wait_for(lambda: machine.verdict()["signals"], seconds=60, what="a verdict")
    assert [signal["signal"] for signal in signals] == ["stalled"]
    assert words in signals[0]["message"]
    assert machine.scrape().get("health", signal="stalled") == 1.0
    command.send(signal.SIGINT)
    command.wait()
    assert ending(machine)[:2] == ("cancelled", "cancelled")


def test_ctrl_c_is_cancelled_and_leaves_nothing(machine):
    command = machine.exec_tiny("--steps", "500", "--step-seconds", "0.05", options=("--no-linger",))
    machine.wait_step(3)
    child = machine.json("supervisor.json")["child_pid"]
    command.send(signal.SIGINT)
    assert command.wait() in (1, 130)
    assert ending(machine)[:2] == ("cancelled", "cancelled")
    assert not alive(child)
    assert not list((machine.home / "targets").glob("*.json"))


def test_sigterm_is_preempted_and_names_the_checkpoint(machine):
    command = machine.exec_tiny("--steps", "500", "--step-seconds", "0.05", options=("--no-linger",))
    machine.wait_step(12)
    wait_for(lambda: machine.scrape().get("checkpoint_last_step"), what="a complete checkpoint")
    command.send(signal.SIGTERM)
    command.send(signal.SIGTERM)  # harmless
    assert command.wait() == 143
    state, reason, when = ending(machine)
    assert (state, reason, when) == ("failed", "preempted", "late")
    assert "checkpoint-" in machine.verdict()["ending"]["advice"]


def test_kill_minus_nine_of_the_supervisor_then_adopt(machine):
    tuned = ("--off", "flat", "--threshold", "flat_logs=50")
    command = machine.exec_tiny("--steps", "200", "--step-seconds", "0.1", options=tuned)
    machine.wait_step(5)
    before = machine.json("supervisor.json")
    command.send(signal.SIGKILL)
    command.process.wait()
    assert alive(before["child_pid"])
    assert (machine.home / "targets" / f"{machine.run_folder().name}.json").exists()
    step = machine.verdict()["step"]
    adopted = machine.start("adopt", machine.run_folder().name, "--no-linger")
    wait_for(lambda: machine.json("supervisor.json")["pid"] == adopted.process.pid, what="the new supervisor")
    machine.wait_step(step + 5)
    samples = machine.scrape()
    known = machine.json("supervisor.json")
    assert (known["off"], known["thresholds"]) == (["flat"], {"flat_logs": 50}), "kept over the adoption"
    assert samples.get("health", signal="flat") is None and samples.get("health", signal="stalled") == 0.0
    assert samples.get("steps_total") == samples.get("step")  # counters come from the pulse, not from zero
    assert (
        samples.get("run_state", state="training") == 1.0
        or samples.get("run_state", state="validating") == 1.0
    )
    second = machine.start("adopt", machine.run_folder().name)
    assert second.wait() == 2
    assert "is watched already" in second.output
    os.kill(before["child_pid"], signal.SIGKILL)
    adopted.wait()
    assert ending(machine)[:2] == ("failed", "unknown")


@pytest.mark.slow
def test_the_training_does_not_notice_a_stopped_supervisor(machine):
    """Thirty seconds of SIGSTOP and 10 MB on stderr: no call of ours on the training thread takes 5 ms."""
    command = machine.exec_tiny(
        "--steps",
        "100000",
        "--step-seconds",
        "0.01",
        "--noise-mb",
        "10",
        "--save-steps",
        "100000",
        "--eval-steps",
        "100000",
    )
    machine.wait_step(10)
    child = machine.json("supervisor.json")["child_pid"]
    from tunewatch.runfolder import RunFolder

    folder = RunFolder(machine.run_folder())
    command.send(signal.SIGSTOP)
    before = folder.pulses()[0]
    until = before["activity_monotonic"] + 30
    wait_for(lambda: folder.pulses()[0]["activity_monotonic"] > until, seconds=60, what="30 s of training")
    after = folder.pulses()[0]
    command.send(signal.SIGCONT)
    assert after["step"] > before["step"] + 100
    assert after["hook_max_seconds"] < 0.005
    assert after["hook_errors"] == 0
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: machine.verdict()["state"] == "failed")
    command.send(signal.SIGTERM)
    command.wait()
    # Thirty silent seconds were the supervisor's own: not a stall.
    assert ending(machine)[1] == "killed_signal_9"


def test_resume_goes_on_under_the_same_id(machine):
    assert machine.exec_tiny("--steps", "4", options=("--no-linger", "--run-id", "again")).wait() == 0
    command = machine.exec_tiny(
        "--steps", "8", "--resume", "--step-seconds", "0.3", options=("--no-linger", "--run-id", "again")
    )
    machine.wait_step(6)
    samples = machine.scrape()
    assert samples.get("resumes_total") == 1
    assert samples.get("steps_total") == samples.get("step") - 4
    assert samples.get("resume_lost", part="optimizer") == 0
    assert samples.get("tokens_seen", kind="non_padding") == 20 * 4 * samples.get("step")
    assert samples.get("tokens_total", kind="non_padding") == 20 * 4 * samples.get("steps_total")
    assert command.wait() == 0
    assert machine.verdict()["step"] == 8


@pytest.mark.slow
def test_a_resume_without_optimizer_is_said_before_the_first_step(machine):
    assert machine.exec_tiny("--steps", "4", "--save-only-model", options=("--no-linger",)).wait() == 0
    for path in (machine.home / "runs").iterdir():
        import shutil

        shutil.rmtree(path)
    command = machine.exec_tiny("--steps", "8", "--resume", options=("--no-linger",))
    assert command.wait() == 0
    lost = next(signal for signal in machine.verdict()["signals"] if signal["signal"] == "resume_lost")
    assert lost["level"] == "bad"
    assert lost["step"] == 4
    assert "optimizer and learning rate schedule" in lost["message"]


def test_our_own_callback_under_exec_reports_once(machine):
    command = machine.exec_tiny("--steps", "4", "--own-callback", options=("--no-linger",))
    assert command.wait() == 0, command.output[-2000:]
    assert len(machine.events("train_begin")) == 1
    assert len([event for event in machine.events("log") if "loss" in event["values"]]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["complete", "kill_rank", "ctrl_c"])
def test_torchrun_leaves_no_descendant(machine, end):
    flags = ["--steps", "6" if end == "complete" else "500", "--step-seconds", "0.05", "--accumulation", "1"]
    if end == "kill_rank":
        flags += ["--kill-at", "20", "--kill-rank", "1"]
    command = machine.start(
        "exec", "--no-linger", "--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-port", str(free_port()), str(TINY), str(machine.folder / "out"), *flags,
    )  # fmt: skip
    machine.wait_step(2)
    ranks = {event["rank"]: event["pid"] for event in machine.events("session")}
    assert set(ranks) == {0, 1}
    if end == "ctrl_c":
        command.send(signal.SIGINT)
    code = command.wait(120)
    assert not any(alive(pid) for pid in ranks.values())
    expected = {
        "complete": ("completed", ""),
        "kill_rank": ("failed", "rank_killed"),
        "ctrl_c": ("cancelled", "cancelled"),
    }
    assert ending(machine)[:2] == expected[end], command.output[-3000:]
    assert (code == 0) == (end == "complete")


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_callback_in_a_script_starts_its_own_supervisor(machine):
    environment = {**machine.environment, "TUNEWATCH_RUN_ID": "from-callback"}
    process = subprocess.Popen(
        [sys.executable, str(TINY), str(machine.folder / "out"), "--own-callback", "--steps", "60",
         "--step-seconds", "0.1", "--off", "flat"],
        env=environment, cwd=machine.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        machine.run_folder(seconds=120)  # it is made by the training, once its libraries are imported
        machine.wait_step(3)
        samples = machine.scrape()
        assert samples.get("attached") == 1
        assert samples.get("health", signal="flat") is None and samples.get("health", signal="stalled") == 0.0
        assert process.wait(60) == 0
        wait_for(lambda: machine.verdict()["state"] == "completed", what="completed")
    finally:
        process.kill()
        process.wait()
    assert machine.verdict()["step"] == 60


def test_bad_usage(machine):
    cases = [
        (("exec",), "no command given"),
        (("exec", "--listen", "nonsense", "--", "true"), "--listen 'nonsense': expected HOST:PORT"),
        (("exec", "--patience", "stepp=5m", "--", "true"), "with one of prepare, imports, download"),
        (("exec", "--patience", "step=soon", "--", "true"), "'soon' is no duration"),
        (("exec", "--off", "overfiting", "--", "true"), "did you mean 'overfitting'?"),
        (("exec", "--threshold", "flat_log=2", "--", "true"), "did you mean 'flat_logs'?"),
        (("exec", "--run-id", "a/b", "--", "true"), "run id 'a/b' is not allowed"),
        (("adopt", "nobody"), "no run 'nobody'"),
    ]
    for arguments, words in cases:
        code, output = machine.run(*arguments)
        assert code == 2, (arguments, output)
        assert words in output, output


def test_a_named_port_that_is_taken(machine):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, output = machine.run("exec", "--listen", f"127.0.0.1:{port}", "--", "true")
    assert code == 2
    assert f"port {port} on 127.0.0.1 is taken" in output


def test_a_home_that_can_not_be_written(machine):
    machine.folder.joinpath("file").write_text("")
    code, output = machine.run("exec", "--", "true", TUNEWATCH_HOME=str(machine.folder / "file" / "home"))
    assert code == 2
    assert "can not be written" in output
    assert "Set TUNEWATCH_HOME" in output


def test_an_unscraped_completed_run_leaves_at_once(machine):
    began = time.monotonic()
    assert machine.run("exec", "--", "true")[0] == 0
    assert time.monotonic() - began < 30  # far below the minute that an unscraped failure waits


@pytest.fixture
def small_memory(machine):
    """A memory cgroup of 200 MB (v1 or v2); returns the file that takes a pid."""
    roots = {"v1": Path("/sys/fs/cgroup/memory"), "v2": Path("/sys/fs/cgroup")}
    kind = "v1" if (roots["v1"] / "memory.limit_in_bytes").exists() else "v2"
    group = roots[kind] / f"tunewatch-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if kind == "v1" else "memory.max")).write_text(str(200_000_000))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group / "cgroup.procs"
    machine.close()
    wait_for(lambda: not (group / "cgroup.procs").read_text().strip(), what="the cgroup to be empty")
    group.rmdir()


def test_a_kill_by_the_kernel_for_memory_is_oom_host(machine, small_memory):
    """The kernel's own out-of-memory killer, in a group of our own; the exit code alone would say SIGKILL."""
    eat = "data = [bytearray(10_000_000) for _ in range(100)]"
    watch = f"{sys.executable} -m tunewatch exec --no-linger -- {sys.executable} -c '{eat}'"
    shell = f"echo $$ > {small_memory} && exec {watch}"
    done = subprocess.run(
        ["sh", "-c", shell], env=machine.environment, cwd=machine.folder, check=False, timeout=120
    )
    assert done.returncode == 137
    assert ending(machine)[:2] == ("failed", "oom_host")


def test_a_home_on_a_read_only_disk(machine):
    if os.geteuid() != 0:
        pytest.skip("mounting a read-only disk needs root")
    disk = machine.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=100k", "tmpfs", disk], check=True)
    try:
        code, output = machine.run("exec", "--", "true", TUNEWATCH_HOME=str(disk / "home"))
    finally:
        subprocess.run(["umount", disk], check=True)
    assert code == 2
    assert f"TUNEWATCH_HOME {disk / 'home'} can not be written: Read-only file system" in output

"""`tunewatch train` from the outside: a run file in, a watched run and a word about it out."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest
import yaml
from harness import Machine, wait_for

ROWS = [{"text": f"the sum of {a} and {b} is {a + b}"} for a in range(6) for b in range(6)]


def write_config(folder: Path, **changes: object) -> Path:
    """A small valid run file, with changes; a value of None takes the key out."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config: dict[str, object] = {
        "name": "sums",
        "model": "tunewatch:tiny",
        "dataset": {"path": "rows.jsonl", "eval_fraction": 0.2},
        "output_dir": "out",
        "training": {"max_steps": 8, "per_device_train_batch_size": 2, "logging_steps": 2, "save_steps": 4},
        "samples": 2,
        **changes,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


def test_a_run_from_start_to_package(machine: Machine):
    config = write_config(machine.folder)
    code, output = machine.run("train", str(config), "--no-linger")
    assert code == 0, output
    verdict = machine.verdict()
    assert (verdict["state"], verdict["step"], verdict["health"]) == ("completed", 8, "ok")
    assert "completed" in output
    facts = json.loads((machine.folder / "out" / "run.json").read_text())
    assert facts["run_id"] == machine.run_folder().name
    info = facts["info"]
    assert info["method"] == "lora"
    assert info["base_model"] == "tunewatch-tiny"
    assert info["dataset"] == "rows.jsonl"
    assert (
        info["dataset_hash"]
        == "sha256:" + hashlib.sha256((machine.folder / "rows.jsonl").read_bytes()).hexdigest()
    )
    assert (info["eval_overlap_rows"], info["eval_rows"], info["dataset_rows"]) == (0, 7, 29)
    assert "2 samples, none reviewed: tunewatch samples show" in output
    listed = machine.run("runs")[1]
    assert listed.rstrip().endswith("step 8/8 (100%), evaluated, 2 samples, none reviewed")
    assert (machine.folder / "out" / "final" / "adapter_model.safetensors").exists()
    states = [event["state"] for event in machine.events("state")]
    assert states[-1] == "packaging"
    # Nothing of the child was printed over the display: it is in the log.
    assert "train_runtime" not in output
    assert "train_runtime" in (machine.run_folder() / "child.log").read_text()


@pytest.mark.slow
def test_resume_goes_on_with_the_same_run(machine: Machine):
    training = {"max_steps": 400, "per_device_train_batch_size": 2, "logging_steps": 2, "save_steps": 4}
    config = write_config(machine.folder, training=training)
    command = machine.start("train", str(config), "--no-linger")
    wait_for(lambda: (machine.folder / "out" / "checkpoint-8" / "trainer_state.json").exists(), seconds=90)
    command.send(signal.SIGTERM)
    assert command.wait() == 1
    verdict = machine.verdict()
    assert verdict["ending"]["reason"] == "preempted"
    stopped_at = verdict["step"]
    run_id = machine.run_folder().name
    training = {**training, "max_steps": stopped_at + 4}
    code, output = machine.run(
        "train", str(write_config(machine.folder, training=training, resume=True)), "--no-linger"
    )
    assert code == 0, output
    assert [path.name for path in (machine.home / "runs").iterdir()] == [run_id]
    verdict = machine.verdict()
    assert (verdict["state"], verdict["step"]) == ("completed", stopped_at + 4)
    assert machine.json("run.json")["sessions"] == 2


@pytest.mark.slow
def test_what_a_run_is_stays_what_it_was_when_it_began(machine: Machine):
    """The file is edited, and used again for other runs, while and after the first one trains."""
    training = {"max_steps": 8, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_steps": 8}
    config = write_config(machine.folder, training=training, lora={"r": 4}, samples=0)
    command = machine.start("train", str(config), "--no-linger")
    folder = machine.run_folder()
    copy = (folder / "config.yaml").read_text()

    other = {**training, "learning_rate": 5e-2, "max_steps": 3}
    write_config(machine.folder, name="other", training=other, lora={"r": 32}, samples=0)
    code, output = machine.run("train", str(config), "--run-id", folder.name)
    assert code == 2 and f"run {folder.name} is watched already" in output
    assert command.wait() == 0, command.output

    facts = json.loads((folder / "run.json").read_text())
    info = facts["info"]
    shown = {
        key: info[key] for key in ("name", "learning_rate", "lora_r", "lora_alpha", "max_steps", "batch_size")
    }
    assert shown == {
        "name": "sums", "learning_rate": 1e-3, "lora_r": 4, "lora_alpha": 8, "max_steps": 8, "batch_size": 2,
    }  # fmt: skip
    assert info["lora_target_modules"] == "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert facts["sessions"] == 1 and (folder / "config.yaml").read_text() == copy

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, _ = machine.run("train", str(config), "--no-linger")
    assert code == 1, "out holds checkpoints of the first run"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modle": "x"}, ["modle", "unknown key", "did you mean 'model'"]),
        ({"output_dir": None}, ["output_dir"]),
        ({"training": ["max_steps"]}, ["training"]),
        ({"patience": {"step": "soon"}}, ["patience.step", "soon"]),
    ],
    ids=["unknown_key", "missing_key", "wrong_type", "bad_duration"],
)
def test_a_bad_run_file_is_refused_before_anything_starts(machine: Machine, changes: dict, words: list[str]):
    code, output = machine.run("train", str(write_config(machine.folder, **changes)))
    assert code == 2
    for word in words:
        assert word in output
    assert "Traceback" not in output
    assert not (machine.home / "runs").exists()


def test_a_deadline_that_is_over(machine: Machine):
    code, output = machine.run("train", str(write_config(machine.folder, deadline="2020-01-01T00:00Z")))
    assert code == 2
    assert "deadline: 2020-01-01T" in output and "is over: a deadline must lie ahead" in output
    assert not (machine.home / "runs").exists()


def test_a_run_file_that_is_not_there(machine: Machine):
    code, output = machine.run("train", str(machine.folder / "nothing.yaml"))
    assert code == 2
    assert "nothing.yaml" in output


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"dataset": "row.jsonl"}, "missing_file", ["row.jsonl", "rows.jsonl"]),
        pytest.param(
            {"training": {"max_stepps": 3}},
            "config",
            ["training.max_stepps", "max_steps"],
            marks=pytest.mark.slow,
        ),
        pytest.param({"model": "./no-model"}, "missing_file", ["no-model"], marks=pytest.mark.slow),
        ({"resume": True}, "config", ["resume", "checkpoint"]),
    ],
    ids=["missing_data", "unknown_training_key", "missing_model", "resume_without_checkpoint"],
)
def test_what_only_the_job_can_see_fails_early_with_its_reason(
    machine: Machine, changes: dict, reason: str, words
):
    code, output = machine.run("train", str(write_config(machine.folder, **changes)), "--no-linger")
    assert code == 1
    ending = machine.verdict()["ending"]
    assert (ending["reason"], ending["when"]) == (reason, "early"), ending
    for word in words:
        assert word in output, output
    assert "Traceback" not in output


def test_a_named_port_that_is_taken(machine: Machine):
    import socket

    config = write_config(machine.folder)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, output = machine.run("train", str(config), "--listen", f"127.0.0.1:{port}")
    assert code == 2
    assert f"port {port} on 127.0.0.1 is taken" in output

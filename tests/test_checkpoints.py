"""Which checkpoints a resume can trust: real ones, damaged in every way that was seen, against what really loads."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from harness import TINY

from tunewatch.supervisor import checkpoints
from tunewatch.supervisor.checkpoints import inspect, newest_complete, newest_resumable, scan

torch = pytest.importorskip("torch")

INFERENCE_ONLY = "good for inference, not for an exact resume"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The output folder of a real training: checkpoint-2 and checkpoint-4."""
    output = tmp_path_factory.mktemp("checkpoints") / "out"
    train(output, "--steps", "4", "--save-steps", "2", "--eval-steps", "4", check=True)
    return output


def train(output, *flags, check=False):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, str(TINY), str(output), "--accumulation", "1", *flags],
        env=environment, check=check, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture
def output(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "out"))


@pytest.fixture
def newest(output):
    return output / "checkpoint-4"


def cut(file, keep=0.5):
    os.truncate(file, int(file.stat().st_size * keep))


def test_real_ones_are_complete_and_resumable(output):
    found = scan(output)
    assert [(item.step, item.name) for item in found] == [(2, "checkpoint-2"), (4, "checkpoint-4")]
    assert all(item.complete and item.resumable and item.problem == "" for item in found)
    newest = output / "checkpoint-4"
    assert found[1].size_bytes == sum(file.stat().st_size for file in newest.iterdir())
    assert found[1].saved_at == max(file.stat().st_mtime for file in newest.iterdir())
    assert newest_complete(found) == newest_resumable(found) == found[1]


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.999])
def test_weights_cut_off(newest, keep):
    weights = newest / "adapter_model.safetensors"
    cut(weights, keep)
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable) == (False, False)
    assert checkpoint.problem == "adapter_model.safetensors is cut off"
    from safetensors import SafetensorError, safe_open

    with pytest.raises(SafetensorError), safe_open(str(weights), "pt") as file:
        file.keys()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_training_state_cut_off(newest, name, keep):
    cut(newest / name, keep)
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable) == (True, False)
    assert checkpoint.problem == f"{name} is cut off"
    with pytest.raises((RuntimeError, EOFError, OSError)):
        torch.load(newest / name, weights_only=False)


@pytest.mark.parametrize(
    ("name", "part"), [("optimizer.pt", "optimizer"), ("scheduler.pt", "scheduler"), ("rng_state.pth", "RNG")]
)
def test_training_state_missing(newest, name, part):
    """As save_only_model leaves it (all three), or somebody who saves space."""
    (newest / name).unlink()
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable) == (True, False)
    assert checkpoint.problem == f"no {part} state: {INFERENCE_ONLY}"
    assert newest_complete(scan(newest.parent)).step == 4
    assert newest_resumable(scan(newest.parent)).step == 2


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "trainer_state.json is missing: the save did not finish"),
        ("", "trainer_state.json is cut off"),
        ('{"global_step": 4, "log_his', "trainer_state.json is cut off"),
        ("[4]", "trainer_state.json is cut off"),
        ("{}", "trainer_state.json is of step None"),
        ('{"global_step": 2}', "trainer_state.json is of step 2"),
    ],
)
def test_trainer_state(newest, content, problem):
    state = newest / "trainer_state.json"
    state.unlink() if content is None else state.write_text(content)
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable, checkpoint.problem) == (False, False, problem)


def test_the_mark_of_a_sigterm_checkpoint_under_way(newest):
    (newest / "checkpoint-is-incomplete.txt").write_text("Checkpoint started at step 4 and in progress...")
    checkpoint = inspect(newest)
    assert not checkpoint.complete
    assert checkpoint.problem == "still being written when the training was terminated"


def test_no_weights_at_all(newest):
    (newest / "adapter_model.safetensors").unlink()
    assert inspect(newest).problem == "no weights"


def shard(folder):
    """Make the weights two shards with an index, as save_pretrained writes a large model."""
    weights = folder / "adapter_model.safetensors"
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        shutil.copy(weights, folder / name)
    weights.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}))
    return names, index


def test_shards(newest):
    names, index = shard(newest)
    assert inspect(newest).resumable
    cut(newest / names[1])
    assert inspect(newest).problem == f"{names[1]} is cut off"
    (newest / names[1]).unlink()
    assert inspect(newest).problem == f"{names[1]} is missing"
    for content in (
        "",
        "[]",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": [1]}}',
        '{"weight_map": {"a": 7}}',
    ):
        index.write_text(content)
        assert inspect(newest).problem == f"{index.name} is broken", content
    index.unlink()
    assert inspect(newest).problem == "the index of the weights' shards is missing"


@pytest.mark.parametrize(
    "header",
    [b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0, "x"]}}', b'{"a": {"data_offsets": [0]}}', b'{"a": {}}', b"\xff"],
)  # fmt: skip
def test_a_header_that_is_nonsense(newest, header):
    (newest / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert inspect(newest).problem == "adapter_model.safetensors is cut off"


@pytest.mark.parametrize("name", ["trainer_state.json", "adapter_model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("what", ["/dev/zero", "pipe", "folder", "nowhere"])
def test_what_is_no_file_is_never_opened(newest, name, what):
    """Reading /dev/zero has no end, and opening a pipe waits for ever: the test would hang."""
    path = newest / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(what)
    checkpoint = inspect(newest)
    assert not checkpoint.resumable or (name, what) == ("optimizer.pt", "folder")
    assert checkpoint.complete == (name == "optimizer.pt")


def deepspeed(folder):
    """The layout of DeepSpeed's save_checkpoint below a transformers checkpoint."""
    inner = folder / "global_step4"
    inner.mkdir()
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"module": {}}, inner / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch.save({"state": {}}, inner / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step4\n")
    return inner


def test_deepspeed(newest):
    inner = deepspeed(newest)
    assert inspect(newest).resumable
    optimizer = inner / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    cut(optimizer)
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable) == (True, False)
    assert checkpoint.problem == f"{optimizer.name} is cut off"
    cut(inner / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert not inspect(newest).complete
    (newest / "latest").unlink()
    assert inspect(newest).problem == "DeepSpeed's file 'latest' is missing: the save did not finish"


def test_sharded_fsdp(newest):
    """torch.distributed.checkpoint's folders; `.metadata` comes last."""
    for name in ("optimizer.pt", "adapter_model.safetensors"):
        (newest / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (newest / name).mkdir()
        (newest / name / "__0_0.distcp").write_bytes(b"data")
        (newest / name / ".metadata").write_bytes(b"metadata")
    assert inspect(newest).resumable
    (newest / "optimizer_0" / ".metadata").unlink()
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable) == (True, False)
    assert checkpoint.problem == "optimizer_0 has no .metadata: the save did not finish"
    (newest / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert not inspect(newest).complete


def test_full_state_fsdp(newest):
    (newest / "adapter_model.safetensors").unlink()
    (newest / "optimizer.pt").rename(newest / "optimizer.bin")
    torch.save({"weight": torch.zeros(2)}, newest / "pytorch_model_fsdp.bin")
    assert inspect(newest).resumable
    cut(newest / "pytorch_model_fsdp.bin")
    assert inspect(newest).problem == "pytorch_model_fsdp.bin is cut off"


def test_one_rng_state_a_rank(newest):
    (newest / "rng_state.pth").rename(newest / "rng_state_0.pth")
    shutil.copy(newest / "rng_state_0.pth", newest / "rng_state_1.pth")
    assert inspect(newest).resumable
    cut(newest / "rng_state_1.pth")
    assert inspect(newest).problem == "rng_state_1.pth is cut off"


def test_the_format_before_torch_1_6(newest):
    state = torch.load(newest / "optimizer.pt", weights_only=False)
    torch.save(state, newest / "optimizer.pt", _use_new_zipfile_serialization=False)
    assert inspect(newest).resumable


def test_what_is_no_checkpoint_folder(output):
    (output / "checkpoint-best").mkdir()
    (output / "checkpoint-").mkdir()
    (output / "checkpoint-7").write_text("a file")
    (output / "runs").mkdir()
    assert [item.step for item in scan(output)] == [2, 4]
    assert scan(output / "nowhere") == []
    assert newest_complete([]) is None


def test_by_number_and_not_by_name(output):
    for step in (10, 100):
        folder = Path(shutil.copytree(output / "checkpoint-4", output / f"checkpoint-{step}"))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert [item.step for item in scan(output)] == [2, 4, 10, 100]
    assert newest_resumable(scan(output)).step == 100


@pytest.mark.parametrize("moment", ["_state_problem", "_weights_problem", "_resume_problem"])
def test_a_checkpoint_that_is_rotated_away_while_we_look(output, monkeypatch, moment):
    real = getattr(checkpoints, moment)

    def vanish(path, *rest):
        if path.name == "checkpoint-4":
            shutil.rmtree(path, ignore_errors=True)
        return real(path, *rest)

    monkeypatch.setattr(checkpoints, moment, vanish)
    found = {item.step: item for item in scan(output)}
    assert found[2].resumable
    assert 4 not in found or not found[4].resumable


def test_an_unchanged_one_is_not_read_again_and_a_changed_one_is(output, monkeypatch):
    first = scan(output)
    read = []
    real = checkpoints._state_problem
    monkeypatch.setattr(
        checkpoints, "_state_problem", lambda path, step: read.append(path.name) or real(path, step)
    )
    assert scan(output, known=first) == first
    assert read == []
    cut(output / "checkpoint-4" / "adapter_model.safetensors")
    second = scan(output, known=first)
    assert read == ["checkpoint-4"]
    assert not second[1].complete
    scan(output, known=second)
    assert read == ["checkpoint-4"] * 2, "one that is not complete may be under way"


def test_rotation(output):
    """save_total_limit: the folder goes away as a whole."""
    before = scan(output)
    shutil.rmtree(output / "checkpoint-2")
    assert [item.step for item in scan(output, known=before)] == [4]


@pytest.mark.parametrize(
    ("damage", "resumes"),
    [("none", True), ("weights", False), ("optimizer", False), ("trainer_state", False)],
)
def test_transformers_agrees(output, damage, resumes):
    """What we call resumable, transformers resumes; what we call broken, it dies of."""
    newest = output / "checkpoint-4"
    if damage == "weights":
        cut(newest / "adapter_model.safetensors")
    elif damage == "optimizer":
        cut(newest / "optimizer.pt")
    elif damage == "trainer_state":
        (newest / "trainer_state.json").unlink()
    assert inspect(newest).resumable == resumes
    done = train(output, "--steps", "5", "--save-steps", "5", "--eval-steps", "5", "--resume")
    assert (done.returncode == 0) == resumes, done.stderr[-2000:]

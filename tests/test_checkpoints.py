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
from tunewatch.supervisor.checkpoints import (
    how_many_fit,
    inspect,
    newest_complete,
    newest_resumable,
    recorded_step,
    scan,
    would_resume,
)

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
    assert [item.kind for item in found] == ["resumable", "resumable"]
    assert found[1].files == len(list((output / "checkpoint-4").iterdir()))
    newest = output / "checkpoint-4"
    assert found[1].size_bytes == sum(file.stat().st_size for file in newest.iterdir())
    assert found[1].saved_at == max(file.stat().st_mtime for file in newest.iterdir())
    assert newest_complete(found) == newest_resumable(found) == found[1]


@pytest.mark.parametrize("keep", [0.0, 0.02, 0.5, 0.999])
def test_weights_cut_off(newest, keep):
    weights = newest / "adapter_model.safetensors"
    cut(weights, keep)
    checkpoint = inspect(newest)
    assert (checkpoint.complete, checkpoint.resumable, checkpoint.kind) == (False, False, "broken")
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
    assert checkpoint.kind == "inference"
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
    optimizer.rename(inner / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (inner / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    torch.save({"module": {}}, inner / "mp_rank_00_model_states.pt")
    torch.save({"state": {}}, inner / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert inspect(newest).problem == "*optim_states.pt of rank 0 is missing"
    (newest / "latest").write_text("")
    assert inspect(newest).problem == "DeepSpeed's file 'latest' is empty: the save did not finish"
    (newest / "latest").unlink()
    assert inspect(newest).problem == "DeepSpeed's file 'latest' is missing: the save did not finish"


def test_sharded_fsdp(newest):
    """torch.distributed.checkpoint's folders; `.metadata` comes last."""
    from torch.distributed.checkpoint import FileSystemWriter, save

    for name in ("optimizer.pt", "adapter_model.safetensors"):
        (newest / name).unlink()
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        save({"a": torch.zeros(100)}, storage_writer=FileSystemWriter(newest / name), no_dist=True)
    assert inspect(newest).resumable
    shard = next((newest / "optimizer_0").glob("*.distcp"))
    cut(shard, 0)
    assert inspect(newest).problem == "optimizer_0 has an empty shard"
    shard.unlink()
    assert inspect(newest).problem == "optimizer_0 has no shard"
    cut(newest / "optimizer_0" / ".metadata")
    shard.write_bytes(b"data")
    assert inspect(newest).problem == "optimizer_0: .metadata is cut off"
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


def ranks(folder, count):
    """RNG states as a training of so many ranks leaves them."""
    for rank in range(count):
        shutil.copy(folder / "rng_state.pth", folder / f"rng_state_{rank}.pth")
    (folder / "rng_state.pth").unlink()


def test_one_rng_state_a_rank(newest):
    ranks(newest, 4)
    assert inspect(newest).resumable
    assert inspect(newest, world_size=4).resumable
    cut(newest / "rng_state_1.pth")
    assert inspect(newest).problem == "rng_state_1.pth is cut off"


@pytest.mark.parametrize(
    ("left", "world_size", "missing"),
    [([0, 2, 3], None, 1), ([1], None, 0), ([0], None, 1), ([0, 1, 2], 4, 3), ([0, 1], 3, 2)],
)
def test_a_rank_without_its_rng_state(newest, left, world_size, missing):
    """Only several ranks number their files: rank 0 alone lacks its neighbour."""
    ranks(newest, 4)
    for rank in {0, 1, 2, 3} - set(left):
        (newest / f"rng_state_{rank}.pth").unlink()
    checkpoint = inspect(newest, world_size=world_size)
    assert (checkpoint.kind, checkpoint.problem) == (
        "inference", f"no RNG state of rank {missing}: not for an exact resume",
    )  # fmt: skip


def test_another_world_size(newest):
    assert inspect(newest, world_size=1).resumable
    assert inspect(newest, world_size=2).problem == "no RNG state of rank 0: not for an exact resume"
    ranks(newest, 2)
    assert inspect(newest, world_size=1).problem.endswith(
        "none for a single process: not for an exact resume"
    )
    assert not scan(newest.parent, world_size=1)[-1].resumable


def old_format(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def test_the_format_before_torch_1_6(newest):
    """Pickles, and behind them the tensors' bytes: a file cut off anywhere is seen, and nothing of it is loaded."""
    state = torch.load(newest / "optimizer.pt", weights_only=False)
    old_format(state, newest / "optimizer.pt")
    assert inspect(newest).resumable
    whole = (newest / "optimizer.pt").read_bytes()
    for keep in [*range(0, len(whole), 97), len(whole) - 1]:
        (newest / "optimizer.pt").write_bytes(whole[:keep])
        assert inspect(newest).problem == "optimizer.pt is cut off", keep
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(2, 2))
    for value in (
        model,
        model.half().state_dict(),
        {"a": torch.ones(3, dtype=torch.bool)},
        {"last_epoch": 3},
    ):
        old_format(value, newest / "optimizer.pt")
        assert inspect(newest).resumable, value


def test_a_pickle_runs_nothing(newest):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(newest / "evil"),)

    old_format({"state": Evil()}, newest / "optimizer.pt")
    assert inspect(newest).resumable
    assert not (newest / "evil").exists()


def test_a_plain_pickle(newest):
    import pickle

    data = pickle.dumps({"last_epoch": 4, "text": "x" * 100})
    (newest / "scheduler.pt").write_bytes(data)
    assert inspect(newest).resumable
    (newest / "scheduler.pt").write_bytes(data[:-1])
    assert inspect(newest).problem == "scheduler.pt is cut off"


@pytest.mark.parametrize("name", ["adapter_config.json", "config.json"])
def test_a_configuration_that_is_cut_off(newest, name):
    (newest / name).write_text('{"peft_type": "LO')
    assert (inspect(newest).kind, inspect(newest).problem) == ("broken", f"{name} is cut off")


def test_adapters_in_folders_of_their_own(newest):
    """As peft saves those that are not named "default"."""
    (newest / "policy").mkdir()
    weights = (newest / "adapter_model.safetensors").rename(newest / "policy" / "adapter_model.safetensors")
    (newest / "adapter_config.json").rename(newest / "policy" / "adapter_config.json")
    assert inspect(newest).resumable
    assert inspect(newest).size_bytes == sum(f.stat().st_size for f in newest.rglob("*") if f.is_file())
    cut(weights)
    assert inspect(newest).problem == "adapter_model.safetensors is cut off"


def large_state(step, entries, **layout):
    history = [
        {"loss": 1.5, "note": 'a "quoted" {brace}', "global_step": 1, "step": n} for n in range(entries)
    ]
    state = {
        "best_metric": None, "epoch": 1.0, "global_step": step, "log_history": history,
        "stateful_callbacks": {"TrainerControl": {"args": {"global_step": 7}}},
    }  # fmt: skip
    return json.dumps(state, **layout) + "\n"


SAVED = {"indent": 2, "sort_keys": True}


@pytest.mark.parametrize("layout", [SAVED, {}, {"indent": 4}], ids=["as saved", "one line", "other indent"])
def test_a_trainer_state_of_many_megabytes(newest, layout):
    state = newest / "trainer_state.json"
    text = large_state(4, 20_000, **layout)
    state.write_text(text)
    assert state.stat().st_size > checkpoints.LARGE_STATE_BYTES
    assert inspect(newest).resumable
    state.write_text(large_state(6, 20_000, **layout))
    assert inspect(newest).problem == "trainer_state.json is of step 6"
    for gone in (2, 3, 60, 500_000, len(text) - checkpoints.LARGE_STATE_BYTES - 10):
        state.write_text(text[:-gone])
        assert inspect(newest).problem == "trainer_state.json is cut off", gone


def test_a_large_state_that_begins_with_its_history(newest):
    state = newest / "trainer_state.json"
    entries = ", ".join(['{"loss": 1.5, "global_step": 2, "note": "]}"}'] * 40_000)
    state.write_text('{"log_history": [' + entries + '], "global_step": 4}')
    assert recorded_step(state) == 4
    state.write_text('{"log_history": [' + entries + "]}")
    assert recorded_step(state) is None


def test_of_fifty_megabytes_little_is_read(newest):
    import tracemalloc

    state = newest / "trainer_state.json"
    state.write_text(large_state(4, 450_000, **SAVED))
    assert state.stat().st_size > 50e6
    tracemalloc.start()
    try:
        assert inspect(newest).resumable
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_links(output, tmp_path):
    """A checkpoint may lie on another disk, and its name may be a lie."""
    elsewhere = tmp_path / "elsewhere"
    (output / "checkpoint-4").rename(elsewhere)
    (output / "checkpoint-4").symlink_to(elsewhere)
    (output / "checkpoint-8").symlink_to(elsewhere)
    (output / "checkpoint-9").symlink_to(tmp_path / "nowhere")
    (output / "checkpoint-10").symlink_to("checkpoint-10")
    found = {item.step: item for item in scan(output)}
    assert found[4].resumable
    assert found[4].size_bytes == sum(file.stat().st_size for file in elsewhere.iterdir())
    assert found[8].problem == "trainer_state.json is of step 4"
    assert set(found) == {2, 4, 8}


def test_which_one_a_resume_takes_and_which_it_should(output):
    from transformers.trainer_utils import get_last_checkpoint

    for step in (20, 30):
        folder = Path(shutil.copytree(output / "checkpoint-4", output / f"checkpoint-{step}"))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (output / "checkpoint-30" / "trainer_state.json").unlink()
    found = scan(output)
    assert str(would_resume(found).path) == get_last_checkpoint(str(output))
    assert (would_resume(found).name, would_resume(found).complete) == ("checkpoint-30", False)
    assert newest_complete(found).name == "checkpoint-20"
    assert would_resume([]) is None


@pytest.mark.parametrize(
    ("free_bytes", "free_inodes", "size", "files", "expected"),
    [
        (1000, 1000, 300, 10, 3),
        (1000, 25, 300, 10, 2),
        (1000, None, 300, 10, 3),
        (299, 1000, 300, 10, 0),
        (1000, 0, 300, 10, 0),
        (-5, None, 300, 10, 0),
        (1000, None, 0, 10, None),
        (1000, 100, 0, 10, 10),
    ],
)
def test_how_many_more_fit(free_bytes, free_inodes, size, files, expected):
    assert how_many_fit(free_bytes, free_inodes, size, files) == expected


def test_thousands_of_checkpoints(output):
    """A second look at them reads none again, and opens no file."""
    for step in range(1000, 3000):
        folder = output / f"checkpoint-{step}"
        folder.mkdir()
        for file in (output / "checkpoint-4").iterdir():
            (folder / file.name).hardlink_to(file)
        (folder / "trainer_state.json").unlink()
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    found = scan(output)
    assert len(found) == 2002
    assert all(item.resumable for item in found)
    assert all(new is old for new, old in zip(scan(output, known=found), found, strict=True))


def test_a_folder_that_may_not_be_read(newest, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints, "_weights_problem", refuse)
    assert inspect(newest).problem == "it can not be read: Permission denied"
    assert inspect(newest).kind == "broken"


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
    [
        ("none", True),
        ("weights", False),
        pytest.param("optimizer", False, marks=pytest.mark.slow),
        pytest.param("trainer_state", False, marks=pytest.mark.slow),
        pytest.param("config", False, marks=pytest.mark.slow),
    ],
)
def test_transformers_agrees(output, damage, resumes):
    """What we call resumable, transformers resumes; what we call broken, it dies of."""
    newest = output / "checkpoint-4"
    if damage == "weights":
        cut(newest / "adapter_model.safetensors")
    elif damage == "optimizer":
        cut(newest / "optimizer.pt")
    elif damage == "config":
        (newest / "config.json").write_text("{")
    elif damage == "trainer_state":
        (newest / "trainer_state.json").unlink()
    assert inspect(newest).resumable == resumes
    done = train(output, "--steps", "5", "--save-steps", "5", "--eval-steps", "5", "--resume")
    assert (done.returncode == 0) == resumes, done.stderr[-2000:]

"""What the probe reads off a trainer: its arguments without secrets and paths, its model and data, its kind."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import smalltrain
from peft import LoraConfig, get_peft_model
from smalltrain import Rows

from tunewatch.probe import facts
from tunewatch.probe.arguments import MAX_ARGUMENTS, recorded

STATE = SimpleNamespace(max_steps=100, global_step=0)


def recorded_of(**values):
    fields = dataclasses.make_dataclass("Arguments", list(values))
    return recorded(fields(**values))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hub_token", "hf_abcdefgh12345678", "***"),
        ("push_to_hub_token", "x", "***"),
        ("wandb_api_key", "abc", "***"),
        ("db_password", "abc", "***"),
        ("client_secret", "abc", "***"),
        ("token", "abc", "***"),
        ("hub_token", None, None),
        ("hub_token", "", None),
        ("use_auth_token", True, True),
        ("eos_token", "<|im_end|>", "<|im_end|>"),
        ("pad_token", "<pad>", "<pad>"),
        ("image_token", "<image>", "<image>"),
        ("pad_token_id", 3, 3),
        ("max_new_tokens", 20, 20),
        ("note", "uses hf_abcdefgh12345678 today", "uses *** today"),
        (
            "tracker",
            "https://me:secret@host.example/x?api_key=abc&y=1",
            "https://host.example/x?api_key=***&y=1",
        ),
        ("output_dir", "/home/someone/runs/first", "first"),
        ("output_dir", "/home/someone/runs/first/", "first"),
        ("output_dir", "~/runs/first", "first"),
        ("output_dir", "runs/first", "runs/first"),
        ("output_dir", "C:\\Users\\someone\\first", "first"),
        ("data", "file:///home/someone/rows.jsonl", "rows.jsonl"),
        ("hub_model_id", "someone/model", "someone/model"),
        ("data_files", ["/a/b/one.json", "/a/b/two.json"], "one.json, two.json"),
        ("report_to", [], None),
        (
            "kwargs",
            {"deep": {"api_key": "abc", "path": "/a/b"}},
            {"kwargs.deep.api_key": "***", "kwargs.deep.path": "b"},
        ),
        ("learning_rate", 2e-5, 2e-5),
        ("bf16", False, False),
        ("system_prompt", "You are a helpful assistant", None),
        ("chat_template", "{% for m in messages %}", None),
        ("text", "two\nlines", None),
        ("long", "x" * 500, "x" * 200),
        ("thing", object(), None),
    ],
)
def test_what_goes_on_record(name, value, expected):
    found = recorded_of(**{name: value})
    if not isinstance(expected, dict):
        expected = {} if expected is None else {name: expected}
    assert found == expected


def test_the_record_is_bounded():
    found = recorded_of(many={f"k{number}": number for number in range(5000)})
    assert len(found) == MAX_ARGUMENTS
    deep: dict[str, Any] = {}
    deep["self"] = deep
    assert recorded_of(deep=deep) == {}


def test_the_arguments_of_a_real_trainer(tmp_path, recwarn):
    from trl import SFTConfig

    args = SFTConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", hub_token="hf_secretsecret1",
        deepspeed=None, lr_scheduler_kwargs={"num_cycles": 2}, lr_scheduler_type="cosine_with_restarts",
    )  # fmt: skip
    recwarn.clear()
    found = recorded(args)
    assert not recwarn.list
    assert (found["output_dir"], found["hub_token"], found["lr_scheduler_type"]) == (
        "out", "***", "cosine_with_restarts",
    )  # fmt: skip
    assert (found["lr_scheduler_kwargs.num_cycles"], found["max_length"], found["seed"]) == (2, 1024, 42)
    assert found["accelerator_config.even_batches"] is True
    text = json.dumps(found)
    assert str(tmp_path) not in text
    assert "secretsecret" not in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"warmup_steps": 5}, 5),
        ({"warmup_steps": 0.1}, 10),
        ({"warmup_steps": 0, "warmup_ratio": 0.25}, 25),
        ({"warmup_steps": 0}, 0),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant"}, 0),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant_with_warmup"}, 5),
        ({}, 0),
        ({"warmup_steps": "a few"}, None),
    ],
)
def test_warmup(arguments, expected):
    assert facts.warmup_steps(SimpleNamespace(**arguments), 100) == expected


def test_a_share_of_an_unknown_number_of_steps_is_unknown():
    args = SimpleNamespace(warmup_steps=0.1, save_steps=0.2, save_strategy="steps")
    state = SimpleNamespace(max_steps=None)
    assert "warmup_steps" not in facts.effective_arguments(args, state)
    assert facts.requested_arguments(args, state) == {}
    assert facts.warmup_steps(args, sys.maxsize) is None


def test_intervals_asked_for():
    args = SimpleNamespace(
        logging_strategy="steps", logging_steps=10, eval_strategy="epoch", eval_steps=7, save_strategy="steps",
        save_steps=0.25,
    )  # fmt: skip
    assert facts.requested_arguments(args, STATE) == {"logging_steps": 10, "save_steps": 25}


def test_whether_it_saves_by_steps_or_epochs():
    strategy = SimpleNamespace(value="epoch")  # an enumeration, there
    assert (
        facts.effective_arguments(SimpleNamespace(save_strategy=strategy), STATE)["save_strategy"] == "epoch"
    )


@pytest.mark.parametrize(
    ("args", "state", "trainer", "batch"),
    [
        ({"per_device_train_batch_size": 2, "train_batch_size": 4, "n_gpu": 2}, {}, None, (2, 4)),
        ({"per_device_train_batch_size": 2}, {"train_batch_size": 8}, None, (2, 2)),
        (
            {"per_device_train_batch_size": 2, "auto_find_batch_size": True},
            {"train_batch_size": 1},
            None,
            (1, 1),
        ),
        (
            {"per_device_train_batch_size": 8},
            {"train_batch_size": 8},
            SimpleNamespace(_train_batch_size=4),
            (4, 4),
        ),
    ],
    ids=["data parallel", "of the checkpoint", "batch size search", "of the trainer"],
)
def test_the_batch_size_in_effect(args, state, trainer, batch):
    args = SimpleNamespace(gradient_accumulation_steps=1, world_size=1, **args)
    found = facts.effective_arguments(args, SimpleNamespace(**state), trainer)
    assert (found["per_device_train_batch_size"], found["batch_size"]) == batch


def test_the_kind_of_a_trainer(tmp_path):
    from trl import DPOTrainer, SFTTrainer

    class Mine(SFTTrainer):
        pass

    assert facts.trainer_name(Mine.__new__(Mine)) == "SFTTrainer"
    assert facts.trainer_name(DPOTrainer.__new__(DPOTrainer)) == "DPOTrainer"
    assert facts.trainer_name(smalltrain.Small.__new__(smalltrain.Small)) == "Trainer"
    assert facts.trainer_name(object()) is None
    assert facts.trainer_name(None) is None


def test_model_and_data():
    model = smalltrain.model()
    model.config._name_or_path = "someone/tiny"
    model.config._commit_hash = "0123abcd"
    args = SimpleNamespace(learning_rate=1e-3, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer = SimpleNamespace(train_dataset=Rows(32))
    found = facts.info(args, STATE, model, trainer)
    assert (found["base_model"], found["base_model_revision"]) == ("someone/tiny", "0123abcd")
    assert (found["method"], found["dataset_rows"], found["batch_size"]) == ("full", 32, 8)
    assert not {"dataset", "lora_r", "lora_target_modules"} & set(found)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    )
    found = facts.info(args, STATE, adapted, trainer)
    assert (found["method"], found["lora_r"], found["lora_target_modules"]) == ("lora", 4, "q_proj,v_proj")
    assert found["base_model_revision"] == "0123abcd"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("imdb", "imdb"), ("json", None), ("parquet", None), (None, None), ("/home/me/rows", "rows")],
)
def test_the_name_of_the_data(name, expected):
    data = SimpleNamespace(info=SimpleNamespace(dataset_name=name, builder_name=None))
    found = facts.info(SimpleNamespace(), STATE, None, SimpleNamespace(train_dataset=data))
    assert found.get("dataset") == expected
    assert "dataset_rows" not in found


def a_gpu(monkeypatch, uuids, *, current=0):
    """torch's view of a machine with GPUs of these uuids, visible to this process."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: len(uuids),
        current_device=lambda: current,
        get_device_properties=lambda index: SimpleNamespace(uuid=uuids[index]),
        get_device_name=lambda: "NVIDIA H200",
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


MIG = "MIG-41b3e9a6-35ab-5e50-a4a6-2e3a4b6d8f00"


@pytest.mark.parametrize(
    ("visible", "n_gpu", "current", "found"),
    [
        ("", 1, 0, ["GPU-aaaa"]),
        ("0,1", 1, 1, ["GPU-bbbb"]),
        ("GPU-aaaa,GPU-bbbb", 1, 1, ["GPU-bbbb"]),
        ("0,1", 2, 0, ["GPU-aaaa", "GPU-bbbb"]),
        (MIG, 1, 0, [MIG]),  # torch names the parent card
    ],
)
def test_the_gpus_of_a_rank_in_nvmls_spelling(monkeypatch, visible, n_gpu, current, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    a_gpu(monkeypatch, ["aaaa", "GPU-bbbb"], current=current)
    assert facts.gpu_uuids(SimpleNamespace(n_gpu=n_gpu)) == found


def test_no_gpu_is_none_and_is_not_looked_for(monkeypatch):
    assert facts.gpu_uuids(SimpleNamespace(n_gpu=0)) == []
    monkeypatch.delitem(sys.modules, "torch")
    assert facts.gpu_uuids(SimpleNamespace(n_gpu=0)) == []


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n",
            "535.183.01",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\n", "575.57.08"),
        ("something else\n", None),
    ],
)
def test_the_gpu_and_its_driver_belong_to_the_environment(monkeypatch, tmp_path, line, driver):
    a_gpu(monkeypatch, ["aaaa"])
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(facts, "_DRIVER", str(tmp_path / "version"))
    found = facts.environment()
    assert (found["gpu"], found.get("driver")) == ("NVIDIA H200", driver)


@pytest.mark.parametrize(
    ("asked", "weights", "computed"),
    [
        ({"bf16": True}, "torch.float32", "bf16"),
        ({"fp16": True}, "torch.float32", "fp16"),
        ({}, "torch.bfloat16", "bf16"),
        ({}, "torch.float16", "fp16"),
        ({}, "torch.float32", "fp32"),
        ({}, None, "fp32"),
    ],
)
def test_what_is_computed_in(asked, weights, computed):
    trainer = SimpleNamespace(model=SimpleNamespace(dtype=weights))
    assert facts.effective_arguments(SimpleNamespace(**asked), STATE, trainer)["precision"] == computed

"""Trainings of a two-layer random Llama by transformers' own Trainer, in this process: a second each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tunewatch.probe.callback import TunewatchCallback

torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    """Rows of eight tokens; the first one is the row's number."""

    def __init__(self, count: int = 32) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([index, *((index * n) % 60 for n in range(1, 8))])
        return {"input_ids": tokens, "labels": tokens.clone()}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128,
        )
    )  # fmt: skip


class Small(Trainer):
    """Notes which rows each optimizer step was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[int, list[int]] = {}

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.rows.setdefault(self.state.global_step + 1, []).extend(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


class AtStep(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(**{
        "output_dir": str(output), "max_steps": 8, "per_device_train_batch_size": 2, "save_steps": 4,
        "logging_steps": 1, "learning_rate": 1e-3, "warmup_steps": 2, "use_cpu": True, "report_to": "none",
        "disable_tqdm": True, **changes,
    })  # fmt: skip


def trainer(output: Path, data: Any = None, *, callbacks: tuple[Any, ...] = (), kind: type[Trainer] = Small,
            optimizers: Any = (None, None), **changes: Any) -> Any:  # fmt: skip
    return kind(
        model=model(), args=arguments(output, **changes), train_dataset=data if data is not None else Rows(),
        eval_dataset=Rows(4), callbacks=[TunewatchCallback(supervise=False, run_id=output.name), *callbacks],
        optimizers=optimizers,
    )  # fmt: skip


def run_folder(home: Path, one: Trainer) -> Path:
    """Where the training of this trainer reported to."""
    callback = next(item for item in one.callback_handler.callbacks if getattr(item, "is_tunewatch", False))
    return home / "runs" / callback.run_id


def events(home: Path, one: Trainer, kind: str) -> list[dict[str, Any]]:
    lines = (run_folder(home, one) / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]

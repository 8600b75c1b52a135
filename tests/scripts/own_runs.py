"""A script or notebook that watches itself with our callback; the functions are what a user's cells would hold."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from tunewatch import TunewatchCallback  # noqa: F401  (for the cells)

OUT = Path(os.environ["OUT"])
torch.set_num_threads(1)


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.tensor([index / 16.0, 1.0]), "labels": torch.tensor([index % 2 * 1.0])}


class Net(torch.nn.Module):
    def __init__(self, trial=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


def build(*callbacks, cls=Trainer, folder="out", model=None, **arguments):
    arguments = {
        "max_steps": 4, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "save_steps": 2, "logging_steps": 1, "learning_rate": 0.1, **arguments,
    }  # fmt: skip
    given = {"model": Net()} if model is None else {"model_init": model}
    return cls(
        **given, args=TrainingArguments(str(OUT / folder), **arguments), train_dataset=Rows(), eval_dataset=Rows(),
        callbacks=list(callbacks),
    )  # fmt: skip


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def say(**facts):
    """Tell the test what the trainers themselves saw."""
    print(json.dumps(facts), flush=True)


def wait_for_file(self, args, state, control, **kwargs):
    """A callback's method: go on when the test says so."""
    while not (OUT / "go").exists():
        time.sleep(0.05)


class Stop(TrainerCallback):
    """Raises in the second step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            raise ZeroDivisionError


if __name__ == "__main__":
    exec(compile(sys.stdin.read(), "cell", "exec"))

"""A small training in which things go wrong the way people reported them; it does not know of tunewatch.

Each `--fault NAME` or `NAME=STEP` is real: the trainer, the data or the model misbehaves, nothing is only written down.
What the training itself knows in the end lands in facts.json of the output folder.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("output_dir")
parser.add_argument("--steps", type=int, default=-1)
parser.add_argument("--epochs", type=float, default=1.0)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--logging-steps", type=int, default=1)
parser.add_argument("--save-steps", type=int, default=0, help="0: no checkpoint")
parser.add_argument("--eval-steps", type=int, default=0, help="0: no evaluation")
parser.add_argument("--eval-sets", default="", help="names of several evaluation sets, with commas between")
parser.add_argument("--eval-on-start", action="store_true")
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--step-seconds", type=float, default=0.0)
parser.add_argument("--model-name", default="")
parser.add_argument("--data-name", default="")
parser.add_argument("--packing", action="store_true", help="TRL's SFTTrainer with packed rows")
parser.add_argument("--fault", action="append", default=[])
options = parser.parse_args()
FAULTS: dict[str, set[int]] = {}
for fault in options.fault:
    name, _, at = fault.partition("=")
    FAULTS.setdefault(name, set()).add(int(at or 0))

torch.set_num_threads(1)
torch.manual_seed(0)
LENGTH = 16


def at(name, step):
    """Whether this fault is due at this step."""
    return step in FAULTS.get(name, ())


def since(name, step):
    return name in FAULTS and step >= min(FAULTS[name])


class Rows(torch.utils.data.Dataset):
    """Rows of 4 to 12 tokens."""

    info = SimpleNamespace(dataset_name=options.data_name)

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([(index * n) % 59 + 1 for n in range(1, 5 + index % 9)])


def collate(rows):
    """Padded to 16; the first two tokens of a row are a prompt, whose labels are masked."""
    if since("no-new-data", done + 1):
        nothing = torch.zeros((len(rows), 0), dtype=torch.long)
        return {"input_ids": nothing, "attention_mask": nothing, "labels": nothing}
    ids = torch.zeros((len(rows), LENGTH), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)], mask[number, : len(row)] = row, 1
        labels[number, 2 : len(row)] = row[2:]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


done = 0


class Faults(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        time.sleep(options.step_seconds)
        if at("kill", step):
            time.sleep(0.5)  # a step that takes a while, so that the logs before it are on the disk
            os.kill(os.getpid(), signal.SIGKILL)
        if at("interrupt", step):
            raise KeyboardInterrupt

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if at("zeroed-nan", state.global_step + 1):
            for parameter in model.parameters():
                parameter.grad = None

    def on_step_end(self, args, state, control, **kwargs):
        global done
        done = state.global_step
        if "shorten" in FAULTS and done == 4:
            state.max_steps = min(FAULTS["shorten"])


class Faulty:
    """What goes wrong inside of a trainer."""

    micro = 0
    seen = None

    def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
        if inputs["input_ids"].numel():
            self.seen = inputs
        else:
            inputs, num_items_in_batch = self.seen, None
        if "inflated" in FAULTS:
            num_items_in_batch = None
        loss = super().compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)
        if "no-gradient" in FAULTS and model.training:
            return loss.detach() + 0.0 * next(model.parameters()).sum()
        if "nan-eval" in FAULTS and not model.training:
            return tuple(part * float("nan") if part is loss[0] else part for part in loss)
        return loss

    def training_step(self, model, inputs, *args, **kwargs):
        step = self.state.global_step + 1
        if "out-of-memory" in FAULTS and self._train_batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = super().training_step(model, inputs, *args, **kwargs)
        if at("nan-gradient", step) or (at("zeroed-nan", step) and self.micro != step):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))
        if at("zeroed-nan", step) and self.micro != step:
            loss = loss * float("nan")
        self.micro = step
        return loss * (1e5 if at("huge", step) else 3.0 if at("spike", step) else 1.0)

    def log(self, logs, *args, **kwargs):
        if "odd-logs" in FAULTS and "loss" in logs:
            logs |= {
                "rewards/chosen": 1.5,
                "eval/loss": 7.0,
                "train.loss": 8.0,
                "loss ": 9.0,
                "": 3.0,
                "Loss": 10.0,
            }
            logs |= {
                "learning_rate": torch.tensor(logs["learning_rate"]),
                "note": "w1 w2",
                "flags": [True, None],
            }
            logs["grad_norm"] = [f"{logs['grad_norm']:.4g}", torch.tensor([logs["grad_norm"]]), None][
                done % 3
            ]
        super().log(logs, *args, **kwargs)


def schedule(optimizer):
    """Warm-up from 0 over two steps, a straight line down; 0 from the step of the fault on."""

    def factor(steps):
        return 0.0 if since("zero-rate", steps + 1) else min(steps / 2, 1.0 - steps / 100)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def small_model():
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, name_or_path=options.model_name, pad_token_id=0,
        )
    )  # fmt: skip
    if "frozen" in FAULTS:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
        model.requires_grad_(False)
    return model


def arguments():
    return {
        "output_dir": options.output_dir, "max_steps": options.steps, "num_train_epochs": options.epochs,
        "per_device_train_batch_size": options.batch, "per_device_eval_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulation, "logging_steps": options.logging_steps,
        "save_strategy": "steps" if options.save_steps else "no", "save_steps": options.save_steps or 500,
        "eval_strategy": "steps" if options.eval_steps else "no", "eval_steps": options.eval_steps or None,
        "eval_on_start": options.eval_on_start, "load_best_model_at_end": "nan-eval" in FAULTS,
        "auto_find_batch_size": "out-of-memory" in FAULTS, "learning_rate": options.learning_rate, "warmup_steps": 2,
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip


def plain_trainer():
    model = small_model()
    evaluation = Rows(8)
    if options.eval_sets:
        evaluation = {name: Rows(6 + 2 * number) for number, name in enumerate(options.eval_sets.split(","))}
    chosen = (None, None)
    if "zero-rate" in FAULTS:
        rate = 1e-3 if "ignores-rate" in FAULTS else options.learning_rate
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        chosen = (optimizer, schedule(optimizer))
    return type("PlainTrainer", (Faulty, Trainer), {})(
        model=model, args=TrainingArguments(**arguments(), remove_unused_columns=False),
        train_dataset=Rows(options.rows), eval_dataset=evaluation, data_collator=collate, callbacks=[Faults()],
        optimizers=chosen,
    )  # fmt: skip


def packing_trainer():
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", *(f"w{number}" for number in range(61)), "<unk>", "</s>"]
    fast = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    rows = [{"text": " ".join(f"w{(i * j) % 60}" for j in range(1, 8))} for i in range(options.rows)]
    settings = {**arguments(), "packing": True, "packing_strategy": "wrapped", "max_length": 32}
    return type("PackingTrainer", (Faulty, SFTTrainer), {})(
        model=small_model(), args=SFTConfig(**settings), train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
        ),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"), callbacks=[Faults()],
    )  # fmt: skip


trainer = packing_trainer() if options.packing else plain_trainer()
trainer.train(resume_from_checkpoint=options.resume or None)
facts = {
    "rows": len(trainer.train_dataset), "step": trainer.state.global_step, "max_steps": trainer.state.max_steps,
    "epoch": trainer.state.epoch, "best": trainer.state.best_model_checkpoint,
}  # fmt: skip
Path(options.output_dir).mkdir(parents=True, exist_ok=True)
Path(options.output_dir, "facts.json").write_text(json.dumps(facts))

"""A training with transformers' own Trainer on one or several ranks; it does not know of tunewatch.

It needs torch and transformers only. What goes wrong is asked for on the command line, for one rank of several.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("output_dir")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep in each step")
parser.add_argument("--data-seconds", type=float, default=0.0, help="the rank sleeps before each batch")
parser.add_argument("--loss-seconds", type=float, default=0.0, help="the rank sleeps before each loss")
parser.add_argument("--rank", type=int, default=0, help="the one that is slow, hangs, dies or raises")
parser.add_argument("--hang-in", choices=["data", "step", "loss"])
parser.add_argument("--hang-at", type=int, default=3, help="hang after this many steps")
parser.add_argument("--kill-at", type=int, help="SIGKILL to itself after this many steps")
parser.add_argument("--raise-times", type=int, default=0, help="fail so many attempts, before the first step")
parser.add_argument("--save-steps", type=int, default=0, help="0: no checkpoints")
parser.add_argument(
    "--take-saves-back", action="store_true", help="a callback that wants none of these saves"
)
parser.add_argument("--save-on-term", action="store_true", help="on SIGTERM, take a while to write a file")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
CHOSEN = int(os.environ.get("RANK", 0)) == options.rank
OUTPUT = Path(options.output_dir)
done = 0


def hang():
    while True:
        time.sleep(3600)


def collate(rows):
    if CHOSEN and options.data_seconds:
        time.sleep(options.data_seconds)
    if CHOSEN and options.hang_in == "data" and done >= options.hang_at:
        hang()
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def attempt():
    """Count this process's attempt in the output folder, from 1 on."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    marks = list(OUTPUT.glob("attempt.*"))
    (OUTPUT / f"attempt.{len(marks)}").touch()
    return len(marks) + 1


class Faults(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(options.step_seconds)
        if CHOSEN and options.hang_in == "step" and state.global_step >= options.hang_at:
            hang()

    def on_step_end(self, args, state, control, **kwargs):
        global done
        done = state.global_step
        if options.take_saves_back:
            control.should_save = False
        if CHOSEN and done == options.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Plain(Trainer):
    def compute_loss(self, *args, **kwargs):
        if CHOSEN and options.hang_in == "loss" and self.state.global_step >= options.hang_at:
            hang()
        if CHOSEN:
            time.sleep(options.loss_seconds)
        return super().compute_loss(*args, **kwargs)


def save_and_leave(number, frame):
    time.sleep(3.0)  # longer than what is left of a command that ended by itself gets
    (OUTPUT / "saved").write_text("whole")
    sys.exit(143)


if CHOSEN and options.raise_times and attempt() <= options.raise_times:
    raise ValueError(
        "broken on purpose"
    )  # not later: Gloo of this torch does not connect again after a restart

if options.save_on_term:
    OUTPUT.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, save_and_leave)

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
)
trainer = Plain(
    model=model,
    args=TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_broadcast_buffers=False,  # as with gradient checkpointing: the forward pass waits for nobody
    ),
    train_dataset=[torch.arange(8) + i for i in range(32)],
    data_collator=collate,
    callbacks=[Faults()],
)
trainer.train()
print("trained to", trainer.state.global_step, flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
    os._exit(0)  # ranks of this torch sometimes abort while the interpreter shuts down, without tunewatch too

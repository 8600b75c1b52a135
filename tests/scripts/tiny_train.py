"""A real SFT training of a tiny random Llama, as a user would write it: it does not know of tunewatch.

Faults are asked for on the command line, and each is real.
"""

import argparse
import os
import signal
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("output_dir")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--save-steps", type=int, default=4)
parser.add_argument("--eval-steps", type=int, default=4)
parser.add_argument("--logging-steps", type=int, default=2)
parser.add_argument("--accumulation", type=int, default=2)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep in each step")
parser.add_argument("--poison-at", type=int, help="from this step on, the weights are NaN")
parser.add_argument("--nan-loss-at", type=int, help="this step's first micro-batch reports a NaN loss, once")
parser.add_argument("--hang-in", choices=["data", "step", "evaluate", "save", "prepare"])
parser.add_argument("--hang-at", type=int, default=3)
parser.add_argument("--kill-at", type=int, help="SIGKILL to itself")
parser.add_argument("--kill-rank", type=int, default=0)
parser.add_argument("--leave-at", type=int, help="os._exit(0)")
parser.add_argument("--raise-at", type=int)
parser.add_argument("--raise-what", default="RuntimeError('broken')")
parser.add_argument(
    "--raise-early", action="store_true", help="a KeyError that quotes a row, before any trainer exists"
)
parser.add_argument("--noise-mb", type=int, default=0, help="write this much to stderr before the training")
parser.add_argument("--save-only-model", action="store_true")
parser.add_argument("--own-callback", action="store_true", help="pass tunewatch's callback, too")
parser.add_argument("--off", action="append", default=[], help="a signal that our callback switches off")
parser.add_argument("--swallow", action="store_true", help="catch the training's exception and exit with 0")
options = parser.parse_args()

if options.raise_early:
    raise KeyError("CANARY-ROW-TEXT")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(0)
RANK = int(os.environ.get("RANK", 0))
WORDS = [f"w{i}" for i in range(60)]


def hang():
    while True:
        time.sleep(3600)


def tokenizer():
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<unk>", "<pad>", "<s>", "</s>"])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


class Faults(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        upcoming = state.global_step + 1
        if options.step_seconds:
            time.sleep(options.step_seconds)
        if upcoming == options.poison_at:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))
        if upcoming == options.kill_at and options.kill_rank == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        if upcoming == options.leave_at:
            os._exit(0)
        if upcoming == options.raise_at:
            exec(f"raise {options.raise_what}")
        if options.hang_in == "step" and upcoming == options.hang_at:
            hang()

    def on_step_end(self, args, state, control, **kwargs):
        if options.hang_in == "data" and state.global_step == options.hang_at:
            hang()

    def on_prediction_step(self, args, state, control, **kwargs):
        if options.hang_in == "evaluate":
            hang()


class Trainer(SFTTrainer):
    micro = 0

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step + 1 == options.nan_loss_at and self.micro != options.nan_loss_at:
            self.micro = options.nan_loss_at
            return loss * float("nan")
        return loss

    def _save_checkpoint(self, *args, **kwargs):
        if options.hang_in == "save":
            hang()
        return super()._save_checkpoint(*args, **kwargs)


rows = [{"text": " ".join(WORDS[(i * j) % 60] for j in range(1, 20))} for i in range(32)]
data = Dataset.from_list(rows)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
)
callbacks = [Faults()]
if options.own_callback:
    from tunewatch import TunewatchCallback

    callbacks.append(TunewatchCallback(off=options.off))
if options.hang_in == "prepare":
    hang()
trainer = Trainer(
    model=model,
    args=SFTConfig(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.accumulation,
        logging_steps=options.logging_steps,
        eval_strategy="steps",
        eval_steps=options.eval_steps,
        save_steps=options.save_steps,
        save_only_model=options.save_only_model,
        report_to="none",
        bf16=False,
        use_cpu=True,
        learning_rate=1e-3,
        warmup_steps=2,
        disable_tqdm=True,
    ),
    train_dataset=data,
    eval_dataset=data.select(range(8)),
    processing_class=tokenizer(),
    peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),
    callbacks=callbacks,
)
for _ in range(options.noise_mb):
    sys.stderr.write("noise " * 170_000 + "\n")
try:
    trainer.train(resume_from_checkpoint=options.resume or None)
except Exception:
    if not options.swallow:
        raise
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
    # Ranks of this torch sometimes abort while the interpreter shuts down ("terminate called without an active
    # exception", one run of eight, without tunewatch too): leave without that.
    sys.stdout.flush()
    os._exit(0)

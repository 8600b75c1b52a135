"""Small real trainings of a random Llama: one for a verdict, one for what looks like a fault; none knows of tunewatch.

Nothing is only written down: the data, the settings or the disk are as bad as people had them. Everything is drawn with
a seed, of its own for each case: two that do not learn would look like one. Those with a fault go on until they are
ended, so that somebody can see it.
"""

import argparse
import json
import time
import zlib
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("output_dir")
parser.add_argument("case")
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()

torch.set_num_threads(1)
SEED = zlib.crc32(options.case.encode()) % 1000
torch.manual_seed(SEED)
CHANCE = torch.Generator().manual_seed(SEED)
WORDS = 64
ENDLESS = 100_000


def draw(below, *shape):
    return torch.randint(below, shape, generator=CHANCE)


NEXT = draw(WORDS - 4, WORDS, 2) + 4
"""Two words that may follow each word: there is something to learn, down to a loss of about ln 2."""


def sentence(length):
    words = [int(draw(WORDS - 4) + 4)]
    while len(words) < length:
        words.append(int(NEXT[words[-1], draw(2)]))
    return torch.tensor(words)


def sentences(count, length=24):
    return [sentence(length) for _ in range(count)]


def noise(count, length=24):
    """Rows with nothing in them but what can be learned by heart."""
    return list(draw(WORDS - 4, count, length) + 4)


def collate(rows):
    width = max(map(len, rows))
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = labels[number, : len(row)] = row
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
        )
    )  # fmt: skip


def arguments(**changes):
    return {
        "output_dir": options.output_dir, "max_steps": 100, "per_device_train_batch_size": 4, "logging_steps": 1,
        "save_strategy": "no", "learning_rate": 3e-3, "warmup_steps": 5, "report_to": "none", "use_cpu": True,
        "bf16": False, "disable_tqdm": True, "seed": SEED, **changes,
    }  # fmt: skip


def evaluating(every, **changes):
    return arguments(eval_strategy="steps", eval_steps=every, per_device_eval_batch_size=4, **changes)


def saving(every, **changes):
    return arguments(save_strategy="steps", save_steps=every, **changes)


class Pace(TrainerCallback):
    """Steps of a thousandth of a second would all lie between two looks of anybody."""

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(0.05)


def train(settings, data, evaluation=None, *, model=None, callbacks=(), **more):
    trainer = Trainer(
        model=model or llama(), args=TrainingArguments(remove_unused_columns=False, **settings), train_dataset=data,
        eval_dataset=evaluation, data_collator=collate, callbacks=[Pace(), *callbacks], **more,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume or None)


def sft(settings, rows, collator=None, **config):
    """TRL's own trainer on rows of text."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, WORDS))]
    fast = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    SFTTrainer(
        model=llama(), args=SFTConfig(**{**settings, **config}), train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
        ),
        data_collator=collator, peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"), callbacks=[Pace()],
    ).train()  # fmt: skip


def text(words):
    return " ".join(f"w{word}" for word in words.tolist())


def hang():
    while True:
        time.sleep(3600)


class Hanging(torch.utils.data.Dataset):
    """Rows of a storage that does not answer any more from some row on."""

    def __init__(self, rows, reads):
        self.rows, self.reads = rows, reads

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.reads -= 1
        if self.reads < 0:
            hang()
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """Rows without end, of no length that anybody knows."""

    def __iter__(self):
        while True:
            yield sentence(int(draw(20) + 8))


# -- sick -----------------------------------------------------------------------------------------------------------


def masked():
    """A collator that lets only count what follows the marker of an answer, and a template that has another marker."""
    marker = WORDS - 1

    def collator(rows):
        batch = collate([torch.tensor(row["input_ids"]) for row in rows])
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            found = (ids == marker).nonzero()
            labels[: int(found[0]) + 1 if len(found) else len(labels)] = -100
        return batch

    rows = [{"text": text(words[words != marker])} for words in sentences(64)]
    sft(arguments(max_steps=ENDLESS), rows, collator)


def frozen():
    """An adapter that was loaded for inference; gradient checkpointing lets the backward pass work all the same."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, task_type="CAUSAL_LM"))
    model.requires_grad_(False)
    model.enable_input_require_grads()
    train(arguments(max_steps=ENDLESS), sentences(64), model=model)


def diverging():
    """The warm-up goes on to a learning rate that no model survives."""
    settings = {"learning_rate": 2.0, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 200}
    train(arguments(max_steps=ENDLESS, **settings), sentences(64))


def overfitting():
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    train(evaluating(10, max_steps=ENDLESS, **settings), noise(16), noise(16))


def flat():
    """1e-9 where 1e-3 was meant."""
    train(arguments(max_steps=ENDLESS, learning_rate=1e-9, lr_scheduler_type="constant"), sentences(64))


def nan():
    """The weights become NaN in the step after somebody has made the file `poison`; `poisoned` tells when it ended."""

    class Poison(TrainerCallback):
        step = None

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if self.step is None and Path(options.output_dir, "poison").exists():
                self.step = state.global_step + 1
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == self.step:
                now = time.time()
                Path(options.output_dir, "poisoned.new").write_text(
                    json.dumps({"step": self.step, "ended": now})
                )
                Path(options.output_dir, "poisoned.new").rename(Path(options.output_dir, "poisoned"))

    train(arguments(max_steps=ENDLESS), sentences(64), callbacks=(Poison(),))


def hanging_data():
    train(arguments(), Hanging(sentences(64), reads=4 * 12))


def hanging_evaluation():
    train(evaluating(10), sentences(64), Hanging(sentences(16), reads=8))


def saves():
    """An ordinary one; what becomes of its checkpoints is a matter of the disk."""
    train(saving(20, max_steps=800), sentences(64))


def hanging_save():
    train(saving(10), sentences(64))


def half():
    """One that is interrupted half-way, and goes on from its checkpoint."""
    train(saving(40, max_steps=400), sentences(64))


# -- well -----------------------------------------------------------------------------------------------------------


def jagged():
    """Batches of one row, some nearly empty, some nothing but noise: the loss jumps about while it comes down."""
    rows = [sentence(int(draw(30) + 3)) if number % 5 else noise(1)[0] for number in range(64)]
    train(arguments(per_device_train_batch_size=1, max_steps=150), rows)


def long_evaluation():
    """Each evaluation ends in seconds of scoring that give no sign of life."""

    def score(_prediction):
        time.sleep(6)
        return {"score": 1.0}

    train(evaluating(35, max_steps=70), sentences(64), sentences(16), compute_metrics=score)


def packed():
    rows = [{"text": text(sentence(int(draw(20) + 6)))} for _ in range(256)]
    sft(arguments(max_steps=120), rows, packing=True, max_length=64)


def streaming():
    train(arguments(max_steps=120), Stream())


globals()[options.case.replace("-", "_")]()

"""What happens before the first step of a fine-tune, as a user's script does it: real datasets, TRL and bars."""

import argparse
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("output_dir")
parser.add_argument("--rows", type=int, default=4000)
parser.add_argument("--num-proc", type=int)
parser.add_argument("--bars-off", action="store_true")
parser.add_argument("--row-seconds", type=float, default=0.0, help="sleep for each row that is tokenized")
parser.add_argument("--hang-at", type=int, help="the tokenizer blocks at this row")
parser.add_argument("--own-callback", action="store_true")
options = parser.parse_args()

import datasets  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

torch.set_num_threads(1)
if options.bars_off:
    datasets.disable_progress_bars()
WORDS = [f"w{i}" for i in range(60)]


class Slow(PreTrainedTokenizerFast):
    seen = 0

    def __call__(self, *args, **kwargs):
        Slow.seen += 1
        if options.hang_at is not None and Slow.seen > options.hang_at:
            threading.Event().wait()
        time.sleep(options.row_seconds)
        return super().__call__(*args, **kwargs)


def tokenizer():
    vocabulary = {word: number for number, word in enumerate([*WORDS, "<unk>", "<pad>", "<s>", "</s>"])}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return Slow(
        tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=64, num_key_value_heads=1, max_position_embeddings=64, **size)
)
callbacks = []
if options.own_callback:
    from tunewatch import TunewatchCallback

    callbacks.append(TunewatchCallback(supervise=False))
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=options.output_dir, max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no",
        report_to="none", bf16=False, use_cpu=True, disable_tqdm=True, dataset_num_proc=options.num_proc,
    ),
    train_dataset=datasets.Dataset.from_list([{"text": f"w{i % 60} w1 CANARY"} for i in range(options.rows)]),
    processing_class=tokenizer(),
    callbacks=callbacks,
)  # fmt: skip
trainer.train()

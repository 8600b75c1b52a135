"""A preference training with TRL's DPOTrainer; it does not know of tunewatch.

python dpo_train.py OUTPUT [STEPS]
"""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

torch.set_num_threads(1)
torch.manual_seed(0)
WORDS = [f"w{i}" for i in range(60)]
words = Tokenizer(
    models.WordLevel(
        {word: number for number, word in enumerate([*WORDS, "<unk>", "<pad>", "<s>", "</s>"])},
        unk_token="<unk>",
    )
)
words.pre_tokenizer = pre_tokenizers.Whitespace()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
)
pairs = [
    {"prompt": f"w{i} w{i + 1}", "chosen": f"w{i + 2} w{i + 3}", "rejected": f"w{i + 9} w{i + 8}"}
    for i in range(16)
]
trainer = DPOTrainer(
    model=model,
    args=DPOConfig(
        output_dir=sys.argv[1],
        max_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 4,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
    peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),  # then the model without it is the reference
    train_dataset=Dataset.from_list(pairs),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ),
)
trainer.train()
print("trained to", trainer.state.global_step, flush=True)

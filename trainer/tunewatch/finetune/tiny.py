"""A model that takes no download and trains in seconds, for rehearsals and tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_VOCABULARY = 1024
_TEXTS = (
    "What is the capital of Norway? The capital of Norway is Oslo.",
    "How do I list hidden files in a folder? Use the command ls -a.",
    "How many grams are in a kilogram? One kilogram is one thousand grams.",
    "When should I water a cactus? Only when the soil has been dry for a while.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def build_tiny_model(folder: Path | str, *, seed: int = 0, texts: Iterable[str] = _TEXTS) -> Path:
    """Write a random two-layer, 32-dimensional Llama and a byte-level BPE tokenizer trained on `texts`.

    The tokenizer can encode any text and has a chat template. The same seed and texts give the same files.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(folder)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,  # ten times the usual one, so that an adapter can move the loss
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

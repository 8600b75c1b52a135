"""Answers of the finished model to held-out prompts, for a person to read.

A falling loss says nothing about tone, truth or format. The text stays in `samples.jsonl`; only the number of
answers leaves this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunewatch.finetune.data import LoadedData, held_out_prompts
from tunewatch.review import SAMPLES


def write_samples(
    model: Any,
    tokenizer: Any,
    data: LoadedData,
    folder: Path,
    *,
    run_id: str,
    number: int,
    max_new_tokens: int,
    report: Callable[[int, int], None],
) -> int:
    """Write `samples.jsonl` with run, prompt, reference and generated text, and return how many there are.

    Greedy decoding, so that two checkpoints can be compared. `report` takes the count done and the total.
    """
    import torch

    prompts = list(held_out_prompts(data, number))
    if not prompts:
        return 0
    temporary = folder / f".{SAMPLES}.part"
    model.eval()
    with temporary.open("w", encoding="utf-8") as file, torch.inference_mode():
        for index, (prompt, reference) in enumerate(prompts):
            report(index, len(prompts))
            inputs = _encode(tokenizer, prompt).to(model.device)
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            row = {
                "run_id": run_id,
                "index": index,
                "prompt": prompt,
                "reference": reference,
                "generated": text,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    temporary.replace(folder / SAMPLES)
    return len(prompts)


def _encode(tokenizer: Any, prompt: Any) -> Any:
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

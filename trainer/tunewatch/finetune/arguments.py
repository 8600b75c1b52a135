"""From the `training:` and `lora:` sections to `trl.SFTConfig` and `peft.LoraConfig`, all keys checked.

Imports trl and peft inside the functions: only the child has them at hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from tunewatch.finetune.config import OWNED_TRAINING_KEYS, RunConfig, shown
from tunewatch.finetune.errors import ConfigError, nearest

_LORA_ALIASES = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
_LORA_DEFAULTS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear"}


def training_arguments(config: RunConfig, *, has_eval: bool) -> Any:
    """The `trl.SFTConfig` of a run. Raises `ConfigError` for unknown keys, wrong types and contradictions."""
    import torch
    import trl

    given = check_fields(config.training, trl.SFTConfig, section="training", refused=set(OWNED_TRAINING_KEYS))
    if not has_eval:
        _refuse_eval_without_data(given)
    elif "eval_strategy" not in given:
        given["eval_strategy"] = "steps" if "eval_steps" in given else "epoch"
    if config.dataset.streaming and int(given.get("max_steps") or 0) <= 0:
        raise ConfigError(
            "streamed rows have no known number: set how many steps to train", key="training.max_steps"
        )
    defaults: dict[str, Any] = {
        "output_dir": str(config.output_dir),
        "run_name": config.name,
        "report_to": "none",
        "disable_tqdm": True,
        "dataset_text_field": "text",
    }
    if not {"bf16", "fp16", "use_cpu"} & given.keys():
        # TRL's default is bf16, which transformers refuses on a CPU and on GPUs before Ampere.
        defaults["bf16"] = torch.cuda.is_available() and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
    try:
        arguments = trl.SFTConfig(**{**defaults, **given})
    except (ValueError, TypeError, ImportError) as error:
        # The texts of TrainingArguments speak of settings only; their first line says what is wrong.
        raise ConfigError(str(error).strip().splitlines()[0], key="training") from error
    if arguments.n_gpu > 1:
        raise ConfigError(
            f"one process sees {arguments.n_gpu} GPUs: set CUDA_VISIBLE_DEVICES to one, or start a script "
            "of your own with tunewatch exec -- torchrun"
        )
    return arguments


def lora_config(config: RunConfig) -> Any | None:
    """The `peft.LoraConfig` of a run, or None for full fine-tuning."""
    if config.lora is False:
        return None
    import peft

    given = {_LORA_ALIASES.get(key, key): value for key, value in config.lora.items()}
    checked = check_fields(given, peft.LoraConfig, section="lora", aliases=_LORA_ALIASES)
    if "r" in checked and "lora_alpha" not in checked:
        checked["lora_alpha"] = 2 * checked["r"]
    try:
        return peft.LoraConfig(**{"task_type": "CAUSAL_LM", **_LORA_DEFAULTS, **checked})
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error).strip().splitlines()[0], key="lora") from error


def check_fields(
    given: dict[str, Any],
    target: type,
    *,
    section: str,
    refused: set[str] | frozenset[str] = frozenset(),
    aliases: dict[str, str] | None = None,
) -> dict[str, Any]:
    """`given` with its values converted to the types of the dataclass `target` (YAML reads `2e-4` as text).

    Raises `ConfigError` for a key that is no field of `target`, and for a value that its type cannot take.
    """
    names = {field.name for field in dataclasses.fields(target) if field.init} - refused
    hints = get_type_hints(target)
    checked = {}
    for key, value in given.items():
        if key not in names:
            close = nearest(key, [*names, *(aliases or {})])
            raise ConfigError(
                "unknown key",
                key=f"{section}.{key}",
                allowed=f"the fields of {target.__name__}",
                nearest=close,
            )
        checked[key] = _convert(f"{section}.{key}", value, hints[key])
    return checked


def _convert(key: str, value: Any, hint: Any) -> Any:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticSchemaGenerationError:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        allowed = " or ".join(dict.fromkeys(_plain(e["msg"]) for e in error.errors(include_url=False)))
        raise ConfigError(f"found {shown(key, value)}", key=key, found=value, allowed=allowed) from None


def _plain(message: str) -> str:
    return message.removeprefix("Input should be ").partition(",")[0]


def _refuse_eval_without_data(given: dict[str, Any]) -> None:
    for key in ("eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end"):
        if given.get(key) not in (None, False, "no"):
            raise ConfigError(
                "there is no evaluation set: set dataset.eval_path, eval_split or eval_fraction",
                key=f"training.{key}",
            )

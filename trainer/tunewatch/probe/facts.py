"""Reads from a trainer's objects what identifies a training: arguments in effect, model, versions, devices, what a
resume brought back. Imports nothing of transformers: what it is handed, it reads by attribute.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

_VERSIONS = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "unsloth",
    "deepspeed",
)
_STATE_FILES = {"optimizer": "optimizer", "scheduler": "scheduler", "rng": "rng_state"}


def restored(args: Any, step: int, objects: dict[str, Any], resume_from: Any) -> dict[str, bool | None]:
    """Which parts of the training state a resume brought back; null for what can not be known.

    A checkpoint without optimizer.pt or scheduler.pt resumes without a word: the step goes on, the learning
    rate starts again at its warm-up.
    """
    if step == 0:
        return {"optimizer": None, "scheduler": None, "rng": None, "data_order": None}
    folder = checkpoint_folder(args, resume_from)
    has = {name: _holds(folder, prefix) for name, prefix in _STATE_FILES.items()}
    optimizer: bool | None = None
    try:
        if len(objects["optimizer"].state) > 0:
            optimizer = True
        elif not _holds(folder, "global_step"):  # DeepSpeed keeps the state there, and to itself
            # One without state of its own (plain SGD) is restored when its file was there.
            optimizer = None if folder is None else bool(has["optimizer"] and has["scheduler"])
    except (KeyError, AttributeError, TypeError):
        pass
    scheduler: bool | None = None
    last_epoch = getattr(objects.get("lr_scheduler"), "last_epoch", None)
    if isinstance(last_epoch, int):
        # ReduceLROnPlateau counts evaluations: 0 is right before the first one.
        scheduler = last_epoch > 0 or bool(has["optimizer"] and has["scheduler"])
    return {
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": has["rng"],
        "data_order": not getattr(args, "ignore_data_skip", False),
    }


def checkpoint_folder(args: Any, resume_from: Any) -> str | None:
    if isinstance(resume_from, (str, os.PathLike)):
        return os.fspath(resume_from)
    if resume_from is True and args.output_dir:
        last = sys.modules["transformers"].trainer_utils.get_last_checkpoint(args.output_dir)
        return last if isinstance(last, str) else None
    return None


def _holds(folder: str | None, prefix: str) -> bool | None:
    if folder is None:
        return None
    try:
        return any(name.startswith(prefix) for name in os.listdir(folder))
    except OSError:
        return None


def limit(value: Any) -> float | None:
    """A total, or None where there is none (transformers writes sys.maxsize for "no end")."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 2**53:
        return None
    return value


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def or_nan(value: float | None) -> float:
    """The pulse's spelling of unknown."""
    return math.nan if value is None else value


def gpu_uuids(args: Any) -> list[str]:
    """The GPUs of this rank, in NVML's spelling; the demo lends a simulated one to a machine that has none."""
    if simulated := os.environ.get("TUNEWATCH_SIMULATED_GPU"):
        return [simulated]
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    indices = (
        range(torch.cuda.device_count()) if getattr(args, "n_gpu", 1) > 1 else [torch.cuda.current_device()]
    )
    visible = [item.strip() for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    found = []
    for index in indices:
        if index < len(visible) and visible[index].startswith("MIG-"):
            found.append(visible[index])  # torch names the parent card, not the slice
            continue
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        if uuid:
            found.append(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    return found


def effective_arguments(args: Any, state: Any) -> dict[str, Any]:
    """The arguments as they took effect (a resume takes some of them from the checkpoint)."""
    per_device = getattr(state, "train_batch_size", None) or getattr(
        args, "per_device_train_batch_size", None
    )
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    world = getattr(args, "world_size", None) or 1
    effective = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "world_size": world,
        "batch_size": per_device * accumulation * world if per_device and accumulation else None,
        "precision": _precision(args),
    }
    for name in ("logging_steps", "eval_steps", "save_steps"):
        effective[name] = getattr(state, name, None) or getattr(args, name, None)
    for name in ("learning_rate", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "seed", "data_seed", "optim",
                 "max_grad_norm", "weight_decay", "gradient_checkpointing", "max_length", "packing",
                 "ignore_data_skip", "load_best_model_at_end", "push_to_hub"):  # fmt: skip
        value = getattr(args, name, None)
        effective[name] = getattr(value, "value", value)
    return {key: value for key, value in effective.items() if isinstance(value, (str, int, float, bool))}


def _precision(args: Any) -> str:
    return "bf16" if getattr(args, "bf16", False) else "fp16" if getattr(args, "fp16", False) else "fp32"


def info(args: Any, state: Any, model: Any) -> dict[str, Any]:
    effective = effective_arguments(args, state)
    info = {
        key: effective.get(key) for key in ("batch_size", "learning_rate", "max_length", "precision", "seed")
    }
    peft = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    config = getattr(model, "config", None)
    name = getattr(peft, "base_model_name_or_path", None) or getattr(config, "_name_or_path", None)
    if name:
        info["base_model"] = _model_name(str(name))
    kind = getattr(peft, "peft_type", None)
    info["method"] = str(getattr(kind, "value", kind)).lower() if peft is not None else "full"
    for label, field in (("lora_r", "r"), ("lora_alpha", "lora_alpha")):
        info[label] = getattr(peft, field, None)
    return {key: value for key, value in info.items() if isinstance(value, (str, int, float)) and value != ""}


def _model_name(name: str) -> str:
    """A hub id as it is; of a local path only the last component."""
    return (
        os.path.basename(name.rstrip("/"))
        if os.path.isabs(name) or name.startswith(".") or os.path.isdir(name)
        else name
    )


def environment() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if isinstance(cuda, str):
        found["cuda"] = cuda
    return found


def parameters(model: Any) -> dict[str, int | None]:
    try:
        trainable = total = 0
        for parameter in model.parameters():
            count = getattr(parameter, "ds_numel", None) or parameter.numel()
            total += count
            trainable += count if parameter.requires_grad else 0
    except Exception:
        return {"trainable_parameters": None, "total_parameters": None}
    return {"trainable_parameters": trainable, "total_parameters": total}

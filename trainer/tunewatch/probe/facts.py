"""Reads from a trainer's objects what identifies a training: arguments in effect, model, versions, devices, what a
resume brought back. Imports nothing of transformers: what it is handed, it reads by attribute.
"""

from __future__ import annotations

import math
import os
import re
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
_NAMED = (
    "learning_rate", "warmup_ratio", "lr_scheduler_type", "seed", "data_seed", "optim", "max_grad_norm",
    "weight_decay", "gradient_checkpointing", "max_length", "packing", "include_num_input_tokens_seen",
    "ignore_data_skip", "load_best_model_at_end", "push_to_hub", "enable_jit_checkpoint",
    "save_strategy",
)  # fmt: skip
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_KINDS = ("logging", "eval", "save")
_DRIVER = "/proc/driver/nvidia/version"
_PARTS = ("optimizer", "scheduler", "rng", "data_order")
_BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")
"""Schedulers that count evaluations: 0 is right before the first one."""
_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "pandas", "sql", "generator", "imagefolder", "audiofolder",
             "videofolder", "webdataset", "xml", "hdf5", "pdffolder")  # fmt: skip
"""What datasets names a data set that has no name."""


def trainer_name(trainer: Any) -> str | None:
    """The nearest class of transformers or trl that a trainer is made of: SFTTrainer, DPOTrainer, Trainer."""
    for kind in type(trainer).__mro__:
        if str(kind.__module__).partition(".")[0] in ("transformers", "trl"):
            return kind.__name__
    return None


def restored(args: Any, state: Any, objects: dict[str, Any], resume_from: Any) -> dict[str, bool | None]:
    """Which parts of the training state a resume brought back; null for what can not be known or has no state.

    A checkpoint without optimizer.pt or scheduler.pt resumes without a word: the step goes on, the optimizer and the
    learning rate start again. transformers restores these two together or not at all.
    """
    if int(state.global_step) == 0:
        return dict.fromkeys(_PARTS)
    names = _names(checkpoint_folder(args, resume_from))
    loaded = None if names is None else _holds_optimizer(names) and "scheduler.pt" in names
    deepspeed = names is not None and any(name.startswith("global_step") for name in names)
    scheduler = _scheduler_restored(args, objects.get("lr_scheduler"), loaded)
    return {
        "optimizer": None if deepspeed else _optimizer_restored(objects.get("optimizer"), scheduler, loaded),
        "scheduler": scheduler,
        "rng": None if names is None else all(name in names for name in _rng_files(args)),
        "data_order": _data_order_restored(args, state, objects.get("train_dataloader")),
    }


def _scheduler_restored(args: Any, scheduler: Any, loaded: bool | None) -> bool | None:
    if loaded:
        return True
    last_epoch = getattr(scheduler, "last_epoch", None)
    if not isinstance(last_epoch, int):
        return None
    if last_epoch > 0:
        return True
    if any(kind.__name__ in _BY_METRIC for kind in type(scheduler).__mro__):
        return loaded
    kind = getattr(args, "lr_scheduler_type", None)
    return None if getattr(kind, "value", kind) == "constant" else False  # nothing to lose


def _optimizer_restored(optimizer: Any, scheduler: bool | None, loaded: bool | None) -> bool | None:
    """Its state speaks for itself, unless it may be older than this resume (or be there from the beginning)."""
    if loaded:
        return True
    try:
        entries = len(optimizer.state)
        stateless = _is_plain_sgd(optimizer)
    except (AttributeError, TypeError):
        return None
    if stateless:
        return None
    if entries and scheduler is not False and loaded is None:
        return True
    if entries and scheduler:  # a trainer that keeps it elsewhere
        return True
    return False if loaded is False or scheduler is False else None


def _is_plain_sgd(optimizer: Any) -> bool:
    """Plain SGD has no state, so none can be lost."""
    return all("momentum" in group and not group["momentum"] for group in optimizer.param_groups)


def _holds_optimizer(names: set[str]) -> bool:
    """optimizer.pt, of FSDP optimizer.bin or a folder optimizer_0, of SageMaker and XLA one a rank."""
    return any(name.startswith("optimizer") or name.endswith("-optimizer.pt") for name in names)


def _rng_files(args: Any) -> list[str]:
    """What the ranks of this node read."""
    if (getattr(args, "world_size", None) or 1) == 1:
        return ["rng_state.pth"]
    first = getattr(args, "process_index", 0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return [f"rng_state_{rank}.pth" for rank in range(first, first + count)]


def _data_order_restored(args: Any, state: Any, loader: Any) -> bool | None:
    """Whether the data goes on where the checkpoint left it.

    transformers computes the place from the step and the present arguments. Where the checkpoint's epoch says
    another place, the batch size, the number of processes or the data are not what they were.
    """
    step, accumulation = int(state.global_step), getattr(args, "gradient_accumulation_steps", None) or 1
    batches = _length(loader)
    steps = limit(state.max_steps) if batches is None else max(1, math.ceil(batches / accumulation))
    if not steps:
        return None
    epochs, rest = divmod(step, int(steps))
    if rest and getattr(args, "ignore_data_skip", False):
        return False
    epoch = finite(getattr(state, "epoch", None))
    if batches is None or epoch is None:
        return None
    return math.isclose(epoch, epochs + rest * accumulation / batches, rel_tol=1e-6)


def _length(sized: Any) -> int | None:
    try:
        return len(sized) or None
    except Exception:  # a stream has none, and a class of the user's may say so in its own way
        return None


def checkpoint_name(args: Any, state: Any, resume_from: Any) -> str | None:
    """The name of the checkpoint folder that a training goes on from, null for a fresh start."""
    folder = checkpoint_folder(args, resume_from) if int(state.global_step) else None
    return os.path.basename(folder.rstrip("/")) or None if folder else None


def checkpoint_folder(args: Any, resume_from: Any) -> str | None:
    """The folder behind `resume_from`: what `train()` was handed, or the argument of that name where nobody saw it."""
    if resume_from is None:
        resume_from = getattr(args, "resume_from_checkpoint", None)
    if isinstance(resume_from, str) and resume_from.lower() == "true":
        resume_from = True
    if isinstance(resume_from, (str, os.PathLike)):
        return os.fspath(resume_from)
    if resume_from is True and args.output_dir:
        last = sys.modules["transformers"].trainer_utils.get_last_checkpoint(args.output_dir)
        return last if isinstance(last, str) else None
    return None


def _names(folder: str | None) -> set[str] | None:
    if folder is None:
        return None
    try:
        return set(os.listdir(folder))
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


def effective_arguments(args: Any, state: Any, trainer: Any = None) -> dict[str, Any]:
    """The arguments as they took effect (a resume takes some of them from the checkpoint)."""
    batch = _micro_batch(args, state, trainer)
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    world = getattr(args, "world_size", None) or 1
    found = {
        "per_device_train_batch_size": batch // max(1, getattr(args, "n_gpu", 1)) if batch else None,
        "gradient_accumulation_steps": accumulation,
        "world_size": world,
        "batch_size": batch * accumulation * world if batch and accumulation else None,
        "precision": _precision(args, getattr(trainer, "model", None)),
        "warmup_steps": warmup_steps(args, getattr(state, "max_steps", None)),
    }
    for kind in _KINDS:
        found[f"{kind}_steps"] = getattr(state, f"{kind}_steps", None) or getattr(args, f"{kind}_steps", None)
    for name in _NAMED:
        found[name] = _plain(getattr(args, name, None))
    return {key: value for key, value in found.items() if isinstance(value, (str, int, float, bool))}


def _micro_batch(args: Any, state: Any, trainer: Any) -> int | None:
    """Rows of a micro-batch of one process. The state's number is the checkpoint's where a training was resumed."""
    found = getattr(trainer, "_train_batch_size", None)
    if not found and getattr(args, "auto_find_batch_size", False):
        found = getattr(state, "train_batch_size", None)
    found = (
        found or getattr(args, "train_batch_size", None) or getattr(args, "per_device_train_batch_size", None)
    )
    return found if isinstance(found, int) else None


def _precision(args: Any, model: Any = None) -> str:
    """What is computed in: by the mixed precision that was asked for, else by the weights themselves."""
    for name in ("bf16", "fp16"):
        if getattr(args, name, False):
            return name
    weights = str(getattr(model, "dtype", ""))
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(weights, "fp32")


def warmup_steps(args: Any, max_steps: Any) -> int | None:
    """Optimizer steps of warm-up; a share of the training is resolved, None where that can not be."""
    if _plain(getattr(args, "lr_scheduler_type", None)) in _WITHOUT_WARMUP:
        return 0
    steps, ratio = getattr(args, "warmup_steps", None), getattr(args, "warmup_ratio", None)
    if isinstance(steps, (int, float)) and steps >= 1:
        return int(steps)
    share = steps or ratio or 0.0
    if not isinstance(share, (int, float)):
        return None
    if share == 0:
        return 0
    return math.ceil(max_steps * share) if isinstance(max_steps, int) and 0 < max_steps < 2**53 else None


def requested_arguments(args: Any, state: Any) -> dict[str, int]:
    """Every how many steps the arguments want a log, an evaluation, a save; a share of the training is resolved."""
    found = {}
    max_steps = getattr(state, "max_steps", None)
    for kind in _KINDS:
        steps = getattr(args, f"{kind}_steps", None)
        if _plain(getattr(args, f"{kind}_strategy", "steps")) != "steps" or not isinstance(
            steps, (int, float)
        ):
            continue
        if steps >= 1:
            found[f"{kind}_steps"] = int(steps)
        elif steps > 0 and isinstance(max_steps, int):
            found[f"{kind}_steps"] = math.ceil(max_steps * steps)
    return found


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def info(args: Any, state: Any, model: Any, trainer: Any = None) -> dict[str, Any]:
    effective = effective_arguments(args, state, trainer)
    info = {
        key: effective.get(key) for key in ("batch_size", "learning_rate", "max_length", "precision", "seed")
    }
    peft = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    config = getattr(model, "config", None)
    name = getattr(peft, "base_model_name_or_path", None) or getattr(config, "_name_or_path", None)
    if name:
        info["base_model"] = _model_name(str(name))
    info["base_model_revision"] = getattr(config, "_commit_hash", None) or getattr(peft, "revision", None)
    kind = getattr(peft, "peft_type", None)
    info["method"] = str(getattr(kind, "value", kind)).lower() if peft is not None else "full"
    for label, field in (("lora_r", "r"), ("lora_alpha", "lora_alpha")):
        info[label] = getattr(peft, field, None)
    targets = getattr(peft, "target_modules", None)
    info["lora_target_modules"] = ",".join(sorted(targets)) if isinstance(targets, (set, list)) else targets
    data = getattr(trainer, "train_dataset", None)
    info["dataset"], info["dataset_rows"] = _dataset_name(data), _length(data)
    return {key: value for key, value in info.items() if isinstance(value, (str, int, float)) and value != ""}


def _dataset_name(data: Any) -> str | None:
    """What a data set is called, if it was loaded by a name."""
    facts = getattr(data, "info", None)
    name = getattr(facts, "dataset_name", None) or getattr(facts, "builder_name", None)
    return _model_name(name) if isinstance(name, str) and name not in _BUILDERS else None


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
    return {**found, **_gpu_and_driver()}


def _gpu_and_driver() -> dict[str, str]:
    """The model of this rank's GPU and the version of its driver, where there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found = {"gpu": str(torch.cuda.get_device_name())}
    try:
        with open(_DRIVER, encoding="utf-8") as file:
            version = re.search(r"Kernel Module\S*(?:\s+for \S+)?\s+([\d.]+)", file.readline())
    except OSError:
        return found
    return {**found, "driver": version[1]} if version else found


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

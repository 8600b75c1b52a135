"""The built-in job, from a checked configuration to a packaged model.

It reports what it does as it goes: the supervisor sees which import, download or tokenization a run is busy
with long before the first step, and knows a run as completed only once `package` says so.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewatch.finetune.arguments import lora_config, training_arguments
from tunewatch.finetune.config import TINY_MODEL, DatasetSection, ModelSection, RunConfig, is_local
from tunewatch.finetune.data import LoadedData, is_streamed, load_data, texts
from tunewatch.finetune.errors import (
    ConfigError,
    DataError,
    DiskFullError,
    JobError,
    MissingFileError,
    NonFiniteWeightsError,
    NothingTrainableError,
)
from tunewatch.finetune.faults import faults_from_environment
from tunewatch.finetune.hub import explain_hub_errors
from tunewatch.finetune.overlap import eval_rows_in_train
from tunewatch.finetune.packaging import package, push
from tunewatch.finetune.resume import choose_checkpoint
from tunewatch.finetune.samples import write_samples
from tunewatch.probe.hook import watch_bars
from tunewatch.probe.writer import RunWriter
from tunewatch.provenance import library_versions, masked, masked_text, overlap_warning, public_name
from tunewatch.review import REVIEW

_ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # TRL pings its makers when a trainer is built
    "TOKENIZERS_PARALLELISM": "false",  # else a warning at each fork of a dataloader worker
}


@dataclass(frozen=True)
class _Prepared:
    trainer: Any
    tokenizer: Any
    data: LoadedData
    info: dict[str, Any]


def run_job(config: RunConfig, writer: RunWriter) -> None:
    """Run the whole job. Raises `JobError` for what it understands; errors of the libraries pass through."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    writer.event("state", state="preparing")
    writer.event("provenance", info={"name": masked_text(config.name)}, environment=library_versions())
    check_writable(config.output_dir)
    checkpoint = choose_checkpoint(config)

    prepared = _prepare(config, writer)
    if checkpoint is not None:
        writer.phase("prepare", detail=f"resuming from {checkpoint.name}", activity="restore")
    prepared.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if _cut_short(prepared.trainer):
        return  # preempted: the checkpoint is written, and there is no time to package a half-done model
    _finish(config, writer, prepared)


def check_writable(output_dir: Path) -> None:
    """Make the folder and write a file into it, so that a wrong path does not cost a download first."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no room in {output_dir.name}: {os.strerror(error.errno)}") from error
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise ConfigError(f"cannot write into {output_dir.name!r}: {reason}", key="output_dir") from error


def _prepare(config: RunConfig, writer: RunWriter) -> _Prepared:
    writer.phase("prepare", detail="importing torch and trl", activity="import")
    import trl

    from tunewatch.probe.callback import TunewatchCallback

    faults = faults_from_environment()
    arguments = training_arguments(config, has_eval=_has_eval(config.dataset))
    adapter = lora_config(config)

    def report(step: str, ratio: float | None, activity: str | None = "load") -> None:
        writer.phase("prepare", detail=step, ratio=ratio, activity=activity)

    watch_bars()
    report("reading the dataset", None)
    data = load_data(config.dataset, seed=arguments.seed)
    overlap = eval_rows_in_train(
        data, lambda ratio: report("comparing the evaluation set with the training set", ratio, None)
    )
    if overlap:
        print(overlap_warning(overlap, _rows(data.eval)), file=sys.stderr, flush=True)

    section = config.model
    if section.name == TINY_MODEL:
        section = section.model_copy(update={"name": str(_tiny_model(config, data))})
    report("loading the tokenizer", None)
    tokenizer = _load_tokenizer(section)
    if data.format == "messages" and not tokenizer.chat_template and not arguments.chat_template_path:
        raise ConfigError(
            f"the dataset holds messages, but {public_name(section.name)} no chat template: set this to a "
            "Jinja file or to a model that has one",
            key="training.chat_template_path",
        )
    report("loading the model", None)
    model = _load_model(section, full=adapter is None)
    report("tokenizing", None, "tokenize")
    with _explain_preparation():
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=data.train,
            eval_dataset=data.eval,
            processing_class=tokenizer,
            peft_config=adapter,
            callbacks=[TunewatchCallback(), *faults],
        )
    if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        raise NothingTrainableError(
            "no parameter of the model can be trained: look at lora.target_modules and lora.inference_mode"
        )

    def tell() -> dict[str, Any]:
        info = run_info(config, section, trainer, data, overlap)
        writer.event("provenance", info=info, environment=library_versions())
        return info

    trainer.add_callback(_at_train_begin(tell))
    return _Prepared(trainer, tokenizer, data, tell())


def _at_train_begin(tell: Callable[[], object]) -> Any:
    """A callback that tells again when a training begins, now with what took effect.

    It comes after the probe's callback, which knows less: of the rows only what became of them.
    """
    from transformers import TrainerCallback

    class TellAgain(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell()

    return TellAgain()


def _finish(config: RunConfig, writer: RunWriter, prepared: _Prepared) -> None:
    run_id = writer.run_id or "none"
    writer.event("state", state="packaging")
    writer.phase("package", detail="writing the model")
    try:
        card = prepared.info | library_versions()
        result = package(prepared.trainer, prepared.tokenizer, config, run_id=run_id, info=card)
    except JobError as error:
        finite = not isinstance(error, NonFiniteWeightsError)
        writer.event(
            "package",
            ok=False,
            reason=error.tunewatch_reason,
            weights_finite=None if finite else False,
            files=0,
            bytes=0,
            push="none",
        )
        raise
    _generate(config, writer, prepared)
    pushed = "none"
    if config.hub.push_to:
        writer.phase("package", detail="pushing to the Hub")
        failure = push(result.folder, config.hub, run_id=run_id)
        if failure is not None:
            traceback.print_exception(failure)
        pushed = "done" if failure is None else "failed"
    writer.event(
        "package",
        ok=True,
        reason=None,
        weights_finite=True,
        files=result.files,
        bytes=result.bytes,
        push=pushed,
    )


def _generate(config: RunConfig, writer: RunWriter, prepared: _Prepared) -> None:
    """Write the samples. A model that is finished and packaged is not lost because of them."""
    if config.samples.number == 0 or prepared.data.eval is None:
        return

    def report(done: int, total: int) -> None:
        writer.phase("package", detail="generating samples", ratio=done / total)

    try:
        generated = write_samples(
            prepared.trainer.model,
            prepared.tokenizer,
            prepared.data,
            config.output_dir,
            run_id=writer.run_id,
            number=config.samples.number,
            max_new_tokens=config.samples.max_new_tokens,
            report=report,
        )
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        generated = 0
    if writer.folder:
        (Path(writer.folder) / REVIEW).unlink(missing_ok=True)  # it is of the samples of an earlier session
    writer.event("samples", generated=generated)


def run_info(
    config: RunConfig, model: ModelSection, trainer: Any, data: LoadedData, overlap: int | None
) -> dict[str, Any]:
    """What identifies a run, as it took effect: keys of `tunewatch_run_info` and more. No path, no secret."""
    arguments = trainer.args
    adapter = next(iter(getattr(trainer.model, "peft_config", {}).values()), None)
    info = {
        "name": config.name,
        "base_model": public_name(model.name),
        "base_model_revision": _model_revision(model, trainer.model),
        "dataset": data.name,
        "dataset_revision": data.revision,
        "dataset_hash": data.hash,
        "dataset_split": config.dataset.split,
        "dataset_rows": _rows(data.train),
        "eval_dataset": data.eval_name,
        "eval_dataset_hash": data.eval_hash,
        "eval_split": config.dataset.eval_split,
        "eval_fraction": config.dataset.eval_fraction,
        "eval_rows": _rows(data.eval),
        "eval_overlap_rows": overlap,
        "method": "full" if adapter is None else "lora",
        "lora_r": getattr(adapter, "r", None),
        "lora_alpha": getattr(adapter, "lora_alpha", None),
        "lora_target_modules": _module_names(adapter.target_modules) if adapter is not None else None,
        "batch_size": (trainer.state.train_batch_size or arguments.per_device_train_batch_size)
        * arguments.gradient_accumulation_steps
        * arguments.world_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "num_train_epochs": arguments.num_train_epochs if arguments.max_steps <= 0 else None,
        "max_steps": arguments.max_steps if arguments.max_steps > 0 else None,
        "learning_rate": arguments.learning_rate,
        "max_length": arguments.max_length,
        "precision": _precision(arguments, trainer.model),
        "seed": arguments.seed,
        "data_seed": arguments.data_seed,
    }
    known: dict[str, Any] = masked({key: value for key, value in info.items() if value is not None})
    return known


def _rows(rows: Any | None) -> int | None:
    """How many rows there are; None while nobody knows."""
    if rows is None:
        return 0
    return None if is_streamed(rows) else len(rows)


def _model_revision(section: ModelSection, model: Any) -> str | None:
    """The commit of a base model of the Hub, or what was asked for where it is unknown; a folder has none."""
    if is_local(section.name):
        return None
    return getattr(model.config, "_commit_hash", None) or section.revision


def _precision(arguments: Any, model: Any) -> str:
    """What is computed in: autocast's type where it is on, else that of most of the weights."""
    if arguments.bf16 or arguments.fp16:
        return "bf16" if arguments.bf16 else "fp16"
    counts: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + parameter.numel()
    most = max(counts, key=counts.__getitem__, default="float32")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(most, most)


def _module_names(targets: str | set[str]) -> str:
    """`q_proj, v_proj` for the modules of all layers; a pattern as it is."""
    return (
        targets if isinstance(targets, str) else ", ".join(sorted({name.rsplit(".")[-1] for name in targets}))
    )


def _has_eval(section: DatasetSection) -> bool:
    return any((section.eval_path, section.eval_split, section.eval_fraction))


def _tiny_model(config: RunConfig, data: LoadedData) -> Path:
    from tunewatch.finetune.tiny import build_tiny_model

    return build_tiny_model(config.output_dir / TINY_MODEL.replace(":", "-"), texts=texts(data))


def _load_tokenizer(section: ModelSection) -> Any:
    from transformers import AutoTokenizer

    if is_local(section.name):
        _check_model_folder(Path(section.name))
    with explain_hub_errors("model", section.name):
        return AutoTokenizer.from_pretrained(
            section.name, revision=section.revision, trust_remote_code=section.trust_remote_code
        )


def _load_model(section: ModelSection, *, full: bool) -> Any:
    """The base model; without `dtype` as it was saved, but in float32 when all its weights are to learn."""
    from transformers import AutoModelForCausalLM

    with explain_hub_errors("model", section.name):
        return AutoModelForCausalLM.from_pretrained(
            section.name,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            dtype=section.dtype or ("float32" if full else "auto"),
        )


def _check_model_folder(folder: Path) -> None:
    if not folder.is_dir():
        siblings = [entry.name for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = difflib.get_close_matches(folder.name, siblings, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise MissingFileError(f"model folder not found: {folder.name}{hint}")
    if not (folder / "config.json").is_file():
        raise MissingFileError(f"model folder {folder.name} has no config.json")


@contextmanager
def _explain_preparation() -> Iterator[None]:
    """Tell settings that PEFT refuses from rows that TRL cannot prepare, by the place that raised."""
    try:
        yield
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if any(frame.f_globals.get("__name__", "").startswith("peft.") for frame in frames):
            # PEFT speaks of modules and ranks here: nothing of the data.
            raise ConfigError(str(error).strip().splitlines()[0], key="lora") from error
        if any(frame.f_code.co_name == "_prepare_dataset" for frame in frames):
            raise DataError(f"TRL could not prepare the rows ({type(error).__name__})") from error
        raise


def _cut_short(trainer: Any) -> bool:
    """Whether transformers' SIGTERM checkpoint ended the training: `train()` returns as if all were done."""
    return trainer.args.enable_jit_checkpoint and trainer.state.global_step < trainer.state.max_steps

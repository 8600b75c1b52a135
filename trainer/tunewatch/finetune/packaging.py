"""The finished model as a folder that stands on its own: weights, tokenizer, card, checksums.

It is written beside its final place and renamed, so `final/` is either whole or not there.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tunewatch.finetune.config import HubSection, RunConfig
from tunewatch.finetune.errors import DiskFullError, NonFiniteWeightsError, PackagingError
from tunewatch.finetune.weights import WeightsReport, check_weights
from tunewatch.provenance import file_sha256

FINAL = "final"
CHECKSUMS = "checksums.json"
_PRIVATE_FILES = ("training_args.bin",)
"""Written by `Trainer.save_model`, but a pickle that names paths of this machine."""


@dataclass(frozen=True)
class Package:
    """A folder that was packaged: how many files, how large."""

    folder: Path
    files: int
    bytes: int
    weights: WeightsReport


def package(
    trainer: Any, tokenizer: Any, config: RunConfig, *, run_id: str, info: Mapping[str, Any]
) -> Package:
    """Write `<output_dir>/final/`. Raises `NonFiniteWeightsError`, `DiskFullError`, `PackagingError`."""
    final = config.output_dir / FINAL
    staging = config.output_dir / f".{FINAL}-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with _explain_disk_errors():
            staging.mkdir(parents=True)
            trainer.save_model(str(staging))
            tokenizer.save_pretrained(str(staging))
            for name in _PRIVATE_FILES:
                (staging / name).unlink(missing_ok=True)
            weights = _checked_weights(staging)
            card = model_card(run_id=run_id, info=info, evaluations=evaluations(trainer.state.log_history))
            (staging / "README.md").write_text(card, encoding="utf-8")
            files = write_checksums(staging, run_id=run_id)
            _replace(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Package(final, len(files), sum(entry["bytes"] for entry in files), weights)


def write_checksums(folder: Path, *, run_id: str) -> list[dict[str, Any]]:
    """Write `checksums.json` (SHA-256 and size of every other file in the folder) and return its entries."""
    files = [
        {
            "path": file.relative_to(folder).as_posix(),
            "bytes": file.stat().st_size,
            "sha256": file_sha256(file),
        }
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != CHECKSUMS
    ]
    manifest = {"run_id": run_id, "algorithm": "sha256", "files": files}
    (folder / CHECKSUMS).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return files


def evaluations(log_history: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Pairs of step and evaluation loss."""
    return [(entry["step"], entry["eval_loss"]) for entry in log_history if "eval_loss" in entry]


def model_card(*, run_id: str, info: Mapping[str, Any], evaluations: list[tuple[int, float]]) -> str:
    """The README of the result: which run made it, from what, and what is known about its quality."""
    adapter = info["method"] == "lora"
    header: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "tags": ["tunewatch", "sft"],
    }
    if "/" in str(info["base_model"]):  # a name without a slash is a local folder, which the Hub would refuse
        header["base_model"] = info["base_model"]
    if evaluations:
        best = min(evaluations, key=lambda pair: pair[1])
        quality = (
            f"Evaluation loss {evaluations[-1][1]:.4g} at step {evaluations[-1][0]} "
            f"(lowest: {best[1]:.4g} at step {best[0]}). "
            "A lower loss alone does not make a better model: read the samples."
        )
    else:
        quality = "No evaluation was run."
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in info.items() if value is not None)
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n"
        f"# {info['name']}\n\n"
        f"{'A LoRA adapter' if adapter else 'A model'} fine-tuned by tunewatch run `{run_id}`.\n\n"
        f"## Quality\n\n{quality}\n\n"
        "## Provenance\n\n"
        "Enough to reconstruct the run; a second run need not be bit-identical.\n\n"
        f"| | |\n| --- | --- |\n| run_id | {run_id} |\n{rows}\n\n"
        f"`{CHECKSUMS}` lists the SHA-256 of every file.\n"
    )


def push(folder: Path, hub: HubSection, *, run_id: str) -> Exception | None:
    """Upload a folder to the Hub; returns what went wrong, or None when the Hub confirmed the commit."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(str(hub.push_to), private=hub.private, exist_ok=True)
        # transformers only waits for such a future and never looks at its exception.
        api.upload_folder(
            repo_id=str(hub.push_to),
            folder_path=str(folder),
            commit_message=f"tunewatch run {run_id}",
            run_as_future=True,
        ).result()
    except Exception as error:  # noqa: BLE001  a finished model must not be lost because of an upload
        return error
    return None


def _checked_weights(folder: Path) -> WeightsReport:
    try:
        weights = check_weights(folder)
    except ValueError as error:
        raise PackagingError(str(error)) from error
    if weights.tensors == 0:
        raise PackagingError("no safetensors weights were written")
    if not weights.finite:
        bad = sum(weights.nonfinite.values())
        raise NonFiniteWeightsError(
            f"{bad} of {weights.values} weights are NaN or infinite, in {len(weights.nonfinite)} of "
            f"{weights.tensors} tensors (the first: {next(iter(weights.nonfinite))}); nothing was packaged"
        )
    return weights


def _replace(staging: Path, final: Path) -> None:
    """Rename `staging` to `final`. A folder that is not empty cannot be replaced in one step."""
    old = final.with_name(f".{final.name}-old-{os.getpid()}")
    if final.exists():
        final.rename(old)
    staging.rename(final)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _explain_disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no room for the result: {os.strerror(error.errno)}") from error
        raise


def _cell(value: Any) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, list | tuple | set)
        else str(value).replace("|", "\\|")
    )

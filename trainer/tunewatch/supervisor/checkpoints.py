"""What checkpoints lie in an output folder, and whether a resume can trust them. No tensor is loaded."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

INCOMPLETE_MARK = "checkpoint-is-incomplete.txt"
"""transformers' JIT checkpoint keeps this file in a folder while it writes it."""


@dataclass(frozen=True)
class Checkpoint:
    """One `checkpoint-N` folder.

    `complete`: every file that the trainer writes is there and whole. `resumable`: it also holds optimizer, scheduler
    and RNG state (`save_only_model` checkpoints do not: good for inference, not for an exact resume). `problem` says
    why not. `size_bytes` is the sum of its files, `saved_at` Unix seconds.
    """

    step: int
    name: str
    path: Path
    complete: bool
    resumable: bool
    problem: str
    size_bytes: int
    saved_at: float


def scan(output_dir: Path | str, known: Iterable[Checkpoint] = ()) -> list[Checkpoint]:
    """Return the checkpoints of an output folder by step; an empty list where there is no such folder.

    Of `known`, an earlier scan, those that are complete and whose files did not change are not read again: the
    trainer state alone may be many megabytes.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    before = {checkpoint.path: checkpoint for checkpoint in known if checkpoint.complete}
    found = []
    for path in folder.glob("checkpoint-*"):
        if path.name[11:].isdecimal() and path.is_dir():
            with contextlib.suppress(FileNotFoundError):  # rotated away while we look
                found.append(inspect(path, before.get(path)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_complete(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    return max((item for item in checkpoints if item.complete), key=lambda item: item.step, default=None)


def newest_resumable(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    return max((item for item in checkpoints if item.resumable), key=lambda item: item.step, default=None)


def inspect(path: Path, known: Checkpoint | None = None) -> Checkpoint:
    """Look at one checkpoint folder. Whatever is in it, a broken file is a `problem`.

    Raises FileNotFoundError when the folder goes away meanwhile. `known` is taken as it is if nothing changed.
    """
    size, saved_at = 0, 0.0
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if file.is_file():
                stat = file.stat()
                size += stat.st_size
                saved_at = max(saved_at, stat.st_mtime)
    if known is not None and (known.size_bytes, known.saved_at) == (size, saved_at):
        return known
    step = int(path.name[11:])
    problem = _state_problem(path, step) or _weights_problem(path)
    lacking = problem or _resume_problem(path)
    return Checkpoint(step, path.name, path, not problem, not lacking, lacking, size, saved_at)


def _state_problem(path: Path, step: int) -> str:
    if (path / INCOMPLETE_MARK).exists():
        return "still being written when the training was terminated"
    # Written last: while it is missing, the save is not over, or was cut off.
    state = path / "trainer_state.json"
    if not state.is_file():
        return "trainer_state.json is missing: the save did not finish"
    try:
        recorded = json.loads(state.read_text(encoding="utf-8")).get("global_step")
    except (OSError, ValueError, AttributeError):
        return "trainer_state.json is cut off"
    return "" if recorded == step else f"trainer_state.json is of step {recorded}"


def _weights_problem(path: Path) -> str:
    if _is_deepspeed(path):
        return _deepspeed_problem(path, "*model_states.pt")
    if any(path.glob("pytorch_model_fsdp_*/")):
        return _sharded_problem(path, "pytorch_model_fsdp_*/")
    weights = sorted([*path.glob("*model*.safetensors"), *path.glob("*model*.bin")])
    indexes = list(path.glob("*.index.json"))
    for index in indexes:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(name for name in names if not (path / name).is_file())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return f"{index.name} is broken"
        if missing:
            return f"{missing[0]} is missing"
    if not weights:
        return "no weights"
    if not indexes and any(_SHARD.search(file.name) for file in weights):
        return "the index of the weights' shards is missing"
    return _first_problem(weights)


_SHARD = re.compile(r"-\d+-of-\d+\.")


def _is_deepspeed(path: Path) -> bool:
    return any(path.glob("global_step*/"))


def _deepspeed_problem(path: Path, pattern: str) -> str:
    """DeepSpeed writes a folder of its own, and last a file `latest` that names it."""
    try:
        folder = path / (path / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return "DeepSpeed's file 'latest' is missing: the save did not finish"
    files = sorted(folder.glob(pattern))
    return _first_problem(files) if files else f"no {pattern} in {folder.name}"


def _sharded_problem(path: Path, pattern: str) -> str:
    """torch.distributed.checkpoint writes each folder's `.metadata` last."""
    for folder in sorted(path.glob(pattern)):
        if not (folder / ".metadata").is_file():
            return f"{folder.name} has no .metadata: the save did not finish"
    return ""


def _first_problem(files: Iterable[Path]) -> str:
    return next(filter(None, map(file_problem, files)), "")


def _resume_problem(path: Path) -> str:
    optimizer = [path / name for name in ("optimizer.pt", "optimizer.bin") if (path / name).exists()]
    scheduler, rng = list(path.glob("scheduler.pt")), sorted(path.glob("rng_state*.pth"))
    if _is_deepspeed(path):  # its model states hold the scheduler
        broken = _deepspeed_problem(path, "*optim_states.pt")
        scheduler = scheduler or rng
    else:
        broken = _sharded_problem(path, "optimizer_*/")
        optimizer = optimizer or list(path.glob("optimizer_*/"))
        if not optimizer:
            return _LACKING.format("optimizer")
    if not scheduler:
        return _LACKING.format("scheduler")
    if not rng:
        return _LACKING.format("RNG")
    return broken or _first_problem(file for file in (*optimizer, *scheduler, *rng) if not file.is_dir())


_LACKING = "no {} state: good for inference, not for an exact resume"


def file_problem(file: Path) -> str:
    """Whether a safetensors or torch file was written to its end: "" if so, else what is wrong."""
    if not file.is_file():  # never open a pipe or a device
        return f"{file.name} is no file"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if file.suffix == ".safetensors":
                whole = _safetensors_is_whole(stream, size)
            else:
                whole = _torch_is_whole(stream, size)
    except OSError as error:
        return f"{file.name} can not be read: {error.strerror}"
    return "" if whole else f"{file.name} is cut off"


def _safetensors_is_whole(stream: BinaryIO, size: int) -> bool:
    """The header names the last byte of the data: https://huggingface.co/docs/safetensors (format)."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        return False
    (length,) = struct.unpack("<Q", prefix)
    if length > min(size, 100_000_000):
        return False
    try:
        header = json.loads(stream.read(length))
        end = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
        )
        return bool(size == 8 + length + end)
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def _torch_is_whole(stream: BinaryIO, size: int) -> bool:
    """torch.save writes a zip, whose directory comes last.

    Its format before torch 1.6 is a pickle with the tensors behind it: of that only the beginning can be told.
    """
    if stream.read(2) != b"PK":
        return size > 0
    try:
        with zipfile.ZipFile(stream) as archive:
            return bool(archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False

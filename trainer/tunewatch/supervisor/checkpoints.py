"""What checkpoints lie in an output folder, and whether a resume can trust them. No tensor is loaded."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

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


def scan(output_dir: Path | str) -> list[Checkpoint]:
    """Return the checkpoints of an output folder by step; an empty list where there is no such folder."""
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    found = [
        inspect(path) for path in folder.glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_complete(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    return max((item for item in checkpoints if item.complete), key=lambda item: item.step, default=None)


def newest_resumable(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    return max((item for item in checkpoints if item.resumable), key=lambda item: item.step, default=None)


def inspect(path: Path) -> Checkpoint:
    """Look at one checkpoint folder. Never raises for what is in it: a broken file is a `problem`."""
    files = [file for file in path.rglob("*") if file.is_file()]
    size, saved_at = 0, 0.0
    for file in files:
        try:
            stat = file.stat()
        except FileNotFoundError:  # rotated away while we look
            continue
        size += stat.st_size
        saved_at = max(saved_at, stat.st_mtime)
    step = int(path.name[11:])
    problem = _weights_problem(path) or _state_problem(path, step)
    lacking = _resume_problem(path)
    return Checkpoint(
        step, path.name, path, not problem, not (problem or lacking), problem or lacking, size, saved_at
    )


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
    if any(path.glob("global_step*")) or any(path.glob("pytorch_model_fsdp_*")):
        return ""  # DeepSpeed and sharded FSDP keep the weights in folders of their own
    for index in path.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return f"{index.name} is broken"
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            return f"{missing[0]} is missing"
    weights = [*path.glob("*model*.safetensors"), *path.glob("*model*.bin")]
    if not weights:
        return "no weights"
    return next(filter(None, map(file_problem, sorted(weights))), "")


def _resume_problem(path: Path) -> str:
    if any(path.glob("global_step*")):
        return ""
    for label, patterns in (
        ("optimizer", ("optimizer.pt", "optimizer.bin", "optimizer_*")),
        ("scheduler", ("scheduler.pt",)),
        ("RNG", ("rng_state*.pth",)),
    ):
        found = [file for pattern in patterns for file in path.glob(pattern)]
        if not found:
            return f"no {label} state: good for inference, not for an exact resume"
        broken = next((text for file in found if file.is_file() and (text := file_problem(file))), "")
        if broken:
            return broken
    return ""


def file_problem(file: Path) -> str:
    """Whether a safetensors or torch file was written to its end: "" if so, else what is wrong."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if file.suffix == ".safetensors":
                whole = _safetensors_is_whole(stream.read(8), stream, size)
            else:
                whole = _torch_is_whole(stream, size)
    except OSError as error:
        return f"{file.name} can not be read: {error.strerror}"
    return "" if whole else f"{file.name} is cut off"


def _safetensors_is_whole(prefix: bytes, stream, size: int) -> bool:  # type: ignore[no-untyped-def]
    """The header names the last byte of the data: https://huggingface.co/docs/safetensors (format)."""
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
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return size == 8 + length + end


def _torch_is_whole(stream, size: int) -> bool:  # type: ignore[no-untyped-def]
    """torch.save writes a zip: its directory, with the end-of-central-directory record, comes last.

    The legacy format (before torch 1.6, and some RNG states) is a pickle, which ends with the STOP opcode.
    """
    head = stream.read(4)
    if not head:
        return False
    stream.seek(max(0, size - 65_557))
    tail = stream.read()
    if head[:2] == b"PK":
        return b"PK\x05\x06" in tail
    return tail[-1:] == b"." or size > 65_557

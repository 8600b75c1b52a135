"""What checkpoints lie in an output folder, and whether a resume can trust them. No tensor is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

INCOMPLETE_MARK = "checkpoint-is-incomplete.txt"
"""transformers' JIT checkpoint keeps this file in a folder while it writes it."""

LARGE_STATE_BYTES = 1_000_000
"""A trainer_state.json beyond this size is not read as a whole: its log history may be of any length."""


@dataclass(frozen=True)
class Checkpoint:
    """One `checkpoint-N` folder.

    `complete`: every file that the trainer writes is there and whole. `resumable`: it also holds optimizer, scheduler
    and RNG state (`save_only_model` checkpoints do not: good for inference, not for an exact resume). `problem` says
    why not. `size_bytes` is the sum of its files, `files` their number, `saved_at` Unix seconds.
    """

    step: int
    name: str
    path: Path
    complete: bool
    resumable: bool
    problem: str
    size_bytes: int
    saved_at: float
    files: int = 0

    @property
    def kind(self) -> str:
        """What it is good for: `resumable`, `inference` (its weights only) or `broken`."""
        return "resumable" if self.resumable else "inference" if self.complete else "broken"


def scan(
    output_dir: Path | str, known: Iterable[Checkpoint] = (), *, world_size: int | None = None
) -> list[Checkpoint]:
    """Return the checkpoints of an output folder by step; an empty list where there is no such folder.

    Of `known`, an earlier scan, those that are complete and whose files did not change are not read again.
    `world_size` is that of the run that would go on from them: each of its ranks needs an RNG state of its own.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        return []
    before = {checkpoint.path: checkpoint for checkpoint in known if checkpoint.complete}
    found = []
    for path in folder.glob("checkpoint-*"):
        if path.name[11:].isdecimal() and path.is_dir():
            with contextlib.suppress(FileNotFoundError):  # rotated away while we look
                found.append(inspect(path, before.get(path), world_size=world_size))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_complete(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    return _newest(item for item in checkpoints if item.complete)


def newest_resumable(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    return _newest(item for item in checkpoints if item.resumable)


def would_resume(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """What `resume_from_checkpoint=True` takes: the folder with the highest number, whole or not."""
    return _newest(checkpoints)


def _newest(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    return max(checkpoints, key=lambda item: item.step, default=None)


def how_many_fit(free_bytes: float, free_inodes: float | None, size: int, files: int) -> int | None:
    """How many more checkpoints of `size` bytes and so many files fit; None where that can not be said.

    `free_inodes` is None where the file system does not limit its files.
    """
    limits = [
        room // need for room, need in ((free_bytes, size), (free_inodes, files)) if room is not None and need
    ]
    return max(0, int(min(limits))) if limits else None


def inspect(path: Path, known: Checkpoint | None = None, *, world_size: int | None = None) -> Checkpoint:
    """Look at one checkpoint folder. Whatever is in it, a broken file is a `problem`.

    Raises FileNotFoundError when the folder goes away meanwhile. `known` is taken as it is if nothing changed.
    """
    size, saved_at, files = 0, 0.0, 0
    for stat in _file_stats(path):
        size, saved_at, files = size + stat.st_size, max(saved_at, stat.st_mtime), files + 1
    if known is not None and (known.size_bytes, known.saved_at, known.files) == (size, saved_at, files):
        return known
    step = int(path.name[11:])
    try:
        problem = _state_problem(path, step) or _weights_problem(path)
        lacking = problem or _resume_problem(path, world_size)
    except FileNotFoundError:
        raise
    except OSError as error:
        problem = lacking = f"it can not be read: {error.strerror}"
    return Checkpoint(step, path.name, path, not problem, not lacking, lacking, size, saved_at, files)


def _file_stats(path: Path | str) -> Iterator[os.stat_result]:
    """Of every file below a folder; scandir, because there may be thousands of checkpoints."""
    with contextlib.suppress(PermissionError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _file_stats(entry.path)
                elif entry.is_file():
                    yield entry.stat()


def _state_problem(path: Path, step: int) -> str:
    if (path / INCOMPLETE_MARK).exists():
        return "still being written when the training was terminated"
    # Written last: while it is missing, the save is not over, or was cut off.
    state = path / "trainer_state.json"
    if not state.is_file():
        return "trainer_state.json is missing: the save did not finish"
    try:
        recorded = recorded_step(state)
    except FileNotFoundError:
        raise
    except OSError as error:
        return f"trainer_state.json can not be read: {error.strerror}"
    except ValueError:
        return "trainer_state.json is cut off"
    return "" if recorded == step else f"trainer_state.json is of step {recorded}"


def recorded_step(state: Path) -> int | None:
    """The `global_step` of a trainer_state.json, None where it has none; ValueError when the file is cut off.

    Of a large one as transformers writes it (keys sorted, indented by two), the beginning and the end tell; one that
    is written in another way is gone through piece by piece.
    """
    if state.stat().st_size <= LARGE_STATE_BYTES:
        content = json.loads(state.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        step = content.get("global_step")
        return step if isinstance(step, int) else None
    with state.open("rb") as stream:
        head = stream.read(65_536)
        stream.seek(-16, os.SEEK_END)
        tail = stream.read()
        found = re.search(rb'^  "global_step": (\d+),$', head, re.MULTILINE)
        if found and head.startswith(b'{\n  "'):
            if not re.search(rb"\n}\s*$", tail):
                raise ValueError("no end")
            return int(found.group(1))
        stream.seek(0)
        return _step_in_stream(stream)


_PIECE = 262_144
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_JSON_TOKEN = re.compile(rb'"((?:[^"\\]|\\.)*)"(?:\s*:\s*(\d+)(?=[\s,}]))?|[{}\[\]]', re.DOTALL)


def _step_in_stream(stream: BinaryIO) -> int | None:
    """The number behind the outermost key `global_step`, in memory that does not grow with the file.

    Raises ValueError when the outermost object does not end.
    """
    depth, step, rest = 0, None, b""
    while chunk := stream.read(_PIECE):
        text, done = rest + chunk, 0
        if step is not None:  # only the end is looked for now
            text = _JSON_STRING.sub(b"", text)
            done = text.find(b'"') if b'"' in text else len(text)
            depth += sum(map(text[:done].count, b"{[")) - sum(map(text[:done].count, b"}]"))
            rest = text[done:]
            continue
        for token in _JSON_TOKEN.finditer(text):
            if len(chunk) == _PIECE and token.end() + 64 > len(text):
                break  # a string or a number that the next piece may continue
            done, sign = token.end(), token.group()[:1]
            if depth == 1 and token.group(1) == b"global_step" and token.group(2):
                step = int(token.group(2))
            depth += (sign in b"{[") - (sign in b"}]")
        rest = text[done:]
    if depth != 0 or rest.strip():
        raise ValueError("no end")
    return step


def _weights_problem(path: Path) -> str:
    if _is_deepspeed(path):
        return _deepspeed_problem(path, "*model_states.pt")
    if any(path.glob("pytorch_model_fsdp_*/")):
        return _sharded_problem(path, "pytorch_model_fsdp_*/")
    weights = {file for pattern in _WEIGHTS for file in path.glob(pattern)}
    indexes = list(path.glob("*.index.json"))
    for index in indexes:
        try:
            shards = {
                path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            }
            missing = sorted(file.name for file in shards if not file.is_file())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return f"{index.name} is broken"
        if missing:
            return f"{missing[0]} is missing"
        weights |= shards
    if not weights:
        return "no weights"
    if not indexes and any(_SHARD.search(file.name) for file in weights):
        return "the index of the weights' shards is missing"
    return _first_problem(sorted(weights)) or _configuration_problem(path)


_WEIGHTS = ("*model*.safetensors", "*model*.bin", "*/adapter_model.safetensors", "*/adapter_model.bin")
"""Adapters other than peft's "default" lie in folders of their own."""

_SHARD = re.compile(r"-\d+-of-\d+\.")


def _configuration_problem(path: Path) -> str:
    """Both are read by a resume, before the weights that they belong to."""
    for name in ("config.json", "adapter_config.json"):
        with contextlib.suppress(FileNotFoundError):
            try:
                json.loads((path / name).read_text(encoding="utf-8"))
            except ValueError:
                return f"{name} is cut off"
    return ""


def _is_deepspeed(path: Path) -> bool:
    return any(path.glob("global_step*/"))


def _deepspeed_problem(path: Path, pattern: str) -> str:
    """DeepSpeed writes a folder of its own, and last a file `latest` that names it."""
    try:
        name = (path / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return "DeepSpeed's file 'latest' is missing: the save did not finish"
    if not name:
        return "DeepSpeed's file 'latest' is empty: the save did not finish"
    folder = path / Path(name).name
    files = sorted(folder.glob(pattern))
    if not files:
        return f"no {pattern} in {folder.name}"
    missing = _missing_rank(files, r"zero_pp_rank_(\d+)_", 1)
    return f"{pattern} of rank {missing} is missing" if missing is not None else _first_problem(files)


def _missing_rank(files: Iterable[Path], pattern: str, world_size: int) -> int | None:
    """The first rank without a file: below `world_size`, or below another one that has its file."""
    ranks = {int(found.group(1)) for file in files if (found := re.search(pattern, file.name))}
    if not ranks:
        return None
    return next((rank for rank in range(max(world_size, *ranks, 1)) if rank not in ranks), None)


def _sharded_problem(path: Path, pattern: str) -> str:
    """torch.distributed.checkpoint writes each folder's `.metadata` last."""
    for folder in sorted(path.glob(pattern)):
        if not (folder / ".metadata").is_file():
            return f"{folder.name} has no .metadata: the save did not finish"
        shards = list(folder.glob("*.distcp"))
        if not shards or not all(shard.stat().st_size for shard in shards):
            return f"{folder.name} has {'an empty' if shards else 'no'} shard"
        if broken := file_problem(folder / ".metadata"):
            return f"{folder.name}: {broken}"
    return ""


def _first_problem(files: Iterable[Path]) -> str:
    return next(filter(None, map(file_problem, files)), "")


def _resume_problem(path: Path, world_size: int | None) -> str:
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
    if lacking := _rng_problem([file.name for file in rng], world_size):
        return lacking
    return broken or _first_problem(file for file in (*optimizer, *scheduler, *rng) if not file.is_dir())


_LACKING = "no {} state: good for inference, not for an exact resume"


def _rng_problem(names: Sequence[str], world_size: int | None) -> str:
    """A single process reads rng_state.pth, each of several ranks its own rng_state_RANK.pth."""
    alone = "rng_state.pth" in names
    if alone if world_size is None else world_size == 1:
        return (
            ""
            if alone
            else "RNG states of several ranks, and none for a single process: not for an exact resume"
        )
    ranks = {int(found.group(1)) for name in names if (found := re.search(r"_(\d+)\.pth$", name))}
    count = max(world_size or 2, *(rank + 1 for rank in ranks), 2)
    missing = next((rank for rank in range(count) if rank not in ranks), None)
    return "" if missing is None else f"no RNG state of rank {missing}: not for an exact resume"


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
    """torch.save writes a zip, whose directory comes last; before torch 1.6 pickles, with the tensors behind them."""
    start = stream.read(len(_OLD_TORCH))
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(stream) as archive:
                return bool(archive.namelist())
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False
    if start == _OLD_TORCH:
        return _old_torch_is_whole(stream, size)
    if size == 0:
        return False
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == pickle.STOP


_OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first of the old format's five pickles: its magic number."""


def _old_torch_is_whole(stream: BinaryIO, size: int) -> bool:
    """Behind the pickles of the version, the system, the object and the storages' keys lie the storages."""
    try:
        reader = _StorageReader(stream)
        *_, keys = [reader.load() for _ in range(4)]
        for key in keys:
            width = reader.widths[key]
            (count,) = struct.unpack("<q", stream.read(8))
            stream.seek(count * width, os.SEEK_CUR)
        return stream.tell() == size
    except Exception:  # noqa: BLE001 - whatever a damaged pickle makes of the reader
        return False


class _StorageReader(pickle.Unpickler):
    """Reads a pickle's structure and nothing else: whatever class or function it names becomes an empty stand-in."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.widths: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_StandIn,), {})

    def persistent_load(self, key: Any) -> Any:
        if key[0] == "storage":
            self.widths[key[2]] = _WIDTHS[key[1].__name__]
        return key[1]


class _StandIn(dict[Any, Any]):
    """Takes whatever a pickle does to the object that it stands for."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass


_WIDTHS = {
    "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2,
    "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16, "UntypedStorage": 1,
}  # fmt: skip
"""Bytes of an element, by torch's class of storage."""

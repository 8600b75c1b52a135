"""Where a result comes from: versions, revisions, and the hash of the data. And what of it nobody may see: secrets.

What is recorded here makes a run reconstructible, not bit-identical: kernels, thread counts and builds
still differ between machines.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
_CHUNK = 1 << 20

WHOLE_HASH_BYTES = 32 << 30
"""Data up to this size is hashed whole (a minute or so from a local disk); of larger data blocks are taken."""

SAMPLED_BLOCKS = 1024
"""Blocks of 1 MiB that are hashed of larger data, evenly spread over all of it."""

_SAVED_METADATA = ("state.json", "dataset_info.json")
"""Beside the Arrow files that `save_to_disk` writes: fingerprints that differ although the rows do not."""


# -- data -----------------------------------------------------------------------------------------------------


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content in hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def dataset_hash(data: Path | Sequence[Path], *, config: str | None = None, split: str = "train") -> str:
    """`sha256:<hex>` of a local dataset: of a file's content, or of the names and contents of several files.

    The bytes count, as they are stored: a row that changed, came, went or moved changes the hash, and so do
    other spaces, line ends, a byte order mark, and compression (a file that was packed again is another file).
    Touching, copying and moving change nothing, nor does the order in which a disk lists a folder. Of a folder
    the names below it count, since they decide the order of rows; hidden files, `cache-*` and `tmp*` files of
    `datasets`, and the bookkeeping of `save_to_disk` do not. Files of a list count in the order of the list, by
    their names below the folder that all of them share. `config` and `split` count for what is more than one
    file, when they are not the usual ones: they choose among its rows.

    Data above `WHOLE_HASH_BYTES` gets `sha256-sampled:<hex>` in bounded time: of names, sizes and
    `SAMPLED_BLOCKS` blocks. It changes with every change of size, and with one in a block that was taken.

    Raises OSError for what can not be read.
    """
    files = list(_files(data))
    if len(files) == 1 and not (isinstance(data, Path) and data.is_dir()):
        names, chosen = [""], ""
    else:
        names = _names(data, files)
        chosen = "" if (config, split) == (None, "train") else f"{config or ''}\0{split}\n"
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) > WHOLE_HASH_BYTES:
        return f"sha256-sampled:{_sampled(files, names, sizes, chosen)}"
    if names == [""]:
        return f"sha256:{file_sha256(files[0])}"
    digest = hashlib.sha256(chosen.encode())
    for name, file in zip(names, files, strict=True):
        digest.update(f"{name}\0{file_sha256(file)}\n".encode("utf-8", "surrogateescape"))
    return f"sha256:{digest.hexdigest()}"


def hub_dataset_hash(name: str, *, revision: str | None, config: str | None, split: str) -> str | None:
    """`sha256:<hex>` of what identifies a dataset of the Hub, streamed or not: its commit, configuration and split.

    None while the commit is not known: a branch holds other rows every day.
    """
    if revision is None or not is_commit(revision):
        return None
    identity = "\0".join((name, revision, config or "", split))
    return f"sha256:{hashlib.sha256(identity.encode()).hexdigest()}"


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit, which never comes to mean anything else."""
    return re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", revision) is not None


def _files(data: Path | Sequence[Path]) -> Iterator[Path]:
    if not isinstance(data, Path):
        yield from data
    elif data.is_file():
        yield data
    else:
        yield from (file for file in sorted(data.rglob("*")) if file.is_file() and _counts(file, data))


def _counts(file: Path, folder: Path) -> bool:
    parts = file.relative_to(folder).parts
    if any(part.startswith((".", "cache-")) for part in parts):
        return False
    saved = (file.parent / "state.json").exists()
    return not (saved and (file.name in _SAVED_METADATA or file.name.startswith("tmp")))


def _names(data: Path | Sequence[Path], files: Sequence[Path]) -> list[str]:
    """The names of files below `data`, or below the folder that the files of a list share."""
    folder = data if isinstance(data, Path) else Path(os.path.commonpath([file.parent for file in files]))
    return [file.relative_to(folder).as_posix() for file in files]


def _sampled(files: Sequence[Path], names: Sequence[str], sizes: Sequence[int], chosen: str) -> str:
    """The hash of evenly spread blocks of the files, seen as one long file."""
    digest = hashlib.sha256(chosen.encode())
    for name, size in zip(names, sizes, strict=True):
        digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
    last = max(0, sum(sizes) - _CHUNK)
    wanted = iter([last * i // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)])
    begin, offset = 0, next(wanted)
    for path, size in zip(files, sizes, strict=True):
        end = begin + size
        if offset < end:
            with path.open("rb") as file:
                while offset < end:
                    file.seek(offset - begin)
                    digest.update(file.read(_CHUNK))
                    offset = next(wanted, sys.maxsize)
        begin = end
    return digest.hexdigest()


def overlap_warning(overlap: int, eval_rows: object) -> str:
    """What it means that evaluation rows are training rows too."""
    return (
        f"{overlap} of {eval_rows} evaluation rows also occur in the training data: "
        "the evaluation loss looks better than the model is"
    )


# -- software and names ---------------------------------------------------------------------------------------


def library_versions() -> dict[str, str]:
    """Versions of Python, the training libraries and CUDA, as far as they are installed; imports nothing."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def public_name(name: str) -> str:
    """A name of a model or dataset as others may see it: of a local path only the last component."""
    return masked_text(Path(name).name if Path(name).is_absolute() else name)


# -- secrets --------------------------------------------------------------------------------------------------

MASK = "***"

_SECRET_WORD = (
    r"(?:token|secrets?|passw(?:or)?ds?|passphrase|credentials?"
    r"|(?:api|access|account|auth|private|secret|signing|wandb|hf)[_-]?keys?)"
)
_SECRET_KEY = re.compile(rf"(?i).*{_SECRET_WORD}")
_SPECIAL_TOKEN = re.compile(
    r"(?i)(?:.*[^a-z])?(?:eos|bos|pad|unk|sep|cls|mask|eot|eom|eod|stop|image|video|audio|boi|eoi|fim|special)[_-]?token"
)
"""Settings of a tokenizer, which are words of a vocabulary and no secrets."""

_ASSIGNED = re.compile(
    rf"(?i)(?<![\w.-])(?P<key>[\w.-]*{_SECRET_WORD})(?P<equals>\\?[\"']?\s*[=:]\s*)"
    r"(?P<value>\\?\"[^\"]*\"|\\?'[^']*'|[^\s&\"']+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+|authorization:\s*(?:basic|token)\s+)[^\s\"']{4,}")
_URL_CREDENTIALS = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s\"']+@")
_KNOWN_TOKENS = re.compile(
    r"\bhf_(?=[a-z]*[A-Z0-9]|[a-z]{20})[A-Za-z0-9]{8,}"  # of Hugging Face; not `hf_transfer`
    r"|\bsk-[\w-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abp]-[\w-]{10,}"
)


def is_secret_key(name: str) -> bool:
    """Whether a setting, option or variable of this name holds a secret: hub_token does, eos_token does not."""
    return bool(_SECRET_KEY.fullmatch(name)) and not _SPECIAL_TOKEN.fullmatch(name)


def masked_text(text: str) -> str:
    """A text without the secrets in it.

    Those are values of assignments whose key is one (`HF_TOKEN=...`, `"api_key": "..."`), bearer values,
    credentials in URLs, and what has the shape of a known kind of token (`hf_...`).
    """
    text = _URL_CREDENTIALS.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    text = _ASSIGNED.sub(_without_value, text)
    return _KNOWN_TOKENS.sub(MASK, text)


def _without_value(found: re.Match[str]) -> str:
    key, equals, value = found["key"], found["equals"], found["value"]
    if not is_secret_key(key) or value.lower() in ("true", "false", "none", "null", "bearer"):
        return found[0]
    return f"{key}{equals}{MASK}"


def masked(value: Any) -> Any:
    """Settings without their secrets: a copy, in which mappings and lists are searched to the bottom."""
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_key(str(key)) and not _says_nothing(item) else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return value


def _says_nothing(value: Any) -> bool:
    return value is None or isinstance(value, bool) or value == ""


def masked_command(command: Sequence[str]) -> list[str]:
    """A command line without its secrets: values of options and assignments, and what `masked_text` finds."""
    shown, hide = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if hide and not argument.startswith("--"):
            shown.append(MASK)
            hide = False
            continue
        secret = is_secret_key(name.lstrip("-")) and re.fullmatch(r"[\w.-]+", name) is not None
        shown.append(f"{name}={MASK}" if secret and equals else masked_text(argument))
        hide = (secret and not equals and argument.startswith("-")) or argument.lower() == "bearer"
    return shown

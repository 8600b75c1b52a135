"""Where a result comes from: versions, revisions, and the hash of the data.

What is recorded here makes a run reconstructible, not bit-identical: kernels, thread counts and builds
still differ between machines.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
_CHUNK = 1 << 20


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content in hex, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def dataset_hash(path: Path) -> str:
    """`sha256:<hex>` of a local dataset: of a file's content, or of the names and contents in a folder.

    It changes when a row, the order of rows or a file name below the folder changes, and not when a file is
    touched, copied or moved. Hidden files and `cache-*` files that `datasets` leaves behind do not count.
    """
    if path.is_file():
        return f"sha256:{file_sha256(path)}"
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith((".", "cache-")) for part in name.parts):
            digest.update(f"{name.as_posix()}\0{file_sha256(file)}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def hub_dataset_hash(name: str, *, revision: str | None, config: str | None, split: str) -> str:
    """`sha256:<hex>` of what identifies a dataset of the Hub: its commit, configuration and split."""
    identity = "\0".join((name, revision or "", config or "", split))
    return f"sha256:{hashlib.sha256(identity.encode()).hexdigest()}"


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
    return Path(name).name if Path(name).is_absolute() else name

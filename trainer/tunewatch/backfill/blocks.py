"""Prometheus' blocks out of OpenMetrics text, by promtool."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import tempfile
from pathlib import Path

_CONTENTS = struct.Struct(">Q44x")
"""The end of an index: where its symbols begin, and what does not matter here."""
_SYMBOLS = struct.Struct(">II")
"""How long the table of symbols is, in bytes and in strings."""

BLOCK_MS = 2 * 3600 * 1000
"""promtool makes blocks of two hours, and reads the whole text once for each of them."""
WINDOW_MS = 12 * BLOCK_MS
"""So it is given a day at a time."""


class BlocksError(Exception):
    """promtool could not do it; the text is what it said."""


def add_blocks(promtool: Path, text: Path, data: Path) -> int:
    """Put what the text holds as blocks into a data folder of Prometheus; how many there are.

    They are made beside the others and renamed: Prometheus may be running, and never sees half of one.
    """
    with tempfile.TemporaryDirectory(prefix=".tunewatch-import-", dir=data) as scratch:
        made = Path(scratch, "blocks")
        made.mkdir()
        _run(promtool, "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text), str(made))
        blocks = [path for path in made.iterdir() if (path / "meta.json").is_file()]
        for block in blocks:
            block.chmod(0o755)
            block.rename(data / block.name)
    return len(blocks)


def holds(data: Path, run_id: str) -> bool:
    """Whether a block of a data folder has samples of a run.

    Looks for its id among the strings of each block's index. promtool could tell, too, but to look into a folder it
    opens the files of a running server's head.
    """
    return any(_has_string(path, run_id.encode()) for path in data.glob("*/index"))


def _has_string(index: Path, text: bytes) -> bool:
    """Whether an index (format 1 or 2) has this string, of less than 128 bytes, in its table of symbols."""
    try:
        with index.open("rb") as file:
            file.seek(-_CONTENTS.size, os.SEEK_END)
            (at,) = _CONTENTS.unpack(file.read(_CONTENTS.size))
            file.seek(at)
            size, _ = _SYMBOLS.unpack(file.read(_SYMBOLS.size))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                return whole.find(bytes([len(text)]) + text, at, at + size + _SYMBOLS.size) >= 0
    except (OSError, ValueError, struct.error):
        return False  # no block, or one that is being deleted


def _run(promtool: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(promtool), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BlocksError(
            f"promtool {' '.join(arguments[:2])} failed: {said[-1] if said else done.returncode}"
        )
    return done.stdout

"""The samples of a run, and whether a person has read them.

A falling loss says nothing about tone, truth or format: a run is only judged when somebody has looked at what the
model writes. The text stays in `samples.jsonl` in the run's output_dir; counts are all that leaves it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewatch.runfolder import RunFolder

SAMPLES = "samples.jsonl"
"""In output_dir: a JSON object a line with `run_id`, `index`, `prompt`, `reference` and `generated`."""

REVIEW = "review.json"
"""In the run folder: `reviewed` of `generated` samples were read, said at `at` (Unix seconds)."""


class ReviewError(Exception):
    """There is nothing to read or to mark; the text is for the user."""


@dataclass(frozen=True)
class ReviewState:
    """How many samples a run wrote, and how many of them a person has read."""

    generated: int
    reviewed: int

    def __str__(self) -> str:
        if self.generated == 0:
            return "no samples"
        word = {0: "none", self.generated: "all"}.get(self.reviewed, str(self.reviewed))
        return f"{self.generated} sample{'s' if self.generated > 1 else ''}, {word} reviewed"


def review_state(folder: RunFolder) -> ReviewState | None:
    """The counts of a run; None when it wrote no samples (it did not come that far, or was not asked to)."""
    generated = _generated(folder)
    if generated is None:
        return None
    reviewed = (folder.read(REVIEW) or {}).get("reviewed")
    return ReviewState(generated, min(reviewed, generated) if isinstance(reviewed, int) else 0)


def read_samples(folder: RunFolder) -> list[dict[str, Any]]:
    """The samples of a run. Raises `ReviewError` when there are none, or no longer any of this run."""
    _some(folder)
    output = (folder.read("run.json") or {}).get("output_dir")
    path = Path(output or folder.path) / SAMPLES
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except FileNotFoundError:
        raise ReviewError(f"the samples of run {folder.run_id} are gone: there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ReviewError(f"{path} can not be read as samples: {type(error).__name__}") from None
    others = {row.get("run_id") for row in rows} - {folder.run_id}
    if others:
        raise ReviewError(
            f"the samples of run {folder.run_id} are gone: {path} is of run {', '.join(map(str, others))}"
        )
    return rows


def mark_reviewed(folder: RunFolder, through: int | None = None) -> ReviewState:
    """Say that a person has read the first `through` samples, or all. Replaces what was said before.

    Raises `ReviewError` when there are no samples, or fewer.
    """
    generated = _some(folder)
    through = generated if through is None else through
    if not 0 <= through <= generated:
        raise ReviewError(
            f"run {folder.run_id} has {generated} samples: found {through}, allowed: 0 to {generated}"
        )
    folder.write(REVIEW, {"reviewed": through, "generated": generated, "at": time.time()})
    return ReviewState(generated, through)


def was_evaluated(folder: RunFolder) -> bool:
    """Whether an evaluation loss was logged in any session of the run."""
    return any(
        key.startswith("eval_") and key.endswith("loss")
        for event in _events(folder, b'"event": "log"', b'"eval_')
        for key in event.get("values") or {}
    )


def _generated(folder: RunFolder) -> int | None:
    last = None
    for event in _events(folder, b'"event": "samples"'):
        last = event.get("generated")
    return last if isinstance(last, int) else None


def _some(folder: RunFolder) -> int:
    state = review_state(folder)
    if state is None or state.generated == 0:
        raise ReviewError(
            f"run {folder.run_id} has no samples: they are written when a `tunewatch train` with evaluation rows "
            "is packaged, unless samples is 0 in its file"
        )
    return state.generated


def _events(folder: RunFolder, *parts: bytes) -> Iterator[dict[str, Any]]:
    """The events whose line holds all the parts; the others are not even parsed."""
    try:
        file = folder.events.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if all(part in line for part in parts):
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                yield event

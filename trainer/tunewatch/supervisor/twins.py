"""Two runs with other settings and the same losses: the settings, or the data, do not reach the training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewatch.events import checked
from tunewatch.runfolder import RunFolder

LOSSES = 10
"""First logged losses that are compared."""

DIGITS = 4
"""Significant digits in which they agree. The same seed gives the same first loss, but not ten of them."""

RUNS = 20
"""The newest other runs that are looked at, of each the first BYTES of its events."""

BYTES = 1 << 20
_SETTINGS = (
    "learning_rate", "batch_size", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "dataset_hash",
    "lora_r", "lora_alpha", "base_model",
)  # fmt: skip

Losses = Sequence[tuple[int, float]]
"""Step and loss of the first logs of a run."""


@dataclass(frozen=True)
class Twin:
    """Another run with the same losses, and the names of the settings in which it differs."""

    run_id: str
    differs: tuple[str, ...]


def first_losses(events: Iterator[Mapping[str, Any]]) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    """The first losses of the first training that began at step 0, and its settings."""
    losses: list[tuple[int, float]] = []
    settings: dict[str, Any] = {}
    fresh = False
    for event in events:
        if event.get("event") == "provenance":
            settings.update(event.get("info") or {})
        elif event.get("event") == "train_begin":
            if fresh or event.get("step"):
                break
            fresh = True
            settings.update(event.get("effective") or {})
        elif fresh and event.get("event") == "log" and "loss" in (event.get("values") or {}):
            losses.append((int(event.get("step") or 0), float(event["values"]["loss"])))
            if len(losses) == LOSSES:
                break
    return losses, settings


def find_twin(folder: RunFolder) -> Twin | None:
    """Look for a run beside this one that shows the same first losses with other settings; None where there is none."""
    losses, settings = first_losses(_events(folder.events))
    ours = _rounded(losses)
    if (
        len(ours) < LOSSES or len({loss for _, loss in ours}) < LOSSES // 2
    ):  # a loss that stands still tells nothing
        return None
    for other in _newest(folder):
        theirs, known = first_losses(_events(other.events))
        differs = tuple(name for name in _SETTINGS if _differ(settings.get(name), known.get(name)))
        if differs and _rounded(theirs) == ours:
            return Twin(other.run_id, differs)
    return None


def _differ(ours: Any, theirs: Any) -> bool:
    return ours is not None and theirs is not None and ours != theirs


def _rounded(losses: Losses) -> list[tuple[int, str]]:
    return [(step, f"{loss:.{DIGITS}g}") for step, loss in losses]


def _newest(folder: RunFolder) -> list[RunFolder]:
    found = []
    for path in folder.path.parent.glob("*/events.jsonl"):
        try:
            found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    newest = [RunFolder(path.parent) for _, path in sorted(found, reverse=True) if path.parent != folder.path]
    return newest[:RUNS]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            lines = file.read(BYTES).split(b"\n")[:-1]
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield checked(event)

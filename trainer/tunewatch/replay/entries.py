"""One entry of a history as a `log` event, with the keys of transformers and a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunewatch.health.reading import finite, whole
from tunewatch.probe.values import as_number

MAX_KEYS = 4096
"""Keys whose spelling is remembered."""

MAX_STEP = 2**53

STEP_KEYS = ("step", "current_steps", "global_step", "global_step/max_steps", "_step")
"""transformers, LLaMA-Factory, a TensorBoard or W&B export, ms-swift ("5/100"), W&B."""

_NUMBERS = frozenset({int, float})


def plain_key(key: str) -> str:
    """`train/loss`, `train.loss` and `loss ` are `loss`; `eval/loss` is `eval_loss`, as the trainer itself names it."""
    key = key.strip()
    for separator in "/.":
        group, found, name = key.partition(separator)
        if found and name and group == "train":
            return name
        if found and name and group in ("eval", "test"):
            return f"{group}_{name}"
    return key


class Steps:
    """The step of each log of one run: as logged, else as a progress bar said, else by epoch, else counted.

    `source` says which it was: "logged", "bar", "epoch" or "counted" (the number of the training log; no trainer's
    step). It is "none" while no log had any. Within a run it only ever changes to "logged".
    """

    def __init__(self) -> None:
        self.source = "none"
        self._last: int | None = None
        self._count = 0

    def of(
        self, entry: Mapping[str, Any], *, train: bool, bar: int | None = None, per_epoch: float | None = None
    ) -> int | None:
        logged = logged_step(entry)
        if logged is not None:
            self.source, self._last = "logged", logged
            return logged
        if self.source == "logged" or not train:
            if self.source == "bar" and bar is not None and self._last is not None:
                return max(bar, self._last)
            return self._last
        self._count += 1
        if self.source == "none":
            self.source = "bar" if bar is not None else "epoch" if per_epoch else "counted"
        step: int | None = self._count
        if self.source == "bar":
            step = bar
        elif self.source == "epoch":
            epoch = finite(entry.get("epoch"))
            step = round(epoch * per_epoch) if epoch is not None and per_epoch else None
        if self.source != "counted" and step is not None and self._last is not None and step <= self._last:
            return None  # a bar that has not moved: output that came late, or in blocks
        self._last = step if step is not None else self._last
        return step


def logged_step(entry: Mapping[str, Any]) -> int | None:
    """The step that the entry itself names."""
    step = entry.get("step")
    if type(step) is int and 0 <= step < MAX_STEP:
        return step
    for key in STEP_KEYS:
        value = entry.get(key)
        if value is not None:
            step = whole(value.partition("/")[0] if isinstance(value, str) else value)
            if step is not None and 0 <= step < MAX_STEP:
                return step
    return None


class Entries:
    """Makes events of the entries of one stream."""

    def __init__(self) -> None:
        self._plain: set[str] = set()

    def values(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry with the keys that the detectors know. What has two spellings keeps the first."""
        if entry.keys() <= self._plain:
            return entry
        renamed: dict[str, Any] = {}
        for key, value in entry.items():
            name = plain_key(key) if isinstance(key, str) else str(key)
            if name == key and len(self._plain) < MAX_KEYS:
                self._plain.add(name)
            renamed.setdefault(name, value)
        return renamed


def log_event(values: dict[str, Any], step: int | None) -> dict[str, Any]:
    """A `log` event. What is no number is left out; those that are not finite stay, and the detectors tell them."""
    if not _NUMBERS.issuperset(map(type, values.values())):
        values = {
            key: number
            for key, raw in values.items()
            if (number := raw if type(raw) is float else as_number(raw)) is not None
        }
    return {"event": "log", "step": step, "values": values}


def is_train_log(values: Mapping[str, Any]) -> bool:
    return "loss" in values and values["loss"] is not None


def is_summary(values: Mapping[str, Any]) -> bool:
    """What transformers logs at the end of `train()`."""
    return "train_runtime" in values

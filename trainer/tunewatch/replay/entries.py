"""One entry of a history as a `log` event, with the keys of transformers and a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunewatch.health.reading import finite, whole
from tunewatch.probe.values import MAX_KEY_LENGTH, as_number

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
        self,
        entry: Mapping[str, Any],
        logged: int | None,
        *,
        train: bool,
        bar: int | None = None,
        per_epoch: float | None = None,
    ) -> int | None:
        """The step of one log; `logged` is what `logged_step` says of it."""
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
    for key in STEP_KEYS:
        value = entry.get(key)
        if value is None:
            continue
        if type(value) is int:
            step: int | None = value
        else:
            step = whole(value.partition("/")[0] if isinstance(value, str) else value)
        if step is not None and 0 <= step < MAX_STEP:
            return step
    return None


class Entries:
    """Makes events of the entries of one stream."""

    def __init__(self) -> None:
        self._plain: set[str] = set()
        """Keys that are spelled as the detectors know them."""
        self._names: dict[str, str] = {}
        """The others, and what they mean."""

    def values(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry with the keys that the detectors know. What has two spellings keeps the first."""
        if entry.keys() <= self._plain:
            return entry
        renamed: dict[str, Any] = {}
        for key, value in entry.items():
            renamed.setdefault(self._names.get(key) or self._name(key), value)
        return renamed

    def _name(self, key: Any) -> str:
        if not isinstance(key, str):
            return str(key)
        name = plain_key(key)
        if len(self._names) < MAX_KEYS and len(key) <= MAX_KEY_LENGTH:
            self._names[key] = name
            if name == key:
                self._plain.add(key)
        return name


def train_begin(max_steps: Any, **facts: Any) -> dict[str, Any]:
    """What a history says of the training that begins, as the probe would have said it; None is unknown."""
    return {"event": "train_begin", "max_steps": max_steps, **facts}


def log_event(values: dict[str, Any], step: int | None, time: float | None = None) -> dict[str, Any]:
    """A `log` event, of Unix time `time` where that is known.

    What is no number is left out; those that are not finite stay, and the detectors tell them.
    """
    if not _NUMBERS.issuperset(map(type, values.values())):
        values = _numbers_of(values)
    return {"event": "log", "t": time, "step": step, "values": values}


def _numbers_of(values: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for key, raw in values.items():
        kind = type(raw)
        if kind is float:
            numbers[key] = raw
        # Durations stand in each line of a LLaMA-Factory log, and what raises an exception takes its time.
        elif raw is not None and not (kind is str and ":" in raw) and (number := as_number(raw)) is not None:
            numbers[key] = number
    return numbers


def is_train_log(values: Mapping[str, Any]) -> bool:
    return values.get("loss") is not None


def is_summary(values: Mapping[str, Any]) -> bool:
    """What transformers logs at the end of `train()`."""
    return "train_runtime" in values

"""One log line as the detectors want it: numbers, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tunewatch.probe.values import as_number, spell_nonfinite

MAX_KEYS = 256
"""Log keys whose meaning is remembered; one beyond them is looked at again in each log."""

_PREFERENCE_TRAINERS = (
    "GRPO", "RLOO", "PPO", "DPO", "KTO", "ORPO", "CPO", "BCO", "XPO", "NashMD", "Reward", "PRM",
)  # fmt: skip
_PLAIN, _EVAL_LOSS, _PREFERENCE = range(3)


_SURELY = 2**63
"""Integers below it are floats without further question."""


def whole(value: Any) -> int | None:
    """`value` as an integer, or None where it is none."""
    number = as_number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def finite(value: Any) -> float | None:
    """`value` as a finite float, or None where it is none."""
    kind = type(value)
    if kind is float and value - value == 0.0:
        return value
    if value is None:
        return None
    if kind is int and -_SURELY < value < _SURELY:
        return float(value)
    number = as_number(value)
    return float(number) if number is not None and math.isfinite(number) else None


def mapping(value: Any) -> Mapping[str, Any]:
    # isinstance with an abstract class takes longer than all else here
    if value is None or type(value) is dict:
        return value or {}
    return value if isinstance(value, Mapping) else {}


def is_preference_trainer(name: Any) -> bool:
    """Whether a trainer of that class optimizes a reward or preferences: there the loss says little."""
    return isinstance(name, str) and any(part in name for part in _PREFERENCE_TRAINERS)


def is_eval_loss(key: str) -> bool:
    return key.startswith("eval_") and key.endswith("loss")


Evals = list[tuple[str, float | None, str | None]]
_NO_EVALS: Evals = []


class Reading:
    """One `log` event. A number that is absent, malformed or not finite is None; the latter is spelled in `*_bad`."""

    __slots__ = (
        "bad",
        "epoch",
        "evals",
        "loss",
        "loss_bad",
        "lr",
        "norm",
        "norm_bad",
        "preference",
        "skipped",
        "step",
        "tokens_all",
        "tokens_loss",
        "train",
        "values",
    )  # fmt: skip

    step: int | None
    train: bool
    """Whether it is a log of training steps (and no evaluation, no summary)."""
    loss: float | None
    loss_bad: str | None
    norm: float | None
    norm_bad: str | None
    bad: bool
    """Whether the loss or the norm is not finite."""
    lr: float | None
    evals: Evals
    """Evaluation losses: key, value, and how it is spelled where it is not finite."""
    preference: bool
    tokens_all: float | None
    tokens_loss: float | None
    skipped: float | None
    epoch: Any
    values: Mapping[str, Any]
    """Epoch and values as they were logged, for what is asked for seldom."""


class Reader:
    """Turns `log` events into readings, and remembers whether the training optimizes a reward or preferences."""

    def __init__(self) -> None:
        self.preference = False
        self._kinds: dict[str, int] = {}
        self._plain: set[str] = set()

    def read(self, event: Mapping[str, Any]) -> Reading:
        values, nonfinite = mapping(event.get("values")), mapping(event.get("nonfinite"))
        reading = Reading()
        reading.values = values
        step = event.get("step")
        reading.step = step if type(step) is int else whole(step)
        loss, norm, rate = values.get("loss"), values.get("grad_norm"), values.get("learning_rate")
        if type(loss) is float and loss - loss == 0.0 and not nonfinite:
            reading.loss, reading.loss_bad = loss, None
        else:
            reading.loss, reading.loss_bad = _number(values, nonfinite, "loss")
        if type(norm) is float and norm - norm == 0.0 and not nonfinite:
            reading.norm, reading.norm_bad = norm, None
        else:
            reading.norm, reading.norm_bad = _number(values, nonfinite, "grad_norm")
        if type(rate) is float and rate - rate == 0.0:
            reading.lr = rate
        else:
            reading.lr = finite(values["learning_rate"] if "learning_rate" in values else values.get("lr"))
        reading.bad = reading.loss_bad is not None or reading.norm_bad is not None
        reading.train = reading.loss is not None or reading.loss_bad is not None
        if nonfinite or not self._plain.issuperset(values):
            reading.evals = self._evaluations(values, nonfinite)
        else:
            reading.evals = _NO_EVALS
        reading.preference = self.preference
        reading.epoch = event.get("epoch")
        tokens = event.get("tokens")
        if tokens is None:
            reading.tokens_all = reading.tokens_loss = None
        else:
            tokens = mapping(tokens)
            reading.tokens_all, reading.tokens_loss = finite(tokens.get("all")), finite(tokens.get("loss"))
        skipped = event.get("skipped")
        reading.skipped = None if skipped is None else finite(skipped)
        return reading

    def _evaluations(self, values: Mapping[str, Any], nonfinite: Mapping[str, Any]) -> Evals:
        found: Evals = []
        kinds = self._kinds
        for keys in (values, nonfinite):
            for key in keys:
                kind = kinds.get(key)
                if kind is None:
                    kind = self._kind(key)
                if kind == _EVAL_LOSS and (keys is values or key not in values or values[key] is None):
                    value, spelled = _number(values, nonfinite, key)
                    if value is not None or spelled is not None:
                        found.append((key, value, spelled))
                elif kind == _PREFERENCE:
                    self.preference = True
        return found

    def _kind(self, key: Any) -> int:
        if not isinstance(key, str):
            return _PLAIN
        kind = _PLAIN
        if key == "kl" or key.startswith(("reward", "eval_reward")):
            kind = _PREFERENCE
        elif is_eval_loss(key):
            kind = _EVAL_LOSS
        if len(self._kinds) < MAX_KEYS:
            self._kinds[key] = kind
            if kind == _PLAIN:
                self._plain.add(key)
        return kind


def _number(
    values: Mapping[str, Any], nonfinite: Mapping[str, Any], key: str
) -> tuple[float | None, str | None]:
    """The value of `key`, and how it is spelled where it is not finite."""
    if nonfinite and isinstance(nonfinite.get(key), str):
        return None, nonfinite[key]
    value = values.get(key)
    if value is None:
        return None, None
    if type(value) is float and value - value == 0.0:
        return value, None
    number = as_number(value)
    if number is None:
        return None, None
    number = float(number)
    return (number, None) if math.isfinite(number) else (None, spell_nonfinite(number))

"""What the fields of an event may hold; docs/run-folder.md is the contract.

Events are written by the training process, which may be of another version of tunewatch, or be no tunewatch at all. A
reader takes them through `checked` and may then trust what is there: a field that makes no sense is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tunewatch.probe.values import as_number

MAX_TEXT = 200
NONFINITE = frozenset({"nan", "inf", "-inf"})


def checked(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event with those of its fields that hold what they should."""
    clean = {}
    for name, value in event.items():
        check = _FIELDS.get(name)
        if check is not None and (value := check(value)) is not None:
            clean[name] = value
    return clean


def _whole(value: Any) -> int | None:
    if type(value) is int and 0 <= value < 2**53:
        return value
    number = _number(value)
    return None if number is None or not 0 <= number < 2**53 else int(number)


def _number(value: Any) -> float | int | None:
    if type(value) is float and value - value == 0.0:  # finite: a replay checks millions of them
        return value
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def _duration(value: Any) -> float | None:
    number = _number(value)
    return None if number is None or number < 0 else float(number)


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value[:MAX_TEXT] if isinstance(value, str) else None


def _texts(value: Any) -> list[str] | None:
    return [item[:MAX_TEXT] for item in value if isinstance(item, str)] if isinstance(value, list) else None


def _scalars(value: Any) -> dict[str, Any] | None:
    """A flat object: text, flags and finite numbers by name."""
    if not isinstance(value, dict):
        return None
    return {
        name: item
        for name, item in value.items()
        if isinstance(name, str) and (isinstance(item, (str, bool)) or _number(item) is not None)
    }


def _numbers(value: Any) -> dict[str, float | int] | None:
    if not isinstance(value, dict):
        return None
    for name, item in value.items():
        if type(item) is not float or item - item != 0.0 or type(name) is not str:
            break
    else:
        return value
    numbers = {name: _number(item) for name, item in value.items() if isinstance(name, str)}
    return {name: number for name, number in numbers.items() if number is not None}


def _spelled(value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict):
        return None
    return {name: item for name, item in value.items() if isinstance(item, str) and item in NONFINITE}


def _flags(value: Any) -> dict[str, bool] | None:
    if not isinstance(value, dict):
        return None
    return {name: item for name, item in value.items() if isinstance(item, bool)}


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("t", "m", "epoch", "ratio", "num_train_epochs"), _number),
    **dict.fromkeys(
        (
            "rank", "pid", "process_start", "world_size", "step", "max_steps", "batches", "trainable_parameters",
            "total_parameters", "save_total_limit", "tokens_seen", "skipped", "generated", "files", "bytes",
        ),
        _whole,
    ),
    "seconds": _duration,
    **dict.fromkeys(
        (
            "event", "session", "way", "python", "phase", "detail", "activity", "state", "nan_visibility", "trainer",
            "checkpoint", "context", "during", "type", "reason", "push",
        ),
        _text,
    ),
    # Paths are as long as the system lets them be.
    "output_dir": lambda value: value if isinstance(value, str) and value else None,
    **dict.fromkeys(
        (
            "interactive", "terminated", "nan_filter", "restart", "loss", "grad_norm", "norm_seen", "requested_stop",
            "ok", "weights_finite",
        ),
        _flag,
    ),
    **dict.fromkeys(("gpus", "bases", "frames"), _texts),
    **dict.fromkeys(("info", "environment", "effective", "requested", "arguments"), _scalars),
    **dict.fromkeys(("values", "tokens", "memory"), _numbers),
    "nonfinite": _spelled,
    "restored": _flags,
}  # fmt: skip

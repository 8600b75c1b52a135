"""Numbers out of whatever a trainer puts into its logs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

MAX_KEY_LENGTH = 128

_last_device_read = 0.0


def as_number(value: Any) -> float | int | None:
    """Return `value` as a plain number, or None where it is not one.

    Understood: int, float, numpy scalars, tensors of one element, and strings that spell a number
    (transformers 5 prints `'4.19'`). None, bool, lists and everything else are no numbers. Reading a tensor of
    an accelerator waits for it, so that is done at most once a second and is "unknown" in between.
    """
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_number(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "size", 1) == 1:
        value = item()
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    return None


def _tensor_number(tensor: Any) -> float | int | None:
    global _last_device_read
    if tensor.numel() != 1 or tensor.dtype == sys.modules["torch"].bool:
        return None
    if tensor.device.type != "cpu":
        now = time.monotonic()
        if now - _last_device_read < 1.0:
            return None
        _last_device_read = now
    return tensor.detach().item()


def split_finite(logs: Mapping[Any, Any]) -> tuple[dict[str, float | int], dict[str, str]]:
    """Split `logs` into finite numbers, and the names of those that are "nan", "inf" or "-inf"."""
    finite: dict[str, float | int] = {}
    nonfinite: dict[str, str] = {}
    for raw_key, raw in list(logs.items()):
        value = as_number(raw)
        if value is None:
            continue
        key = str(raw_key)[:MAX_KEY_LENGTH]
        if isinstance(value, int) or math.isfinite(value):
            finite[key] = value
        else:
            nonfinite[key] = spell_nonfinite(value)
    return finite, nonfinite


def spell_nonfinite(value: float) -> str:
    """Spell a non-finite float the way events do: "nan", "inf" or "-inf"."""
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")

"""Durations as people write them."""

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)")


class DurationError(ValueError):
    """A duration that can not be read."""


def parse_duration(value: str | float) -> float:
    """Return seconds from 300, "300", "5m", "1h30m", "1.5h"; DurationError for anything else or not above 0."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        text = str(value).strip().lower()
        if _NUMBER.fullmatch(text):
            text += "s"
        if not re.fullmatch(rf"(?:{_PART.pattern}\s*)+", text):
            raise DurationError(f"{value!r} is no duration: write seconds (300) or 90s, 5m, 1h30m, 2d")
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if not 0 < seconds < float("inf"):
        raise DurationError(f"{value!r} is no duration: it must be above 0")
    return seconds

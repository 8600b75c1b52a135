"""Durations and points in time as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)")


_TIME_OF_DAY = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


class DurationError(ValueError):
    """A duration or a point in time that can not be read."""


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


def parse_time(value: str | datetime, now: datetime) -> datetime:
    """Return the point in time that is meant: ISO 8601 (local time unless it has a zone), or HH:MM, the next such time
    after `now`. Raises DurationError for anything else; a day alone is none.
    """
    text = value.isoformat() if isinstance(value, datetime) else str(value).strip()
    local = now.astimezone().replace(tzinfo=None)
    try:
        if found := _TIME_OF_DAY.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in found.groups())
            next_one = local.replace(hour=hour, minute=minute, second=second, microsecond=0)
            return (next_one if next_one > local else next_one + timedelta(days=1)).astimezone()
        if ":" in text or "T" in text.upper():
            return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        pass
    raise DurationError(
        f"{text!r} is no point in time: write 2026-12-24T18:00, with +01:00 or Z behind it if it is not local time, or "
        "18:00 for the next such time"
    )


def parse_deadline(value: str | datetime, now: datetime) -> float:
    """Return the Unix time of a deadline that is still to come; raises DurationError where it is over or is none."""
    deadline = parse_time(value, now)
    if deadline <= now:
        raise DurationError(f"{deadline.isoformat(timespec='minutes')} is over: a deadline must lie ahead")
    return deadline.timestamp()


def earliest(*times: float | None) -> float | None:
    """The first of those that are known; None where none is."""
    return min((time for time in times if time is not None), default=None)


def slurm_deadline(environment: Mapping[str, str], now: float) -> float | None:
    """When the Slurm job ends that this process runs in, Unix time; None where there is none, or Slurm does not say.

    Slurm exports SLURM_JOB_END_TIME since 23.02. A time that is over is that of a job whose limit was extended.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    if "SLURM_JOB_ID" not in environment or not text.isascii() or not text.isdecimal() or len(text) > 12:
        return None
    return float(text) if float(text) > now else None

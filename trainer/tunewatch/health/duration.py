"""Durations for people."""

from __future__ import annotations


def human_duration(seconds: float) -> str:
    """Spell a duration with its two largest units: 42 s, 5 min 30 s, 3 h 5 min, 2 d 4 h."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total} s"
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {left} s"

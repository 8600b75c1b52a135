"""From the drivers' units to base units."""

from __future__ import annotations


def from_percent(value: float) -> float:
    """A share of 1."""
    return value / 100


def from_milli(value: float) -> float:
    """Milliwatts to watts, millijoules to joules."""
    return value / 1000


def from_mega(value: float) -> float:
    """Megahertz to hertz."""
    return value * 1_000_000


def from_mebi(value: float) -> float:
    """Mebibytes to bytes."""
    return value * 1_048_576


def from_nano(value: float) -> float:
    """Nanoseconds to seconds."""
    return value / 1_000_000_000


def from_micro(value: float) -> float:
    """Microseconds to seconds."""
    return value / 1_000_000

"""The table of readings: which metric a reading feeds, with which labels, and what is believable.

The ranges are wide: they exist to keep out what drivers have really reported, such as a utilisation of
4294967295 % or 600 W on a laptop, not to judge a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One reading in base units; a value outside `low` to `high` is rejected."""

    metric: str
    low: float
    high: float
    labels: tuple[tuple[str, str], ...] = ()


_PEBIBYTE = 2.0**50
_FASTEST_CLOCK = 100e9  # effective rates of GDDR memory reach some 30 GHz
_MOST_POWER = 20e3  # the largest modules of today draw about 3 kW
_MOST_ENERGY = 1e15  # 20 kW for 1500 years

_temperature = ("tunewatch_gpu_temperature_celsius", 1.0, 150.0)
_clock = ("tunewatch_gpu_clock_hertz", 0.0, _FASTEST_CLOCK)

THROTTLE_BITS: dict[str, int] = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
"""Bits of nvmlClocksEventReasons (nvml.h), named as nvidia-smi names them."""

FIELDS: dict[str, Field] = {
    "utilization": Field("tunewatch_gpu_utilization_ratio", 0.0, 1.0),
    "memory_used": Field("tunewatch_gpu_memory_used_bytes", 0.0, _PEBIBYTE),
    "memory_reserved": Field("tunewatch_gpu_memory_reserved_bytes", 0.0, _PEBIBYTE),
    # Total 0 is how some unified-memory drivers say "not mine".
    "memory_total": Field("tunewatch_gpu_memory_total_bytes", 1.0, _PEBIBYTE),
    "power": Field("tunewatch_gpu_power_watts", 0.0, _MOST_POWER),
    "power_limit": Field("tunewatch_gpu_power_limit_watts", 1.0, _MOST_POWER),
    "energy": Field("tunewatch_gpu_energy_joules_total", 0.0, _MOST_ENERGY, (("source", "counter"),)),
    "temperature_gpu": Field(*_temperature, (("sensor", "gpu"),)),
    "temperature_memory": Field(*_temperature, (("sensor", "memory"),)),
    # nvml.h: "This value may exceed 100% in certain cases."
    "fan": Field("tunewatch_gpu_fan_ratio", 0.0, 2.0),
    "clock_graphics": Field(*_clock, (("domain", "graphics"),)),
    "clock_sm": Field(*_clock, (("domain", "sm"),)),
    "clock_memory": Field(*_clock, (("domain", "memory"),)),
    "clock_video": Field(*_clock, (("domain", "video"),)),
    "performance_state": Field("tunewatch_gpu_performance_state", 0.0, 15.0),
} | {
    f"throttle_{reason}": Field("tunewatch_gpu_throttle_active", 0.0, 1.0, (("reason", reason),))
    for reason in THROTTLE_BITS
}

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
_LONGEST_TIME = 1e9  # seconds; 30 years
_MOST_ERRORS = 1e12
_MOST_ROWS = 1e6  # a GPU has some thousand spare rows

_temperature = ("tunewatch_gpu_temperature_celsius", 1.0, 150.0)
_clock = ("tunewatch_gpu_clock_hertz", 0.0, _FASTEST_CLOCK)
_limit = ("tunewatch_gpu_temperature_limit_celsius", 20.0, 150.0)
_ecc = ("tunewatch_gpu_ecc_errors_total", 0.0, _MOST_ERRORS)
_rows = ("tunewatch_gpu_remapped_rows", 0.0)

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

LOST_TIME_REASONS = tuple(reason for reason in THROTTLE_BITS if reason != "gpu_idle")
"""The reasons whose time counts as lost."""

RECOVERY_ACTIONS = ("none", "reset", "reboot", "drain_p2p", "drain_and_reset")
"""The actions of nvmlDeviceGpuRecoveryAction_t (nvml.h), each at its number.

Higher numbers are unknown on purpose: 5 was a bus reset in release 580 and is something else in release 615.
"""

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
    "limit_slowdown": Field(*_limit, (("limit", "slowdown"),)),
    "limit_shutdown": Field(*_limit, (("limit", "shutdown"),)),
    "limit_max_operating": Field(*_limit, (("limit", "max_operating"),)),
    "limit_memory_max": Field(*_limit, (("limit", "memory_max"),)),
    "ecc_corrected": Field(*_ecc, (("kind", "corrected"),)),
    "ecc_uncorrected": Field(*_ecc, (("kind", "uncorrected"),)),
    "rows_correctable": Field(*_rows, _MOST_ROWS, (("kind", "correctable"),)),
    "rows_uncorrectable": Field(*_rows, _MOST_ROWS, (("kind", "uncorrectable"),)),
    "rows_pending": Field(*_rows, 1.0, (("kind", "pending"),)),
    "rows_failed": Field(*_rows, 1.0, (("kind", "failed"),)),
}
FIELDS |= {
    f"throttle_{reason}": Field("tunewatch_gpu_throttle_active", 0.0, 1.0, (("reason", reason),))
    for reason in THROTTLE_BITS
}
FIELDS |= {
    f"throttled_{reason}": Field(
        "tunewatch_gpu_throttle_seconds_total", 0.0, _LONGEST_TIME, (("reason", reason),)
    )
    for reason in LOST_TIME_REASONS
}
FIELDS |= {
    f"recovery_{action}": Field("tunewatch_gpu_recovery_action", 0.0, 1.0, (("action", action),))
    for action in RECOVERY_ACTIONS
}

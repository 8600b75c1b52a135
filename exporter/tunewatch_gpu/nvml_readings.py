"""What NVML is asked about one card or MIG slice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

from tunewatch_gpu.nvml_calls import Absent, Handle, ask
from tunewatch_gpu.nvml_fields import IN_EACH_COLLECTION, POWER_INSTANT, SINCE_580, read_field_values
from tunewatch_gpu.readings import NO_PERMISSION, NOT_SUPPORTED, UNKNOWN_VALUE, Readings
from tunewatch_gpu.run_memory import Process
from tunewatch_gpu.units import from_mega, from_milli, from_percent

_PSTATE_UNKNOWN = 32
_SUCCESS = 0  # nvml.h
_TABLE_TOO_SMALL = 7

# reading, width in bits of the driver's field, to the base unit, query
_SCALARS: tuple[tuple[str, int, Callable[[float], float], Callable[[Handle], int]], ...] = (
    ("power_limit", 32, from_milli, pynvml.nvmlDeviceGetEnforcedPowerLimit),
    ("power", 32, from_milli, pynvml.nvmlDeviceGetPowerUsage),
    ("energy", 64, from_milli, pynvml.nvmlDeviceGetTotalEnergyConsumption),
    (
        "temperature_gpu",
        32,
        float,
        partial(pynvml.nvmlDeviceGetTemperature, sensor=pynvml.NVML_TEMPERATURE_GPU),
    ),
    ("fan", 32, from_percent, pynvml.nvmlDeviceGetFanSpeed),
    (
        "clock_graphics",
        32,
        from_mega,
        partial(pynvml.nvmlDeviceGetClockInfo, type=pynvml.NVML_CLOCK_GRAPHICS),
    ),
    ("clock_sm", 32, from_mega, partial(pynvml.nvmlDeviceGetClockInfo, type=pynvml.NVML_CLOCK_SM)),
    ("clock_memory", 32, from_mega, partial(pynvml.nvmlDeviceGetClockInfo, type=pynvml.NVML_CLOCK_MEM)),
    ("clock_video", 32, from_mega, partial(pynvml.nvmlDeviceGetClockInfo, type=pynvml.NVML_CLOCK_VIDEO)),
)

# reading, threshold
_LIMITS = {
    "limit_shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "limit_slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "limit_memory_max": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "limit_max_operating": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}


def read_card(handle: Handle, driver_version: str) -> Readings:
    """What is asked of a card in each collection."""
    readings = Readings()
    read_utilization(handle, readings)
    read_memory(handle, readings)
    for field, bits, convert, query in _SCALARS:
        try:
            readings.accept(field, ask(query, handle), convert, bits=bits)
        except Absent as absent:
            readings.reject(field, absent.reason)
    _read_performance_state(handle, readings)
    _read_throttling(handle, readings)
    wanted = dict(IN_EACH_COLLECTION)
    if _release(driver_version) >= 580:
        wanted |= SINCE_580
    if readings.absent.get("power") == NOT_SUPPORTED:
        wanted |= POWER_INSTANT
    read_field_values(handle, wanted, readings)
    readings.check(_highest_power_limit(handle))
    return readings


def read_utilization(handle: Handle, readings: Readings) -> None:
    """Share of time in which a kernel ran."""
    try:
        rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    except Absent as absent:
        readings.reject("utilization", absent.reason)
    else:
        readings.accept("utilization", rates.gpu, from_percent, bits=32)


def read_memory(handle: Handle, readings: Readings) -> None:
    """Memory v2, which keeps the reserve apart; v1 where v2 is missing or broken (WSL2, before 510)."""
    parts = {"memory_used": "used", "memory_reserved": "reserved", "memory_total": "total"}
    try:
        memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    except Absent as absent:
        for field in parts:
            readings.reject(field, absent.reason)
        if absent.reason == NO_PERMISSION:
            return
        del parts["memory_reserved"]
        try:
            memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        except Absent:
            return
    for field, part in parts.items():
        readings.accept(field, getattr(memory, part), bits=64)


def _read_performance_state(handle: Handle, readings: Readings) -> None:
    try:
        state = ask(pynvml.nvmlDeviceGetPerformanceState, handle)
    except Absent as absent:
        readings.reject("performance_state", absent.reason)
        return
    if state == _PSTATE_UNKNOWN:
        readings.reject("performance_state", UNKNOWN_VALUE)
    else:
        readings.accept("performance_state", state, bits=32)


def _read_throttling(handle: Handle, readings: Readings) -> None:
    """Clock event reasons, under their old name on drivers before 535."""
    try:
        try:
            mask = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        except Absent as absent:
            if absent.reason != NOT_SUPPORTED:
                raise
            mask = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    except Absent as absent:
        readings.reject("throttle", absent.reason)
    else:
        readings.accept_throttle_mask(mask)


def _highest_power_limit(handle: Handle) -> float | None:
    try:
        _lowest, highest = ask(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
    except Absent:
        return None
    return None if highest == 2**32 - 1 else from_milli(highest)


def _release(driver_version: str) -> int:
    """The first number of a driver version, 0 where it has none."""
    first = driver_version.partition(".")[0]
    return int(first) if first.isascii() and first.isdecimal() else 0


def read_limits(handle: Handle) -> Readings:
    """The temperatures at which something happens; they do not change."""
    readings = Readings()
    for field, threshold in _LIMITS.items():
        try:
            value = ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, threshold)
            readings.accept(field, value, bits=32)
        except Absent as absent:
            readings.reject(field, absent.reason)
    return readings


def list_processes(handle: Handle) -> list[Process]:
    """All that compute or draw on a card or slice, those that do both twice; Absent where nobody tells."""
    processes = _list(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    try:
        processes += _list(pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle)
    except Absent:
        pass  # a card that can not draw
    return processes


def _list(query: Callable[[Handle], list[Any]], handle: Handle) -> list[Process]:
    def ask_again_if_grown(handle: Handle) -> list[Any]:
        """A list may outgrow the table between the question for its length and the one for its content."""
        try:
            return query(handle)
        except pynvml.NVMLError as error:
            if error.value == _SUCCESS:
                return []  # how some releases of nvidia-ml-py say it
            if error.value != _TABLE_TOO_SMALL:
                raise
            return query(handle)

    return [(process.pid, process.usedGpuMemory) for process in ask(ask_again_if_grown, handle)]

"""NVML's field values: many readings in one call, each with a return code and a type of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from tunewatch_gpu.fields import RECOVERY_ACTIONS
from tunewatch_gpu.nvml_calls import ABSENT, GPU_GONE, Absent, GpuDown, Handle, ask
from tunewatch_gpu.readings import ERROR, MALFORMED, UNKNOWN_VALUE, Readings
from tunewatch_gpu.units import from_milli, from_nano

_RECOVERY_ACTION = "recovery_action"

Wanted = Mapping[int, tuple[str, Callable[[float], float]]]
"""Field id (nvml.h; numbers because older nvidia-ml-py lacks most names) to reading and base unit."""

IN_EACH_COLLECTION: Wanted = {
    82: ("temperature_memory", float),
    # The clock event reasons whose time the driver counts, in ns.
    74: ("throttled_sw_power_cap", from_nano),
    76: ("throttled_sync_boost", from_nano),
    230: (_RECOVERY_ACTION, float),
}

SINCE_580: Wanted = {
    269: ("throttled_sw_thermal_slowdown", from_nano),
    270: ("throttled_hw_thermal_slowdown", from_nano),
    271: ("throttled_hw_power_brake_slowdown", from_nano),
}
"""Not to be asked of an older driver: these numbers were other fields in release 575."""

POWER_INSTANT: Wanted = {186: ("power", from_milli)}
"""For drivers that know no other power."""

WEAR: Wanted = {
    3: ("ecc_corrected", float),
    4: ("ecc_uncorrected", float),
    142: ("rows_correctable", float),
    143: ("rows_uncorrectable", float),
    144: ("rows_pending", float),
    145: ("rows_failed", float),
}
"""What changes seldom."""

# nvmlFieldValue_t.valueType: member of the union, width in bits where it is unsigned
_VALUE_TYPES: dict[int, tuple[str, int | None]] = {
    0: ("dVal", None),
    1: ("uiVal", 32),
    2: ("ulVal", 64),
    3: ("ullVal", 64),
    4: ("sllVal", None),
    5: ("siVal", None),
    6: ("usVal", 16),
}


def read_field_values(handle: Handle, wanted: Wanted, readings: Readings) -> None:
    """Take `wanted` into `readings` with one call, or with one for each where a driver refuses them together."""
    try:
        values = list(ask(pynvml.nvmlDeviceGetFieldValues, handle, list(wanted)))
    except Absent:
        values = []
        for field_id, (reading, _convert) in wanted.items():
            try:
                values += ask(pynvml.nvmlDeviceGetFieldValues, handle, [field_id])
            except Absent as absent:
                readings.reject(reading, absent.reason)
    for value in values:
        reading, convert = wanted[value.fieldId]
        if value.nvmlReturn in GPU_GONE:
            raise GpuDown(GPU_GONE[value.nvmlReturn])
        if value.nvmlReturn != 0:
            readings.reject(reading, ABSENT.get(value.nvmlReturn, ERROR))
        else:
            _accept(reading, value, convert, readings)


def _accept(reading: str, value: Any, convert: Callable[[float], float], readings: Readings) -> None:
    if value.valueType not in _VALUE_TYPES:
        readings.reject(reading, MALFORMED)
        return
    member, bits = _VALUE_TYPES[value.valueType]
    raw = getattr(value.value, member)
    if reading != _RECOVERY_ACTION:
        readings.accept(reading, raw, convert, bits=bits)
    elif raw in range(len(RECOVERY_ACTIONS)):
        readings.accept_recovery_action(RECOVERY_ACTIONS[int(raw)])
    else:
        readings.reject(reading, UNKNOWN_VALUE)
        readings.remarks.append(f"the driver asks for recovery action {raw}, which is not known here")

"""Readings from NVML through nvidia-ml-py.

Errors are kept to the reading or the GPU they belong to. A collection fails as a whole only where the
session with the driver is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pynvml

from tunewatch_gpu.readings import (
    ERROR,
    GPU_LOST,
    MALFORMED,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    UNKNOWN_VALUE,
    Readings,
)
from tunewatch_gpu.snapshot import UNKNOWN, Gpu, Identity, Request, Snapshot, choose_uuid, clean_label
from tunewatch_gpu.source import Announce, SourceUnavailable
from tunewatch_gpu.units import from_mega, from_milli, from_percent

# Return codes by what they mean for us (nvml.h; numbers because older nvidia-ml-py lacks some names).
_SESSION_GONE = {
    1: "uninitialized",
    9: "driver_not_loaded",
    12: "library_not_found",
    18: "driver_library_mismatch",
}
_GPU_GONE = {15: GPU_LOST, 16: RESET_REQUIRED, 28: GPU_LOST}
# 2: a query that makes no sense for this kind of handle; 13: older driver than the query; 25: struct
# version; 26: deprecated.
_ABSENT = {
    2: NOT_SUPPORTED,
    3: NOT_SUPPORTED,
    13: NOT_SUPPORTED,
    25: NOT_SUPPORTED,
    26: NOT_SUPPORTED,
    4: NO_PERMISSION,
    999: UNKNOWN_VALUE,
}
_PSTATE_UNKNOWN = 32
_FIELD_MEMORY_TEMPERATURE = 82
_FIELD_POWER_INSTANT = 186
_REOPEN_WHEN_LOST = 60.0  # seconds
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")

Handle = Any

# Not an NVMLError, and unknown to nvidia-ml-py before 13.
_LIBRARY_MISMATCH = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)


class _GpuDown(Exception):
    """This GPU does not answer; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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


class NvmlSource:
    """NVML in this process. Not safe against a driver that hangs or crashes: that is the reader's job."""

    name = "nvml"

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._open = False
        self._driver_version = ""
        self._opened_at = 0.0
        self._cards_at_open: frozenset[str] = frozenset()

    def read(self, request: Request) -> Snapshot:
        """One collection; see `Source`."""
        self._announce(self.name, None)
        if self._open and _listed_cards() != self._cards_at_open:
            self.close()  # NVML lists its GPUs once, at initialisation
        if not self._open:
            self._start()
        count = _whole(pynvml.nvmlDeviceGetCount)
        if count == 0:
            raise SourceUnavailable("no_devices", "NVML works but finds no GPU")
        snapshot = Snapshot(self.name, count, [])
        for index in range(count):
            if index in request.skip:
                snapshot.lost[str(index)] = "skipped"
                continue
            self._announce(self.name, index)
            self._read_card(index, snapshot)
        if _has_lost(snapshot) and time.monotonic() - self._opened_at >= _REOPEN_WHEN_LOST:
            self.close()  # a card that was reset is visible to a new session only
        return snapshot

    def close(self) -> None:
        """Shut NVML down; an error while doing so changes nothing."""
        if self._open:
            self._open = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                pass

    def _start(self) -> None:
        _whole(pynvml.nvmlInit)
        self._open = True
        self._opened_at = time.monotonic()
        self._cards_at_open = _listed_cards()
        self._driver_version = _text("", pynvml.nvmlSystemGetDriverVersion)

    def _read_card(self, index: int, snapshot: Snapshot) -> None:
        """Add the GPU at `index` and its MIG slices to `snapshot`."""
        try:
            handle = _raw(pynvml.nvmlDeviceGetHandleByIndex, index)
            identity = self._identify(handle, index)
        except (_Absent, _GpuDown) as failure:
            snapshot.lost[str(index)] = failure.reason
            return
        card = Gpu(identity)
        snapshot.gpus.append(card)
        try:
            readings = _read_handle(handle)
        except _GpuDown as down:
            card.down_reason = down.reason
            return
        if not readings.values and {UNKNOWN_VALUE, ERROR} & set(readings.absent.values()):
            card.down_reason = ERROR
            return
        card.readings, card.absent = readings.values, readings.absent
        try:
            snapshot.gpus += self._read_slices(handle, identity)
        except _GpuDown as down:
            card.readings.clear()
            card.down_reason = down.reason

    def _identify(self, handle: Handle, index: int) -> Identity:
        try:
            pci_bus_id = clean_label(_decode(_raw(pynvml.nvmlDeviceGetPciInfo, handle).busId))
        except _Absent:
            pci_bus_id = ""
        return Identity(
            uuid=choose_uuid(_text("", pynvml.nvmlDeviceGetUUID, handle), pci_bus_id, index),
            index=index,
            name=_text(UNKNOWN, pynvml.nvmlDeviceGetName, handle),
            driver_version=self._driver_version,
            pci_bus_id=pci_bus_id,
        )

    def _read_slices(self, handle: Handle, parent: Identity) -> list[Gpu]:
        """The MIG slices of a card, empty where MIG is off or unknown here."""
        try:
            current, _pending = _raw(pynvml.nvmlDeviceGetMigMode, handle)
            slots = _raw(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) if current else 0
        except _Absent:
            return []
        slices = []
        for slot in range(slots):
            try:
                slice_handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except pynvml.NVMLError as error:
                if error.value in _GPU_GONE:
                    raise _GpuDown(_GPU_GONE[error.value]) from None
                continue  # an empty slot, or a slice that was cut anew while we looked
            uuid = _text("", pynvml.nvmlDeviceGetUUID, slice_handle)
            if not uuid.startswith("MIG-"):
                continue
            name = _text(UNKNOWN, pynvml.nvmlDeviceGetName, slice_handle)
            readings = Readings()
            # Only what belongs to the slice: a driver that answers power or clocks here answers for the card.
            _read_memory(slice_handle, readings)
            _read_utilization(slice_handle, readings)
            readings.check(None)
            identity = Identity(
                uuid=uuid,
                index=parent.index,
                name=name,
                driver_version=parent.driver_version,
                pci_bus_id=parent.pci_bus_id,
                parent_uuid=parent.uuid,
                mig_profile=name.partition(" MIG ")[2],
            )
            slices.append(Gpu(identity, readings.values, readings.absent))
        return slices


class _Absent(Exception):
    """A query has no answer; `reason` as in `readings`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _raw(query: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The answer to `query`; _Absent, _GpuDown or SourceUnavailable by what the driver's code means."""
    try:
        return query(*arguments, **options)
    except pynvml.NVMLError as error:
        code = error.value
        if code in _SESSION_GONE:
            raise SourceUnavailable(_SESSION_GONE[code], f"NVML: {error}") from None
        if code in _GPU_GONE:
            raise _GpuDown(_GPU_GONE[code]) from None
        raise _Absent(_ABSENT.get(code, ERROR)) from None
    except _LIBRARY_MISMATCH:
        raise _Absent(NOT_SUPPORTED) from None
    except UnicodeDecodeError:
        raise _Absent(MALFORMED) from None


def _whole(query: Callable[[], Any]) -> Any:
    """The answer to a query without which there is no collection."""
    try:
        return query()
    except pynvml.NVMLError as error:
        raise SourceUnavailable(_SESSION_GONE.get(error.value, "nvml_error"), f"NVML: {error}") from None


def _decode(text: str | bytes) -> str:
    """nvidia-ml-py returns str in some versions and bytes in others."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _text(default: str, query: Callable[..., str | bytes], *arguments: Any) -> str:
    try:
        return clean_label(_decode(_raw(query, *arguments))) or default
    except _Absent:
        return default


def _read_handle(handle: Handle) -> Readings:
    readings = Readings()
    _read_utilization(handle, readings)
    _read_memory(handle, readings)
    for field, bits, convert, query in _SCALARS:
        try:
            readings.accept(field, _raw(query, handle), convert, bits=bits)
        except _Absent as absent:
            readings.reject(field, absent.reason)
    _read_performance_state(handle, readings)
    _read_throttling(handle, readings)
    _read_field_values(handle, readings)
    readings.check(_highest_power_limit(handle))
    return readings


def _read_utilization(handle: Handle, readings: Readings) -> None:
    try:
        rates = _raw(pynvml.nvmlDeviceGetUtilizationRates, handle)
    except _Absent as absent:
        readings.reject("utilization", absent.reason)
    else:
        readings.accept("utilization", rates.gpu, from_percent, bits=32)


def _read_memory(handle: Handle, readings: Readings) -> None:
    """Memory v2, which keeps the reserve apart; v1 where v2 is missing or broken (WSL2, before 510)."""
    parts = {"memory_used": "used", "memory_reserved": "reserved", "memory_total": "total"}
    try:
        memory = _raw(pynvml.nvmlDeviceGetMemoryInfo, handle, version=pynvml.nvmlMemory_v2)
    except _Absent as absent:
        for field in parts:
            readings.reject(field, absent.reason)
        if absent.reason == NO_PERMISSION:
            return
        del parts["memory_reserved"]
        try:
            memory = _raw(pynvml.nvmlDeviceGetMemoryInfo, handle)
        except _Absent:
            return
    for field, part in parts.items():
        readings.accept(field, getattr(memory, part), bits=64)


def _read_performance_state(handle: Handle, readings: Readings) -> None:
    try:
        state = _raw(pynvml.nvmlDeviceGetPerformanceState, handle)
    except _Absent as absent:
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
            mask = _raw(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        except _Absent as absent:
            if absent.reason != NOT_SUPPORTED:
                raise
            mask = _raw(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    except _Absent as absent:
        readings.reject("throttle", absent.reason)
    else:
        readings.accept_throttle_mask(mask)


def _read_field_values(handle: Handle, readings: Readings) -> None:
    """Readings that only the field-value interface has, in one query."""
    wanted: dict[int, tuple[str, Callable[[float], float]]] = {
        _FIELD_MEMORY_TEMPERATURE: ("temperature_memory", float)
    }
    if readings.absent.get("power") == NOT_SUPPORTED:
        wanted[_FIELD_POWER_INSTANT] = ("power", from_milli)
    try:
        values = _raw(pynvml.nvmlDeviceGetFieldValues, handle, list(wanted))
    except _Absent as absent:
        readings.reject("temperature_memory", absent.reason)
        return
    for value in values:
        field, convert = wanted[value.fieldId]
        if value.nvmlReturn in _GPU_GONE:
            raise _GpuDown(_GPU_GONE[value.nvmlReturn])
        if value.nvmlReturn != 0:
            readings.reject(field, _ABSENT.get(value.nvmlReturn, ERROR))
        elif value.valueType not in _VALUE_TYPES:
            readings.reject(field, MALFORMED)
        else:
            member, bits = _VALUE_TYPES[value.valueType]
            readings.accept(field, getattr(value.value, member), convert, bits=bits)


def _highest_power_limit(handle: Handle) -> float | None:
    try:
        _lowest, highest = _raw(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
    except _Absent:
        return None
    return None if highest == 2**32 - 1 else from_milli(highest)


def _has_lost(snapshot: Snapshot) -> bool:
    return bool(snapshot.lost) or any(gpu.down_reason for gpu in snapshot.gpus)


def _listed_cards() -> frozenset[str]:
    """The cards the kernel driver lists, by PCI bus id; empty where it lists none (WSL2)."""
    try:
        return frozenset(entry.name for entry in _PROC_GPUS.iterdir())
    except OSError:
        return frozenset()

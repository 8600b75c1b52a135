"""Readings from NVML through nvidia-ml-py.

Errors are kept to the reading or the GPU they belong to. A collection fails as a whole only where the
session with the driver is gone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pynvml

from tunewatch_gpu.nvml_calls import GPU_GONE, Absent, GpuDown, Handle, ask, ask_for_all, ask_text, decode
from tunewatch_gpu.nvml_fields import WEAR, read_field_values
from tunewatch_gpu.nvml_readings import list_processes, read_card, read_limits, read_memory, read_utilization
from tunewatch_gpu.pace import Pace
from tunewatch_gpu.readings import ERROR, UNKNOWN_VALUE, Readings
from tunewatch_gpu.run_memory import Impossible, RunFinder, memory_by_run
from tunewatch_gpu.snapshot import UNKNOWN, Gpu, Identity, Request, Snapshot, choose_uuid, clean_label
from tunewatch_gpu.source import Announce, SourceUnavailable, TellXid
from tunewatch_gpu.xid_watcher import WATCHING, XidWatcher, watch_all

_REOPEN_WHEN_LOST = 60.0  # seconds
_PROC_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(slots=True)
class _Kept:
    """What a GPU or slice told in an earlier collection and is not asked in each; runs by `run_memory`."""

    limits: Readings | None = None
    wear: Readings = field(default_factory=Readings)
    run_memory: dict[str, float] = field(default_factory=dict)
    no_run_memory: str = ""


class NvmlSource:
    """NVML in this process. Not safe against a driver that hangs or crashes: that is the reader's job.

    Calls a collection: one for the count, then 20 for each card, the field values of all kinds being one.
    Every sixth collection (or 30 s) asks each card and slice also for its processes (2 lists, 2 calls for a
    list that is not empty), and each card for its wear (1 call); once in a session each card is asked for
    4 temperature limits. Xid errors cost no call in a collection; see `XidWatcher`.
    """

    name = "nvml"

    def __init__(self, announce: Announce, tell_xid: TellXid) -> None:
        self._announce = announce
        self._tell_xid = tell_xid
        self._watches = False
        self._watcher: XidWatcher | None = None
        self._unwatched: dict[str, str] = {}
        self._pace = Pace()
        self._asks_for_all = True
        self._kept: dict[str, _Kept] = {}
        self._runs = RunFinder()
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
        count = ask_for_all(pynvml.nvmlDeviceGetCount)
        if count == 0:
            raise SourceUnavailable("no_devices", "NVML works but finds no GPU")
        snapshot = Snapshot(self.name, count, [])
        self._asks_for_all = self._pace.due()
        if self._asks_for_all:
            self._runs.begin_round()
        cards: list[tuple[Handle, str]] = []
        for index in range(count):
            if index in request.skip:
                snapshot.lost[str(index)] = "skipped"
                continue
            self._announce(self.name, index)
            cards += self._read_card(index, snapshot)
        self._announce(self.name, None)
        if WATCHING not in request.avoid:
            self._watch(cards, snapshot)
        answering = {gpu.identity.uuid for gpu in snapshot.gpus if not gpu.down_reason}
        self._kept = {uuid: kept for uuid, kept in self._kept.items() if uuid in answering}
        if _has_lost(snapshot) and time.monotonic() - self._opened_at >= _REOPEN_WHEN_LOST:
            self.close()  # a card that was reset is visible to a new session only
        return snapshot

    def close(self) -> None:
        """Shut NVML down; an error while doing so changes nothing."""
        stopped = self._watcher is None or self._watcher.stop()
        self._watcher, self._watches = None, False
        self._kept.clear()
        if self._open:
            self._open = False
            if not stopped:
                return
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                pass

    def _start(self) -> None:
        ask_for_all(pynvml.nvmlInit)
        self._open = True
        self._opened_at = time.monotonic()
        self._cards_at_open = _listed_cards()
        self._driver_version = ask_text("", pynvml.nvmlSystemGetDriverVersion)

    def _watch(self, cards: list[tuple[Handle, str]], snapshot: Snapshot) -> None:
        """Watch `cards` for Xid errors, once in a session; note on `snapshot` which can not be watched."""
        if not self._watches:
            self._watches = True
            self._watcher, self._unwatched = watch_all(self.name, self._tell_xid, cards)
        for gpu in snapshot.gpus:
            if gpu.identity.uuid in self._unwatched:
                gpu.absent["xid"] = self._unwatched[gpu.identity.uuid]

    def _read_card(self, index: int, snapshot: Snapshot) -> list[tuple[Handle, str]]:
        """Add the GPU at `index` and its MIG slices to `snapshot`; its handle and uuid, if it has some."""
        try:
            handle = ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            identity = self._identify(handle, index)
        except (Absent, GpuDown) as failure:
            snapshot.lost[str(index)] = failure.reason
            return []
        card = Gpu(identity)
        snapshot.gpus.append(card)
        try:
            readings = read_card(handle, self._driver_version)
            card.readings, card.absent = readings.values, readings.absent
            snapshot.warnings += [f"GPU {index}: {remark}" for remark in readings.remarks]
            if not _has_measurement(readings) and {UNKNOWN_VALUE, ERROR} & set(readings.absent.values()):
                card.down_reason = ERROR
                return [(handle, identity.uuid)]
            slices = self._read_slices(handle, identity)
            self._add_seldom_read(handle, card, has_slices=bool(slices))
            snapshot.gpus += slices
        except GpuDown as down:
            card.readings, card.absent, card.run_memory = {}, {}, {}
            card.down_reason = down.reason
        return [(handle, identity.uuid)]

    def _add_seldom_read(self, handle: Handle, card: Gpu, *, has_slices: bool) -> None:
        """Add to `card` what is not read in each collection, read anew where it is time."""
        is_due = self._asks_for_all or card.identity.uuid not in self._kept
        kept = self._kept.setdefault(card.identity.uuid, _Kept())
        if is_due:
            kept.wear = Readings()
            read_field_values(handle, WEAR, kept.wear)
            if kept.limits is None or {UNKNOWN_VALUE, ERROR} & set(kept.limits.absent.values()):
                kept.limits = read_limits(handle)
        for readings in (kept.wear, kept.limits or Readings()):
            card.readings |= readings.values
            card.absent |= readings.absent
        if not has_slices:  # a card lists the processes of its slices, too
            self._add_run_memory(handle, card, is_due=is_due)

    def _add_run_memory(self, handle: Handle, gpu: Gpu, *, is_due: bool) -> None:
        kept = self._kept.setdefault(gpu.identity.uuid, _Kept())
        if is_due:
            try:
                total = gpu.readings.get("memory_total")
                kept.run_memory = memory_by_run(list_processes(handle), total, self._runs)
                kept.no_run_memory = ""
            except (Absent, Impossible) as failure:
                kept.run_memory, kept.no_run_memory = {}, failure.reason
        gpu.run_memory = kept.run_memory
        if kept.no_run_memory:
            gpu.absent["run_memory"] = kept.no_run_memory

    def _identify(self, handle: Handle, index: int) -> Identity:
        try:
            pci_bus_id = clean_label(decode(ask(pynvml.nvmlDeviceGetPciInfo, handle).busId))
        except Absent:
            pci_bus_id = ""
        return Identity(
            uuid=choose_uuid(ask_text("", pynvml.nvmlDeviceGetUUID, handle), pci_bus_id, index),
            index=index,
            name=ask_text(UNKNOWN, pynvml.nvmlDeviceGetName, handle),
            driver_version=self._driver_version,
            pci_bus_id=pci_bus_id,
        )

    def _read_slices(self, handle: Handle, parent: Identity) -> list[Gpu]:
        """The MIG slices of a card, empty where MIG is off or unknown here."""
        try:
            current, _pending = ask(pynvml.nvmlDeviceGetMigMode, handle)
            slots = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) if current else 0
        except Absent:
            return []
        slices = []
        for slot in range(slots):
            try:
                slice_handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            except pynvml.NVMLError as error:
                if error.value in GPU_GONE:
                    raise GpuDown(GPU_GONE[error.value]) from None
                continue  # an empty slot, or a slice that was cut anew while we looked
            uuid = ask_text("", pynvml.nvmlDeviceGetUUID, slice_handle)
            if not uuid.startswith("MIG-"):
                continue
            name = ask_text(UNKNOWN, pynvml.nvmlDeviceGetName, slice_handle)
            readings = Readings()
            # Only what belongs to the slice: a driver that answers power or clocks here answers for the card.
            read_memory(slice_handle, readings)
            read_utilization(slice_handle, readings)
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
            self._add_run_memory(
                slice_handle, slices[-1], is_due=self._asks_for_all or uuid not in self._kept
            )
        return slices


def _has_measurement(readings: Readings) -> bool:
    """Whether the card told anything but what it needs."""
    return any(not key.startswith("recovery_") for key in readings.values)


def _has_lost(snapshot: Snapshot) -> bool:
    return bool(snapshot.lost) or any(gpu.down_reason for gpu in snapshot.gpus)


def _listed_cards() -> frozenset[str]:
    """The cards the kernel driver lists, by PCI bus id; empty where it lists none (WSL2)."""
    try:
        return frozenset(entry.name for entry in _PROC_GPUS.iterdir())
    except OSError:
        return frozenset()

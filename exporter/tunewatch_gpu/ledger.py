"""What the sidecar remembers between collections, and how long it believes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tunewatch_gpu.fields import LOST_TIME_REASONS
from tunewatch_gpu.readings import NOT_SUPPORTED
from tunewatch_gpu.snapshot import Gpu, Identity, Snapshot
from tunewatch_gpu.xids import XidCounts


@dataclass(slots=True)
class Integral:
    """A total summed up from a rate, for what the driver has no counter for: power to energy, throttling to time."""

    total: float
    rate: float
    at: float

    def advance(self, rate: float, at: float, longest_gap: float) -> None:
        """Add the trapezoid since the last reading; a gap longer than `longest_gap` seconds adds nothing."""
        if at - self.at <= longest_gap:
            self.total += (self.rate + rate) / 2 * (at - self.at)
        self.rate, self.at = rate, at


@dataclass(slots=True)
class Ledger:
    """Facts of this sidecar's life, all times in seconds.

    `stale_after` is the age at which readings are dropped. `gpus` is the last good collection; `known` are
    the cards ever seen, by uuid; `down` the reasons of those that do not answer. `energy` by uuid and
    `throttled` by uuid and reason are summed up here, where the driver has no counter. `xids` outlive the
    readers that told of them.
    """

    stale_after: float
    expected_by_user: int | None = None
    source: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    known: dict[str, Identity] = field(default_factory=dict)
    down: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    most_counted: int = 0
    energy: dict[str, Integral] = field(default_factory=dict)
    throttled: dict[tuple[str, str], Integral] = field(default_factory=dict)
    counts_throttling: set[tuple[str, str]] = field(default_factory=set)
    xids: XidCounts = field(default_factory=XidCounts)
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    consecutive_failures: int = 0
    duration: float | None = None
    success_at: float | None = None
    success_time: float | None = None

    @property
    def expected(self) -> int | None:
        """How many cards there should be; None while nobody knows."""
        if self.expected_by_user is not None:
            return self.expected_by_user
        return max(self.most_counted, len(self.known)) or None

    def record_success(self, snapshot: Snapshot, at: float, time: float, duration: float) -> None:
        """Take in a snapshot; `at` is monotonic, `time` the wall clock."""
        self.source, self.duration = snapshot.source, duration
        self.success_at, self.success_time = at, time
        self.consecutive_failures = 0
        self.most_counted = max(self.most_counted, snapshot.count)
        self.gpus = self._distinct(snapshot.gpus)
        cards = {gpu.identity.uuid: gpu for gpu in self.gpus if gpu.identity.physical}
        self.known |= {uuid: gpu.identity for uuid, gpu in cards.items()}
        self.seen = sum(not gpu.down_reason for gpu in cards.values())
        self.down = {uuid: gpu.down_reason for uuid, gpu in cards.items() if gpu.down_reason}
        for uuid, identity in self.known.items():
            if uuid not in cards:
                place = (str(identity.index), identity.pci_bus_id)
                self.down[uuid] = next((snapshot.lost[key] for key in place if key in snapshot.lost), "gone")
        for gpu in self.gpus:
            self.rejected.update(gpu.absent.items())
            self._integrate_power(gpu, at)
            self._integrate_throttling(gpu, at)

    def record_failure(self, reason: str, duration: float) -> None:
        """Take in a collection that failed; what was known stays until it is stale."""
        self.failures[reason] += 1
        self.consecutive_failures += 1
        self.duration = duration

    def record_xid(self, source: str, uuid: str, code: int, time: float) -> None:
        """Take in an Xid error that `source` tells of, at Unix time `time`."""
        if reason := self.xids.record(source, uuid, code, time):
            self.rejected["xid", reason] += 1

    def fresh_until(self) -> float | None:
        """When (monotonic) the readings turn stale; None without a success so far."""
        return None if self.success_at is None else self.success_at + self.stale_after

    def _distinct(self, gpus: list[Gpu]) -> list[Gpu]:
        """One GPU per uuid: two series with the same labels would spoil the whole scrape."""
        found: dict[str, Gpu] = {}
        for gpu in gpus:
            if gpu.identity.uuid in found:
                self.rejected["uuid", "duplicate"] += 1
            else:
                found[gpu.identity.uuid] = gpu
        return list(found.values())

    def _integrate_power(self, gpu: Gpu, at: float) -> None:
        uuid, power = gpu.identity.uuid, gpu.readings.get("power")
        has_no_counter = "energy" not in gpu.readings and gpu.absent.get("energy") == NOT_SUPPORTED
        if power is None or not has_no_counter:
            return
        self.energy.setdefault(uuid, Integral(0.0, power, at)).advance(power, at, self.stale_after)

    def _integrate_throttling(self, gpu: Gpu, at: float) -> None:
        """Per reason, the driver's counter or our own sum: whichever came first, since a mix would jump."""
        for reason in LOST_TIME_REASONS:
            key, counter = (gpu.identity.uuid, reason), f"throttled_{reason}"
            active = gpu.readings.get(f"throttle_{reason}")
            if counter in gpu.readings and key not in self.throttled:
                self.counts_throttling.add(key)
                continue
            gpu.readings.pop(counter, None)
            has_no_counter = gpu.absent.get(counter, NOT_SUPPORTED) == NOT_SUPPORTED
            if active is not None and has_no_counter and key not in self.counts_throttling:
                time_lost = self.throttled.setdefault(key, Integral(0.0, active, at))
                time_lost.advance(active, at, self.stale_after)

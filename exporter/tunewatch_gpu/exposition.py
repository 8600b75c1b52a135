"""From the ledger to the text of `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tunewatch_gpu.fields import FIELDS, LOST_TIME_REASONS, RECOVERY_ACTIONS
from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.metrics import METRIC, METRICS
from tunewatch_gpu.readings import RESET_REQUIRED
from tunewatch_gpu.snapshot import Identity

# The classic text format, which Prometheus 2.x and 3.x both take for this type.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TIME = "tunewatch_gpu_time_seconds"


class _Families:
    """The families of one rendering, in the order of the table; those without a sample are left out."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        for metric in METRICS:
            family = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            self._families[metric.name] = family(metric.name, metric.help, labels=metric.labels)

    def add(self, name: str, value: float, *labels: str) -> None:
        """One sample, its labels in the order of the table."""
        self._families[name].add_metric(labels, value)  # type: ignore[attr-defined]

    def collect(self) -> Iterator[Metric]:
        """The families that have samples."""
        return (family for family in self._families.values() if family.samples)


class _LedgerCollector(Collector):
    def __init__(self, ledger: Ledger, version: str, restarts: int, fresh: bool) -> None:
        self._ledger = ledger
        self._version = version
        self._restarts = restarts
        self._fresh = fresh

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        self._add_health(families)
        if self._fresh:
            self._add_gpus(families)
        return families.collect()

    def _add_health(self, families: _Families) -> None:
        ledger = self._ledger
        families.add("tunewatch_gpu_build_info", 1, self._version)
        success = self._fresh and ledger.consecutive_failures == 0
        families.add("tunewatch_gpu_collector_success", float(success))
        if ledger.duration is not None:
            families.add("tunewatch_gpu_collector_duration_seconds", ledger.duration)
        if ledger.success_time is not None:
            families.add("tunewatch_gpu_collector_last_success_timestamp_seconds", ledger.success_time)
            families.add("tunewatch_gpu_collector_source_info", 1, ledger.source)
        for reason, count in sorted(ledger.failures.items()):
            families.add("tunewatch_gpu_collector_failures_total", count, reason)
        families.add("tunewatch_gpu_reader_restarts_total", self._restarts)
        for (field, reason), count in sorted(ledger.rejected.items()):
            families.add("tunewatch_gpu_readings_rejected_total", count, field, reason)
        if ledger.expected is not None:
            families.add("tunewatch_gpu_expected", ledger.expected)
        # Not readings but what has happened: shown also while the GPU that told of it does not answer.
        for uuid, code, xid in ledger.xids:
            families.add("tunewatch_gpu_xid_errors_total", xid.count, uuid, str(code))
            families.add("tunewatch_gpu_xid_last_timestamp_seconds", xid.last, uuid, str(code))

    def _add_gpus(self, families: _Families) -> None:
        ledger = self._ledger
        families.add("tunewatch_gpu_seen", ledger.seen)
        for gpu in ledger.gpus:
            uuid = gpu.identity.uuid
            _add_identity(families, gpu.identity, up=not gpu.down_reason)
            for key, value in gpu.readings.items():
                field = FIELDS[key]
                families.add(field.metric, value, uuid, *(label for _, label in field.labels))
            energy = ledger.energy.get(uuid)
            if energy is not None and "power" in gpu.readings and "energy" not in gpu.readings:
                families.add("tunewatch_gpu_energy_joules_total", energy.total, uuid, "integrated")
            for reason in LOST_TIME_REASONS:
                throttled = ledger.throttled.get((uuid, reason))
                if throttled is not None and f"throttle_{reason}" in gpu.readings:
                    families.add("tunewatch_gpu_throttle_seconds_total", throttled.total, uuid, reason)
            for run_id, memory in sorted(gpu.run_memory.items()):
                families.add("tunewatch_gpu_run_memory_bytes", memory, uuid, run_id)
        for uuid, reason in ledger.down.items():
            if reason == RESET_REQUIRED:  # the driver's answer to every question, this one included
                for action in RECOVERY_ACTIONS:
                    families.add("tunewatch_gpu_recovery_action", float(action == "reset"), uuid, action)
        present = {gpu.identity.uuid for gpu in ledger.gpus}
        for uuid, identity in ledger.known.items():
            if uuid not in present:
                _add_identity(families, identity, up=False)


def _add_identity(families: _Families, identity: Identity, *, up: bool) -> None:
    families.add(
        "tunewatch_gpu_info",
        1,
        identity.uuid,
        str(identity.index),
        identity.name,
        identity.driver_version,
        identity.pci_bus_id,
        identity.parent_uuid,
        identity.mig_profile,
        "true" if identity.simulated else "false",
    )
    families.add("tunewatch_gpu_up", float(up), identity.uuid)


def render(ledger: Ledger, version: str, restarts: int, *, fresh: bool) -> bytes:
    """The exposition without the clock; `fresh` says whether the readings may be shown."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_LedgerCollector(ledger, version, restarts, fresh))
    return generate_latest(registry)


class Page:
    """What `/metrics` answers: rendered once a cycle, and the same without readings for when they are stale.

    Which of the two holds is decided at the scrape, so that even a stuck cycle can not serve old readings.
    """

    def __init__(self, fresh: bytes, stale: bytes, fresh_until: float | None) -> None:
        self._fresh = fresh
        self._stale = stale
        self._fresh_until = fresh_until

    @classmethod
    def of(cls, ledger: Ledger, version: str, restarts: int) -> Page:
        """Render `ledger` as it is now."""
        stale = render(ledger, version, restarts, fresh=False)
        if ledger.success_at is None:
            return cls(stale, stale, None)
        return cls(render(ledger, version, restarts, fresh=True), stale, ledger.fresh_until())

    def text(
        self, monotonic: Callable[[], float] = time.monotonic, clock: Callable[[], float] = time.time
    ) -> bytes:
        """The exposition for a scrape now."""
        is_fresh = self._fresh_until is not None and monotonic() < self._fresh_until
        return (self._fresh if is_fresh else self._stale) + _clock_text(clock())


def _clock_text(now: float) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ClockCollector(now))
    return generate_latest(registry)


class _ClockCollector(Collector):
    def __init__(self, now: float) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(_TIME, METRIC[_TIME].help)
        family.add_metric((), self._now)
        yield family

"""The collecting loop: a timer, the reader, the ledger, the page."""

from __future__ import annotations

import logging
import select
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from tunewatch_gpu.exposition import Page
from tunewatch_gpu.kernel_log import KERNEL_LOG, KernelLog
from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.reader_process import ReaderFailure, ReaderProcess, Stopped
from tunewatch_gpu.snapshot import Request, Snapshot, bus_key

log = logging.getLogger("tunewatch-gpu")

_SHORTEST_STALE_AGE = 15.0
_STALE_INTERVALS = 3
_LONGEST_PAUSE = 60.0
_PAUSE_INTERVALS = 8
_READER_SHARE = 0.8  # of the deadline, so that the reader itself gives up before it is killed
_ISOLATION_INTERVALS = 4
_LONGEST_ISOLATION = 300.0
_CRASHES_BEFORE_AVOIDING = 2
_AVOIDANCE = 60.0
_STOP_PATIENCE = 1.2
_MOST_UNPLACED = 100


@dataclass(frozen=True, slots=True)
class Settings:
    """How to collect; `interval` and `timeout` in seconds, `exit_after_failures` 0 means never."""

    interval: float
    timeout: float
    reader: ReaderOptions
    kernel_log: Path = KERNEL_LOG
    expect_gpus: int | None = None
    exit_after_failures: int = 0
    version: str = ""

    @property
    def stale_after(self) -> float:
        """Age in seconds at which readings are no longer shown."""
        return max(_STALE_INTERVALS * self.interval, _SHORTEST_STALE_AGE)

    def pause(self, failures: int) -> float:
        """Seconds between the starts of two collections, after `failures` in a row."""
        longest = max(self.interval, min(_LONGEST_PAUSE, _PAUSE_INTERVALS * self.interval))
        return min(longest, self.interval * 2 ** max(0, min(failures, 16) - 1))


class Blame:
    """Decides what to leave alone for a while after the reader hung or crashed.

    One card that hangs the driver is skipped so that the others can be read. As soon as a second one hangs
    it is the driver and not the card, and nothing is skipped. NVML that keeps crashing is avoided. A reader
    that dies between collections had nothing to do but wait for Xid events: that is left out if it happens again.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._card: int | None = None
        self._card_until = 0.0
        self._times = 0
        self._crashes = 0
        self._avoid_until = 0.0
        self._idle_crashes = 0
        self._unwatched_until = 0.0

    def failed(self, failure: ReaderFailure, cards: int, now: float) -> None:
        """Learn from a failure; `cards` is how many GPUs are known."""
        if failure.reason not in ("reader_timeout", "reader_crashed"):
            return
        if failure.reason == "reader_crashed" and failure.source == "nvml":
            self._crashes += 1
            if self._crashes >= _CRASHES_BEFORE_AVOIDING:
                self._avoid_until = now + _AVOIDANCE
        if failure.reason == "reader_crashed" and not failure.source:
            self._idle_crashes += 1
            if self._idle_crashes >= _CRASHES_BEFORE_AVOIDING:
                self._idle_crashes, self._unwatched_until = 0, now + _LONGEST_ISOLATION
        if failure.index is None or cards < 2:
            return
        if self._card not in (None, failure.index):
            self._card, self._card_until, self._times = None, 0.0, 0
            return
        self._card = failure.index
        isolation = _ISOLATION_INTERVALS * self._interval * 2 ** min(self._times, 10)
        self._card_until = now + min(_LONGEST_ISOLATION, isolation)
        self._times += 1

    def succeeded(self, skipped: tuple[int, ...]) -> None:
        """A collection worked; one that skipped nothing clears the card."""
        self._crashes = 0
        if not skipped:
            self._card, self._times = None, 0

    def skip(self, now: float) -> tuple[int, ...]:
        """Indices of GPUs to leave alone now."""
        return (self._card,) if self._card is not None and now < self._card_until else ()

    def avoid(self, now: float) -> tuple[str, ...]:
        """Sources, and what of a source, to leave alone now."""
        sources = ("nvml",) if now < self._avoid_until else ()
        return (*sources, "xid_events") if now < self._unwatched_until else sources


class Sidecar:
    """Collects every interval until `wake` (a descriptor) turns readable."""

    def __init__(self, settings: Settings, wake: int) -> None:
        self._settings = settings
        self._wake = wake
        self._ledger = Ledger(settings.stale_after, settings.expect_gpus)
        self._reader = ReaderProcess(settings.reader, wake)
        self._blame = Blame(settings.interval)
        self._kernel_log = KernelLog(settings.kernel_log)
        self._unplaced: deque[tuple[str, int, float]] = deque(maxlen=_MOST_UNPLACED)
        self._last_snapshot_time: float | None = None
        if self._kernel_log.unreadable:
            log.info("no kernel log (%s): Xid errors come from NVML alone", self._kernel_log.unreadable)
        self._reported_failure = ""
        self._reported_warnings: set[str] = set()
        self._turned_at = time.monotonic()
        self._publish()

    def metrics(self) -> bytes:
        """The exposition for a scrape now."""
        return self._page.text()

    def healthy(self) -> bool:
        """Whether the loop still turns, whatever the drivers do."""
        longest = self._settings.timeout + self._settings.pause(64) + _SHORTEST_STALE_AGE
        return time.monotonic() - self._turned_at < longest

    def run(self) -> int:
        """Collect until woken (0) or until too many collections in a row have failed (1)."""
        try:
            while True:
                started = self._turned_at = time.monotonic()
                self._collect(started)
                failures = self._ledger.consecutive_failures
                if 0 < self._settings.exit_after_failures <= failures:
                    log.error("%d collections failed in a row: giving up as asked", failures)
                    return 1
                pause = started + self._settings.pause(failures) - time.monotonic()
                if select.select([self._wake], [], [], max(0.0, pause))[0]:
                    return 0
        except Stopped:
            return 0
        finally:
            self._reader.stop(_STOP_PATIENCE)
            self._kernel_log.close()

    def _collect(self, started: float) -> None:
        ledger, settings = self._ledger, self._settings
        request = Request(
            deadline=started + _READER_SHARE * settings.timeout,
            skip=self._blame.skip(started),
            avoid=self._blame.avoid(started),
            known=tuple((uuid, identity.pci_bus_id) for uuid, identity in ledger.known.items()),
            after=self._last_snapshot_time,
        )
        try:
            snapshot = self._reader.read(request, started + settings.timeout)
        except ReaderFailure as failure:
            now = time.monotonic()
            ledger.record_failure(failure.reason, now - started)
            self._blame.failed(failure, len(ledger.known), now)
            self._report_failure(failure)
        else:
            now = time.monotonic()
            before = dict(ledger.down)
            self._report_source(snapshot)
            ledger.record_success(snapshot, now, time.time(), now - started)
            self._blame.succeeded(request.skip)
            self._last_snapshot_time = snapshot.time
            self._report_cards(before, snapshot)
        self._record_xids()
        self._publish()

    def _record_xids(self) -> None:
        """Xid errors from the reader, whether it answered or not, and from the kernel log."""
        for xid in self._reader.take_xids():
            self._ledger.record_xid(xid.source, xid.uuid, xid.code, xid.time)
        self._unplaced += [(bus_id, code, time.time()) for bus_id, code in self._kernel_log.poll()]
        uuids = {bus_key(identity.pci_bus_id): uuid for uuid, identity in self._ledger.known.items()}
        for _ in range(len(self._unplaced)):
            bus_id, code, at = self._unplaced.popleft()
            if bus_key(bus_id) in uuids:
                self._ledger.record_xid("kernel_log", uuids[bus_key(bus_id)], code, at)
            else:
                self._unplaced.append((bus_id, code, at))  # of a card that was not seen yet

    def _publish(self) -> None:
        restarts = max(0, self._reader.starts - 1)
        self._page = Page.of(self._ledger, self._settings.version, restarts)

    def _report_failure(self, failure: ReaderFailure) -> None:
        """Say it once, not every cycle."""
        said = f"{failure.reason}: {failure.message}"
        if said != self._reported_failure:
            self._reported_failure = said
            log.warning("no GPU readings, reason=%s; trying again", said)

    def _report_source(self, snapshot: Snapshot) -> None:
        if self._reported_failure or snapshot.source != self._ledger.source:
            self._reported_failure = ""
            log.info("reading %d GPU(s) from %s", snapshot.count, snapshot.source)

    def _report_cards(self, before: dict[str, str], snapshot: Snapshot) -> None:
        down = self._ledger.down
        for uuid in down.keys() - before.keys():
            log.warning("GPU %s does not answer, reason=%s", uuid, down[uuid])
        for uuid in before.keys() - down.keys():
            log.info("GPU %s answers again", uuid)
        for warning in snapshot.warnings:
            if warning not in self._reported_warnings and len(self._reported_warnings) < 1000:
                self._reported_warnings.add(warning)
                log.warning("%s", warning)

"""GPUs that do not exist, for demonstrations and for trying dashboards and alerts without a card.

Values follow from the wall clock, a seed and a scenario alone, so two readers agree and a test can predict them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tunewatch_gpu.card_state import CardState
from tunewatch_gpu.fields import LOST_TIME_REASONS, THROTTLE_BITS
from tunewatch_gpu.readings import GPU_LOST, RESET_REQUIRED, Readings
from tunewatch_gpu.snapshot import Gpu, Identity, Request, Snapshot
from tunewatch_gpu.source import Announce, TellXid

if TYPE_CHECKING:
    from tunewatch_gpu.scenario import ScenarioFile

_GIB = 2**30
_TOTAL = 80 * _GIB
_POWER_LIMIT = 400.0
_IDLE_POWER = 60.0
_EPOCH = 1_700_000_000.0  # energy counts from here
_BEAT = 10.0  # seconds of which a share is throttled
_PERIOD = 90.0  # seconds of one rise and fall of the load
_UNCHANGING = {
    "limit_slowdown": 96,
    "limit_shutdown": 101,
    "limit_max_operating": 90,
    "limit_memory_max": 105,
    "rows_correctable": 0,
    "rows_uncorrectable": 0,
    "rows_pending": 0,
    "rows_failed": 0,
}


def simulated_uuid(index: int) -> str:
    """The uuid of a simulated GPU."""
    return f"GPU-51515151-5151-5151-5151-{index:012x}"


class SimulatedSource:
    """`count` plausible GPUs; every one carries `simulated="true"` in its identity."""

    name = "simulated"

    def __init__(
        self,
        announce: Announce,
        tell_xid: TellXid,
        count: int,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        scenario: ScenarioFile | None = None,
    ) -> None:
        self._announce = announce
        self._tell_xid = tell_xid
        self._count = count
        self._seed = seed
        self._clock = clock
        self._scenario = scenario
        self._told: set[tuple[int, int]] | None = None

    def read(self, request: Request) -> Snapshot:
        """One collection; see `Source`."""
        self._announce(self.name, None)
        now = self._clock()
        if self._scenario is not None:
            self._follow(self._scenario, now, request.after)
        gpus = [self._gpu(index, now) for index in range(self._count) if index not in request.skip]
        complaint = self._scenario.complaint if self._scenario is not None else ""
        return Snapshot(self.name, self._count, gpus, time=now, warnings=[complaint] if complaint else [])

    def close(self) -> None:
        """Nothing to release."""

    def _follow(self, scenario: ScenarioFile, now: float, after: float | None) -> None:
        """Take the scenario as it is now and tell the Xid errors that have become due, each once.

        What an earlier reader had told by its last snapshot, at `after`, is not told again.
        """
        is_new = scenario.refresh()
        due = scenario.scenario.xids(now - scenario.origin, self._count)
        if self._told is None:
            told_before = after - scenario.origin if after is not None else -math.inf
            self._told = {(xid.number, xid.card) for xid in due if xid.at <= told_before}
        elif is_new:
            self._told = set()
        for xid in due:
            if (xid.number, xid.card) not in self._told:
                self._told.add((xid.number, xid.card))
                self._tell_xid(self.name, simulated_uuid(xid.card), xid.code, scenario.origin + xid.at)

    def _state(self, index: int, now: float) -> CardState:
        if self._scenario is None:
            return CardState()
        return self._scenario.scenario.state(index, now - self._scenario.origin)

    def _gpu(self, index: int, now: float) -> Gpu:
        identity = Identity(
            uuid=simulated_uuid(index),
            index=index,
            name="Simulated GPU 80GB",
            driver_version="simulated",
            pci_bus_id=f"00000000:{index + 1:02X}:00.0",
            simulated=True,
        )
        state = self._state(index, now)
        if state.lost or state.reset_required:
            return Gpu(identity, down_reason=GPU_LOST if state.lost else RESET_REQUIRED)
        readings = Readings()
        self._read_load(index, now, state, readings)
        _read_faults(now, state, readings)
        run_memory = {run: gib * _GIB for run, gib in state.run_memory.items()}
        return Gpu(identity, readings.values, readings.absent, run_memory)

    def _read_load(self, index: int, now: float, state: CardState, readings: Readings) -> None:
        phase = 0.7 * index + self._seed
        rate = 2 * math.pi / _PERIOD
        elapsed = now - _EPOCH
        # Load swings between 0.70 and 0.98; power follows it, so energy is its exact integral.
        load = 0.84 + 0.14 * math.sin(rate * elapsed + phase)
        swing = _POWER_LIMIT - _IDLE_POWER
        power = _IDLE_POWER + swing * load
        energy = (_IDLE_POWER + swing * 0.84) * elapsed + swing * 0.14 / rate * (
            math.cos(phase) - math.cos(rate * elapsed + phase)
        )
        used = sum(state.run_memory.values()) or 40 + 24 * load
        readings.accept("utilization", load if state.utilization is None else state.utilization)
        readings.accept("memory_total", _TOTAL)
        readings.accept("memory_reserved", _GIB / 2)
        readings.accept("memory_used", round(used * _GIB))
        readings.accept("power", power if state.power is None else state.power)
        readings.accept("power_limit", _POWER_LIMIT)
        readings.accept("energy", energy)
        temperature = 35 + 40 * load if state.temperature is None else state.temperature
        readings.accept("temperature_gpu", temperature)
        readings.accept("temperature_memory", temperature + 8)
        readings.accept("clock_graphics", 1.98e9 - 0.2e9 * load)
        readings.accept("clock_sm", 1.98e9 - 0.2e9 * load)
        readings.accept("clock_memory", 2.619e9)
        readings.accept("performance_state", 0)


def _read_faults(now: float, state: CardState, readings: Readings) -> None:
    mask = sum(
        THROTTLE_BITS[reason] for reason, share in state.throttle.items() if now % _BEAT < share * _BEAT
    )
    readings.accept_throttle_mask(mask)
    for reason in LOST_TIME_REASONS:
        readings.accept(f"throttled_{reason}", state.throttled.get(reason, 0.0))
    for field, value in _UNCHANGING.items():
        readings.accept(field, value)
    for kind in ("corrected", "uncorrected"):
        readings.accept(f"ecc_{kind}", state.ecc.get(kind, 0.0))
    readings.accept_recovery_action(state.recovery_action)

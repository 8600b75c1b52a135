"""GPUs that do not exist, for demonstrations and for trying dashboards and alerts without a card.

Values follow from the wall clock and a seed alone, so two readers agree and a test can predict them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tunewatch_gpu.readings import Readings
from tunewatch_gpu.snapshot import Gpu, Identity, Request, Snapshot
from tunewatch_gpu.source import Announce

_GIB = 2**30
_TOTAL = 80 * _GIB
_POWER_LIMIT = 400.0
_IDLE_POWER = 60.0
_EPOCH = 1_700_000_000.0  # energy counts from here
_PERIOD = 90.0  # seconds of one rise and fall of the load


def simulated_uuid(index: int) -> str:
    """The uuid of a simulated GPU."""
    return f"GPU-51515151-5151-5151-5151-{index:012x}"


class SimulatedSource:
    """`count` plausible GPUs; every one carries `simulated="true"` in its identity."""

    name = "simulated"

    def __init__(
        self, announce: Announce, count: int, seed: int = 0, clock: Callable[[], float] = time.time
    ) -> None:
        self._announce = announce
        self._count = count
        self._seed = seed
        self._clock = clock

    def read(self, request: Request) -> Snapshot:
        """One collection; see `Source`."""
        self._announce(self.name, None)
        now = self._clock()
        gpus = [self._gpu(index, now) for index in range(self._count) if index not in request.skip]
        return Snapshot(self.name, self._count, gpus)

    def close(self) -> None:
        """Nothing to release."""

    def _gpu(self, index: int, now: float) -> Gpu:
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
        readings = Readings()
        readings.accept("utilization", load)
        readings.accept("memory_total", _TOTAL)
        readings.accept("memory_reserved", _GIB / 2)
        readings.accept("memory_used", round((40 + 24 * load) * _GIB))
        readings.accept("power", power)
        readings.accept("power_limit", _POWER_LIMIT)
        readings.accept("energy", energy)
        readings.accept("temperature_gpu", 35 + 40 * load)
        readings.accept("temperature_memory", 40 + 45 * load)
        readings.accept("clock_graphics", 1.98e9 - 0.2e9 * load)
        readings.accept("clock_sm", 1.98e9 - 0.2e9 * load)
        readings.accept("clock_memory", 2.619e9)
        readings.accept("performance_state", 0)
        readings.accept_throttle_mask(0x4 if load > 0.95 else 0)
        identity = Identity(
            uuid=simulated_uuid(index),
            index=index,
            name="Simulated GPU 80GB",
            driver_version="simulated",
            pci_bus_id=f"00000000:{index + 1:02X}:00.0",
            simulated=True,
        )
        return Gpu(identity, readings.values, readings.absent)

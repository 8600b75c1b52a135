"""The gate every number passes before it may become a reading.

Unsupported, unknown, not permitted, a sentinel and an unbelievable value all lead to the same thing: no
reading, and a reason for it.
"""

from __future__ import annotations

from collections.abc import Callable

from tunewatch_gpu.fields import FIELDS, RECOVERY_ACTIONS, THROTTLE_BITS

NOT_SUPPORTED = "not_supported"
NO_PERMISSION = "no_permission"
UNKNOWN_VALUE = "unknown"
SENTINEL = "sentinel"
OUT_OF_RANGE = "out_of_range"
MALFORMED = "malformed"
ERROR = "error"
GPU_LOST = "gpu_lost"
RESET_REQUIRED = "reset_required"

_POWER_MARGIN = 1.5  # a driver reported 600 W on a board whose highest limit is 160 W


class Readings:
    """Collects the readings of one GPU; `values` in base units, `absent` with the reason for each gap.

    `remarks` are for the log.
    """

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.absent: dict[str, str] = {}
        self.remarks: list[str] = []

    def accept(
        self,
        field: str,
        raw: float,
        convert: Callable[[float], float] = float,
        *,
        bits: int | None = None,
    ) -> None:
        """Take `raw`, converted to the base unit, unless it is no measurement.

        `bits` is the width of the driver's unsigned field: all ones in that width means "not available",
        while a narrower all-ones pattern (255 W, 65535 MiB) is a value like any other.
        """
        if bits is not None and raw == 2**bits - 1:
            self.reject(field, SENTINEL)
            return
        value = convert(raw)
        limits = FIELDS[field]
        if limits.low <= value <= limits.high:
            self.absent.pop(field, None)
            self.values[field] = value
        else:
            self.reject(field, OUT_OF_RANGE)

    def accept_throttle_mask(self, mask: int) -> None:
        """Take the 64-bit mask of the reasons that hold the clocks down."""
        if mask == 2**64 - 1:
            self.reject("throttle", SENTINEL)
            return
        for reason, bit in THROTTLE_BITS.items():
            self.values[f"throttle_{reason}"] = float(bool(mask & bit))

    def accept_recovery_action(self, action: str) -> None:
        """Take one of `RECOVERY_ACTIONS`."""
        for known in RECOVERY_ACTIONS:
            self.values[f"recovery_{known}"] = float(known == action)

    def reject(self, field: str, reason: str) -> None:
        """Note that `field` has no value, and why."""
        self.values.pop(field, None)
        self.absent[field] = reason

    def check(self, highest_power_limit: float | None) -> None:
        """Drop values that contradict each other; `highest_power_limit` in watts, None where unknown."""
        total = self.values.get("memory_total")
        for part in ("memory_used", "memory_reserved"):
            if part not in self.values:
                continue
            if total is None:
                # A part of an unknown whole: seen on machines whose GPU shares the host's memory.
                self.reject(part, self.absent.get("memory_total", UNKNOWN_VALUE))
            elif self.values[part] > total:
                self.reject(part, OUT_OF_RANGE)
        power = self.values.get("power")
        if power is not None and highest_power_limit and power > _POWER_MARGIN * highest_power_limit:
            self.reject("power", OUT_OF_RANGE)

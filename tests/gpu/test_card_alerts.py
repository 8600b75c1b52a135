"""From what befalls a card to the message a person gets: a sidecar with a scenario, the shipped rules, faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_harness import RunningSidecar

from tunewatch.stack import Stack
from tunewatch_gpu.simulated import simulated_uuid

TIME_SCALE = 60.0  # 30 minutes of throttling are 30 seconds
DEADLINE = 120.0

FAULTS = """
events:
  - {card: 0, xid: 48, ecc: {uncorrected: 1}, recovery_action: reset}
  - {card: 1, xid: 94, ecc: {corrected: 9}, recovery_action: drain_and_reset}
  - {card: 2, throttle: {hw_thermal_slowdown: 0.5}, temperature: 97}
  # Nothing to be told of: a program's own error, and a card at its power cap.
  - {card: 3, xid: 31, ecc: {corrected: 9}, throttle: {sw_power_cap: 1}, utilization: 1, temperature: 80}
"""
TOLD = {
    ("TunewatchGpuXidCritical", 0),
    ("TunewatchGpuEccUncorrected", 0),
    ("TunewatchGpuResetRequired", 0),
    ("TunewatchGpuXidWarning", 1),
    ("TunewatchGpuResetDue", 1),
    ("TunewatchGpuThrottled", 2),
    ("TunewatchGpuHot", 2),
}
OVER_WHEN_MENDED = {
    ("TunewatchGpuEccUncorrected", 0),
    ("TunewatchGpuResetRequired", 0),
    ("TunewatchGpuHot", 2),
}


@pytest.mark.slow
def test_what_befalls_a_card_is_told_and_nothing_else(
    start_sidecar: Callable[..., RunningSidecar], tmp_path: Path
) -> None:
    scenario = tmp_path / "scenario.yml"
    scenario.write_text(FAULTS)
    arguments = ("--backend", "simulated", "--interval", "0.5", "--scenario", str(scenario))
    sidecar = start_sidecar({"TUNEWATCH_GPU_SIMULATE": "4"}, *arguments)
    cards = {simulated_uuid(index): index for index in range(4)}
    with Stack(tmp_path / "home", time_scale=TIME_SCALE) as stack:
        stack.add_static_target("gpu", sidecar.url.removeprefix("http://"))

        def told(status: str) -> set[tuple[str, int | None]]:
            assert stack.inbox is not None
            return {
                (alert.name, cards.get(alert.labels.get("uuid", "")))
                for notification in stack.inbox.notifications
                for alert in notification.alerts
                if alert.status == status and alert.name != "TunewatchWatchdog"
            }

        def wait_for(status: str, wanted: set[tuple[str, int]]) -> None:
            deadline = time.monotonic() + DEADLINE
            while not wanted <= told(status):
                assert time.monotonic() < deadline, f"{status}: {told(status)}"
                time.sleep(0.1)

        wait_for("firing", TOLD)
        assert told("firing") == TOLD
        scenario.write_text("events: []\n")
        wait_for("resolved", OVER_WHEN_MENDED)
        assert told("firing") == TOLD

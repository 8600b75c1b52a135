"""From a card that falls off the bus to the message a person gets: the sidecar, Prometheus and Alertmanager."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, RunningSidecar, card, uuid_of

from tunewatch.inbox import Alert
from tunewatch.stack import Stack

TIME_SCALE = 30.0  # a scrape every half second; "for: 5m" is ten seconds


def wait_for_alert(stack: Stack, name: str, status: str = "firing", seconds: float = 90.0) -> Alert:
    assert stack.inbox is not None
    deadline = time.monotonic() + seconds
    while True:
        alerts = [alert for notification in stack.inbox.notifications for alert in notification.alerts]
        for alert in alerts:
            if (alert.name, alert.status) == (name, status):
                return alert
        assert time.monotonic() < deadline, f"not told: {name} {status}; told: {alerts}"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_lost_card_and_then_a_lost_driver(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar], tmp_path: Path
) -> None:
    driver.play(card(0), card(1))
    sidecar = start_sidecar(driver.environment, "--backend", "nvml", "--interval", "0.5")
    sidecar.wait_success()
    address = sidecar.url.removeprefix("http://")
    with Stack(tmp_path / "home", time_scale=TIME_SCALE) as stack:
        stack.add_static_target("gpu", address)
        driver.play(card(0), card(1, **{"!*": 15}))  # NVML_ERROR_GPU_IS_LOST
        sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 0)
        lost = wait_for_alert(stack, "TunewatchGpuLost")
        assert lost.labels["instance"] == address
        assert lost.labels["uuid"] == uuid_of(1)
        assert f"GPU 1, NVIDIA Test 40GB ({uuid_of(1)})" in lost.annotations["description"]

        driver.play({"!nvmlDeviceGetCount_v2": 999})
        blind = wait_for_alert(stack, "TunewatchGpuSidecarBlind")
        assert blind.labels["instance"] == address
        assert "reason" in blind.annotations["description"]
        # What nobody can see any more is not well, and not told twice.
        wait_for_alert(stack, "TunewatchGpuLost", "resolved")

        driver.play(card(0), card(1))
        wait_for_alert(stack, "TunewatchGpuSidecarBlind", "resolved")
        assert stack.inbox is not None
        names = {alert.name for told in stack.inbox.notifications for alert in told.alerts}
        assert {name for name in names if name.startswith("TunewatchGpu")} == {lost.name, blind.name}

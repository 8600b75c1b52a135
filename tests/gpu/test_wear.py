"""Throttled time, recovery action, temperature limits, ECC errors and remapped rows, from NVML."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from gpu_harness import FakeDriver, RunningSidecar, Scrape, card, uuid_of

from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.snapshot import Gpu, Identity, Snapshot

Start = Callable[..., RunningSidecar]

FAST = ("--backend", "nvml", "--interval", "0.2")


def test_values(driver: FakeDriver, start_sidecar: Start) -> None:
    driver.play(card(0), card(1, field230=4, field145=1, limit0=92))
    scrape = start_sidecar(driver.environment, *FAST).wait_success()
    uuid = uuid_of(0)

    def values(name: str, label: str) -> dict[str, float | None]:
        return {
            labels[label]: scrape.value(name, **labels)
            for labels in scrape.labels(name)
            if labels["uuid"] == uuid
        }

    assert values("temperature_limit_celsius", "limit") == {
        "shutdown": 101, "slowdown": 96, "memory_max": 105, "max_operating": 90,
    }  # fmt: skip
    assert values("ecc_errors_total", "kind") == {"corrected": 7, "uncorrected": 2}
    assert values("remapped_rows", "kind") == {
        "correctable": 5,
        "uncorrectable": 3,
        "pending": 1,
        "failed": 0,
    }
    assert values("recovery_action", "action") == {
        "none": 1, "reset": 0, "reboot": 0, "drain_p2p": 0, "drain_and_reset": 0,
    }  # fmt: skip
    seconds = values("throttle_seconds_total", "reason")
    # The counters of the driver, in ns there; what it does not count starts at 0 and is not active (mask 0x24).
    assert seconds == {
        "sw_power_cap": 74.5, "sync_boost": 0, "sw_thermal_slowdown": 2.5, "hw_thermal_slowdown": 1.25,
        "hw_power_brake_slowdown": 0, "hw_slowdown": 0, "applications_clocks_setting": 0,
        "display_clock_setting": 0,
    }  # fmt: skip
    assert scrape.value("recovery_action", uuid=uuid_of(1), action="drain_and_reset") == 1
    assert scrape.value("recovery_action", uuid=uuid_of(1), action="none") == 0
    assert scrape.value("remapped_rows", uuid=uuid_of(1), kind="failed") == 1
    assert scrape.value("temperature_limit_celsius", uuid=uuid_of(1), limit="shutdown") == 92


ABSENCES: list[tuple[dict[str, object], str, dict[str, str], str, str]] = [
    ({"field230": None}, "recovery_action", {"action": "none"}, "recovery_action", "not_supported"),
    ({"field230": 6}, "recovery_action", {"action": "reset"}, "recovery_action", "unknown"),
    ({"!field230": 999}, "recovery_action", {"action": "none"}, "recovery_action", "unknown"),
    ({"field3": 2**64 - 1}, "ecc_errors_total", {"kind": "corrected"}, "ecc_corrected", "sentinel"),
    ({"!field4": 3}, "ecc_errors_total", {"kind": "uncorrected"}, "ecc_uncorrected", "not_supported"),
    ({"!field4": 4}, "ecc_errors_total", {"kind": "uncorrected"}, "ecc_uncorrected", "no_permission"),
    ({"field142": 2**32 - 1}, "remapped_rows", {"kind": "correctable"}, "rows_correctable", "sentinel"),
    ({"field144": 2}, "remapped_rows", {"kind": "pending"}, "rows_pending", "out_of_range"),
    ({"field76": 2**64 - 1}, "throttle_seconds_total", {"reason": "sync_boost"}, "throttled_sync_boost", "sentinel"),
    ({"limit1": None}, "temperature_limit_celsius", {"limit": "slowdown"}, "limit_slowdown", "not_supported"),
    ({"limit0": 2**32 - 1}, "temperature_limit_celsius", {"limit": "shutdown"}, "limit_shutdown", "sentinel"),
    ({"limit3": 0}, "temperature_limit_celsius", {"limit": "max_operating"}, "limit_max_operating", "out_of_range"),
]  # fmt: skip


def test_what_is_no_measurement_is_absent(driver: FakeDriver, start_sidecar: Start) -> None:
    """One fault a card: it costs one series of that card, is counted, and the neighbours keep theirs."""
    whole = len(ABSENCES)
    driver.play(*(card(index, **case[0]) for index, case in enumerate(ABSENCES)), card(whole))
    # One collection, so that each reason is counted once for each card that has it.
    sidecar = start_sidecar(driver.environment, "--backend", "nvml", "--interval", "300")
    scrape = sidecar.wait_success()
    expected: dict[tuple[str, str], int] = {}
    for index, (_, metric, labels, field, reason) in enumerate(ABSENCES):
        assert scrape.value(metric, uuid=uuid_of(index), **labels) is None, (metric, labels, reason)
        assert scrape.value(metric, uuid=uuid_of(whole), **labels) is not None
        assert scrape.readings(uuid_of(whole)) - scrape.readings(uuid_of(index)) <= {metric}
        expected[field, reason] = expected.get((field, reason), 0) + 1
    counted = {
        (labels["field"], labels["reason"]): scrape.value("readings_rejected_total", **labels)
        for labels in scrape.labels("readings_rejected_total")
    }
    assert counted == expected
    assert "GPU 1: the driver asks for recovery action 6, which is not known here" in sidecar.log()


def test_throttled_time_is_summed_up_where_the_driver_does_not_count(
    driver: FakeDriver, start_sidecar: Start
) -> None:
    """Field 269 is asked of release 580 and newer alone: before, that number was another field."""
    counters = dict.fromkeys(("field74", "field76", "field270", "field271"))
    driver.play(card(0, throttle=0x20, field269=3_000_000_000, **counters), {"driver": "575.51.03"})
    sidecar = start_sidecar(driver.environment, *FAST)

    def lost(scrape: Scrape, reason: str) -> float:
        return scrape.value("throttle_seconds_total", uuid=uuid_of(0), reason=reason) or 0.0

    def at(scrape: Scrape) -> float:
        return scrape.value("collector_last_success_timestamp_seconds") or 0.0

    first = sidecar.wait(lambda scrape: lost(scrape, "sw_thermal_slowdown") > 0)
    began = lost(first, "sw_thermal_slowdown")
    last = sidecar.wait(lambda scrape: lost(scrape, "sw_thermal_slowdown") > began + 1, seconds=15)
    summed = lost(last, "sw_thermal_slowdown") - began
    assert summed == pytest.approx(at(last) - at(first), abs=0.05), "active all the time"
    assert last.value("throttle_seconds_total", uuid=uuid_of(0), reason="sw_power_cap") == 0
    assert last.value("throttle_seconds_total", uuid=uuid_of(0), reason="gpu_idle") is None
    driver.play(card(0, throttle=0x20, **{"!nvmlDeviceGetCurrentClocksEventReasons": 4}))
    sidecar.wait(lambda scrape: not scrape.labels("throttle_active"))
    assert not sidecar.scrape().value("throttle_seconds_total", uuid=uuid_of(0), reason="hw_slowdown")


def test_a_driver_that_refuses_several_fields_at_once_is_asked_one_by_one(
    driver: FakeDriver, start_sidecar: Start
) -> None:
    driver.play(card(0, **{"!several": 2}))
    scrape = start_sidecar(driver.environment, *FAST).wait_success()
    assert scrape.value("ecc_errors_total", uuid=uuid_of(0), kind="uncorrected") == 2
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="memory") == 72


def test_wear_is_read_again_in_time_and_limits_are_not(driver: FakeDriver, start_sidecar: Start) -> None:
    driver.play(card(0))
    sidecar = start_sidecar(driver.environment, *FAST)
    sidecar.wait_success()
    driver.play(card(0, field4=3, limit1=80, field230=1))
    scrape = sidecar.wait(
        lambda scrape: scrape.value("ecc_errors_total", uuid=uuid_of(0), kind="uncorrected") == 3
    )
    assert scrape.value("temperature_limit_celsius", uuid=uuid_of(0), limit="slowdown") == 96
    assert scrape.value("recovery_action", uuid=uuid_of(0), action="reset") == 1
    sidecar.stop()
    calls = dict(line.split() for line in driver.calls.read_text().splitlines())
    cycles = int(calls["nvmlDeviceGetCount_v2"])
    assert int(calls["nvmlDeviceGetTemperatureThreshold"]) == 4
    asked = cycles + -(-cycles // 6)
    # The last collection may have been cut off.
    assert abs(int(calls["nvmlDeviceGetFieldValues"]) - asked) <= 1, "once a cycle, and for wear each sixth"


def test_a_card_that_answers_nothing_but_what_it_needs_is_down(
    driver: FakeDriver, start_sidecar: Start
) -> None:
    nothing = {key.removeprefix("gpu0."): None for key in card(0)}
    keep = {"uuid": uuid_of(0), "pci": "00000000:01:00.0", "name": "NVIDIA Test 40GB", "field230": 1}
    driver.play(card(0, **nothing | keep, **{"!nvmlDeviceGetTemperature": 999}))
    scrape = start_sidecar(driver.environment, *FAST).wait_success()
    assert scrape.value("up", uuid=uuid_of(0)) == 0
    assert scrape.readings(uuid_of(0)) == {"recovery_action"}
    assert scrape.value("recovery_action", uuid=uuid_of(0), action="reset") == 1


def ledger_of(*collections: tuple[float, dict[str, float], dict[str, str]]) -> Ledger:
    """A ledger after collections: when, readings of its one GPU, and what it has none of."""
    ledger = Ledger(stale_after=15)
    for at, readings, absent in collections:
        gpu = Gpu(Identity("GPU-a", 0), dict(readings), dict(absent))
        ledger.record_success(Snapshot("nvml", 1, [gpu]), at=at, time=at, duration=0.1)
    return ledger


def test_throttled_time_keeps_the_source_it_began_with() -> None:
    """A counter of hours beside a sum of seconds, in one series, would be read as hours lost in an instant."""
    active, counted = {"throttle_sw_power_cap": 1.0}, {"throttled_sw_power_cap": 7200.0}
    key = ("GPU-a", "sw_power_cap")
    ledger = ledger_of((0, active, {}), (10, active, {}), (20, active | counted, {}), (30, active, {}))
    assert ledger.throttled[key].total == 30
    assert "throttled_sw_power_cap" not in ledger.gpus[0].readings

    ledger = ledger_of((0, active | counted, {}), (10, active, {}), (20, active | counted, {}))
    assert key not in ledger.throttled
    assert ledger.gpus[0].readings["throttled_sw_power_cap"] == 7200


def test_throttled_time_over_gaps_and_edges() -> None:
    on, off = {"throttle_hw_slowdown": 1.0}, {"throttle_hw_slowdown": 0.0}
    key = ("GPU-a", "hw_slowdown")
    # 10 s on; on to off in 4 s counts half; then a gap longer than readings are believed.
    assert ledger_of((0, on, {}), (10, on, {}), (14, off, {}), (24, off, {})).throttled[key].total == 12
    assert ledger_of((0, on, {}), (16, on, {}), (17, on, {})).throttled[key].total == 1
    # A counter that failed to be read is not replaced by a sum.
    assert key not in ledger_of((0, on, {"throttled_hw_slowdown": "sentinel"})).throttled

"""The NVML source: real nvidia-ml-py, a fake library underneath."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from gpu_harness import FakeDriver, RunningSidecar, Scrape, card, uuid_of

FAST = ("--backend", "nvml", "--interval", "0.2")

GPU, MEMORY = {"sensor": "gpu"}, {"sensor": "memory"}

Read = Callable[..., Scrape]


@pytest.fixture
def read(driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]) -> Read:
    """Play a scenario and take the first good scrape."""

    def play(*parts: dict[str, object]) -> Scrape:
        driver.play(*parts)
        return start_sidecar(driver.environment, *FAST).wait_success()

    return play


def test_values_in_base_units(read: Read) -> None:
    scrape = read(card(0))
    uuid = uuid_of(0)
    assert scrape.value("utilization_ratio", uuid=uuid) == 0.37
    assert scrape.value("memory_used_bytes", uuid=uuid) == 8 * 1024**3
    assert scrape.value("memory_reserved_bytes", uuid=uuid) == 512 * 1024**2
    assert scrape.value("memory_total_bytes", uuid=uuid) == 40 * 1024**3
    assert scrape.value("power_watts", uuid=uuid) == 123.456
    assert scrape.value("power_limit_watts", uuid=uuid) == 300
    assert scrape.value("energy_joules_total", uuid=uuid, source="counter") == 987654.321
    assert scrape.value("temperature_celsius", uuid=uuid, sensor="gpu") == 61
    assert scrape.value("temperature_celsius", uuid=uuid, sensor="memory") == 72
    assert scrape.value("fan_ratio", uuid=uuid) == 0.45
    assert scrape.value("clock_hertz", uuid=uuid, domain="graphics") == 1.410e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="sm") == 1.395e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="memory") == 1.593e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="video") == 1.275e9
    assert scrape.value("performance_state", uuid=uuid) == 2
    # 0x24 is sw_power_cap (0x4) and sw_thermal_slowdown (0x20) of nvml.h.
    active = {
        labels["reason"]
        for labels in scrape.labels("throttle_active")
        if scrape.value("throttle_active", **labels) == 1
    }
    assert active == {"sw_power_cap", "sw_thermal_slowdown"}
    assert scrape.value("throttle_active", uuid=uuid, reason="hw_slowdown") == 0
    assert scrape.labels("info") == [
        {
            "uuid": uuid,
            "index": "0",
            "name": "NVIDIA Test 40GB",
            "driver_version": "580.65.06",
            "pci_bus_id": "00000000:01:00.0",
            "parent_uuid": "",
            "mig_profile": "",
            "simulated": "false",
        }
    ]
    assert scrape.value("up", uuid=uuid) == 1
    assert scrape.value("expected") == 1
    assert scrape.value("seen") == 1
    assert scrape.value("collector_source_info", source="nvml") == 1


def test_a_scrape_is_clean_for_prometheus(read: Read) -> None:
    scrape = read(card(0), card(1, fan=None, **{"!nvmlDeviceGetPowerUsage": 4}))
    assert scrape.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert "_created" not in scrape.text
    assert scrape.text.count("# TYPE tunewatch_gpu_power_watts gauge") == 1
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape.text, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("code", "reason"),
    [(3, "not_supported"), (4, "no_permission"), (13, "not_supported"), (999, "unknown"), (21, "error")],
)
def test_an_error_costs_one_reading_and_is_counted(read: Read, code: int, reason: str) -> None:
    scrape = read(card(0, **{"!nvmlDeviceGetTemperature": code}), card(1))
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") is None
    assert scrape.value("readings_rejected_total", field="temperature_gpu", reason=reason)
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="memory") == 72
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456
    assert scrape.value("temperature_celsius", uuid=uuid_of(1), sensor="gpu") == 61
    assert scrape.value("up", uuid=uuid_of(0)) == 1


@pytest.mark.parametrize(
    ("changes", "metric", "labels", "field", "reason"),
    [
        ({"power": 2**32 - 1}, "power_watts", {}, "power", "sentinel"),
        ({"temperature": 2**32 - 1}, "temperature_celsius", GPU, "temperature_gpu", "sentinel"),
        (
            {"field82": 2**32 - 1},
            "temperature_celsius",
            {"sensor": "memory"},
            "temperature_memory",
            "sentinel",
        ),
        ({"energy": 2**64 - 1}, "energy_joules_total", {"source": "counter"}, "energy", "sentinel"),
        ({"memory_used": 2**64 - 1}, "memory_used_bytes", {}, "memory_used", "sentinel"),
        ({"throttle": 2**64 - 1}, "throttle_active", {"reason": "sw_power_cap"}, "throttle", "sentinel"),
        ({"utilization": 2**32 - 1}, "utilization_ratio", {}, "utilization", "sentinel"),
        ({"utilization": 200000}, "utilization_ratio", {}, "utilization", "out_of_range"),
        ({"pstate": 32}, "performance_state", {}, "performance_state", "unknown"),
        ({"memory_total": 0}, "memory_total_bytes", {}, "memory_total", "out_of_range"),
        ({"memory_total": 0}, "memory_used_bytes", {}, "memory_used", "out_of_range"),
        # 600 W on a board whose highest limit is 160 W, as one laptop's driver said.
        ({"power": 600_000, "power_limit_max": 160_000}, "power_watts", {}, "power", "out_of_range"),
        ({"memory_used": 42949672961}, "memory_used_bytes", {}, "memory_used", "out_of_range"),
    ],
)
def test_what_is_no_measurement_is_absent(
    read: Read, changes: dict[str, object], metric: str, labels: dict[str, str], field: str, reason: str
) -> None:
    scrape = read(card(0, **changes), card(1))
    assert scrape.value(metric, uuid=uuid_of(0), **labels) is None
    assert scrape.value(metric, uuid=uuid_of(1), **labels) is not None
    assert scrape.value("readings_rejected_total", field=field, reason=reason)


def test_a_sentinel_is_all_ones_of_its_own_width_only(read: Read) -> None:
    scrape = read(card(0, power=255_000, memory_used=65535, energy=2**32 - 1, temperature=127))
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 255
    assert scrape.value("memory_used_bytes", uuid=uuid_of(0)) == 65535
    assert scrape.value("energy_joules_total", uuid=uuid_of(0), source="counter") == 4294967.295
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") == 127


def test_a_gpu_with_every_reading_unsupported_is_up_and_silent(read: Read) -> None:
    """An integrated GPU (Jetson): nothing works, nothing is broken."""
    scrape = read({"gpu0.uuid": uuid_of(0), "gpu0.name": "Orin (nvgpu)"})
    assert scrape.value("up", uuid=uuid_of(0)) == 1
    assert scrape.readings(uuid_of(0)) == set()


def test_shared_memory_gpu_has_no_memory_series(read: Read) -> None:
    """GB10: both memory calls answer NOT_SUPPORTED, the rest works."""
    nothing = {"memory_total": None, "memory_used": None, "memory_reserved": None}
    scrape = read(card(0, **nothing))
    assert not {name for name in scrape.readings(uuid_of(0)) if name.startswith("memory")}
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456
    assert scrape.value("readings_rejected_total", field="memory_total", reason="not_supported")


def test_memory_falls_back_to_v1_where_v2_is_broken(read: Read) -> None:
    scrape = read(card(0, **{"!nvmlDeviceGetMemoryInfo_v2": 999}))
    # v1 counts the reserve as used: 8 GiB and 512 MiB.
    assert scrape.value("memory_used_bytes", uuid=uuid_of(0)) == 9126805504
    assert scrape.value("memory_reserved_bytes", uuid=uuid_of(0)) is None


def test_instant_power_where_the_driver_knows_no_other(read: Read) -> None:
    scrape = read(card(0, power=None, field186=66_840))
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 66.84


def test_throttle_reasons_under_their_old_name(read: Read) -> None:
    scrape = read(card(0, **{"!nvmlDeviceGetCurrentClocksEventReasons": 13}))
    assert scrape.value("throttle_active", uuid=uuid_of(0), reason="sw_power_cap") == 1


def test_name_that_is_no_text(read: Read) -> None:
    scrape = read(card(0, name_byte=0xF8))
    assert scrape.labels("info")[0]["name"] == "unknown"
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456


def test_label_values_are_escaped_and_cleaned(read: Read) -> None:
    scrape = read(card(0, name='a"b\\c\x07d'))
    assert scrape.labels("info")[0]["name"] == 'a"b\\cd'


def test_useless_uuids_do_not_collide(read: Read) -> None:
    zero = "GPU-00000000-0000-0000-0000-000000000000"
    scrape = read(card(0, uuid=zero), card(1, uuid=zero))
    assert {labels["uuid"] for labels in scrape.labels("up")} == {
        "PCI-00000000:01:00.0",
        "PCI-00000000:02:00.0",
    }


def test_a_uuid_given_twice_is_exposed_once(read: Read) -> None:
    scrape = read(card(0), card(1, uuid=uuid_of(0)))
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456
    assert scrape.value("readings_rejected_total", field="uuid", reason="duplicate")


def test_mig_slices(driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]) -> None:
    part, other = "MIG-aaaaaaaa-0000-0000-0000-000000000001", "MIG-aaaaaaaa-0000-0000-0000-000000000002"
    parent = card(0, utilization=None, mig=1)
    slice_lines = {
        "gpu0.mig2.uuid": part,
        "gpu0.mig2.name": "NVIDIA Test 40GB MIG 1g.5gb",
        "gpu0.mig2.memory_total": 5 * 1024**3,
        "gpu0.mig2.memory_reserved": 0,
        "gpu0.mig2.memory_used": 1024**3,
        "gpu0.mig2.power": 999_000,
    }
    driver.play(parent, slice_lines)
    sidecar = start_sidecar(driver.environment, *FAST)
    scrape = sidecar.wait_success()
    identity = next(labels for labels in scrape.labels("info") if labels["uuid"] == part)
    assert (identity["parent_uuid"], identity["mig_profile"]) == (uuid_of(0), "1g.5gb")
    assert scrape.value("memory_used_bytes", uuid=part) == 1024**3
    assert scrape.value("power_watts", uuid=part) is None, "a slice has no power of its own"
    assert scrape.value("utilization_ratio", uuid=uuid_of(0)) is None
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456
    assert (scrape.value("expected"), scrape.value("seen")) == (1, 1)
    # Sliced anew: the old slice is not lost, it is no more.
    driver.play(parent, {"gpu0.mig0.uuid": other, "gpu0.mig0.name": "NVIDIA Test 40GB MIG 2g.10gb"})
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=other) == 1)
    assert scrape.value("up", uuid=part) is None


@pytest.mark.parametrize("call", ["!*", "!nvmlDeviceGetHandleByIndex_v2", "!nvmlDeviceGetUtilizationRates"])
@pytest.mark.parametrize("code", [15, 16])
def test_a_lost_card_hides_nothing_and_keeps_its_name(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar], call: str, code: int
) -> None:
    driver.play(*(card(index) for index in range(3)))
    sidecar = start_sidecar(driver.environment, *FAST)
    identity = [labels for labels in sidecar.wait_success().labels("info") if labels["index"] == "1"]
    driver.play(card(0), card(1, **{call: code}), card(2, power=222_000))
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 0)
    assert [labels for labels in scrape.labels("info") if labels["index"] == "1"] == identity
    # A driver that wants a reset before it answers anything has thereby said what it asks for.
    assert scrape.readings(uuid_of(1)) == (set() if code == 15 else {"recovery_action"})
    assert scrape.value("recovery_action", uuid=uuid_of(1), action="reset") == (None if code == 15 else 1)
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456
    assert scrape.value("power_watts", uuid=uuid_of(2)) == 222
    assert (scrape.value("expected"), scrape.value("seen")) == (3, 2)
    assert scrape.value("collector_success") == 1
    driver.play(*(card(index) for index in range(3)))
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 1)
    assert scrape.value("power_watts", uuid=uuid_of(1)) == 123.456


def test_a_card_that_leaves_the_list_is_down(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]
) -> None:
    driver.play(card(0), card(1))
    sidecar = start_sidecar(driver.environment, *FAST)
    sidecar.wait_success()
    driver.play(card(0))
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 0)
    assert (scrape.value("expected"), scrape.value("seen")) == (2, 1)


def test_expected_count_from_the_command_line(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]
) -> None:
    driver.play(card(0))
    scrape = start_sidecar(driver.environment, *FAST, "--expect-gpus", "8").wait_success()
    assert (scrape.value("expected"), scrape.value("seen")) == (8, 1)


def test_energy_is_integrated_where_there_is_no_counter(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]
) -> None:
    driver.play(card(0, energy=None, power=200_000))
    sidecar = start_sidecar(driver.environment, *FAST)
    labels = {"uuid": uuid_of(0), "source": "integrated"}
    first = sidecar.wait(lambda scrape: scrape.value("energy_joules_total", **labels))
    start = first.value("energy_joules_total", **labels) or 0.0
    began = first.value("collector_last_success_timestamp_seconds") or 0.0
    last = sidecar.wait(lambda scrape: (scrape.value("energy_joules_total", **labels) or 0.0) > start + 200)
    joules = (last.value("energy_joules_total", **labels) or 0.0) - start
    seconds = (last.value("collector_last_success_timestamp_seconds") or 0.0) - began
    assert joules == pytest.approx(200 * seconds, rel=0.02), "200 W for that long"
    assert last.value("energy_joules_total", uuid=uuid_of(0), source="counter") is None


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "driver_not_loaded"), (18, "driver_library_mismatch"), (999, "nvml_error")]
)
def test_driver_that_comes_later(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar], code: int, reason: str
) -> None:
    driver.play({"!nvmlInitWithFlags": code}, card(0))
    sidecar = start_sidecar(driver.environment, *FAST)
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason=reason))
    assert scrape.value("collector_success") == 0
    assert scrape.labels("up") == []
    assert f"reason={reason}" in sidecar.log()
    driver.play(card(0))
    assert sidecar.wait_success().value("power_watts", uuid=uuid_of(0)) == 123.456


def test_no_cards_is_a_failure(driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar]) -> None:
    driver.play()
    sidecar = start_sidecar(driver.environment, *FAST)
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="no_devices"))
    assert scrape.value("collector_success") == 0


def test_without_driver_and_program_it_says_so(
    start_sidecar: Callable[..., RunningSidecar], tmp_path: os.PathLike[str]
) -> None:
    nothing = {"LD_LIBRARY_PATH": str(tmp_path), "PATH": str(tmp_path)}
    sidecar = start_sidecar(nothing, "--interval", "0.2")
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="no_driver"))
    assert scrape.value("collector_success") == 0
    assert "reason=no_driver" in sidecar.log()
    assert sidecar.get("/healthz") == (200, "ok\n")

"""The nvidia-smi source: a real child process that plays nvidia-smi."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from gpu_harness import FakeSmi, RunningSidecar, Scrape, smi_card, uuid_of

Start = Callable[..., RunningSidecar]


def name_of(process: psutil.Process) -> str:
    """The name of a process, "" when it has ended since it was listed."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@pytest.fixture
def start(smi: FakeSmi, start_sidecar: Start) -> Start:
    def go(*arguments: str) -> RunningSidecar:
        fast = ("--backend", "nvidia-smi", "--interval", "0.2", "--nvidia-smi", str(smi.program))
        return start_sidecar(smi.environment, *fast, *arguments)

    return go


def test_values_in_base_units(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0), smi_card(1, power__draw="99.00 W")])
    scrape = start().wait_success()
    uuid = uuid_of(0)
    assert scrape.value("utilization_ratio", uuid=uuid) == 0.37
    assert scrape.value("memory_used_bytes", uuid=uuid) == 8 * 1024**3
    assert scrape.value("memory_reserved_bytes", uuid=uuid) == 512 * 1024**2
    assert scrape.value("memory_total_bytes", uuid=uuid) == 40 * 1024**3
    assert scrape.value("power_watts", uuid=uuid) == 123.45
    assert scrape.value("power_limit_watts", uuid=uuid) == 300
    assert scrape.value("temperature_celsius", uuid=uuid, sensor="gpu") == 61
    assert scrape.value("temperature_celsius", uuid=uuid, sensor="memory") == 72
    assert scrape.value("fan_ratio", uuid=uuid) == 0.45
    assert scrape.value("clock_hertz", uuid=uuid, domain="graphics") == 1.410e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="sm") == 1.395e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="memory") == 1.593e9
    assert scrape.value("clock_hertz", uuid=uuid, domain="video") == 1.275e9
    assert scrape.value("performance_state", uuid=uuid) == 2
    assert scrape.value("throttle_active", uuid=uuid, reason="sw_power_cap") == 1
    assert scrape.value("throttle_active", uuid=uuid, reason="sw_thermal_slowdown") == 1
    assert scrape.value("throttle_active", uuid=uuid, reason="gpu_idle") == 0
    assert scrape.value("ecc_errors_total", uuid=uuid, kind="corrected") == 7
    assert scrape.value("ecc_errors_total", uuid=uuid, kind="uncorrected") == 2
    assert scrape.value("remapped_rows", uuid=uuid, kind="correctable") == 5
    assert scrape.value("remapped_rows", uuid=uuid, kind="uncorrectable") == 3
    assert scrape.value("remapped_rows", uuid=uuid, kind="pending") == 1
    assert scrape.value("remapped_rows", uuid=uuid, kind="failed") == 0
    assert scrape.value("throttle_seconds_total", uuid=uuid, reason="sw_power_cap") == 74.5
    assert scrape.value("throttle_seconds_total", uuid=uuid, reason="sw_thermal_slowdown") == 2.5
    assert scrape.value("throttle_seconds_total", uuid=uuid, reason="hw_thermal_slowdown") == 1.25
    assert scrape.value("throttle_seconds_total", uuid=uuid, reason="hw_slowdown") == 0
    assert scrape.value("recovery_action", uuid=uuid, action="none") == 1
    assert scrape.value("power_watts", uuid=uuid_of(1)) == 99
    assert scrape.value("collector_source_info", source="nvidia-smi") == 1
    assert scrape.value("energy_joules_total", uuid=uuid, source="counter") is None
    assert scrape.value("energy_joules_total", uuid=uuid, source="integrated") is not None


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("[N/A]", "not_supported"),
        ("N/A", "not_supported"),
        ("[Not Supported]", "not_supported"),
        ("[Function Not Found]", "not_supported"),
        ("[Requested functionality has been deprecated]", "not_supported"),
        ("[Insufficient Permissions]", "no_permission"),
        ("[Unknown Error]", "unknown"),
        ("Unknown", "unknown"),
        ("ERR!", "error"),
        ("", "malformed"),
        ("11.5 kW", "malformed"),
        ("-1 W", "malformed"),
        ("0x10", "malformed"),
        ("nan", "malformed"),
        ("1e3 W", "malformed"),
        ("NVIDIA H200", "malformed"),
        ("601.00 W", "out_of_range"),
    ],
)
def test_what_is_no_measurement_is_absent(smi: FakeSmi, start: Start, cell: str, reason: str) -> None:
    columns = ("power.draw", "power.draw.average", "power.draw.instant")
    smi.put("gpus.json", [smi_card(0) | dict.fromkeys(columns, cell), smi_card(1)])
    scrape = start().wait_success()
    assert scrape.value("power_watts", uuid=uuid_of(0)) is None
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") == 61
    assert scrape.value("power_watts", uuid=uuid_of(1)) == 123.45
    assert scrape.value("up", uuid=uuid_of(0)) == 1
    assert scrape.value("readings_rejected_total", field="power", reason=reason)


def test_cells_without_units(smi: FakeSmi, start: Start) -> None:
    bare = {column: cell.split(" ")[0] for column, cell in smi_card(0).items() if column != "name"}
    smi.put("gpus.json", [smi_card(0) | bare])
    scrape = start().wait_success()
    assert scrape.value("memory_used_bytes", uuid=uuid_of(0)) == 8 * 1024**3
    assert scrape.value("utilization_ratio", uuid=uuid_of(0)) == 0.37


def test_header_with_an_unknown_unit_gives_no_reading(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0) | {"temperature.gpu": "142"}])
    smi.put("headers.json", {"temperature.gpu": "temperature.gpu [F]"})
    scrape = start().wait_success()
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") is None


def test_renamed_column_costs_its_reading_only(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0)])
    smi.put("headers.json", {"temperature.gpu": "temperature.board"})
    scrape = start().wait_success()
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") is None
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.45


def test_decimal_comma_gives_no_reading(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0, power__draw="11,17 W"), smi_card(1)])
    scrape = start().wait_success()
    assert scrape.readings(uuid_of(0)) == set()
    assert scrape.value("power_watts", uuid=uuid_of(1)) == 123.45


def test_instant_power_where_the_driver_knows_no_other(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0, power__draw="[N/A]", power__draw__average="[N/A]")])
    assert start().wait_success().value("power_watts", uuid=uuid_of(0)) == 150


def test_shared_memory_gpu(smi: FakeSmi, start: Start) -> None:
    """GB10: no memory of its own, the rest is there."""
    nothing = dict.fromkeys(("memory.total", "memory.used", "memory.reserved"), "[N/A]")
    smi.put("gpus.json", [smi_card(0, power__draw="11.17 W", utilization__gpu="0 %") | nothing])
    scrape = start().wait_success()
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 11.17
    assert scrape.value("utilization_ratio", uuid=uuid_of(0)) == 0
    assert not {name for name in scrape.readings(uuid_of(0)) if name.startswith("memory")}


def test_integrated_gpu_without_any_reading(smi: FakeSmi, start: Start) -> None:
    """Jetson: everything is N/A, and the GPU is not broken."""
    cells = dict.fromkeys(smi_card(0), "[N/A]") | {"index": "0", "name": "Orin (nvgpu)"}
    smi.put("gpus.json", [cells])
    scrape = start().wait_success()
    identity = scrape.labels("info")[0]
    assert (identity["uuid"], identity["name"]) == ("INDEX-0", "Orin (nvgpu)")
    assert scrape.value("up", uuid="INDEX-0") == 1
    assert scrape.readings("INDEX-0") == set()


def test_columns_that_the_driver_does_not_know_are_dropped_once(smi: FakeSmi, start: Start) -> None:
    """A driver before 535: other name for the throttle reasons, no reserve, no split of the power."""
    old = smi_card(0)
    for column in ("memory.reserved", "power.draw.average", "power.draw.instant", "temperature.memory"):
        del old[column]
    for column in [
        column for column in old if column.startswith(("remapped_rows", "clocks_event_reasons_c"))
    ]:
        del old[column]
    old["clocks_throttle_reasons.active"] = old.pop("clocks_event_reasons.active")
    smi.put("gpus.json", [old])
    sidecar = start()
    scrape = sidecar.wait_success()
    assert scrape.value("throttle_active", uuid=uuid_of(0), reason="sw_power_cap") == 1
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.45
    assert scrape.value("memory_reserved_bytes", uuid=uuid_of(0)) is None
    first = scrape.value("collector_last_success_timestamp_seconds")
    sidecar.wait(lambda scrape: scrape.value("collector_last_success_timestamp_seconds") != first)
    starts = [rest for what, rest in smi.calls() if what == "start" and "--query-gpu" in rest]
    assert len(set(starts[:8])) == 8, "each of five unknown columns and two unknown sections costs one call"
    assert len(set(starts[7:])) == 1, "and is not asked for again"


def test_old_question_answered_under_the_new_name(smi: FakeSmi, start: Start) -> None:
    """Seen with 535.113.01: asked for clocks_throttle_reasons, headed clocks_event_reasons."""
    cells = smi_card(0)
    cells["clocks_throttle_reasons.active"] = cells.pop("clocks_event_reasons.active")
    smi.put("gpus.json", [cells])
    smi.put("headers.json", {"clocks_throttle_reasons.active": "clocks_event_reasons.active"})
    assert start().wait_success().value("throttle_active", uuid=uuid_of(0), reason="sw_power_cap") == 1


def test_mig_slices_from_the_listing(smi: FakeSmi, start: Start) -> None:
    part = "MIG-aaaaaaaa-0000-0000-0000-000000000001"
    smi.put("gpus.json", [smi_card(0, mig__mode__current="Enabled", utilization__gpu="[N/A]"), smi_card(1)])
    smi.put(
        "listing",
        f"GPU 0: NVIDIA Test 40GB (UUID: {uuid_of(0)})\n"
        f"  MIG 1g.5gb      Device  0: (UUID: {part})\n"
        f"GPU 1: NVIDIA Test 40GB (UUID: {uuid_of(1)})\n",
    )
    scrape = start().wait_success()
    identity = next(labels for labels in scrape.labels("info") if labels["uuid"] == part)
    assert (identity["parent_uuid"], identity["mig_profile"]) == (uuid_of(0), "1g.5gb")
    assert scrape.readings(part) == set()
    assert scrape.value("utilization_ratio", uuid=uuid_of(0)) is None


def test_what_the_driver_asks_for_and_what_it_does_not_know(smi: FakeSmi, start: Start) -> None:
    """A consumer card: no ECC, no spare rows, and the words for each action."""
    words = {
        "None": "none", "Reset": "reset", "Reboot": "reboot", "Drain P2P": "drain_p2p",
        "Drain and Reset": "drain_and_reset",
    }  # fmt: skip
    plain = {column: "[N/A]" for column in smi_card(0) if column.startswith(("ecc.errors", "remapped_rows"))}
    cells = [*words, "[N/A]", "Tea Break"]
    smi.put("gpus.json", [smi_card(i, gpu_recovery_action=cell) | plain for i, cell in enumerate(cells)])
    sidecar = start()
    scrape = sidecar.wait_success()
    assert scrape.labels("ecc_errors_total") == scrape.labels("remapped_rows") == []
    for index, action in enumerate(words.values()):
        asked_for = {
            labels["action"]
            for labels in scrape.labels("recovery_action")
            if labels["uuid"] == uuid_of(index) and scrape.value("recovery_action", **labels) == 1
        }
        assert asked_for == {action}
    assert {labels["uuid"] for labels in scrape.labels("recovery_action")} == {uuid_of(i) for i in range(5)}
    assert scrape.value("readings_rejected_total", field="recovery_action", reason="not_supported")
    assert scrape.value("readings_rejected_total", field="recovery_action", reason="unknown")
    assert "GPU 6: the driver asks for recovery action 'Tea Break', which is not known here" in sidecar.log()


def test_reset_required_is_down(smi: FakeSmi, start: Start) -> None:
    reset = dict.fromkeys(("temperature.gpu", "utilization.gpu"), "[GPU requires reset]")
    smi.put("gpus.json", [smi_card(0) | reset | {"memory.used": "0 MiB"}, smi_card(1)])
    scrape = start().wait_success()
    assert scrape.value("up", uuid=uuid_of(0)) == 0
    assert scrape.readings(uuid_of(0)) == {"recovery_action"}
    assert scrape.value("recovery_action", uuid=uuid_of(0), action="reset") == 1
    assert scrape.value("recovery_action", uuid=uuid_of(0), action="none") == 0
    assert scrape.value("power_watts", uuid=uuid_of(1)) == 123.45


def test_card_with_nothing_but_errors_is_down(smi: FakeSmi, start: Start) -> None:
    keep = ("uuid", "index", "name", "driver_version", "pci.bus_id", "mig.mode.current")
    broken = {column: cell if column in keep else "ERR!" for column, cell in smi_card(0).items()}
    smi.put("gpus.json", [broken, smi_card(1)])
    scrape = start().wait_success()
    assert scrape.value("up", uuid=uuid_of(0)) == 0
    assert scrape.value("up", uuid=uuid_of(1)) == 1


def test_card_off_the_bus_does_not_silence_the_others(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(index) for index in range(3)])
    sidecar = start()
    sidecar.wait_success()
    smi.put("lost", "0000:02:00.0")
    scrape = sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 0)
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.45
    assert scrape.value("power_watts", uuid=uuid_of(2)) == 123.45
    assert (scrape.value("expected"), scrape.value("seen")) == (3, 2)
    assert f"GPU {uuid_of(1)} does not answer, reason=gpu_lost" in sidecar.log()


def test_warning_after_a_whole_table(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0)])
    smi.put("trailer", "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n")
    smi.put("exit_code", "14")
    sidecar = start()
    assert sidecar.wait_success().value("power_watts", uuid=uuid_of(0)) == 123.45
    assert "infoROM is corrupted" in sidecar.log()


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        (
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144\n",
            18,
            "driver_library_mismatch",
        ),
        ("No devices were found\n", 6, "no_devices"),
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
            9,
            "driver_not_loaded",
        ),
        ("Unable to determine the device handle for GPU 0000:0B:00.0: Unknown Error\n", 255, "gpu_lost"),
        ("", 0, "malformed_output"),
        ("", 1, "nvidia_smi_failed"),
        ("name, uuid\nTesla T4, GPU-abc, extra\n", 0, "malformed_output"),
        ("<?xml version='1.0'?><nvidia_smi_log></nvidia_smi_log>\n", 0, "malformed_output"),
    ],
)
def test_answers_without_a_table(smi: FakeSmi, start: Start, text: str, code: int, reason: str) -> None:
    smi.put("raw", text)
    smi.put("exit_code", str(code))
    sidecar = start()
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason=reason))
    assert scrape.value("collector_success") == 0
    assert scrape.labels("up") == []
    smi.put("gpus.json", [smi_card(0)])
    smi.drop("exit_code")
    smi.drop("raw")
    assert sidecar.wait_success().value("power_watts", uuid=uuid_of(0)) == 123.45


def test_a_program_that_hangs_is_killed_with_its_children(smi: FakeSmi, start: Start) -> None:
    smi.put("hang")
    smi.put("grandchild")
    sidecar = start("--timeout", "3")
    sidecar.wait(lambda scrape: (scrape.value("collector_failures_total", reason="timeout") or 0) >= 2)
    smi.put("gpus.json", [smi_card(0)])
    smi.drop("hang")
    sidecar.wait_success()
    calls = smi.calls()
    assert len([what for what, _ in calls if what == "start"]) >= 3
    assert "overlap" not in [what for what, _ in calls]
    names = [name_of(process) for process in sidecar.processes()]
    assert names.count("sleep") <= 1, f"killed calls left their children behind: {names}"


def test_a_grandchild_that_keeps_the_pipes_open_does_not_delay(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0)])
    smi.put("grandchild")
    sidecar = start("--timeout", "30")
    scrape = sidecar.wait_success(seconds=20)
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.45
    sidecar.wait(lambda _: len(smi.calls()) > 12)
    names = [name_of(process) for process in sidecar.processes()]
    assert names.count("sleep") <= 2, f"six calls left their children behind: {names}"


def test_never_two_at_once(smi: FakeSmi, start: Start) -> None:
    """Killed readers and many scrapers do not lead to overlapping calls."""
    smi.put("gpus.json", [smi_card(0)])
    smi.put("delay", "0.3")
    sidecar = start("--interval", "0.1")
    for _ in range(3):
        sidecar.wait_success()
        sidecar.reader().kill()
        sidecar.wait(lambda scrape: scrape.value("collector_success") == 0)
    sidecar.wait_success()
    sidecar.stop()
    notes = [what for what, _ in smi.calls()]
    assert "overlap" not in notes
    assert notes.count("start") > 3


def test_what_a_killed_reader_leaves_behind_is_ended(smi: FakeSmi, start: Start) -> None:
    smi.put("hang")
    smi.put("grandchild")
    sidecar = start("--timeout", "60")
    deadline = time.monotonic() + 20
    while not (sleeping := [process for process in sidecar.processes() if name_of(process) == "sleep"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sidecar.reader().kill()
    assert not psutil.wait_procs(sleeping, timeout=10)[1]


def test_killed_sidecar_takes_reader_and_program_along(smi: FakeSmi, start: Start) -> None:
    smi.put("hang")
    sidecar = start("--timeout", "60")
    deadline = time.monotonic() + 20
    while not smi.calls():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = sidecar.processes()
    assert len(family) >= 3
    sidecar.process.kill()
    _gone, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_auto_falls_back_from_a_missing_library(smi: FakeSmi, start_sidecar: Start) -> None:
    smi.put("gpus.json", [smi_card(0)])
    sidecar = start_sidecar(smi.environment, "--interval", "0.2", "--nvidia-smi", str(smi.program))
    scrape = sidecar.wait_success()
    assert scrape.value("collector_source_info", source="nvidia-smi") == 1


def test_the_program_runs_in_the_c_locale(smi: FakeSmi, start: Start, tmp_path: Path) -> None:
    smi.put("gpus.json", [smi_card(0)])
    script = smi.program.read_text().replace("exec", f'echo "$LC_ALL" > {tmp_path}/locale; exec')
    smi.program.write_text(script)
    start().wait_success()
    assert (tmp_path / "locale").read_text() == "C\n"


CAPTURES = os.environ.get("TUNEWATCH_CAPTURES", "")


def _captures() -> list[Path]:
    return sorted(path for path in Path(CAPTURES).rglob("*") if path.is_file()) if CAPTURES else []


@pytest.mark.skipif(not CAPTURES, reason="TUNEWATCH_CAPTURES names no folder of real nvidia-smi outputs")
@pytest.mark.parametrize("path", _captures(), ids=lambda path: path.name)
def test_capture_as_an_answer_gives_no_reading(smi: FakeSmi, start: Start, path: Path) -> None:
    """None of the files repeats our question, so none of their numbers may come out."""
    smi.put("raw", path.read_text(errors="replace"))
    scrape = start().wait(lambda scrape: scrape.labels("collector_failures_total"))
    assert scrape.value("collector_success") == 0
    assert scrape.labels("info") == []
    assert "reader_crashed" not in scrape.text


def _tables(path: Path) -> list[list[dict[str, str]]]:
    """The --query-gpu tables of a full capture, as cards with cells by column."""
    tables: list[list[dict[str, str]]] = []
    header: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        cells = line.split(", ")
        if {"uuid", "index"} <= set(cells):
            header = [cell.partition(" [")[0] for cell in cells]
            tables.append([])
        elif header and len(cells) == len(header):
            tables[-1].append(dict(zip(header, cells, strict=True)))
        else:
            header = []
    return tables


@pytest.mark.skipif(not CAPTURES, reason="TUNEWATCH_CAPTURES names no folder of real nvidia-smi outputs")
@pytest.mark.parametrize("path", _captures(), ids=lambda path: path.name)
def test_numbers_of_a_capture_come_out_as_they_are(smi: FakeSmi, start: Start, path: Path) -> None:
    """The cells of a real machine, asked for column by column: each number is there, none is invented."""
    for cards in _tables(path):
        smi.put("gpus.json", cards)
        (smi.folder / "calls").unlink(missing_ok=True)
        sidecar = start()
        scrape = sidecar.wait_success()
        for cells in cards:
            uuid = f"PCI-{cells['pci.bus_id']}" if "-00000000-" in cells["uuid"] else cells["uuid"]
            for name, labels, column, factor in EXPECTED:
                number = cells.get(column, "").split(" ")[0].strip("P")
                is_number = number.replace(".", "").isdigit()
                expected = float(number) * factor if is_number else None
                found = scrape.value(name, uuid=uuid, **labels)
                assert found == (pytest.approx(expected) if is_number else None), (column, cells.get(column))
        sidecar.stop()


EXPECTED: list[tuple[str, dict[str, str], str, float]] = [
    ("utilization_ratio", {}, "utilization.gpu", 0.01),
    ("memory_used_bytes", {}, "memory.used", 2**20),
    ("memory_reserved_bytes", {}, "memory.reserved", 2**20),
    ("memory_total_bytes", {}, "memory.total", 2**20),
    ("power_watts", {}, "power.draw", 1),
    ("power_limit_watts", {}, "enforced.power.limit", 1),
    ("temperature_celsius", {"sensor": "gpu"}, "temperature.gpu", 1),
    ("temperature_celsius", {"sensor": "memory"}, "temperature.memory", 1),
    ("fan_ratio", {}, "fan.speed", 0.01),
    ("clock_hertz", {"domain": "graphics"}, "clocks.current.graphics", 1e6),
    ("clock_hertz", {"domain": "sm"}, "clocks.current.sm", 1e6),
    ("clock_hertz", {"domain": "memory"}, "clocks.current.memory", 1e6),
    ("clock_hertz", {"domain": "video"}, "clocks.current.video", 1e6),
    ("performance_state", {}, "pstate", 1),
    ("ecc_errors_total", {"kind": "corrected"}, "ecc.errors.corrected.volatile.total", 1),
    ("ecc_errors_total", {"kind": "uncorrected"}, "ecc.errors.uncorrected.volatile.total", 1),
    ("remapped_rows", {"kind": "correctable"}, "remapped_rows.correctable", 1),
    ("remapped_rows", {"kind": "uncorrectable"}, "remapped_rows.uncorrectable", 1),
    (
        "throttle_seconds_total",
        {"reason": "sw_power_cap"},
        "clocks_event_reasons_counters.sw_power_cap",
        1e-6,
    ),
]


def test_scrapes_never_start_the_program(smi: FakeSmi, start: Start) -> None:
    smi.put("gpus.json", [smi_card(0)])
    sidecar = start("--interval", "300")
    sidecar.wait_success()
    before = len(smi.calls())
    scrapes: list[Scrape] = [sidecar.scrape() for _ in range(20)]
    assert all(scrape.value("power_watts", uuid=uuid_of(0)) == 123.45 for scrape in scrapes)
    assert len(smi.calls()) == before

"""The command, the simulated GPUs, the table of metrics, and what the whole weighs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from gpu_harness import COMMAND, FakeDriver, RunningSidecar, card, pss_bytes

from tunewatch_gpu.fields import FIELDS
from tunewatch_gpu.metrics import METRIC, METRICS
from tunewatch_gpu.simulated import SimulatedSource, simulated_uuid
from tunewatch_gpu.snapshot import Request

Start = Callable[..., RunningSidecar]


def test_simulated_gpus(start_sidecar: Start) -> None:
    sidecar = start_sidecar({"TUNEWATCH_GPU_SIMULATE": "3"}, "--backend", "simulated", "--interval", "0.2")
    scrape = sidecar.wait_success()
    assert {labels["uuid"] for labels in scrape.labels("info")} == {
        "GPU-51515151-5151-5151-5151-000000000000",
        "GPU-51515151-5151-5151-5151-000000000001",
        "GPU-51515151-5151-5151-5151-000000000002",
    }
    assert {labels["simulated"] for labels in scrape.labels("info")} == {"true"}
    uuid = simulated_uuid(0)
    before = scrape.value("power_watts", uuid=uuid)
    scrape = sidecar.wait(lambda scrape: scrape.value("power_watts", uuid=uuid) != before)
    assert (scrape.value("memory_used_bytes", uuid=uuid) or 0) < 80 * 2**30


def test_the_variable_alone_simulates(start_sidecar: Start) -> None:
    scrape = start_sidecar({"TUNEWATCH_GPU_SIMULATE": "1"}, "--interval", "0.2").wait_success()
    assert scrape.value("collector_source_info", source="simulated") == 1
    assert scrape.value("seen") == 1


def test_simulation_follows_from_time_and_seed_alone() -> None:
    def read(now: float, seed: int = 0) -> dict[str, float]:
        source = SimulatedSource(lambda *_: None, lambda *_: None, 1, seed, clock=lambda: now)
        return source.read(Request(1.0)).gpus[0].readings

    assert read(1.8e9) == read(1.8e9)
    assert read(1.8e9) != read(1.8e9, seed=1)
    first, last = read(1.8e9), read(1.8e9 + 1)
    mean_power = (first["power"] + last["power"]) / 2
    assert last["energy"] - first["energy"] == pytest.approx(mean_power, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--web.listen-address", "9460"], {}, "'9460' is no HOST:PORT, such as 127.0.0.1:9460"),
        (["--web.listen-address", "127.0.0.1:70000"], {}, "'127.0.0.1:70000' is no HOST:PORT"),
        (["--interval", "0"], {}, "'0' is no number of seconds from 0.05 to 3600"),
        (["--backend", "rocm"], {}, "invalid choice: 'rocm' (choose from 'auto', 'nvml'"),
        (["--expect-gpus", "-1"], {}, "'-1' is no whole number from 0 up"),
        ([], {"TUNEWATCH_GPU_SIMULATE": "many"}, "TUNEWATCH_GPU_SIMULATE is 'many'; a number from 1 to 64"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], environment: dict[str, str], complaint: str) -> None:
    ended = subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 2
    assert complaint in ended.stderr


def test_table_of_metrics() -> None:
    assert len(METRIC) == len(METRICS), "names are unique"
    for metric in METRICS:
        assert metric.name.startswith("tunewatch_gpu_")
        assert metric.type in ("gauge", "counter")
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert not metric.unit or metric.name.removesuffix("_total").endswith("_" + metric.unit)
        assert metric.help
    for field in FIELDS.values():
        assert METRIC[field.metric].labels == ("uuid", *(name for name, _ in field.labels))


def test_imports_nothing_of_the_training_side_and_no_heavy_library() -> None:
    code = (
        "import sys, tunewatch_gpu.cli, tunewatch_gpu.reader, tunewatch_gpu.nvml, tunewatch_gpu.nvidia_smi;"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ended.stdout.split())
    assert not loaded & {"tunewatch", "torch", "numpy", "typer", "rich", "yaml", "asyncio"}
    assert {"tunewatch_gpu", "pynvml", "prometheus_client"} <= loaded


def test_all_processes_together_stay_small(driver: FakeDriver, start_sidecar: Start) -> None:
    """Less than 40 MiB with eight GPUs, after it has collected and has been scraped for a while."""
    driver.play(*(card(index) for index in range(8)))
    sidecar = start_sidecar(driver.environment, "--interval", "0.1")
    sidecar.wait_success()
    for _ in range(30):
        assert sidecar.scrape().value("seen") == 8
    processes = sidecar.processes()
    assert len(processes) == 2
    assert pss_bytes(processes) < 40 * 2**20


def test_version() -> None:
    ended = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=20, check=True)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", ended.stdout)

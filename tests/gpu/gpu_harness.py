"""A running `tunewatch-gpu`, the driver it believes to see, and what its endpoint says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

COMMAND = (sys.executable, "-m", "tunewatch_gpu.cli")
HERE = Path(__file__).parent
_LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)/metrics")


def build_fake_nvml(folder: Path) -> Path:
    """Compile the fake library into `folder` under the name that the binding loads; needs gcc."""
    library = folder / "libnvidia-ml.so.1"
    source = HERE / "fake_nvml" / "nvml.c"
    subprocess.run(
        ["gcc", "-O1", "-pthread", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
    )
    return library


def uuid_of(index: int) -> str:
    """The uuid of fake GPU `index`."""
    return f"GPU-aaaaaaaa-0000-0000-0000-{index:012d}"


def card(index: int, **changes: object) -> dict[str, object]:
    """Scenario lines of one healthy card; a change to None removes a line, names may be calls (`!...`)."""
    values: dict[str, object] = {
        "uuid": uuid_of(index),
        "name": "NVIDIA Test 40GB",
        "pci": f"00000000:{index + 1:02X}:00.0",
        "utilization": 37,
        "utilization_memory": 12,
        "memory_total": 42949672960,
        "memory_reserved": 536870912,
        "memory_used": 8589934592,
        "power": 123456,
        "power_limit": 300000,
        "power_limit_max": 400000,
        "energy": 987654321,
        "temperature": 61,
        "field82": 72,
        "fan": 45,
        "clock_graphics": 1410,
        "clock_sm": 1395,
        "clock_memory": 1593,
        "clock_video": 1275,
        "pstate": 2,
        "throttle": 0x24,
        "limit0": 101,
        "limit1": 96,
        "limit2": 105,
        "limit3": 90,
        "field3": 7,
        "field4": 2,
        "field142": 5,
        "field143": 3,
        "field144": 1,
        "field145": 0,
        "field74": 74_500_000_000,
        "field76": 0,
        "field269": 2_500_000_000,
        "field270": 1_250_000_000,
        "field271": 0,
        "field230": 0,
        "processes": "",
        "graphics": "",
    }
    values |= changes
    return {f"gpu{index}.{key}": value for key, value in values.items() if value is not None}


def smi_card(index: int, **changes: str) -> dict[str, str]:
    """The cells of one healthy card as nvidia-smi spells them."""
    cells = {
        "uuid": uuid_of(index),
        "index": str(index),
        "name": "NVIDIA Test 40GB",
        "driver_version": "580.65.06",
        "pci.bus_id": f"00000000:{index + 1:02X}:00.0",
        "mig.mode.current": "[N/A]",
        "utilization.gpu": "37 %",
        "memory.used": "8192 MiB",
        "memory.reserved": "512 MiB",
        "memory.total": "40960 MiB",
        "power.draw": "123.45 W",
        "power.draw.average": "123.45 W",
        "power.draw.instant": "150.00 W",
        "enforced.power.limit": "300.00 W",
        "power.limit": "350.00 W",
        "power.max_limit": "400.00 W",
        "temperature.gpu": "61",
        "temperature.memory": "72",
        "fan.speed": "45 %",
        "clocks.current.graphics": "1410 MHz",
        "clocks.current.sm": "1395 MHz",
        "clocks.current.memory": "1593 MHz",
        "clocks.current.video": "1275 MHz",
        "pstate": "P2",
        "clocks_event_reasons.active": "0x0000000000000024",
        "gpu_recovery_action": "None",
        "ecc.errors.corrected.volatile.total": "7",
        "ecc.errors.uncorrected.volatile.total": "2",
        "remapped_rows.correctable": "5",
        "remapped_rows.uncorrectable": "3",
        "remapped_rows.pending": "Yes",
        "remapped_rows.failure": "No",
        "clocks_event_reasons_counters.sw_power_cap": "74500000 us",
        "clocks_event_reasons_counters.sync_boost": "0 us",
        "clocks_event_reasons_counters.sw_thermal_slowdown": "2500000 us",
        "clocks_event_reasons_counters.hw_thermal_slowdown": "1250000 us",
        "clocks_event_reasons_counters.hw_power_brake_slowdown": "0 us",
    }
    return cells | {name.replace("__", "."): cell for name, cell in changes.items()}


class FakeDriver:
    """A scenario file for the fake NVML and the environment that makes a process load the library."""

    def __init__(self, library: Path, folder: Path) -> None:
        self._scenario = folder / "scenario"
        self.log = folder / "nvml.log"
        self.calls = folder / "nvml.calls"
        self.environment = {
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_SCENARIO": str(self._scenario),
            "FAKE_NVML_LOG": str(self.log),
            "FAKE_NVML_CALLS": str(self.calls),
        }

    def play(self, *parts: Mapping[str, object]) -> None:
        """Replace the scenario, in one step."""
        lines = {"driver": "580.65.06"}
        for part in parts:
            lines |= {key: str(value) for key, value in part.items()}
        temporary = self._scenario.with_suffix(".new")
        temporary.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        temporary.replace(self._scenario)

    def unload(self) -> None:
        """Take the driver away."""
        self._scenario.unlink()

    def notes(self) -> list[str]:
        """Inits, event sets that were waited for, and shutdowns so far."""
        return self.log.read_text().split() if self.log.exists() else []


class FakeSmi:
    """The fake nvidia-smi program and the files it answers from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "nvidia-smi"
        self.program.write_text(
            f'#!/bin/sh\nexec {sys.executable} -S {HERE / "fake_smi" / "nvidia_smi.py"} "$@"\n'
        )
        self.program.chmod(0o755)
        self.environment = {"FAKE_SMI": str(folder), "LD_LIBRARY_PATH": str(folder)}

    def put(self, name: str, content: object = "") -> None:
        """Set one of the files; lists and dicts as JSON."""
        text = content if isinstance(content, str) else json.dumps(content)
        temporary = self.folder / "new"
        temporary.write_text(text)
        temporary.replace(self.folder / name)

    def drop(self, name: str) -> None:
        """Remove one of the files."""
        (self.folder / name).unlink()

    def calls(self) -> list[tuple[str, str]]:
        """What the program noted so far, with its arguments."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        parts = [line.partition(" ") for line in lines]
        return [(what, rest) for what, _, rest in parts]


class Scrape:
    """One answer of `/metrics`."""

    def __init__(self, text: str, content_type: str) -> None:
        self.text = text
        self.content_type = content_type
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The sample `tunewatch_gpu_<name>` with exactly these labels, None where it is absent."""
        return self.samples.get((f"tunewatch_gpu_{name}", frozenset(labels.items())))

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of all samples of a metric."""
        return [dict(labels) for sample, labels in self.samples if sample == f"tunewatch_gpu_{name}"]

    def readings(self, uuid: str) -> set[str]:
        """Names (without prefix) of the series of one GPU other than its identity and health."""
        names = {name for name, labels in self.samples if dict(labels).get("uuid") == uuid}
        return {name.removeprefix("tunewatch_gpu_") for name in names} - {"info", "up"}


class RunningSidecar:
    """A `tunewatch-gpu` process; use as a context manager."""

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], log: Path) -> None:
        self._log = log
        inherited = {key: value for key, value in os.environ.items() if key != "TUNEWATCH_GPU_SIMULATE"}
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tunewatch_gpu.cli",
                    "--web.listen-address",
                    "127.0.0.1:0",
                    *arguments,
                ],
                env={**inherited, **environment},
                stderr=stream,
                start_new_session=True,
            )
        self.url = self._wait_for_url()

    def __enter__(self) -> RunningSidecar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def log(self) -> str:
        """All that it has logged."""
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a page."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def scrape(self) -> Scrape:
        """One scrape."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as response:
            return Scrape(response.read().decode(), response.headers["Content-Type"])

    def wait(self, condition: Callable[[Scrape], object], seconds: float = 40) -> Scrape:
        """Scrape until `condition` holds; fails with the last scrape and the log after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            scrape = self.scrape()
            if condition(scrape):
                return scrape
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s\n{scrape.text}\n{self.log()}")
            time.sleep(0.05)

    def wait_success(self, seconds: float = 40) -> Scrape:
        """The first scrape after a collection that worked."""
        return self.wait(lambda scrape: scrape.value("collector_success") == 1, seconds)

    def reader(self) -> psutil.Process:
        """The reader process."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children():
                try:
                    if "tunewatch_gpu.reader" in child.cmdline():
                        return child
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)
        raise AssertionError("there is no reader")

    def processes(self) -> list[psutil.Process]:
        """The sidecar and all its descendants."""
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            match = _LISTENING.search(self.log())
            if match:
                return match[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.process.send_signal(signal.SIGKILL)
        raise AssertionError(f"it does not listen:\n{self.log()}")


def pss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Memory of several processes, shared pages counted once (`Pss` of smaps_rollup)."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total

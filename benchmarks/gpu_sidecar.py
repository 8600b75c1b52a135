"""What the GPU sidecar costs: memory, processor time, scrape latency, on fake GPUs under a real binding.

    python benchmarks/gpu_sidecar.py [--gpus 8] [--seconds 20] [--interval 1]

Needs gcc. Numbers are of this machine; compare them with each other, not with those of another one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))

from gpu_harness import FakeDriver, RunningSidecar, build_fake_nvml, card, pss_bytes


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Processor time used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def scrape_times(sidecar: RunningSidecar, count: int, clients: int) -> list[float]:
    """Seconds of `count` scrapes each by `clients` at once."""
    times: list[float] = []

    def client() -> None:
        for _ in range(count):
            began = time.perf_counter()
            status, _body = sidecar.get("/metrics")
            times.append(time.perf_counter() - began)
            assert status == 200

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def show_times(what: str, times: list[float]) -> None:
    """Median and 99th percentile in milliseconds."""
    cuts = statistics.quantiles(times, n=100)
    print(f"{what}: p50 {cuts[49] * 1e3:.2f} ms, p99 {cuts[98] * 1e3:.2f} ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--interval", type=float, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lib").mkdir()
        driver = FakeDriver(build_fake_nvml(folder / "lib"), folder)
        driver.play(*(card(index) for index in range(options.gpus)))
        arguments = ("--backend", "nvml", "--interval", str(options.interval))
        with RunningSidecar(driver.environment, arguments, folder / "log") as sidecar:
            scrape = sidecar.wait_success()
            processes = sidecar.processes()
            before = cpu_seconds(processes)
            time.sleep(options.seconds)
            used = cpu_seconds(processes) - before
            print(f"{options.gpus} GPUs, {len(scrape.samples)} samples, {len(scrape.text)} bytes a scrape")
            share = 100 * used / options.seconds
            print(f"processor: {share:.2f} % of a core at an interval of {options.interval} s")
            show_times("one client", scrape_times(sidecar, 500, 1))
            show_times("20 clients at once", scrape_times(sidecar, 50, 20))
            for process in processes:
                print(f"PSS of {process.cmdline()[3:5]}: {pss_bytes([process]) / 2**20:.1f} MiB")
            print(f"PSS in all: {pss_bytes(processes) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

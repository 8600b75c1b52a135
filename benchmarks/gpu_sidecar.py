"""What the GPU sidecar costs: memory, processor time, NVML calls, scrape latency, on fake GPUs under a real binding.

    python benchmarks/gpu_sidecar.py [--gpus 8] [--processes 16] [--seconds 20] [--interval 1]

Needs gcc. Numbers are of this machine; compare them with each other, not with those of another one.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
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


def show_calls(driver: FakeDriver) -> None:
    """NVML calls of a collection on average; they are written down when the sidecar ends."""
    calls = {name: int(count) for name, count in map(str.split, driver.calls.read_text().splitlines())}
    waits = calls.pop("nvmlEventSetWait_v2", 0)
    cycles = calls["nvmlDeviceGetCount_v2"]
    print(f"NVML calls a collection: {sum(calls.values()) / cycles:.1f}, over {cycles} collections; of these")
    for name, count in sorted(calls.items(), key=lambda item: -item[1]):
        if count >= cycles / 100:
            print(f"  {count / cycles:6.2f} {name}")
    print(f"waits for Xid events, beside them: {waits}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--processes", type=int, default=16, help="on each GPU")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--interval", type=float, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "lib").mkdir()
        driver = FakeDriver(build_fake_nvml(folder / "lib"), folder)
        users = [subprocess.Popen(["sleep", "3600"]) for _ in range(options.processes)]
        listed = ",".join(f"{user.pid}:{2**30}" for user in users)
        driver.play(*(card(index, processes=listed) for index in range(options.gpus)))
        arguments = ("--backend", "nvml", "--interval", str(options.interval))
        with RunningSidecar(driver.environment, arguments, folder / "log") as sidecar:
            scrape = sidecar.wait_success()
            processes = sidecar.processes()
            before = [cpu_seconds([process]) for process in processes]
            time.sleep(options.seconds)
            shares = [
                100 * (cpu_seconds([process]) - used) / options.seconds
                for process, used in zip(processes, before, strict=True)
            ]
            print(f"{options.gpus} GPUs, {len(scrape.samples)} samples, {len(scrape.text)} bytes a scrape")
            print(
                f"processor: {sum(shares):.2f} % of a core at an interval of {options.interval} s:", end=" "
            )
            print(f"{shares[0]:.2f} % the endpoint, {sum(shares[1:]):.2f} % the reader with its fake driver")
            show_times("one client", scrape_times(sidecar, 500, 1))
            show_times("20 clients at once", scrape_times(sidecar, 50, 20))
            for process in processes:
                print(f"PSS of {process.cmdline()[3:5]}: {pss_bytes([process]) / 2**20:.1f} MiB")
            print(f"PSS in all: {pss_bytes(processes) / 2**20:.1f} MiB")
        for user in users:
            user.kill()
            user.wait()
        show_calls(driver)


if __name__ == "__main__":
    main()

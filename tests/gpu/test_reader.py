"""A driver that hangs or crashes, a reader that is killed or stopped: scrapes go on, old readings do not."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest
from gpu_harness import COMMAND, FakeDriver, FakeSmi, RunningSidecar, Scrape, card, uuid_of

from tunewatch_gpu import reader_process
from tunewatch_gpu.exposition import Page
from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.reader_process import ReaderFailure, ReaderProcess
from tunewatch_gpu.sidecar import Blame, Settings
from tunewatch_gpu.snapshot import Gpu, Identity, Request, Snapshot

Start = Callable[..., RunningSidecar]

FAST = ("--backend", "nvml", "--interval", "0.2", "--timeout", "1")


@pytest.fixture
def start(driver: FakeDriver, start_sidecar: Start) -> Start:
    def go(*arguments: str) -> RunningSidecar:
        return start_sidecar(driver.environment, *FAST, *arguments)

    return go


def test_killed_reader_comes_back(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0))
    sidecar = start()
    sidecar.wait_success()
    first = sidecar.reader()
    first.send_signal(signal.SIGKILL)
    scrape = sidecar.wait(lambda scrape: scrape.value("reader_restarts_total") == 1)
    assert scrape.value("collector_failures_total", reason="reader_crashed") == 1
    assert "killed by SIGKILL" in sidecar.log()
    sidecar.wait_success()
    assert sidecar.reader().pid != first.pid


def test_stopped_reader_is_replaced(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0))
    sidecar = start()
    sidecar.wait_success()
    first = sidecar.reader()
    first.send_signal(signal.SIGSTOP)
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="reader_timeout"))
    assert scrape.value("collector_success") == 0
    assert not first.is_running()
    sidecar.wait_success()


def test_driver_that_crashes(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0), {"!nvmlDeviceGetCount_v2": "crash"})
    sidecar = start()
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="reader_crashed"))
    assert scrape.value("collector_success") == 0
    assert "the reader was killed by SIGSEGV in nvml" in sidecar.log()
    driver.play(card(0))
    assert sidecar.wait_success().value("power_watts", uuid=uuid_of(0)) == 123.456


def test_driver_that_hangs(driver: FakeDriver, start: Start) -> None:
    """Readings vanish at their stated age (here 15 s) and come back with the driver; scrapes always work."""
    driver.play(card(0))
    sidecar = start()
    good = sidecar.wait_success()
    before = good.value("collector_last_success_timestamp_seconds") or 0.0
    driver.play(card(0), {"!nvmlDeviceGetCount_v2": "hang"})
    scrape = sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="reader_timeout"))
    assert scrape.value("collector_success") == 0
    scrape = sidecar.wait(lambda scrape: not scrape.labels("power_watts"), seconds=25)
    assert scrape.labels("up") == scrape.labels("info") == []
    assert scrape.value("expected") == 1
    last = scrape.value("collector_last_success_timestamp_seconds") or 0.0
    assert last >= before
    assert (scrape.value("time_seconds") or 0.0) - last >= 14.9  # ages are told by another clock than this
    assert sidecar.get("/healthz")[0] == 200
    driver.play(card(0))
    scrape = sidecar.wait_success()
    assert scrape.value("power_watts", uuid=uuid_of(0)) == 123.456


@pytest.mark.parametrize("how", ["hang", "crash"])
def test_one_card_that_hangs_the_driver_is_left_alone(driver: FakeDriver, start: Start, how: str) -> None:
    driver.play(*(card(index) for index in range(3)))
    sidecar = start()
    sidecar.wait_success()
    driver.play(card(0), card(1, **{"!nvmlDeviceGetPowerUsage": how}), card(2, power=222_000))
    scrape = sidecar.wait(
        lambda scrape: scrape.value("collector_success") == 1 and scrape.value("up", uuid=uuid_of(1)) == 0
    )
    assert scrape.readings(uuid_of(1)) == set()
    assert scrape.value("power_watts", uuid=uuid_of(2)) == 222
    assert f"GPU {uuid_of(1)} does not answer, reason=skipped" in sidecar.log()
    assert "in nvml at GPU 1" in sidecar.log()
    driver.play(*(card(index) for index in range(3)))
    sidecar.wait(lambda scrape: scrape.value("up", uuid=uuid_of(1)) == 1)


def test_initialisation_that_hangs(driver: FakeDriver, start: Start) -> None:
    driver.play({"!nvmlInitWithFlags": "hang"}, card(0))
    sidecar = start()
    sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="reader_timeout"))
    driver.play(card(0))
    sidecar.wait_success()


def test_library_that_crashes_makes_room_for_nvidia_smi(
    driver: FakeDriver, smi: FakeSmi, start_sidecar: Start
) -> None:
    driver.play({"!nvmlInitWithFlags": "crash"}, card(0))
    smi.put("gpus.json", [{"uuid": uuid_of(0), "index": "0", "temperature.gpu": "61"}])
    sidecar = start_sidecar(
        {**driver.environment, "FAKE_SMI": str(smi.folder)},
        *("--interval", "0.2", "--nvidia-smi", str(smi.program)),
    )
    scrape = sidecar.wait_success()
    assert scrape.value("collector_source_info", source="nvidia-smi") == 1
    assert scrape.value("temperature_celsius", uuid=uuid_of(0), sensor="gpu") == 61


def test_scrapes_are_answered_while_the_driver_hangs(driver: FakeDriver, start: Start) -> None:
    driver.play({"!nvmlInitWithFlags": "hang"}, card(0))
    sidecar = start("--timeout", "60")
    reader = sidecar.reader()
    for _ in range(20):
        assert sidecar.scrape().value("collector_success") == 0
    assert sidecar.reader().pid == reader.pid, "all within one hanging collection"


@pytest.mark.parametrize("hanging", [False, True])
def test_sigterm_ends_it_in_order(driver: FakeDriver, start: Start, hanging: bool) -> None:
    driver.play(card(0))
    sidecar = start("--timeout", "60")
    sidecar.wait_success()
    if hanging:
        driver.play(card(0), {"!nvmlDeviceGetCount_v2": "hang"})
        # The clock of the last success stands still once the reader hangs.
        last = [0.0]

        def hangs(scrape: Scrape) -> bool:
            now = scrape.value("collector_last_success_timestamp_seconds") or 0.0
            standing, last[0] = now == last[0], now
            time.sleep(0.6)
            return standing

        sidecar.wait(hangs)
    family = sidecar.processes()
    began = time.monotonic()
    assert sidecar.stop() == 0
    assert time.monotonic() - began < 2, "a promise to whatever stops it, not a measure of speed"
    assert not psutil.wait_procs(family, timeout=2)[1]
    if not hanging:
        assert driver.notes()[-1] == "shutdown"


def test_sigint_ends_it_too(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0))
    sidecar = start()
    sidecar.wait_success()
    sidecar.process.send_signal(signal.SIGINT)
    assert sidecar.process.wait(5) == 0
    assert driver.notes()[-1] == "shutdown"


def test_reader_ends_with_a_killed_sidecar(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0), {"!nvmlDeviceGetCount_v2": "hang"})
    sidecar = start("--timeout", "60")
    reader = sidecar.reader()
    sidecar.process.kill()
    assert not psutil.wait_procs([reader], timeout=5)[1]


def test_gives_up_when_asked_to(driver: FakeDriver, start: Start) -> None:
    sidecar = start("--exit-after-failures", "3")
    assert sidecar.process.wait(20) == 1
    assert "3 collections failed in a row" in sidecar.log()


def test_a_queue_of_clients_is_accepted(driver: FakeDriver, start: Start) -> None:
    """100 clients that come while the process is stopped wait in the listen queue; none is turned away."""
    driver.play(card(0))
    sidecar = start()
    sidecar.wait_success()
    port = int(sidecar.url.rpartition(":")[2])
    sidecar.process.send_signal(signal.SIGSTOP)
    try:
        waiting = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
    finally:
        sidecar.process.send_signal(signal.SIGCONT)
    for connection in waiting:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
    for connection in waiting:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        connection.close()


def test_pages(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0))
    sidecar = start()
    sidecar.wait_success()
    status, text = sidecar.get("/")
    assert status == 200
    assert 'href="/metrics"' in text
    assert sidecar.get("/healthz") == (200, "ok\n")
    assert sidecar.get("/nothing")[0] == 404


def test_a_taken_port_is_named(driver: FakeDriver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*COMMAND, "--web.listen-address", f"127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert ended.returncode == 1
    assert f"can not listen on 127.0.0.1 port {port}: Address already in use" in ended.stderr


def test_readings_are_dropped_at_their_age_even_if_nothing_collects() -> None:
    ledger = Ledger(stale_after=15)
    gpu = Gpu(Identity("GPU-a", 0), {"power": 100.0})
    ledger.record_success(Snapshot("nvml", 1, [gpu]), at=1000.0, time=5.0, duration=0.1)
    page = Page.of(ledger, "1", 0)
    fresh, stale = page.text(lambda: 1014.9, lambda: 20.0), page.text(lambda: 1015.0, lambda: 20.0)
    assert b'tunewatch_gpu_power_watts{uuid="GPU-a"} 100.0' in fresh
    assert b"tunewatch_gpu_collector_success 1.0" in fresh
    assert b"GPU-a" not in stale
    assert b"tunewatch_gpu_collector_success 0.0" in stale


def test_energy_over_a_gap_is_not_invented() -> None:
    ledger = Ledger(stale_after=15)

    def record(power: float, at: float) -> None:
        gpu = Gpu(Identity("GPU-a", 0), {"power": power}, {"energy": "not_supported"})
        ledger.record_success(Snapshot("nvml", 1, [gpu]), at=at, time=at, duration=0.1)

    record(100, 0)
    record(200, 10)  # (100 + 200) / 2 W for 10 s
    record(300, 40)  # 30 s without readings
    record(300, 42)  # 300 W for 2 s
    assert ledger.energy["GPU-a"].total == 1500 + 600


def test_no_second_reader_beside_one_that_can_not_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in uninterruptible sleep can not be made on demand: its survival is pretended."""
    monkeypatch.setattr(reader_process, "end_children", lambda patience: {4711})
    waiting = ReaderProcess(ReaderOptions("simulated"), wake=0)
    with pytest.raises(ReaderFailure, match="process 4711 of an earlier collection hangs") as failed:
        waiting.read(Request(1.0), time.monotonic() + 1)
    assert failed.value.reason == "reader_stuck"
    assert waiting.starts == 0


def test_pauses_grow_to_a_bound() -> None:
    settings = Settings(interval=5, timeout=10, reader=None)  # type: ignore[arg-type]
    assert [settings.pause(failures) for failures in range(7)] == [5, 5, 10, 20, 40, 40, 40]
    assert Settings(interval=30, timeout=10, reader=None).pause(9) == 60  # type: ignore[arg-type]
    assert Settings(interval=120, timeout=10, reader=None).pause(9) == 120  # type: ignore[arg-type]


def test_two_cards_that_hang_are_the_driver_and_not_a_card() -> None:
    blame = Blame(interval=5)
    blame.failed(ReaderFailure("reader_timeout", "", "nvml", 1), cards=4, now=100)
    assert blame.skip(119.9) == (1,)
    assert blame.skip(120) == ()
    blame.failed(ReaderFailure("reader_timeout", "", "nvml", 2), cards=4, now=110)
    assert blame.skip(111) == ()


def test_a_single_card_is_never_skipped() -> None:
    blame = Blame(interval=5)
    blame.failed(ReaderFailure("reader_timeout", "", "nvml", 0), cards=1, now=100)
    assert blame.skip(101) == ()

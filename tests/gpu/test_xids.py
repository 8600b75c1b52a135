"""Xid errors: NVML's events, the kernel log, and the count of both."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, RunningSidecar, Scrape, card, uuid_of

from tunewatch_gpu.exposition import Page
from tunewatch_gpu.kernel_log import KernelLog
from tunewatch_gpu.ledger import Ledger
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.reader_process import ReaderFailure, ReaderProcess, ToldXid
from tunewatch_gpu.sidecar import Blame
from tunewatch_gpu.xids import XidCounts

Start = Callable[..., RunningSidecar]


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("4,1,1000000,-;NVRM: Xid (PCI:0000:01:00): 31, from before the sidecar\n")
    return path


def say(path: Path, *messages: str, seconds: float = 2.0, priority: int = 4) -> None:
    with path.open("a") as file:
        file.writelines(f"{priority},7,{int(seconds * 1e6)},-;{message}\n" for message in messages)


@pytest.fixture
def start(driver: FakeDriver, start_sidecar: Start, kernel_log: Path) -> Start:
    def go(*arguments: str) -> RunningSidecar:
        sidecar = start_sidecar(
            driver.environment,
            *("--backend", "nvml", "--interval", "0.2", "--kernel-log", str(kernel_log)),
            *arguments,
        )
        sidecar.wait(lambda _: "watching" in driver.notes())
        return sidecar

    return go


def count(scrape: Scrape, xid: int, index: int = 0) -> float | None:
    return scrape.value("xid_errors_total", uuid=uuid_of(index), xid=str(xid))


def test_events_are_counted_and_outlive_the_reader(driver: FakeDriver, start: Start) -> None:
    driver.play(card(0), card(1))
    sidecar = start()
    assert sidecar.wait_success().labels("xid_errors_total") == []
    before = time.time()
    driver.play(card(0), card(1), {"event0": "1 79", "event1": "0 31"})
    scrape = sidecar.wait(lambda scrape: count(scrape, 79, 1) and count(scrape, 31))
    assert len(scrape.labels("xid_errors_total")) == 2
    told = scrape.value("xid_last_timestamp_seconds", uuid=uuid_of(1), xid="79") or 0.0
    assert before <= told <= time.time()

    sidecar.reader().send_signal(signal.SIGKILL)
    scrape = sidecar.wait(lambda scrape: scrape.value("reader_restarts_total") == 1)
    assert count(scrape, 79, 1) == count(scrape, 31) == 1
    sidecar.wait(lambda _: driver.notes().count("watching") >= 2)
    driver.play(card(0), card(1), {"event0": "1 79", "event1": "0 31", "event2": "1 79"})
    scrape = sidecar.wait(lambda scrape: count(scrape, 79, 1) == 2)
    assert count(scrape, 31) == 1
    assert (scrape.value("xid_last_timestamp_seconds", uuid=uuid_of(1), xid="79") or 0.0) > told


def test_an_error_that_hangs_the_driver_is_told(driver: FakeDriver, start: Start) -> None:
    """The thread tells it at once: the collection after it never ends, and the reader is killed."""
    driver.play(card(0))
    sidecar = start("--timeout", "3")
    sidecar.wait_success()
    driver.play(card(0), {"!nvmlDeviceGetCount_v2": "hang", "event0": "0 119"})
    scrape = sidecar.wait(lambda scrape: count(scrape, 119))
    assert count(scrape, 119) == 1
    sidecar.wait(lambda scrape: scrape.value("collector_failures_total", reason="reader_timeout"))
    assert count(sidecar.scrape(), 119) == 1


def test_last_words_of_a_reader_that_is_killed_are_heard() -> None:
    """What it told after its last answer; somebody it left behind still holds the pipe open."""
    reader = ReaderProcess(ReaderOptions("simulated"), wake=0)
    reader._answers, held_open = os.pipe()
    reader._child = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    told = '{"at": ["nvml", 0]}\n{"snapsh{"at": 0}\n{"xid": ["nvml", "GPU-a", 79, 5.5]}\n{"xid": ["nvml", 4'
    os.write(held_open, told.encode())
    reader.kill()
    assert reader.take_xids() == [ToldXid("nvml", "GPU-a", 79, 5.5)]
    assert reader.take_xids() == []
    os.close(held_open)


def test_the_kernel_log_is_a_second_source(driver: FakeDriver, start: Start, kernel_log: Path) -> None:
    driver.play(card(0), card(1))
    sidecar = start()
    sidecar.wait_success()
    say(
        kernel_log,
        "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    )
    sidecar.wait(lambda scrape: count(scrape, 79) == 1)
    # NVML tells of the same one, and then both of another.
    driver.play(card(0), card(1), {"event0": "0 79", "event1": "1 48"})
    sidecar.wait(lambda scrape: count(scrape, 48, 1) == 1)
    assert count(sidecar.scrape(), 79) == 1
    say(kernel_log, "NVRM: Xid (PCI:0000:02:00): 48, Channel 00000001", seconds=3)
    say(kernel_log, "NVRM: Xid (PCI:0000:02:00): 13, Graphics Exception", seconds=4)
    scrape = sidecar.wait(lambda scrape: count(scrape, 13, 1) == 1)
    assert count(scrape, 48, 1) == 1
    assert count(scrape, 31) is None, "from before the sidecar"


def test_the_kernel_log_counts_where_nvml_has_no_events(
    driver: FakeDriver, start_sidecar: Start, kernel_log: Path
) -> None:
    driver.play(card(0, **{"!nvmlDeviceRegisterEvents": 3}))
    arguments = ("--backend", "nvml", "--interval", "0.2", "--kernel-log", str(kernel_log))
    sidecar = start_sidecar(driver.environment, *arguments)
    scrape = sidecar.wait_success()
    assert scrape.value("readings_rejected_total", field="xid", reason="not_supported")
    say(kernel_log, "NVRM: Xid (PCI:0000:01:00): 43, pid=17, name=python, Ch 00000008")
    scrape = sidecar.wait(lambda scrape: count(scrape, 43) == 1)
    assert "python" not in scrape.text


def test_an_error_of_a_card_that_is_not_known_yet_is_kept(
    driver: FakeDriver, start_sidecar: Start, kernel_log: Path
) -> None:
    sidecar = start_sidecar(
        driver.environment, "--backend", "nvml", "--interval", "0.2", "--kernel-log", str(kernel_log)
    )

    def failures(scrape: Scrape) -> float:
        return scrape.value("collector_failures_total", reason="driver_not_loaded") or 0.0

    before = failures(sidecar.wait(failures))
    say(kernel_log, "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.")
    sidecar.wait(lambda scrape: failures(scrape) >= before + 2)  # so the log was read in between
    driver.play(card(0))
    assert count(sidecar.wait_success(), 79) == 1


def test_without_a_kernel_log_it_says_so(driver: FakeDriver, start_sidecar: Start, tmp_path: Path) -> None:
    driver.play(card(0))
    sidecar = start_sidecar(driver.environment, "--backend", "nvml", "--kernel-log", str(tmp_path / "none"))
    sidecar.wait_success()
    assert "no kernel log (No such file or directory): Xid errors come from NVML alone" in sidecar.log()


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", [("0000:03:00", 14)]),
        (
            "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            [("0000:05:00", 79)],
        ),
        ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", [("0000:18:00.0", 79)]),
        (
            "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000)",
            [("0018:01:00", 149)],
        ),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06", []),
        ("NVRM: GPU at PCI:0000:05:00: GPU-d1b7fc70-0000-0000-0000-000000000000", []),
        ("somebody: NVRM: Xid (PCI:0000:05:00): 79, not at the start", []),
        ("NVRM: Xid (PCI:0000:05:00): 12345, no code", []),
        ("NVRM: Xid (PCI:0000:05:00)", []),
    ],
)
def test_lines_of_the_kernel_log(kernel_log: Path, message: str, found: list[tuple[str, int]]) -> None:
    log = KernelLog(kernel_log)
    say(kernel_log, message)
    assert log.poll() == found
    assert log.poll() == []
    log.close()


def test_both_lines_about_a_fall_off_the_bus_are_one(kernel_log: Path) -> None:
    log = KernelLog(kernel_log)
    xid, plain = (
        "NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:05:00.0: GPU has fallen off the bus.",
    )
    say(kernel_log, xid, plain, seconds=100)
    say(kernel_log, "NVRM: GPU 0000:06:00.0: GPU has fallen off the bus.", seconds=101)
    say(kernel_log, xid, seconds=161)  # 61 s after: another one
    assert log.poll() == [("0000:05:00", 79), ("0000:06:00.0", 79), ("0000:05:00", 79)]
    log.close()


def test_what_a_program_wrote_into_the_kernel_log_is_not_the_kernels(kernel_log: Path) -> None:
    log = KernelLog(kernel_log)
    say(kernel_log, "NVRM: Xid (PCI:0000:05:00): 79, forged", priority=12)  # facility 1: user
    assert log.poll() == []
    log.close()


def test_a_line_that_comes_in_two_parts(kernel_log: Path) -> None:
    log = KernelLog(kernel_log)
    with kernel_log.open("a") as file:
        file.write("4,8,5000000,-;NVRM: Xid (PCI:0000:05")
        file.flush()
        assert log.poll() == []
        file.write(":00): 94, Contained ECC error\n SUBSYSTEM=pci\n")
    assert log.poll() == [("0000:05:00", 94)]
    log.close()


def counted(counts: XidCounts) -> dict[tuple[str, int], int]:
    return {(uuid, code): count.count for uuid, code, count in counts}


def test_two_sources_count_an_error_once() -> None:
    counts = XidCounts()
    for source, at in [("nvml", 100), ("kernel_log", 102), ("kernel_log", 110), ("nvml", 111), ("nvml", 120)]:
        assert counts.record(source, "GPU-a", 79, at) == ""
    assert counted(counts) == {("GPU-a", 79): 3}
    assert [count.last for _, _, count in counts] == [120]


def test_a_source_that_missed_errors_is_not_deaf_for_ever() -> None:
    """The kernel log saw three that NVML missed; ten minutes later, what NVML tells is new."""
    counts = XidCounts()
    for at in (100, 101, 102):
        counts.record("kernel_log", "GPU-a", 31, at)
    counts.record("nvml", "GPU-a", 31, 103)
    assert counted(counts) == {("GPU-a", 31): 3}
    counts.record("nvml", "GPU-a", 31, 703)
    counts.record("kernel_log", "GPU-a", 31, 704)
    assert counted(counts) == {("GPU-a", 31): 4}
    assert [count.last for _, _, count in counts] == [703]


def test_codes_are_bounded() -> None:
    ledger = Ledger(stale_after=15)
    for code in range(1, 40):
        ledger.record_xid("nvml", "GPU-a", code, 100)
    ledger.record_xid("nvml", "GPU-a", 1, 101)
    ledger.record_xid("nvml", "GPU-b", 33, 101)
    ledger.record_xid("nvml", "GPU-b", 2**32, 101)
    found = counted(ledger.xids)
    assert len(found) == 33
    assert found["GPU-a", 1] == 2
    assert found["GPU-b", 33] == 1
    assert ledger.rejected == {("xid", "too_many_codes"): 7, ("xid", "no_xid"): 1}


def test_errors_are_shown_while_the_readings_are_stale() -> None:
    ledger = Ledger(stale_after=15)
    ledger.record_xid("nvml", "GPU-a", 79, 1234.5)
    text = Page.of(ledger, "1", 0).text(lambda: 0.0, lambda: 20.0).decode()
    assert 'tunewatch_gpu_xid_errors_total{uuid="GPU-a",xid="79"} 1.0' in text
    assert 'tunewatch_gpu_xid_last_timestamp_seconds{uuid="GPU-a",xid="79"} 1234.5' in text


def test_a_reader_that_dies_while_it_waits_waits_for_no_events_for_a_while() -> None:
    blame = Blame(interval=5)
    idle = ReaderFailure("reader_crashed", "before it asked a driver")
    blame.failed(idle, cards=2, now=100)
    blame.succeeded(())
    assert blame.avoid(101) == ()
    blame.failed(idle, cards=2, now=110)
    assert blame.avoid(409) == ("xid_events",)
    assert blame.avoid(410) == ()

"""Whose memory it is: real processes with a run in their environment, listed by the fake driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, FakeSmi, RunningSidecar, Scrape, card, smi_card, uuid_of

from tunewatch_gpu.run_memory import Impossible, RunFinder, memory_by_run

Start = Callable[..., RunningSidecar]

FAST = ("--backend", "nvml", "--interval", "0.2")
GIB = 2**30

# A process that drops the variable from the environment of its child, says who that is, and waits.
DROPPING = """
import os, subprocess, sys
os.environ.pop("TUNEWATCH_RUN_ID")
print(subprocess.Popen(["sleep", "300"], stdout=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sleeper() -> Iterator[Callable[[str | None], int]]:
    """Starts a process of a run, or of none; its process id."""
    with ExitStack() as stack:

        def start(run_id: str | None) -> int:
            environment = {key: value for key, value in os.environ.items() if key != "TUNEWATCH_RUN_ID"}
            if run_id is not None:
                environment["TUNEWATCH_RUN_ID"] = run_id
            process = stack.enter_context(subprocess.Popen(["sleep", "300"], env=environment))
            stack.callback(process.kill)
            return process.pid

        yield start


@pytest.fixture
def dropped() -> Iterator[int]:
    """A process without the variable, whose parent is of run `dropper`."""
    environment = {**os.environ, "TUNEWATCH_RUN_ID": "dropper"}
    with subprocess.Popen(
        [sys.executable, "-c", DROPPING], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        yield child
        os.kill(child, 9)
        parent.kill()


def by_run(scrape: Scrape, index: int = 0) -> dict[str, float | None]:
    return {
        labels["run_id"]: scrape.value("run_memory_bytes", **labels)
        for labels in scrape.labels("run_memory_bytes")
        if labels["uuid"] == uuid_of(index)
    }


def test_memory_by_run(
    driver: FakeDriver, start_sidecar: Start, sleeper: Callable[[str | None], int], dropped: int
) -> None:
    first, second, other, stranger = (sleeper(run) for run in ("run-a", "run-a", "run-b", None))
    driver.play(
        card(
            0,
            processes=f"{first}:{4 * GIB},{second}:{GIB},{stranger}:{3 * GIB},{dropped}:{2 * GIB}",
            graphics=f"{stranger}:{3 * GIB}",  # it draws, too: the same memory once more
        ),
        card(1, processes=f"{other}:{5 * GIB},{first}:{GIB}"),
        card(2, processes=f"{first}:na,{second}:{GIB},{other}:{GIB}"),
        card(3, processes=f"{first}:na"),
        card(4, processes="0:1024"),
        card(5, processes=f"{first}:{41 * GIB}"),  # more than the card has
        card(6, processes=None),
        card(7),
        card(8, processes=f"{first}:{GIB}", graphics=None),
        card(9, processes=f"4194000:{GIB}"),  # of another pid namespace: not to be seen from here
    )
    scrape = start_sidecar(driver.environment, "--backend", "nvml", "--interval", "300").wait_success()
    assert by_run(scrape, 0) == {"run-a": 5 * GIB, "dropper": 2 * GIB, "": 3 * GIB}
    assert by_run(scrape, 1) == {"run-b": 5 * GIB, "run-a": GIB}
    assert by_run(scrape, 2) == {"run-b": GIB}, "a part of run-a would pass for the whole"
    assert [by_run(scrape, index) for index in (3, 4, 5, 6, 7)] == [{}] * 5
    assert by_run(scrape, 8) == {"run-a": GIB}
    assert by_run(scrape, 9) == {"": GIB}
    assert scrape.value("readings_rejected_total", field="run_memory", reason="not_supported") == 2
    assert scrape.value("readings_rejected_total", field="run_memory", reason="out_of_range") == 2
    assert all(set(labels) == {"uuid", "run_id"} for labels in scrape.labels("run_memory_bytes"))


def test_a_process_that_ends_is_seen_to_end(
    driver: FakeDriver, start_sidecar: Start, sleeper: Callable[[str | None], int]
) -> None:
    driver.play(card(0, processes=f"{sleeper('run-a')}:{GIB}"))
    sidecar = start_sidecar(driver.environment, *FAST)
    assert by_run(sidecar.wait_success()) == {"run-a": GIB}
    driver.play(card(0))
    sidecar.wait(lambda scrape: by_run(scrape) == {})


def test_slices_have_their_own_processes(
    driver: FakeDriver, start_sidecar: Start, sleeper: Callable[[str | None], int]
) -> None:
    part, pid = "MIG-aaaaaaaa-0000-0000-0000-000000000001", sleeper("run-a")
    processes = f"{pid}:{GIB}"
    part_lines = {
        "gpu0.mig2.uuid": part,
        "gpu0.mig2.name": "NVIDIA Test 40GB MIG 1g.5gb",
        "gpu0.mig2.processes": processes,
    }
    driver.play(card(0, mig=1, processes=processes), part_lines)
    scrape = start_sidecar(driver.environment, *FAST).wait_success()
    assert scrape.value("run_memory_bytes", uuid=part, run_id="run-a") == GIB
    assert by_run(scrape) == {}, "the card lists the processes of its slices: they would count twice"


def test_from_nvidia_smi(smi: FakeSmi, start_sidecar: Start, sleeper: Callable[[str | None], int]) -> None:
    """No process name is asked for, and one with a comma would not shift what follows."""
    smi.put("gpus.json", [smi_card(0), smi_card(1)])
    rows = [
        f"{uuid_of(0)}, {sleeper('run-a')}, 4096 MiB",
        f"{uuid_of(0)}, {sleeper(None)}, 1024 MiB",
        f"{uuid_of(1)}, {sleeper('run-b')}, [N/A]",
    ]
    smi.put("processes", "\n".join(rows) + "\n")
    fast = ("--backend", "nvidia-smi", "--interval", "0.2", "--nvidia-smi", str(smi.program))
    scrape = start_sidecar(smi.environment, *fast).wait_success()
    assert by_run(scrape, 0) == {"run-a": 4 * GIB, "": GIB}
    assert by_run(scrape, 1) == {}
    assert scrape.value("readings_rejected_total", field="run_memory", reason="not_supported")
    assert "process_name" not in str(smi.calls())


def write_process(proc: Path, pid: int, parent: int, start: int, environ: bytes | None) -> None:
    """What /proc tells of a process whose name is made to mislead."""
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    fields = ["S", str(parent), *["0"] * 17, str(start), *["0"] * 30]
    (folder / "stat").write_text(f"{pid} (a) R 1 (b) {' '.join(fields)}\n")
    (folder / "environ").unlink(missing_ok=True)
    if environ is not None:
        (folder / "environ").write_bytes(environ)


def test_the_nearest_ancestor_with_a_run_counts(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, 100, b"TUNEWATCH_RUN_ID=outer\0")
    write_process(tmp_path, 11, 10, 101, b"A=1\0TUNEWATCH_RUN_ID=inner\0B=2\0")
    write_process(tmp_path, 12, 11, 102, None)
    write_process(tmp_path, 13, 12, 103, b"TUNEWATCH_RUN_ID=not allowed!\0XTUNEWATCH_RUN_ID=no\0")
    write_process(tmp_path, 20, 1, 200, b"")
    finder = RunFinder(tmp_path)
    assert [finder.run_of(pid) for pid in (10, 11, 12, 13, 20, 99)] == [
        "outer",
        "inner",
        "inner",
        "inner",
        "",
        "",
    ]


def test_a_process_id_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, 100, b"TUNEWATCH_RUN_ID=first\0")
    finder = RunFinder(tmp_path)
    assert finder.run_of(10) == "first"
    write_process(tmp_path, 10, 1, 100, b"TUNEWATCH_RUN_ID=unseen\0")
    finder.begin_round()
    assert finder.run_of(10) == "first", "an environment is read once in a life"
    write_process(tmp_path, 10, 1, 500, b"TUNEWATCH_RUN_ID=second\0")
    finder.begin_round()
    assert finder.run_of(10) == "second"
    finder.begin_round()
    finder.begin_round()  # not asked for in between: it has ended
    write_process(tmp_path, 10, 1, 500, b"TUNEWATCH_RUN_ID=third\0")
    assert finder.run_of(10) == "third"


def test_runs_of_a_card_are_bounded(tmp_path: Path) -> None:
    for number in range(20):
        write_process(tmp_path, 100 + number, 1, number, f"TUNEWATCH_RUN_ID=run-{number}\0".encode())
    memory = memory_by_run([(100 + number, 1) for number in range(20)], 100, RunFinder(tmp_path))
    assert len(memory) == 17
    assert memory[""] == 4


@pytest.mark.parametrize("processes", [[(0, 1)], [(2**32 - 1, None)], [(1843396608, 51442)], [(5, 101)]])
def test_impossible_lists(tmp_path: Path, processes: list[tuple[int, int | None]]) -> None:
    with pytest.raises(Impossible):
        memory_by_run([(7, 1), *processes], 100, RunFinder(tmp_path))

"""When a run's time is over: where that comes from, who keeps it, and what is said of a real run that is too slow."""

from __future__ import annotations

import signal
import sys
import time
from datetime import UTC, datetime

import pytest
from harness import wait_for

TOLD = "walltime_deadline_timestamp_seconds"
SLEEPS = ("--", sys.executable, "-c", "import time; time.sleep(600)")


def in_slurm(end):
    return {"SLURM_JOB_ID": "4711", "SLURM_JOB_END_TIME": str(int(end))}


def test_the_earliest_of_deadline_walltime_and_slurm_job(machine):
    now = time.time()
    for flags, slurm, end in (
        (["--deadline", datetime.fromtimestamp(now + 5000, UTC).isoformat()], {}, now + 5000),
        (
            ["--deadline", datetime.fromtimestamp(now + 5000, UTC).isoformat(), "--walltime", "20m"],
            {},
            now + 1200,
        ),
        (["--walltime", "2h"], in_slurm(now + 3000), now + 3000),
    ):
        command = machine.start("exec", "--no-linger", "--run-id", f"run-{end:.0f}", *flags, *SLEEPS, **slurm)
        machine.run_id = f"run-{end:.0f}"
        # A walltime counts from a moment later on, which may be long on a busy machine.
        assert machine.scrape().get(TOLD) == pytest.approx(end, abs=60.0)
        command.send(signal.SIGINT)
        command.wait()


def test_who_takes_over_keeps_it(machine):
    first = machine.start("exec", "--walltime", "2h", *SLEEPS)
    end = machine.scrape().get(TOLD)
    first.send(signal.SIGKILL)
    first.wait()
    assert machine.json("supervisor.json")["deadline"] == end
    second = machine.start("adopt", machine.run_folder().name, "--no-linger")
    wait_for(lambda: machine.json("supervisor.json")["pid"] == second.process.pid, what="the run is adopted")
    assert machine.scrape().get(TOLD) == end
    second.send(signal.SIGKILL)
    second.wait()
    third = machine.start(
        "adopt", machine.run_folder().name, "--no-linger", "--deadline", "2099-01-01T00:00Z"
    )
    wait_for(
        lambda: machine.json("supervisor.json")["pid"] == third.process.pid, what="the run is adopted again"
    )
    assert machine.scrape().get(TOLD) == datetime(2099, 1, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("text", "words"),
    [("soon", "'soon' is no point in time: write 2026-12-24T18:00"), ("2020-01-01T00:00Z", "is over")],
)
def test_a_deadline_that_is_none(machine, text, words):
    code, output = machine.run("exec", "--deadline", text, "--", "true")
    assert (code, output.startswith("tunewatch: --deadline: "), words in output) == (2, True, True)


@pytest.mark.slow
def test_a_real_run_that_will_not_end_in_time(machine):
    """2000 steps of a fifth of a second are 400 s; it has two minutes."""
    machine.exec_tiny(
        "--steps", "2000", "--step-seconds", "0.2", "--save-steps", "30",
        options=("--walltime", "2m", "--threshold", "late_seconds=1"),
    )  # fmt: skip

    def told():
        return [one for one in machine.verdict()["signals"] if one["signal"] == "will_not_fit"]

    (found,) = wait_for(told, seconds=100, what="a verdict on its time")
    assert found["message"].startswith("At its recent pace it needs "), found
    assert (
        " of 2000, " in found["message"] and "the last checkpoint before that is of step " in found["message"]
    )

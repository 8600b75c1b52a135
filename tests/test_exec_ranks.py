"""`tunewatch exec` on trainings of several ranks: one run, each rank seen, and the one that the others wait for."""

from __future__ import annotations

import math
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from harness import wait_for

from tunewatch.probe.pulse import FIELDS, PHASES
from tunewatch.probe.tap import _tap_instance
from tunewatch.supervisor.ranks import laggard, last_in_step

PLAIN = Path(__file__).parent / "scripts" / "plain_train.py"


def pulse(phase: str, step: float = 3.0, stage: float = 0.0) -> dict[str, float]:
    return {**dict.fromkeys(FIELDS, 0.0), "phase": PHASES.index(phase), "step": step, "step_stage": stage}


class TestLaggard:
    @pytest.mark.parametrize(
        "pulses",
        [
            {},
            {0: pulse("data")},
            {0: pulse("compute", stage=2), 1: pulse("compute", stage=2)},
            {0: pulse("data"), 1: pulse("data")},
            {0: pulse("data", stage=2), 1: pulse("data", stage=1)},  # of a step that is over
            {0: pulse("prepare", math.nan), 1: pulse("prepare", math.nan)},
        ],
        ids=["none", "single", "same_step", "all_wait_for_data", "stage_of_old_step", "all_prepare"],
    )
    def test_none_where_all_stand_alike(self, pulses):
        assert laggard(pulses) is None

    @pytest.mark.parametrize(
        ("pulses", "words"),
        [
            (
                {0: pulse("compute"), 1: pulse("data")},
                "rank 1 is behind: waiting for the next batch after step 3",
            ),
            ({0: pulse("save"), 1: pulse("compute")}, "rank 0 is behind: saving a checkpoint after step 3"),
            ({0: pulse("data"), 1: pulse("evaluate")}, "rank 1 is behind: in an evaluation after step 3"),
            (
                {0: pulse("evaluate", 4.0), 1: pulse("compute", 3.0)},
                "rank 1 is behind: inside a step after step 3",
            ),
            (
                {0: pulse("compute", stage=2), 1: pulse("compute", stage=1)},
                "rank 1 is behind: inside a step after step 3",
            ),
            ({0: pulse("compute", 0.0), 1: pulse("prepare", math.nan)}, "rank 1 is behind: while preparing"),
            (
                {0: pulse("compute"), 1: pulse("compute"), 2: pulse("data"), 3: pulse("data")},
                "rank 2 is behind: waiting for the next batch after step 3",
            ),
        ],
        ids=["data", "save", "evaluate", "step", "stage", "prepare", "lowest_of_two"],
    )
    def test_the_one_that_has_come_least_far(self, pulses, words):
        assert str(laggard(pulses)) == words


@pytest.mark.parametrize(
    ("pulses", "rank"),
    [
        ({}, None),
        ({0: pulse("compute", stage=1)}, None),
        ({0: pulse("compute", stage=2), 1: pulse("compute", stage=1)}, 1),
        ({0: pulse("compute", stage=1), 1: pulse("compute", stage=4), 2: pulse("compute", stage=2)}, 0),
        ({0: pulse("compute", stage=1), 1: pulse("compute", stage=1), 2: pulse("compute", stage=2)}, None),
        ({0: pulse("compute", stage=2), 1: pulse("compute", stage=2)}, None),
        ({0: pulse("compute", stage=2), 1: pulse("data")}, None),
        ({0: pulse("compute", stage=2), 1: pulse("compute", 2.0, stage=1)}, None),
        ({0: pulse("data", stage=2), 1: pulse("data", stage=1)}, None),
    ],
    ids=["none", "single", "behind", "of_three", "two", "alike", "data", "another_step", "step_over"],
)
def test_who_alone_is_last_in_the_step(pulses, rank):
    assert last_in_step(pulses) == rank


def torchrun(machine, *flags, options=("--no-linger",), launcher=()):
    return machine.start(
        "exec", *options, "--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *launcher, str(PLAIN), str(machine.folder / "out"), *flags,
    )  # fmt: skip


def ended(machine):
    ending = machine.verdict()["ending"]
    return ending["state"], ending["reason"], ending["message"]


def assert_one_run(text, ranks):
    """No series twice; of the run, one; of what differs, one a rank."""
    names = [line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    run_ids = {name.partition('run_id="')[2].partition('"')[0] for name in names if 'run_id="' in name}
    assert len(run_ids) == 1
    for once in ("step", "max_steps", "run_info", "session_elapsed_seconds", "steps_total", "attached"):
        found = [name for name in names if name.partition("{")[0] == f"tunewatch_{once}"]
        assert len(found) == 1, found
        assert "rank=" not in found[0]
    for each in ("rank_step", "last_step_timestamp_seconds") if len(ranks) > 1 else ():
        found = [name for name in names if name.partition("{")[0] == f"tunewatch_{each}"]
        assert len(found) == len(ranks)
        assert all(any(f'rank="{rank}"' in name for name in found) for rank in ranks)
    for rank in ranks:
        assert any(
            name.startswith("tunewatch_process_memory_bytes") and f'rank="{rank}"' in name for name in names
        )
        assert len(ranks) == 1 or any(
            name.startswith("tunewatch_rank_phase_seconds_total")
            and f'rank="{rank}"' in name
            and 'phase="data"' in name
            for name in names
        )


def test_two_ranks_are_one_run_and_a_slow_one_is_seen(machine):
    """Rank 1 needs 0.2 s to load each batch; rank 0 does not, and waits for it in the collective."""
    command = torchrun(machine, "--steps", "400", "--rank", "1", "--data-seconds", "0.2")
    machine.wait_step(2)
    before = machine.scrape()
    machine.wait_step(int(before.get("step")) + 10)
    after = machine.scrape()
    assert_one_run(after.text, ranks=("0", "1"))

    def grown(name, **labels):
        return after.get(name, **labels) - before.get(name, **labels)

    steps = grown("rank_step", rank="1")
    assert grown("rank_phase_seconds_total", rank="1", phase="data") >= 0.2 * (steps - 1)
    assert grown("rank_phase_seconds_total", rank="0", phase="compute") > grown(
        "rank_phase_seconds_total", rank="0", phase="data"
    )
    assert abs(after.get("rank_step", rank="0") - after.get("rank_step", rank="1")) <= 1
    assert after.get("attached") == 1
    command.send(signal.SIGINT)
    command.wait()
    assert ended(machine)[:2] == ("cancelled", "cancelled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data-seconds", "0.4"], "while it waits for its data."),
        (["--loss-seconds", "1.2"], "while it computes its loss."),
    ],
    ids=["data", "loss"],
)
def test_the_rank_that_keeps_the_other_waiting_is_named(machine, flags, words):
    limits = [f"--threshold={limit}" for limit in ("pace_seconds=1", "pace_steps=3", "pace_windows=3")]
    command = torchrun(machine, "--steps", "400", "--rank", "1", *flags, options=("--no-linger", *limits))

    def slow_rank():
        return [one for one in machine.verdict()["signals"] if one["signal"] == "slow_rank"]

    (found,) = wait_for(slow_rank, seconds=90, what="a slow rank")
    assert found["message"].startswith("Rank 1 keeps the others waiting for "), found
    assert found["message"].endswith(words), found
    command.send(signal.SIGINT)
    command.wait()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("data", "rank 1 is behind: waiting for the next batch after step 3"),
        pytest.param("step", "rank 1 is behind: inside a step after step 3", marks=pytest.mark.slow),
        pytest.param("loss", "rank 1 is behind: inside a step after step 3", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_hangs_is_named(machine, where, words):
    options = ("--no-linger", "--grace", "2s", "--patience", "step=2s", "--patience", "step_factor=3")
    command = torchrun(machine, "--steps", "400", "--rank", "1", "--hang-in", where, options=options)
    signals = wait_for(lambda: machine.verdict()["signals"], seconds=90, what="a verdict")
    (stalled,) = [one for one in signals if one["signal"] == "stalled"]
    assert stalled["message"].endswith(f"after step 3, inside a step; {words}."), stalled
    assert "that rank" in stalled["advice"]
    command.send(signal.SIGINT)
    command.wait()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(machine):
    command = torchrun(machine, "--steps", "400", "--rank", "1", "--kill-at", "3")
    assert command.wait() == 1
    state, reason, message = ended(machine)
    assert (state, reason) == ("failed", "rank_killed"), command.output[-3000:]
    assert "ank 1" in message


@pytest.mark.slow
def test_accelerate_launch_is_one_run(machine):
    command = machine.start(
        "exec", "--no-linger", "--", sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2",
        "--cpu", str(PLAIN), str(machine.folder / "out"), "--steps", "60", "--step-seconds", "0.1",
    )  # fmt: skip
    machine.wait_step(2)
    # With --cpu it starts two processes only where there is an MPI.
    ranks = sorted({str(event["rank"]) for event in machine.events("session")})
    assert_one_run(machine.scrape().text, ranks)
    assert command.wait() == 0, command.output[-3000:]
    assert ended(machine)[:2] == ("completed", "")
    assert machine.verdict()["step"] == 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failures", "code", "expected"), [(1, 0, ("completed", "")), (2, 1, ("failed", "unknown"))]
)
def test_a_restart_by_torchrun(machine, failures, code, expected):
    """A failure that the next attempt made good is no cause of the end; of the last attempt it is."""
    command = torchrun(
        machine, "--rank", "1", "--raise-times", str(failures), "--steps", "6",
        launcher=("--max-restarts", "1"),
    )  # fmt: skip
    assert command.wait() == code, command.output[-3000:]
    state, reason, message = ended(machine)
    assert (state, reason) == expected, machine.verdict()
    assert ("ValueError" in message) == (failures == 2)
    assert len(machine.events("train_begin")) == (1 if code == 0 else 0)
    assert [event["rank"] for event in machine.events("exception") if event["type"] == "ValueError"] == [
        1
    ] * failures


class Told:
    """Who is told by the tap; what it was told, in order."""

    def __init__(self, *, in_company):
        self.in_company, self.heard = in_company, []

    def __getattr__(self, name):
        return lambda *_: self.heard.append(name)


class Loop:
    """The order in which transformers' training loop calls its own parts, with an evaluation behind the step."""

    def _get_num_items_in_batch(self, batches):
        return len(batches)

    def get_batch_samples(self, batches):
        return self._get_num_items_in_batch(batches)

    def compute_loss(self, model, inputs):
        return 0.5

    def training_step(self, model, inputs):
        return self.compute_loss(model, inputs)

    def run(self):
        counted = self.get_batch_samples([1, 2])
        losses = [self.training_step(None, batch) for batch in (1, 2)]
        return counted, losses, self._get_num_items_in_batch([3])


@pytest.mark.parametrize(
    ("in_company", "heard"),
    [
        (True, ["batches_are_here", *["advances", "advances", "micro_batch"] * 2]),
        (False, ["micro_batch"] * 2),  # a single process waits for nobody, and pays for nothing
    ],
)
def test_the_tap_tells_how_far_a_rank_is(in_company, heard):
    loop, told, undos = Loop(), Told(in_company=in_company), []
    _tap_instance(loop, told, undos)
    assert loop.run() == (2, [0.5, 0.5], 1)
    assert told.heard == heard
    for undo in undos:
        undo()
    assert vars(loop) == {}

"""Runs that are slow, starved, unsaved or late, told by stories in front of a real supervisor."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import wait_for
from story import EFFECTIVE, START, Story

from tunewatch.probe.pulse import INDEX, Pulse
from tunewatch.supervisor import disk

PLAIN = Path(__file__).parent / "scripts" / "plain_train.py"


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch, walltime=None)
    yield story
    story.close()


def begun(story, max_steps=400, **fields):
    story.open_session()
    story.beat("prepare")
    story.train_begin(max_steps=max_steps, **fields)
    story.beat("data", max_steps=float(max_steps))


def walk(story, first, last, **each):
    """Steps, with a look at every fifth; returns the last look."""
    for step in range(first, last + 1, 5):
        story.steps(step, min(step + 4, last), **each)
        story.supervisor._tick()
    return story.tick()


def signals(snapshot):
    return {verdict.signal: verdict for verdict in snapshot.verdicts}


def pause(story, phase, seconds):
    """An evaluation or a save, as long as that."""
    story.beat(phase)
    snapshot = story.wait(seconds)
    story.pulse.values[INDEX[f"{phase}_seconds"]] += seconds
    story.beat("data")
    return snapshot


NO_SAVES = {**EFFECTIVE, "save_strategy": "no"}


def test_a_run_that_becomes_slow_and_recovers(story):
    begun(story, effective=NO_SAVES)
    assert signals(walk(story, 1, 165)) == {}
    assert signals(pause(story, "evaluate", 900)) == {}
    assert signals(walk(story, 166, 230, seconds=5.0)) == {}  # five minutes and a few steps more
    snapshot = walk(story, 231, 240, seconds=5.0)
    assert set(signals(snapshot)) == {"slow"}
    assert signals(snapshot)["slow"].message.startswith(
        "It trains 32 tokens a second, and trained 80 "
    )  # of 160 a step
    assert (snapshot.health, signals(snapshot)["slow"].level) == ("attention", "attention")
    assert 'tunewatch_health{run_id="story-1",signal="slow"} 1.0' in story.exposition()
    assert "slow" in [
        one["signal"] for one in json.loads((story.folder.path / "verdict.json").read_text())["signals"]
    ]
    assert signals(walk(story, 241, 300)) == {}


def test_sequences_that_become_longer_are_not_slow(story):
    begun(story, effective=NO_SAVES)
    walk(story, 1, 165)
    assert signals(walk(story, 166, 300, seconds=8.0, tokens=640)) == {}


def test_a_resume_is_not_compared_with_the_session_before(story):
    begun(story, effective=NO_SAVES)
    walk(story, 1, 165)
    story.close()
    story.watch(new_session=True)
    story.open_session("s2")
    story.train_begin(step=100, max_steps=400, effective=NO_SAVES)
    story.beat("data", max_steps=400.0)
    assert signals(walk(story, 101, 260, seconds=5.0)) == {}


def test_a_run_that_waits_for_its_data(story):
    begun(story, effective=NO_SAVES)
    story.clock.passed += 700.0  # the first batch
    assert "data_starved" not in signals(walk(story, 1, 150, wait=0.5))
    found = signals(walk(story, 151, 160, wait=0.5))
    assert found["data_starved"].message == (
        "It waits for the next batch for 50% of its time, 1 s before each step."
    )
    assert signals(walk(story, 161, 300, wait=0.1)) == {}


def test_one_rank_that_keeps_the_other_waiting(story):
    begun(story, effective={**NO_SAVES, "world_size": 2})
    story.steps(1, 1)
    other = Pulse(str(story.folder.path / "pulse.1"), rank=1)
    for step in range(2, 170):
        story.steps(step, step, wait=0.05)
        other.update(
            step=float(step), first_step=0.0, step_seconds_count=float(step), step_seconds_sum=2.0 * step,
            data_seconds=0.9 * step, compute_seconds=1.1 * step, phase=1.0,
        )  # fmt: skip
        story.supervisor._tick()
    found = signals(story.tick())
    assert set(found) == {"slow_rank"}
    assert found["slow_rank"].message.startswith(
        "Rank 1 keeps the others waiting for 40% of the time, 0.8 s "
    )
    other.close()


def test_a_checkpoint_that_does_not_come(story):
    begun(story, max_steps=100)
    walk(story, 1, 20, seconds=40.0)
    story.checkpoint(20)
    assert signals(walk(story, 21, 46, seconds=40.0)) == {}
    found = signals(walk(story, 47, 55, seconds=40.0))
    assert found["checkpoint_overdue"].message == (
        "A checkpoint was due at step 40; at step 55 the newest is of step 20."
    )
    story.checkpoint(55)
    assert signals(story.tick()) == {}
    walk(story, 56, 60, seconds=40.0)
    story.event("save", step=60, checkpoint="checkpoint-60", seconds=1.0)  # it lies on another machine
    assert signals(walk(story, 61, 75, seconds=40.0)) == {}


@pytest.mark.slow
def test_a_real_training_whose_callback_takes_the_saves_back(machine):
    machine.start(
        "exec", "--no-linger", "--threshold", "overdue_seconds=1", "--", sys.executable, str(PLAIN),
        str(machine.folder / "out"), "--steps", "2000", "--step-seconds", "0.1", "--save-steps", "5",
        "--take-saves-back",
    )  # fmt: skip

    def overdue():
        return [one for one in machine.verdict()["signals"] if one["signal"] == "checkpoint_overdue"]

    (found,) = wait_for(overdue, seconds=90, what="a verdict on the checkpoint")
    assert found["message"].startswith("A checkpoint was due at step 5; at step "), found
    assert found["message"].endswith(" there is none."), found


def test_checkpoints_of_another_run_are_none_of_this_one(story):
    story.open_session()
    story.beat("prepare")
    story.checkpoint(80)
    for file in (story.output / "checkpoint-80").iterdir():
        os.utime(file, (START - 7200.0, START - 7200.0))
    story.train_begin(max_steps=100)
    story.beat("data", max_steps=100.0)
    assert "checkpoint_overdue" in signals(walk(story, 1, 40, seconds=40.0))


def free(monkeypatch, amount, inodes=10_000):
    space = SimpleNamespace(f_bavail=amount, f_frsize=1, f_files=10_000, f_favail=inodes)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: space)


def saved(story, step):
    folder = story.output / f"checkpoint-{step}"
    story.checkpoint(step)
    return sum(file.stat().st_size for file in folder.iterdir())


def test_the_checkpoints_to_come_do_not_fit(story, monkeypatch):
    begun(story, max_steps=100)
    walk(story, 1, 20)
    free(monkeypatch, 10**9)
    size = saved(story, 20)
    assert signals(story.tick()) == {}
    free(monkeypatch, 3.5 * size)  # steps 40, 60, 80 and 100 are to come
    found = signals(story.wait(20))
    assert "that of step 100 will not fit" in found["will_not_fit"].message
    free(monkeypatch, 4.5 * size)
    assert signals(story.wait(20)) == {}
    free(monkeypatch, 10**9, inodes=19)  # each has five files
    assert "(4 of about 5 files), and 19 files are free" in signals(story.wait(20))["will_not_fit"].message


def test_a_limit_lets_fewer_of_them_lie_there(story, monkeypatch):
    begun(story, max_steps=100, save_total_limit=1)
    walk(story, 1, 20)
    free(monkeypatch, 10**9)
    size = saved(story, 20)
    free(monkeypatch, 1.1 * size)
    assert signals(story.wait(20)) == {}
    story.train_begin(
        step=0, max_steps=100, save_total_limit=1, effective={**EFFECTIVE, "load_best_model_at_end": True}
    )
    assert "will_not_fit" in signals(story.wait(20)), "the best one may stay beside the newest"


def test_the_middle_of_a_save_is_not_judged(story, monkeypatch):
    begun(story, max_steps=100, save_total_limit=1)
    walk(story, 1, 20)
    free(monkeypatch, 10**9)
    size = saved(story, 20)
    free(monkeypatch, 1.1 * size)
    walk(story, 21, 40)
    assert signals(story.tick()) == {}
    story.beat("save")
    free(monkeypatch, 0.2 * size)
    assert signals(story.wait(40)) == {}, "the old one goes when the new one is whole"
    (story.output / "checkpoint-20").rename(story.output / "gone")
    free(monkeypatch, 1.1 * size)
    story.checkpoint(40)
    story.beat("data")
    assert signals(story.tick()) == {}
    free(monkeypatch, 0.9 * size)
    assert "will_not_fit" in signals(story.wait(20))


def test_a_run_without_checkpoints_is_told_of_once_it_is_half_an_hour_old(story):
    begun(story, max_steps=1000, effective=NO_SAVES)
    assert signals(walk(story, 1, 90, seconds=20.0)) == {}
    snapshot = walk(story, 91, 95, seconds=20.0)
    assert signals(snapshot)["work_at_risk"].message == (
        "This training makes no checkpoints (save_strategy no): 31 min 40 s of work would be lost now, and 5 h 33 min "
        "at its end."
    )
    assert snapshot.checkpoint_interval_steps is None


def test_epochs_are_the_usual_time_between_checkpoints(story):
    """An epoch is 50 steps; of 100 s each that is 83 min, far more than the 500 steps that nobody asked for."""
    begun(story, max_steps=200, effective={**EFFECTIVE, "save_strategy": "epoch", "save_steps": 500})
    snapshot = walk(story, 1, 60, seconds=100.0)
    assert (snapshot.checkpoint_interval_steps, signals(snapshot)) == (50, {})
    assert "work_at_risk" in signals(walk(story, 61, 130, seconds=100.0))  # 2.5 epochs are 125 steps


@pytest.mark.parametrize(
    ("times", "end"),
    [
        ({"walltime": 7200.0}, START + 7200.0),
        ({"walltime": 7200.0, "deadline": START + 3600.0}, START + 3600.0),
        ({"walltime": 1800.0, "deadline": START + 3600.0}, START + 1800.0),
        ({"walltime": None, "deadline": START + 3600.0}, START + 3600.0),
        ({"walltime": None}, None),
    ],
)
def test_the_earliest_end_counts(tmp_path, monkeypatch, times, end):
    story = Story(tmp_path, monkeypatch, **times)
    begun(story)
    assert story.tick().walltime_deadline == end
    assert ("tunewatch_walltime_deadline_timestamp_seconds" in story.exposition()) == (end is not None)
    assert json.loads((story.folder.path / "supervisor.json").read_text())["deadline"] == end
    story.close()


def test_a_run_that_will_not_end_in_time(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch, walltime=None, deadline=START + 1000.0)
    begun(story, max_steps=600)
    walk(story, 1, 19)
    assert signals(story.tick()) == {}
    story.checkpoint(19)
    assert signals(walk(story, 20, 50)) == {}, "not within a minute of the twentieth step"
    found = signals(walk(story, 51, 55))
    # 545 steps of 2 s are to come, 1090 s; 890 s are left, which is 445 steps.
    assert found["will_not_fit"].message == (
        "At its recent pace it needs 18 min 10 s more, and its time is over in 14 min 50 s: it will get to about step "
        "500 of 600, 3 min 20 s short; the last checkpoint before that is of step 500."
    )
    story.clock.set_by = -3600.0  # by the clock, which is what a deadline is told by, there is an hour more
    assert signals(walk(story, 56, 60)) == {}
    story.close()

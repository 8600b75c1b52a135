"""Resumes: what was lost, how the schedule goes on; and the disk, the hub, two writers."""

from __future__ import annotations

import pytest
from health_feed import active, alarms, begin, log, verdict

from tunewatch.health import Health


@pytest.mark.parametrize(
    ("step", "restored", "words"),
    [
        (40, {"optimizer": False, "scheduler": True}, "did not restore the optimizer:"),
        (40, {"optimizer": True, "scheduler": False}, "did not restore the learning rate schedule:"),
        (40, {"optimizer": False, "scheduler": False}, "the optimizer and learning rate schedule:"),
        (40, {"optimizer": True, "scheduler": True, "rng": False}, None),
        (40, {"optimizer": None, "scheduler": None}, None),
        (0, {"optimizer": False, "scheduler": False}, None),
    ],
)
def test_a_lossy_resume_is_said_before_the_first_step(step, restored, words):
    health = Health()
    begin(health, step=step, restored=restored)
    if words is None:
        assert active(health) == set()
    else:
        assert active(health) == {"resume_lost"}
        assert words in health.verdicts[0].message
        begin(health, step=40, restored={"optimizer": True, "scheduler": True})
        assert active(health) == set()


def earlier(health: Health, *, max_steps: int, rates: dict[int, float]) -> None:
    """An earlier session of the run."""
    health.past({"event": "train_begin", "step": 0, "max_steps": max_steps, "effective": {}})
    for step, rate in rates.items():
        health.past({"event": "log", "step": step, "values": {"loss": 2.0, "learning_rate": rate}})
    assert active(health) == set()


def linear(step: int) -> float:
    return 1e-3 * (1 - step / 100)


RATES = {step: linear(step) for step in range(10, 60, 10)}


@pytest.mark.parametrize(
    ("start", "first", "rate", "restarted"),
    [
        (50, 60, linear(60), False),
        (50, 60, 0.0, True),
        (50, 60, 1e-3, True),
        (20, 30, linear(30), False),  # steps that are done again have the rate of then
        (20, 30, linear(50) / 2, True),
        (20, 25, linear(25), False),
    ],
)
def test_the_first_rate_after_a_resume(start, first, rate, restarted):
    health = Health()
    earlier(health, max_steps=100, rates=RATES)
    begin(health, step=start, max_steps=100)
    log(health, first, loss=2.0, learning_rate=rate)
    assert ("lr_restarted" in active(health)) == restarted


def test_a_rate_that_starts_again_within_a_log():
    health = Health()
    for step, rate in enumerate([3e-5, 1e-4, 2e-4, 1.2e-4, 6e-5, 2e-5, 4e-6], 1):
        log(health, step, loss=2.0 - step / 10, learning_rate=rate)
    assert active(health) == set()
    log(health, 8, loss=1.2, learning_rate=1.1e-4)
    assert alarms(health) == {"lr_restarted"}


def test_a_schedule_that_is_meant_to_restart_may():
    health = Health()
    begin(health, effective={"lr_scheduler_type": "cosine_with_restarts"})
    for step in range(1, 50):
        log(health, step, loss=2.0 - step / 100, learning_rate=1e-4 * (1 - (step % 10) / 10))
    assert alarms(health) == set()


def test_another_length_bends_the_schedule():
    health = Health()
    earlier(health, max_steps=8, rates={})
    begin(health, step=4, max_steps=12)
    assert alarms(health) == {"schedule_reshaped"}
    assert "planned for 8 steps and goes on for 12" in verdict(health, "schedule_reshaped").message
    begin(health, step=4, max_steps=12)
    assert alarms(health) == set()


def test_a_smaller_batch_that_starts_again_does_not():
    health = Health()
    begin(health, step=2, max_steps=4)
    begin(health, step=2, max_steps=6, restart=True)
    assert alarms(health) == set()


@pytest.mark.parametrize(
    ("requested", "effective", "words"),
    [
        ({"logging_steps": 3, "save_steps": 100}, {"logging_steps": 1, "save_steps": 2},
         "logs every 1 steps and not every 3, saves every 2 steps and not every 100"),
        ({"logging_steps": 5}, {"logging_steps": 5}, None),
        ({"eval_steps": 0.1}, {"eval_steps": 20}, None),
        ({"eval_steps": None}, {"eval_steps": 20}, None),
    ],
)  # fmt: skip
def test_arguments_that_the_checkpoint_overrode_are_a_note(requested, effective, words):
    health = Health()
    begin(health, step=4, max_steps=200, requested=requested, effective=effective)
    assert health.level == "ok"
    assert active(health) == ({"arguments_overridden"} if words else set())
    if words:
        assert words in verdict(health, "arguments_overridden").message


def test_one_step_back_is_a_note_and_many_are_two_writers():
    health = Health()
    for step in (10, 20, 30, 20, 30, 40):
        log(health, step, loss=2.0 - step / 100)
    assert active(health) == {"step_back"}
    for step in range(50, 90, 10):
        log(health, step, loss=1.5)
        log(health, step - 30, loss=1.5)
    assert alarms(health) == {"two_writers"}


def test_a_failed_push_until_the_next_good_one():
    health = Health()
    begin(health)
    health.event({"event": "hub_push", "ok": False, "type": "HfHubHTTPError", "reason": None, "step": 30})
    assert alarms(health) == {"hub_push_failed"}
    assert "(HfHubHTTPError)" in verdict(health, "hub_push_failed").message
    health.event({"event": "hub_push", "ok": None, "step": 40})
    assert alarms(health) == {"hub_push_failed"}
    health.event({"event": "hub_push", "ok": True, "step": 60})
    assert alarms(health) == set()


@pytest.mark.parametrize(
    ("apart", "steps", "raised"), [(500, 100, True), (100, 100, False), (10, None, False)]
)
def test_a_training_that_will_not_log_is_told_so_at_its_begin(apart, steps, raised):
    health = Health()
    begin(health, max_steps=steps, effective={"logging_steps": apart})
    assert (active(health), health.level) == ({"never_logs"} if raised else set(), "ok")
    if raised:
        assert "logs every 500 steps and has 100" in verdict(health, "never_logs").message

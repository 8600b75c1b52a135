"""A train loss that is almost nothing: what may be known by heart, and what only looks like it."""

from __future__ import annotations

import pytest
from health_feed import active, alarms, begin, log, verdict

from tunewatch.health import Health

FALL = [2.0] * 10 + [2.0 * 0.6**i for i in range(1, 21)]
"""Down to 2 * 0.6 ** 20 = 0.00007; the quick mean follows by a factor of 0.8 a log at least."""


def feed(health: Health, per_epoch: int = 10, first: int = 1, **values: float) -> None:
    for step, loss in enumerate(FALL, first):
        log(health, step, loss=loss * (1.001 if step % 2 else 0.999), epoch=step / per_epoch, **values)
    for step in range(first + 30, first + 50):
        log(health, step, loss=0.0001, epoch=step / per_epoch, **values)


def test_a_supervised_fine_tuning_that_falls_to_nothing():
    health = Health()
    begin(health, trainer="SFTTrainer")
    feed(health)
    assert alarms(health) == {"collapsed_loss"}
    found = verdict(health, "collapsed_loss")
    assert found.level == "attention"
    assert found.message.startswith("The train loss fell from 2 to ")
    assert found.message.endswith("epochs: it may know its data by heart.")


@pytest.mark.parametrize("trainer", ["Trainer", "Seq2SeqTrainer", None])
def test_of_another_trainer_the_loss_alone_proves_nothing(trainer):
    """A classifier may be that sure of what it has never seen."""
    health = Health()
    begin(health, trainer=trainer)
    feed(health)
    assert alarms(health) == set()


@pytest.mark.parametrize(("start", "end"), [(5.0, 0.05), (0.5, 0.015)])
def test_small_beside_the_start_or_small_by_itself_is_not_enough(start, end):
    """1 % of the start but above 0.02; below 0.02 but 3 % of the start."""
    health = Health()
    begin(health, trainer="SFTTrainer")
    for step in range(1, 80):
        log(health, step, loss=max(end, start * 0.8 ** max(0, step - 10)), epoch=step / 10)
    assert "collapsed_loss" not in active(health)


def test_within_the_first_epoch_every_text_is_new():
    health = Health()
    begin(health, trainer="SFTTrainer")
    feed(health, per_epoch=50)
    assert alarms(health) == set()


def test_tokens_guessed_right_say_so_too():
    for accuracy, expected in ((0.995, {"collapsed_loss"}), (0.98, set())):
        health = Health()
        feed(health, mean_token_accuracy=accuracy)
        assert alarms(health) == expected


@pytest.mark.parametrize(
    ("trainer", "evaluation", "expected"),
    [
        ("SFTTrainer", 0.0008, set()),  # it is as good on texts it has not seen
        ("SFTTrainer", 1.9, {"collapsed_loss"}),
        ("Trainer", 1.9, {"collapsed_loss"}),
        ("Trainer", 0.005, set()),
    ],
)
def test_an_evaluation_tells(trainer, evaluation, expected):
    health = Health()
    begin(health, trainer=trainer)
    log(health, 0, eval_loss=evaluation)
    feed(health)
    assert alarms(health) == expected
    if expected:
        assert "where the evaluation loss is 1.9" in verdict(health, "collapsed_loss").message


def test_it_is_taken_back_when_the_loss_is_that_of_new_texts_again():
    health = Health()
    begin(health, trainer="SFTTrainer")
    losses = [*FALL[:20], *[0.015] * 30, *[1.0] * 40]
    for step, loss in enumerate(losses, 1):
        log(health, step, loss=loss, epoch=step / 10)
        if step == 50:
            assert "collapsed_loss" in active(health)
    assert "collapsed_loss" not in active(health)


def test_a_log_that_names_no_epoch_says_nothing():
    health = Health()
    begin(health, trainer="SFTTrainer")
    for step, loss in enumerate(FALL, 1):
        log(health, step, loss=loss)
    assert alarms(health) == set()

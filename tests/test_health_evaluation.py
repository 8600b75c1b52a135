"""Evaluation losses, and a train loss on another scale than theirs."""

from __future__ import annotations

import pytest
from health_feed import active, alarms, begin, log, moment, verdict

from tunewatch.health import Health


def feed(
    health: Health, evals: list[float], train: list[float] | None = None, key: str = "eval_loss"
) -> None:
    train = train or [2.0 - i / 20 for i in range(len(evals))]
    for index, (loss, evaluation) in enumerate(zip(train, evals, strict=True), 1):
        log(health, index * 100, loss=loss)
        log(health, index * 100, **{key: evaluation})


def test_two_losses_that_fall_and_level_are_ok():
    health = Health()
    begin(health, max_steps=6000)
    falling = [1.0 + 1.5 * 0.9**i for i in range(60)]
    feed(health, [loss + 0.1 for loss in falling], falling)
    assert (health.level, active(health)) == ("ok", set())


def test_overfitting_names_the_best_step():
    health = Health()
    feed(health, [2.0, 1.8, 1.7, 1.75, 1.9])
    assert active(health) == set()
    feed(health, [2.0])
    assert alarms(health) == {"overfitting"}, "1.9 and 2.0 are over 1.87"
    assert "from 1.7 at step 300 to 2 " in verdict(health, "overfitting").message
    assert "nearest to step 300" in verdict(health, "overfitting").advice


@pytest.mark.parametrize(
    ("there", "advice"),
    [
        (None, "Stop it, and keep the checkpoint nearest to step 300."),
        ({200, 300, 500}, "Stop it, and keep the checkpoint of step 300: it is still there."),
        ({200, 500}, "Stop it, and keep the checkpoint of step 200: that of step 300 is not there."),
        (set(), "Stop it, and keep a checkpoint of about step 300 the next time: there is none."),
    ],
)
def test_overfitting_says_whether_the_best_checkpoint_is_still_there(there, advice):
    health = Health()
    health.tick(moment(checkpoint_steps=None if there is None else frozenset(there)))
    feed(health, [2.0, 1.8, 1.7, 1.75, 1.9, 2.0])
    assert verdict(health, "overfitting").advice == advice


def test_and_says_it_anew_when_the_checkpoint_goes():
    health = Health()
    health.tick(moment(checkpoint_steps=frozenset({300, 600})))
    feed(health, [2.0, 1.8, 1.7, 1.75, 1.9, 2.0])
    health.tick(moment(checkpoint_steps=frozenset({500, 600})))
    assert "that of step 300 is not there" in verdict(health, "overfitting").advice
    assert verdict(health, "overfitting").step == 600
    feed(health, [1.6])
    health.tick(moment(checkpoint_steps=frozenset({600})))
    assert "step 500" in verdict(health, "overfitting").advice, "it is over: the text stays as it was"


def test_metrics_of_which_more_is_better_do_not_count():
    health = Health()
    for step, accuracy in enumerate([0.5, 0.6, 0.8, 0.9, 0.95, 0.99], 1):
        log(health, step, loss=2.0 - step / 10)
        log(health, step, eval_loss=2.1 - step / 10, eval_accuracy=accuracy, eval_f1=accuracy * 2)
    assert active(health) == set()


def test_one_of_several_sets_is_enough_and_is_named():
    health = Health()
    for number, (a, b) in enumerate(
        [(2.0, 3.0), (1.8, 2.9), (1.7, 2.8), (1.75, 2.7), (1.9, 2.6), (2.0, 2.5)], 1
    ):
        log(health, number * 100, loss=2.0 - number / 20)
        log(health, number * 100, eval_held_out_loss=a, eval_other_loss=b)
    assert alarms(health) == {"overfitting"}
    assert "(eval_held_out_loss) rose from 1.7 at step 300 to 2 " in verdict(health, "overfitting").message


def test_an_evaluation_on_another_scale_is_compared_with_itself():
    """Completions only: five times the train loss, and falling with it."""
    health = Health()
    feed(health, [10.0, 9.0, 8.5, 8.2, 8.0, 7.9])
    assert active(health) == set()


def test_when_the_train_loss_rose_too_it_has_another_name():
    health = Health()
    feed(health, [2.0, 1.8, 1.7, 1.9, 2.0, 2.1], [2.0, 1.8, 1.6, 2.2, 2.4, 2.5])
    assert alarms(health) == {"eval_rising"}


def test_a_steady_small_rise_is_seen():
    health = Health()
    feed(health, [2.0, 1.9, 1.8, 1.83, 1.86, 1.9])
    assert alarms(health) == {"overfitting"}, "three rises, 5.6 % in all"


def test_noise_is_no_rise():
    health = Health()
    losses = [
        0.272,
        0.260,
        0.239,
        0.241,
        0.239,
        0.253,
        0.227,
        0.243,
        0.223,
        0.262,
        0.219,
        0.209,
        0.216,
        0.249,
        0.239,
    ]
    feed(health, losses)
    assert alarms(health) == set()


def test_sets_are_told_apart():
    health = Health()
    begin(health)
    log(health, 10, {"eval_a_loss": "nan"})
    assert active(health) == {"eval_nonfinite", "no_best_checkpoint"}
    log(health, 10, eval_b_loss=2.0)
    assert active(health) == {"eval_nonfinite"}, "a sound set does not heal another"
    assert "eval_a_loss" in verdict(health, "eval_nonfinite").message
    log(health, 20, eval_a_loss=2.1)
    assert active(health) == set()


def test_never_finite_means_no_best_checkpoint():
    health = Health()
    begin(health)
    for step in (10, 20):
        log(health, step, loss=2.0)
        log(health, step, {"eval_loss": "nan"})
        assert alarms(health) == {"eval_nonfinite", "no_best_checkpoint"}
    log(health, 30, eval_loss=2.0)
    log(health, 40, {"eval_loss": "nan"})
    assert alarms(health) == {"eval_nonfinite"}


def test_preferences_have_no_overfitting():
    health = Health()
    begin(health, trainer="DPOTrainer")
    feed(health, [0.6, 0.5, 0.4, 0.6, 0.8, 0.9])
    assert alarms(health) == set()


class TestScale:
    @pytest.mark.parametrize(
        ("effective", "factor"),
        [
            ({"gradient_accumulation_steps": 8}, 8),
            ({"world_size": 4}, 4),
            ({"gradient_accumulation_steps": 4, "world_size": 2}, 8),
            ({"gradient_accumulation_steps": 2}, 2),
        ],
    )
    def test_a_train_loss_that_is_summed_over_micro_batches(self, effective, factor):
        health = Health()
        begin(health, effective=effective)
        log(health, 0, eval_loss=2.09)
        log(health, 1, loss=2.09 * factor + 0.02)
        assert alarms(health) == {"loss_scale"}
        assert f"{factor}.0 times" in verdict(health, "loss_scale").message

    @pytest.mark.parametrize(
        ("effective", "train"),
        [({"gradient_accumulation_steps": 8}, 2.2), ({}, 16.7), ({"gradient_accumulation_steps": 8}, 8.0)],
    )
    def test_another_ratio_is_none(self, effective, train):
        health = Health()
        begin(health, effective=effective)
        log(health, 0, eval_loss=2.09)
        log(health, 1, loss=train)
        assert alarms(health) == set()

    def test_far_from_the_start_only_a_large_factor_counts(self):
        for accumulation, expected in ((2, set()), (8, {"loss_scale"})):
            health = Health()
            begin(health, effective={"gradient_accumulation_steps": accumulation})
            log(health, 100, loss=2.0 * accumulation)
            log(health, 500, eval_loss=2.0)
            assert alarms(health) == expected

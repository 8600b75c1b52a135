"""Evaluation losses, and a train loss on another scale than theirs."""

from __future__ import annotations

import pytest
from health_feed import active, alarms, begin, log, verdict

from tunewatch.health import Health


def feed(
    health: Health, evals: list[float], train: list[float] | None = None, key: str = "eval_loss"
) -> None:
    train = train or [2.0 - i / 20 for i in range(len(evals))]
    for index, (loss, evaluation) in enumerate(zip(train, evals, strict=True), 1):
        log(health, index * 100, loss=loss)
        log(health, index * 100, **{key: evaluation})


def test_overfitting_names_the_best_step():
    health = Health()
    feed(health, [2.0, 1.8, 1.7, 1.75, 1.9])
    assert active(health) == set()
    feed(health, [2.0])
    assert alarms(health) == {"overfitting"}, "1.9 and 2.0 are over 1.87"
    assert "from 1.7 at step 300 to 2 " in verdict(health, "overfitting").message
    assert "nearest to step 300" in verdict(health, "overfitting").advice


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

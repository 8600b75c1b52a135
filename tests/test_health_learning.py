"""Runs that compute and learn nothing: dead losses, masked labels, frozen adapters, a learning rate of 0."""

from __future__ import annotations

import pytest
from health_feed import active, alarms, begin, log, logs, verdict

from tunewatch.health import Health


def healthy() -> Health:
    health = Health()
    begin(health, max_steps=1000, effective={"warmup_steps": 5}, trainable_parameters=8, total_parameters=80)
    return health


class TestDeadLoss:
    def test_exactly_0_for_ever_without_a_norm_is_dead(self):
        health = Health()
        log(health, 20, loss=1.93)
        log(health, 40, loss=0.0)
        assert active(health) == set(), "one line may be a window without labels"
        log(health, 60, loss=0.0)
        assert active(health) == {"zero_loss"}
        assert verdict(health, "zero_loss").step == 60

    def test_so_is_one_that_was_small_for_one_log_only(self):
        health = Health()
        logs(health, [0.012, 0.0, 0.0])
        assert active(health) == {"zero_loss"}

    def test_with_a_norm_of_0_the_labels_are_masked(self):
        health = healthy()
        logs(health, [0.0, 0.0], grad_norm=0.0, learning_rate=1e-4)
        assert active(health) == {"labels_masked"}

    def test_the_count_of_label_tokens_says_so_whatever_the_loss(self):
        health = healthy()
        log(health, 1, loss=2.0, grad_norm=1.0, tokens={"all": 100, "loss": 0})
        log(health, 2, loss=2.0, grad_norm=1.0, tokens={"all": 200, "loss": 0})
        assert active(health) == {"labels_masked"}

    def test_zero_with_growing_label_tokens_is_a_dead_run(self):
        health = healthy()
        for step in (1, 2):
            log(health, step, loss=0.0, grad_norm=0.0, tokens={"all": 100 * step, "loss": 50 * step})
        assert active(health) == {"zero_loss"}

    def test_a_rounded_loss_with_a_gradient_is_alive(self):
        health = healthy()
        logs(health, [1.4, 0.6] + [0.0] * 20, grad_norm=0.004, learning_rate=1e-4)
        assert alarms(health) == set()

    def test_a_memorised_task_comes_down_in_steps(self):
        health = Health()
        logs(health, [1.2, 0.4, 0.1, 0.02, 0.003] + [0.0] * 20)
        assert alarms(health) == set()

    @pytest.mark.parametrize("key", ["kl", "reward", "rewards/chosen"])
    def test_where_a_reward_is_optimized_0_is_usual(self, key):
        health = Health()
        logs(health, [0.0] * 40, grad_norm=0.0, learning_rate=1e-6, **{key: 0.1})
        assert alarms(health) == set()

    @pytest.mark.parametrize(
        "trainer", ["GRPOTrainer", "DPOTrainer", "KTOTrainer", "ORPOTrainer", "RewardTrainer"]
    )
    def test_such_a_trainer_is_known_by_its_name(self, trainer):
        health = Health()
        begin(health, trainer=trainer)
        logs(health, [0.0] * 40, grad_norm=0.0)
        assert alarms(health) == set()
        begin(health, trainer="SFTTrainer")
        logs(health, [0.0] * 2, grad_norm=0.0)
        assert alarms(health) == {"labels_masked"}


class TestNoGradient:
    def test_nothing_trainable_is_said_before_the_first_step_and_holds(self):
        health = Health()
        begin(health, trainable_parameters=0, total_parameters=1_000)
        assert active(health) == {"nothing_trainable"}
        logs(health, [2.3 - i / 100 for i in range(30)])
        assert "nothing_trainable" in active(health)
        begin(health, trainable_parameters=64, total_parameters=1_000)
        assert active(health) == set()

    def test_an_unknown_count_is_not_0(self):
        health = Health()
        begin(health, trainable_parameters=None, total_parameters=None)
        assert active(health) == set()

    def test_a_frozen_adapter(self):
        health = healthy()
        logs(health, [2.31, 2.28, 2.35, 2.30], grad_norm=0.0, learning_rate=2e-4)
        assert active(health) == set()
        log(health, 5, loss=2.33, grad_norm=0.0, learning_rate=2e-4)
        assert active(health) == {"no_gradient"}

    def test_batches_of_one_row_have_a_norm_of_0_now_and_then(self):
        health = healthy()
        for step in range(1, 200):
            loss = 2.0 - step / 200 + (0.3 if step % 3 else -0.3)
            log(health, step, loss=loss, grad_norm=3.0 if step % 8 == 1 else 0.0, learning_rate=1e-4)
        assert "no_gradient" not in active(health)


class TestLearningRate:
    @pytest.mark.parametrize("zero", [0, 0.0, "0"])
    def test_0_in_the_middle_for_two_logs(self, zero):
        health = healthy()
        log(health, 100, loss=2.0, learning_rate=1e-4)
        log(health, 110, loss=1.9, learning_rate=zero)
        assert active(health) == {"lr_zero_expected"}
        log(health, 120, loss=1.8, learning_rate=zero)
        assert alarms(health) == {"lr_zero"}
        log(health, 130, loss=1.7, learning_rate=1e-4)
        assert "lr_zero" in active(health), "it stays for ten logs"

    @pytest.mark.parametrize("steps", [(1, 2, 5), (980, 990, 1000)])
    def test_in_the_warm_up_and_at_the_end_it_is_a_note(self, steps):
        health = healthy()
        for step in steps:
            log(health, step, loss=3.0 - step / 1000, learning_rate=0.0)
        assert active(health) == {"lr_zero_expected"}
        assert health.level == "ok"

    def test_skips_of_the_scaler_explain_it(self):
        health = healthy()
        for step in range(6, 30):
            log(health, step, loss=3.0 - step / 100, learning_rate=0.0, skipped=step)
        assert alarms(health) == set()
        for step in (30, 31):
            log(health, step, loss=2.0, learning_rate=0.0, skipped=29)
        assert alarms(health) == {"lr_zero"}

    def test_a_log_read_on_its_own_takes_three(self):
        health = Health()
        for step in (1, 2):
            log(health, step, loss=557.5032 / step**3, learning_rate=0.0, grad_norm=0.0)
        assert "lr_zero" not in active(health)
        log(health, 3, loss=20.0, learning_rate=0.0, grad_norm=0.0)
        assert "lr_zero" in active(health)


class TestScalerSkips:
    def test_the_first_skips_are_a_note(self):
        health = Health()
        begin(health, precision="fp16")
        for step in range(1, 201):
            log(health, step, loss=2.0 - step / 200, skipped=min(step, 15))
            assert alarms(health) == set()

    def test_skipping_for_ever_is_bad_after_50_steps(self):
        health = Health()
        begin(health, precision="fp16")
        for step in range(1, 51):
            assert "fp16_overflow" not in active(health)
            log(health, step, loss=2.0, skipped=step)
        assert "fp16_overflow" in active(health)

    def test_a_third_of_the_steps_later_on(self):
        health = Health()
        begin(health, precision="fp16")
        for step in range(10, 300, 10):
            log(health, step, loss=2.0 - step / 300, skipped=0 if step <= 200 else (step - 200) // 3)
        assert alarms(health) == {"fp16_overflow"}
        assert "of the last 20 steps" in verdict(health, "fp16_overflow").message


def wavy(count: int, level: float = 1.4, height: float = 0.05) -> list[float]:
    """Up and down around a level."""
    return [level + (height if i % 2 else -height) for i in range(count)]


class TestFlat:
    def test_chance_level_is_seen_after_ten_logs(self):
        health = Health()
        losses = [10.824, 10.8252, 10.8224, 10.8244, 10.8231, 10.8237, 10.8239, 10.8204, 10.8205]
        logs(health, losses)
        assert active(health) == set()
        log(health, 10, loss=10.8219)
        assert active(health) == {"flat"}
        assert verdict(health, "flat").message.startswith(
            "The loss has not moved at all in 10 logs (10.82 at"
        )
        assert "labels (masking" in verdict(health, "flat").advice

    def test_noise_around_a_level_is_seen_after_thirty(self):
        health = Health()
        logs(health, wavy(29))
        assert active(health) == set()
        log(health, 30, loss=1.4)
        assert active(health) == {"flat"}
        assert "has not come down in 30 logs: 1.4 at the start" in verdict(health, "flat").message

    def test_wide_noise_takes_sixty_and_asks_for_larger_batches(self):
        health = Health()
        logs(health, wavy(59, 2.0, 0.6))
        assert active(health) == set(), "up and down by 30 %: the quick mean was far below the start"
        log(health, 60, loss=2.6)
        assert alarms(health) == {"flat"}
        assert "jumps up and down" in verdict(health, "flat").message
        assert "gradient accumulation" in verdict(health, "flat").advice

    def test_wide_noise_around_a_loss_that_falls_is_none(self):
        health = Health()
        logs(health, [loss - i / 100 for i, loss in enumerate(wavy(100, 2.5, 0.6))])
        assert alarms(health) == set()

    def test_nor_is_one_that_fell_by_half_of_the_noise_or_did_so_once(self):
        for after in (wavy(80, 1.55, 0.6), wavy(40, 1.2, 0.6) + wavy(60, 2.0, 0.6)):
            health = Health()
            logs(health, wavy(10, 2.0, 0.6) + after)
            assert "flat" not in active(health)

    def test_when_the_evaluation_is_flat_too_it_says_so(self):
        for evaluation, neither in ((2.01, True), (1.8, False)):
            health = Health()
            log(health, 0, eval_loss=2.02)
            logs(health, wavy(29))
            log(health, 29, eval_loss=evaluation)
            log(health, 30, loss=1.4)
            message = verdict(health, "flat").message
            assert message.startswith("Neither loss has come down") == neither
            assert ("the evaluation loss 2.02 at first, 2.01 at its best" in message) == neither

    def test_it_gives_way_to_the_reason_once_that_is_known(self):
        """Two alerts with contrary advice (a larger batch; a lower learning rate) help nobody."""
        health = Health()
        begin(health)
        logs(health, [2.0] * 12)
        assert active(health) == {"flat"}
        logs(health, [5.0] * 12, first=13)
        assert alarms(health) >= {"diverging"}
        assert "flat" not in active(health)

    def test_a_slow_start_in_the_warm_up_is_not(self):
        health = Health()
        begin(health, effective={"warmup_steps": 40})
        logs(health, [10.0] * 40)
        assert active(health) == set()

    def test_a_rate_that_rises_shows_the_warm_up(self):
        health = Health()
        for step in range(1, 61):
            log(health, step, loss=wavy(60)[step - 1], learning_rate=min(step, 50) * 1e-6)
            assert ("flat" in active(health)) == (step > 50), step

    def test_nor_has_a_long_schedule_begun_before_2_percent_of_it(self):
        health = Health()
        for step in range(1, 71):
            rate = 1e-4 * (1 - step / 3000)
            log(health, step, loss=wavy(70)[step - 1], learning_rate=rate)
            begun = rate <= 0.98 * 1e-4 * (1 - 1 / 3000)
            assert ("flat" in active(health)) == begun, step
        assert begun

    def test_a_loss_that_falls_takes_it_back(self):
        health = Health()
        logs(health, wavy(30))
        logs(health, [1.3 - i / 20 for i in range(20)], first=31)
        assert active(health) == set()

    def test_what_has_come_down_once_is_never_flat_again(self):
        health = Health()
        logs(health, [2.0] * 10 + [2.0 - i / 20 for i in range(20)])
        logs(health, wavy(60, 2.0, 0.01), first=31)
        assert "flat" not in active(health)

    def test_a_preference_is_never_flat(self):
        health = Health()
        begin(health, trainer="DPOTrainer")
        logs(health, [0.6931] * 100)
        assert active(health) == set()


def test_steps_without_tokens():
    health = healthy()
    for step in range(1, 8):
        log(health, step, loss=2.0 - step / 10, tokens={"all": min(step, 4) * 100, "loss": min(step, 4) * 90})
        assert ("data_not_consumed" in active(health)) == (step == 7)

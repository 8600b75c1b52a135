"""Spikes, bursts, divergence; each curve is made by hand, so that what is right is plain."""

from __future__ import annotations

import math
import random

from health_feed import active, alarms, begin, log, logs, verdict

from tunewatch.health import Health


def noisy(count: int, *, start: float = 2.0, slope: float = 0.004, noise: float = 0.05) -> list[float]:
    rng = random.Random(7)
    return [start - slope * i + rng.gauss(0.0, noise) for i in range(count)]


def test_one_spike_that_comes_back_is_a_note():
    health = Health()
    losses = noisy(60)
    losses[30] = 9.0
    logs(health, losses[:31])
    assert active(health) == {"spike"}
    assert health.level == "ok"
    assert "to 9 at step 31" in verdict(health, "spike").message
    logs(health, losses[31:], first=32)
    assert active(health) == set()


def test_a_spike_before_the_noise_is_known_is_a_note_too():
    health = Health()
    logs(health, [0.6623, 0.8022, 4.2653, 0.77, 0.556, 0.8223])
    assert active(health) == {"spike"}


def test_an_odd_first_window_is_none():
    health = Health()
    logs(health, [0.94, 1.79, 1.75, 1.71, 1.69, 1.66])
    assert active(health) == set()


def test_a_second_spike_soon_after_counts():
    for gap, expected in ((9, {"spikes"}), (10, set())):
        health = Health()
        losses = noisy(100)
        losses[40] = losses[40 + gap] = 9.0
        logs(health, losses[: 41 + gap])
        assert alarms(health) == expected, gap


def test_a_jump_that_does_not_come_back_in_five_logs_counts():
    health = Health()
    losses = noisy(60, noise=0.45)
    losses[40:45] = [2 * loss for loss in losses[40:45]]
    logs(health, losses[:45])
    assert alarms(health) == {"spikes"}


def test_a_jagged_curve_is_no_alarm():
    rng = random.Random(1)
    health = Health()
    for step in range(1, 1500):
        log(
            health,
            step,
            loss=1.2 + 1.3 * math.exp(-step / 15) - step / 3000 + rng.gauss(0.0, 0.2),
            grad_norm=math.exp(rng.gauss(0.0, 0.7)),
        )
        assert alarms(health) == set(), step


def test_stairs_down_at_the_epochs_are_no_alarm():
    health = Health()
    for step in range(1, 150):
        log(health, step, loss=2.0 * 0.6 ** (step // 25) + 0.02 * (step % 2))
        assert active(health) == set(), step


def test_stairs_that_rise_a_little_within_each_epoch_are_no_alarm():
    """What a memorising model logs: down at each border of an epoch, slowly up again before the next."""
    health = Health()
    for step in range(1, 200):
        epoch, within = divmod(step, 25)
        log(health, step, loss=1.8 * 0.65**epoch * (1 + 0.004 * within), epoch=step / 25)
        assert active(health) == set(), step


def test_the_wide_swings_of_the_start_do_not_hide_a_burst_in_the_calm_after():
    """From 8 down to 0.1 in six logs, then 5 % of noise: twice the loss for five logs is plain to see."""
    calm = [0.1 * (1 + (0.05 if i % 2 else -0.05)) for i in range(40)]
    losses = [8.0, 7.5, 3.0, 0.4, 0.2, 0.12, *calm]
    health = Health()
    logs(health, losses)
    assert active(health) == set()
    logs(health, [2 * loss for loss in calm[:5]], first=47)
    assert "spikes" in alarms(health)


def test_the_same_rise_within_wide_noise_is_none():
    wide = [0.1 * (1 + (0.6 if i % 2 else -0.6)) for i in range(60)]
    health = Health()
    logs(health, wide)
    logs(health, [2 * loss for loss in wide[:4]] + [0.04], first=61)
    assert alarms(health) <= {"flat"}


def test_a_slow_rise_of_a_calm_curve_is_divergence_and_a_small_one_is_not():
    """1 % of noise, from 1.0 up to 1.3 or 1.15 in thirty logs, where it stays."""
    for top, expected in ((1.3, {"diverging"}), (1.15, set())):
        health = Health()
        down = [1.0 + math.exp(-i / 5) for i in range(40)]
        up = [1.0 + (top - 1.0) * min(1.0, i / 30) for i in range(1, 60)]
        logs(health, [loss * (1.005 if i % 2 else 0.995) for i, loss in enumerate(down + up)])
        assert alarms(health) == expected, top


def test_divergence():
    health = Health()
    logs(health, noisy(60))
    best = min(noisy(60))
    logs(health, [best * (1 + 0.05 * i) for i in range(30)], first=61)
    assert "diverging" in active(health)
    assert health.level == "bad"


def test_a_dead_window_is_no_best_loss():
    health = Health()
    begin(health, precision="fp16")
    logs(health, noisy(40))
    for step in (41, 42, 43, 44):
        log(health, step, {"grad_norm": "nan"}, loss=0.0)
    logs(health, noisy(80)[44:], first=45)
    assert "diverging" not in active(health)
    assert "spikes" not in active(health)


def test_a_loss_of_0_that_a_filter_made_up_is_no_best_loss():
    health = Health()
    begin(health, each_step=True)
    logs(health, noisy(40), grad_norm=0.2)
    logs(health, [0.0] * 4, first=41, grad_norm=0.2)
    logs(health, noisy(80)[44:], first=45, grad_norm=0.2)
    assert alarms(health) == set()


def test_a_huge_first_loss_is_said_at_once():
    health = Health()
    begin(health)
    log(health, 1, loss=344093.2)
    assert alarms(health) == {"loss_huge"}
    assert "344093" in verdict(health, "loss_huge").message


def test_a_sane_or_a_preference_loss_is_not_huge():
    """174 is where a healthy public log of a summed loss begins."""
    for trainer, loss in (("SFTTrainer", 12.6), ("SFTTrainer", 174.0), ("GRPOTrainer", 5000.0)):
        health = Health()
        begin(health, trainer=trainer)
        log(health, 1, loss=loss)
        assert active(health) == set()


def test_a_gradient_norm_that_explodes():
    rng = random.Random(3)
    health = Health()
    for step in range(1, 41):
        log(health, step, loss=2.0 - step / 100, grad_norm=200_000 * math.exp(rng.gauss(0.0, 0.2)))
    assert active(health) == set(), "its size alone says nothing"
    log(health, 41, loss=1.6, grad_norm=1e7)
    assert active(health) == {"grad_spike"}
    log(health, 42, loss=1.6, grad_norm=1e7)
    assert alarms(health) == set()
    log(health, 43, loss=1.6, grad_norm=1e7)
    assert alarms(health) == {"grad_explosion"}


def around(level: float, share: float, count: int) -> list[float]:
    """Up and down around a level by a share of it: each log lies twice the share from the next, so that the noise is
    0.886 * 2 * share of the level."""
    return [level * (1 + (share if i % 2 else -share)) for i in range(count)]


def test_a_jump_is_measured_against_level_noise_and_the_first_losses():
    calm, rough = around(1.0, 0.001, 40), around(1.0, 0.15, 40)  # noise 0.0018 and 0.27
    small = [2.0] * 10 + [2.0 * 0.5**i for i in range(1, 9)] + around(0.01, 0.01, 60)
    for losses, jump, expected in (
        (calm, 1.45, set()),  # less than half of the level
        (calm, 1.55, {"spike"}),
        (rough, 2.0, set()),  # 4.5 times the noise is 1.2
        (rough, 2.6, {"spike"}),
        (small, 0.045, set()),  # 2 % of the first losses is 0.04
        (small, 0.06, {"spike"}),
    ):
        health = Health()
        logs(health, losses)
        log(health, len(losses) + 1, loss=jump)
        assert active(health) - {"flat"} == expected, jump


def test_two_jumps_have_to_be_larger_than_the_swings_of_the_start():
    """A third of a thousandth of where the loss came from: no reason to look at it."""
    calm = around(0.1, 0.05, 40)
    for start, expected in (([8.0, 7.5, 3.0, 0.4, 0.2, 0.12], set()), ([0.13, 0.12, 0.11], {"spikes"})):
        health = Health()
        logs(health, [*start, *calm, 0.3, *calm[:4], 0.3])
        assert "spike" in active(health)
        assert alarms(health) - {"flat"} == expected


def test_spikes_are_taken_back_after_ten_calm_logs():
    health = Health()
    calm = around(1.0, 0.02, 40)
    logs(health, [*calm, 4.0, 1.0, 4.0])
    assert "spikes" in active(health)
    logs(health, calm[:16], first=44)
    assert active(health) <= {"flat"}


def test_a_rate_that_is_too_high_from_the_first_step_on_is_divergence():
    """The best quick mean comes when the loss is up already; only the first loss tells."""
    health = Health()
    begin(health)
    logs(health, [4.0, 12.0, 20.0] + [14.0] * 20)
    assert verdict(health, "diverging").message.endswith("at step 23, 4 at its best.")


def test_a_first_loss_of_half_of_what_follows_is_no_best():
    health = Health()
    begin(health)
    logs(health, [0.94] + [1.79] * 25 + [1.7 - 0.02 * i for i in range(20)])
    assert "diverging" not in active(health)


def test_one_huge_spike_is_no_divergence():
    health = Health()
    logs(health, [*around(1.0, 0.02, 40), 500.0])
    for step, loss in enumerate(around(1.0, 0.02, 30), 42):
        log(health, step, loss=loss)
        assert alarms(health) <= {"flat"}, step


def test_a_rise_in_noise_has_to_be_larger_to_be_divergence():
    """Noise 0.18: 4.5 thirds of it are 0.27, 8 thirds 0.47."""
    for top, expected in ((1.24, False), (1.45, True)):
        health = Health()
        logs(health, around(1.0, 0.1, 40) + around(top, 0.1, 25))
        assert ("diverging" in active(health)) == expected, top


def test_a_rise_of_less_than_a_hundredth_of_the_start_is_none():
    fall = [2.0] * 10 + [2.0 * 0.7**i for i in range(1, 18)]
    for top, expected in ((0.02, False), (0.04, True)):
        health = Health()
        rise = [0.005 + (top - 0.005) * min(1.0, i / 20) for i in range(1, 50)]
        logs(health, fall + [0.005] * 30 + rise)
        assert ("diverging" in active(health)) == expected, top


def test_two_short_rises_are_no_divergence():
    health = Health()
    calm = around(1.0, 0.01, 30)
    for number in range(4):
        logs(health, [*calm, *[1.45] * 5], first=1 + 35 * number)
        assert "diverging" not in active(health)


def test_a_flattering_mean_of_a_damaged_window_is_no_best_loss():
    health = Health()
    begin(health, precision="fp16")
    logs(health, around(1.0, 0.02, 40))
    for step in range(41, 47):
        log(health, step, {"grad_norm": "nan"}, loss=0.4)
    logs(health, around(1.0, 0.02, 30), first=47)
    assert "diverging" not in active(health)
    assert "spike" not in active(health)


def test_a_norm_that_stays_up_in_noise_is_an_explosion_until_it_is_down_again():
    """ln 12 = 2.5 lies below six times the noise of the logarithm (0.44), but above ln 10 for five logs."""
    norms = [math.exp(0.25 if i % 2 else -0.25) for i in range(60)]
    health = Health()
    for step, norm in enumerate([*norms, *(12 * norm for norm in norms[:5])], 1):
        log(health, step, loss=2.0 - step / 100, grad_norm=norm)
    assert active(health) == {"grad_explosion"}
    for step, norm in enumerate(norms[:17], 66):
        log(health, step, loss=1.3 - step / 1000, grad_norm=norm)
    assert active(health) == set()

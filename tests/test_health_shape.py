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
    for gap, expected in ((12, {"spikes"}), (40, set())):
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
    for trainer, loss in (("SFTTrainer", 12.6), ("SFTTrainer", 25.4), ("GRPOTrainer", 5000.0)):
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

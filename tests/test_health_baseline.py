"""The running means, with values worked out by hand."""

from __future__ import annotations

import pytest

from tunewatch.health.baseline import Level, LogLevel, Smooth


def test_level():
    level = Level()
    level.add(1.0)
    assert (level.count, level.mean, level.noise) == (1, 1.0, 0.0)
    level.add(1.2)
    # mean of both; noise 0.886 * 0.2 = 0.1772 of a mean of 1.0, times the new mean
    assert level.mean == pytest.approx(1.1)
    assert level.swing == pytest.approx(0.1772)
    assert level.noise == pytest.approx(0.1772 * 1.1)
    level.add(9.0)
    # cut at 1.1 + 3 * 0.19492 = 1.68476; a third of the way up
    assert level.mean == pytest.approx(1.1 + 0.58476 / 3)


def test_the_noise_of_a_level_shrinks_with_it():
    level = Level()
    for index in range(60):
        level.add(4.0 * (1.05 if index % 2 else 0.95))
    at_4 = level.noise
    # 0.886 times the distance of two logs, 10 % of 4
    assert at_4 == pytest.approx(0.886 * 0.4, rel=0.1)
    for index in range(60):
        level.add(0.04 * (1.05 if index % 2 else 0.95))
    assert level.noise == pytest.approx(at_4 / 100, rel=0.2)
    assert level.swing > 3 * level.noise


@pytest.mark.parametrize("value", [0.0, -3.0, 1e308, -1e308, 5e-324])
def test_any_level_stays_a_number(value):
    level = Level()
    for number in range(30):
        level.add(value if number % 3 else 1.0)
    assert level.noise >= 0.0
    assert level.mean == level.mean


def test_log_level():
    level = LogLevel()
    for value in (1.0, 1.2, 5.0):
        level.add(value)
    # noise 0.886 * 0.2 = 0.1772; cut at 1.1 + 3 * 0.1772 = 1.6316, noise then the mean of it and 0.886 * 0.4316
    assert level.mean == pytest.approx(1.1 + 0.5316 / 3)
    assert level.noise == pytest.approx((0.1772 + 0.886 * 0.4316) / 2)


def test_smooth():
    smooth = Smooth()
    for value in (5.0, 4.0, 3.0, 2.0):
        smooth.add(value)
    assert (smooth.fast, smooth.best, smooth.first, smooth.start) == (3.5, None, 3.5, None)
    smooth.add(1.0)
    assert smooth.fast == smooth.best == pytest.approx(3.0)  # 3.5 + 0.2 (1.0 - 3.5)
    smooth.add(8.0)
    assert smooth.fast == pytest.approx(4.0)
    assert smooth.best == pytest.approx(3.0)
    for _ in range(4):
        smooth.add(1.0)
    assert smooth.start == pytest.approx((5 + 4 + 3 + 2 + 1 + 8 + 4) / 10)
    smooth.add(100.0)
    assert smooth.start == pytest.approx(2.7)

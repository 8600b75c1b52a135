"""Durations as people write them."""

from __future__ import annotations

import pytest

from tunewatch.durations import DurationError, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (300, 300.0),
        (0.5, 0.5),
        ("300", 300.0),
        ("1.5", 1.5),
        ("90s", 90.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("5min", 300.0),
        (" 1H30m ", 5400.0),
        ("1h 30m", 5400.0),
        ("1.5 h", 5400.0),
        ("2d", 172800.0),
    ],
)
def test_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "5 5m", "1 2", "1h30", "-5m", "5m-", "1e3", "m", 0, -1, "0s", True, float("nan"), float("inf")],
)  # fmt: skip
def test_refused_with_what_was_found(text):
    with pytest.raises(DurationError, match="is no duration") as error:
        parse_duration(text)
    assert repr(text) in str(error.value)

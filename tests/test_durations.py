"""Durations and points in time as people write them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tunewatch.durations import (
    DurationError,
    earliest,
    parse_deadline,
    parse_duration,
    parse_time,
    slurm_deadline,
)


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


@pytest.fixture
def in_berlin(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


NOW = datetime(2026, 12, 24, 16, 30, tzinfo=UTC)
"""Half past five in the evening in Berlin."""


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-12-25T18:00", "2026-12-25 17:00"),
        ("2026-12-25 18:00:30", "2026-12-25 17:00:30"),
        ("2026-12-25T18:00Z", "2026-12-25 18:00"),
        ("2026-12-25T18:00-05:00", "2026-12-25 23:00"),
        (" 18:00 ", "2026-12-24 17:00"),
        ("17:30", "2026-12-25 16:30"),
        ("17:29", "2026-12-25 16:29"),
        ("9:05:10", "2026-12-25 08:05:10"),
        ("2026-07-01T18:00", "2026-07-01 16:00"),
        (datetime(2026, 12, 25, 18), "2026-12-25 17:00"),
        (datetime(2026, 12, 25, 18, tzinfo=timezone(timedelta(hours=3))), "2026-12-25 15:00"),
    ],
    ids=str,
)
def test_points_in_time(in_berlin, text, utc):
    assert parse_time(text, NOW) == datetime.fromisoformat(f"{utc}+00:00")


@pytest.mark.parametrize(
    "text", ["", "soon", "2026-12-25", "24:00", "18:60", "18", "8h", "2026-13-01T00:00", "1766600000"]
)
def test_no_point_in_time(text):
    with pytest.raises(DurationError, match="is no point in time: write 2026-12-24T18:00") as error:
        parse_time(text, NOW)
    assert repr(text) in str(error.value)


def test_a_deadline_lies_ahead(in_berlin):
    assert parse_deadline("2026-12-24T17:31", NOW) == NOW.timestamp() + 60.0
    for text in ("2026-12-24T17:30", "2020-01-01T00:00Z"):
        with pytest.raises(DurationError, match="is over: a deadline must lie ahead"):
            parse_deadline(text, NOW)


@pytest.mark.parametrize(
    ("environment", "end"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"}, 1_800_000_000.0),
        ({"SLURM_JOB_END_TIME": "1800000000"}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "Unknown"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "9" * 40}, None),
    ],
)
def test_the_end_of_a_slurm_job(environment, end):
    assert slurm_deadline(environment, 1_790_000_000.0) == end


def test_the_earliest_of_those_that_are_known():
    assert earliest(None, 5.0, 3.0) == 3.0
    assert earliest(None, None) is None

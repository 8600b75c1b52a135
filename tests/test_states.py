"""The states of a run and the steps between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewatch.states import LIVE, STATES, TERMINAL, may_follow

NAMES = ["queued", "preparing", "training", "validating", "packaging", "completed", "failed", "cancelled"]


def test_the_states_are_these():
    assert list(STATES) == NAMES
    assert {"completed", "failed", "cancelled"} == TERMINAL
    assert {"preparing", "training", "validating", "packaging"} == LIVE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("queued", "preparing"),
        ("preparing", "training"),
        ("preparing", "validating"),  # a script that only evaluates
        ("training", "validating"),
        ("validating", "training"),
        ("training", "packaging"),
        ("packaging", "training"),  # train() again, in a script
        ("preparing", "completed"),  # a command that is no training
        *((live, end) for live in sorted(LIVE) for end in sorted(TERMINAL)),
        ("queued", "failed"),
        ("queued", "cancelled"),
    ],
)
def test_allowed(before, after):
    assert may_follow(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("queued", "training"),
        ("queued", "completed"),
        *((live, "queued") for live in sorted(LIVE)),
        ("training", "preparing"),
        *((end, any_state) for end in sorted(TERMINAL) for any_state in NAMES),
    ],
)
def test_not_allowed(before, after):
    assert not may_follow(before, after)


@given(st.lists(st.sampled_from(NAMES), max_size=30))
def test_whatever_comes_a_run_ends_once(wanted):
    state, ends = "queued", 0
    for after in wanted:
        if may_follow(state, after):
            ends += after in TERMINAL
            state = after
    assert ends == (1 if state in TERMINAL else 0)

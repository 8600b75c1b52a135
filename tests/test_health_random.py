"""Whatever the events hold, a Health takes it: no exception, no illegal verdict."""

from __future__ import annotations

import json
import math

from health_feed import moment
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewatch.health import LEVELS, SIGNALS, Health

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["nan", "inf", "0", "4.19"]),
)
junk = st.one_of(
    scalars, st.lists(scalars, max_size=3), st.dictionaries(st.text(max_size=4), scalars, max_size=3)
)
numbers = st.one_of(st.floats(0, 5), st.sampled_from([0, 0.0, 1e308, -1.0, 344093.2]), scalars)
keys = st.sampled_from(
    [
        "loss",
        "grad_norm",
        "learning_rate",
        "lr",
        "eval_loss",
        "eval_a_loss",
        "epoch",
        "kl",
        "rewards/chosen",
        "x",
    ]
)
values = st.one_of(junk, st.dictionaries(keys, numbers, max_size=8))
steps = st.one_of(st.integers(-5, 200), scalars)
names = st.sampled_from(
    [
        "train_begin",
        "log",
        "log",
        "log",
        "nonfinite",
        "finite",
        "evaluate",
        "save",
        "hub_push",
        "train_end",
        "other",
    ]
)
fields = {
    "step": steps, "values": values, "nonfinite": values, "tokens": st.one_of(junk, st.dictionaries(
        st.sampled_from(["all", "loss", "non_padding"]), numbers)),
    "skipped": numbers, "max_steps": steps, "effective": st.one_of(junk, st.dictionaries(st.sampled_from(
        ["precision", "warmup_steps", "warmup_ratio", "gradient_accumulation_steps", "world_size", "logging_steps",
         "lr_scheduler_type"]), numbers)),
    "requested": st.one_of(junk, st.dictionaries(st.sampled_from(["logging_steps", "eval_steps"]), numbers)),
    "restored": junk, "nan_visibility": st.sampled_from(["each step", "logs only", None]), "trainer": junk,
    "trainable_parameters": numbers, "total_parameters": numbers, "restart": junk, "loss": junk, "grad_norm": junk,
    "norm_seen": junk, "seconds": numbers, "ok": junk, "type": junk,
}  # fmt: skip
events = st.builds(
    lambda name, rest: {"event": name, **rest},
    st.one_of(names, junk),
    st.fixed_dictionaries({}, optional=fields),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(events, max_size=40), st.lists(events, max_size=5))
def test_random_events(now, before):
    health = Health()
    for event in before:
        health.past(event)
    for event in now:
        health.event(event)
        health.tick(moment(step=None))
        assert health.level in ("ok", *LEVELS[1:])
        for verdict in health.verdicts:
            assert verdict.level == SIGNALS[verdict.signal]
            assert verdict.step is None or type(verdict.step) is int
            assert verdict.message.endswith(".") and verdict.advice.endswith(".")
            assert "\n" not in verdict.message
            json.dumps(verdict.to_json(), allow_nan=False)
    assert health.deadline is None if not now else math.isfinite(health.deadline)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(keys, numbers, max_size=8), min_size=1, max_size=60))
def test_random_logs(lines):
    health = Health()
    for step, line in enumerate(lines):
        health.event({"event": "log", "step": step, "values": line})
    assert set(SIGNALS) >= {verdict.signal for verdict in health.verdicts}

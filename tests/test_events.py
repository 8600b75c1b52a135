"""What an event's fields may hold, and that readers know every field that is written."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from tunewatch import events
from tunewatch.probe.failure import describe

TRAINER = Path(__file__).resolve().parents[1] / "trainer" / "tunewatch"


def test_every_field_that_is_written_is_read():
    """A field that `checked` does not know would be lost without a word."""
    written = {"t", "m", "event", "rank", "session", *describe(ValueError())}
    for path in [*TRAINER.glob("probe/*.py"), *TRAINER.glob("finetune/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "event"
            ):
                written |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    assert {"step", "values", "terminated", "pid"} - {"pid"} <= written
    assert written <= events._FIELDS.keys(), written - events._FIELDS.keys()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("step", [0, 7, "12", 3.0], [-1, None, True, "x", math.nan, math.inf, 10**30, [1], {}]),
        ("seconds", [0, 2.5, "3"], [-1.0, math.nan, None, False, "soon"]),
        ("ratio", [0.5, 0, "0.25"], [None, True, math.inf, []]),
        ("detail", ["tokenizing", ""], [None, 3, ["x"], {}]),
        ("restart", [True, False], [None, 0, 1, "true"]),
        ("gpus", [["GPU-1"], []], [None, "GPU-1", {"a": 1}]),
        ("values", [{"loss": 1.0}, {}], [None, [1], "loss"]),
        ("nonfinite", [{"loss": "nan"}, {}], [None, "nan", []]),
        ("restored", [{"optimizer": False}, {}], [None, True]),
    ],
)
def test_what_makes_no_sense_is_absent(name, good, bad):
    assert [value for value in good if name not in events.checked({name: value})] == []
    assert [value for value in bad if name in events.checked({name: value})] == []


def test_inside_of_objects_too():
    event = {
        "values": {"loss": 2.0, "n": "3", "list": [1], "flag": True, "nan": math.nan, 7: 1.0},
        "nonfinite": {"loss": "nan", "x": "very", "y": 1},
        "effective": {"batch_size": 8, "precision": "bf16", "packing": True, "odd": [1], "nan": math.nan},
        "restored": {"optimizer": None, "rng": False},
    }
    assert events.checked(event) == {
        "values": {"loss": 2.0, "n": 3.0},
        "nonfinite": {"loss": "nan"},
        "effective": {"batch_size": 8, "precision": "bf16", "packing": True},
        "restored": {"rng": False},
    }


def test_a_field_of_another_version_is_left_out():
    assert events.checked({"event": "log", "step": 1, "something new": 1}) == {"event": "log", "step": 1}

"""Runs whose losses are the same although their settings are not."""

from __future__ import annotations

import json
import os

import pytest

from tunewatch.runfolder import RunFolder
from tunewatch.supervisor.twins import LOSSES, Twin, find_twin

CURVE = [4.1764 - 0.01234 * step for step in range(LOSSES + 5)]


@pytest.fixture
def runs(tmp_path):
    def write(name, losses, begins=0, age=0.0, **settings):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        info = {key: settings.pop(key) for key in ("dataset_hash", "lora_r") if key in settings}
        events = [
            {"event": "provenance", "info": info},
            {"event": "train_begin", "step": begins, "effective": {"batch_size": 8, **settings}},
            *(
                {"event": "log", "step": step + 1, "values": {"loss": loss}}
                for step, loss in enumerate(losses)
            ),
        ]
        folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
        os.utime(folder.events, (1.7e9 - age, 1.7e9 - age))
        return folder

    return write


def test_another_learning_rate_and_the_same_losses(runs):
    runs("old", CURVE, learning_rate=1e-5)
    assert find_twin(runs("new", CURVE, learning_rate=1e-3)) == Twin("old", ("learning_rate",))


def test_other_data_and_the_same_losses(runs):
    runs("old", CURVE, learning_rate=1e-5, dataset_hash="sha256:1")
    new = runs("new", [loss + 1e-7 for loss in CURVE], learning_rate=1e-5, dataset_hash="sha256:2")
    assert find_twin(new) == Twin("old", ("dataset_hash",))


@pytest.mark.parametrize(
    ("theirs", "settings"),
    [
        ([*CURVE[:9], CURVE[9] + 0.01, *CURVE[10:]], {"learning_rate": 1e-5}),  # one loss differs
        (CURVE, {"learning_rate": 1e-3}),  # the same run once more: nothing is wrong
        (CURVE, {}),  # its settings are not known
        (CURVE[: LOSSES - 1], {"learning_rate": 1e-5}),  # too short to tell
        (CURVE, {"learning_rate": 1e-5, "begins": 50}),  # resumed: not its first losses
    ],
)
def test_no_twin(runs, theirs, settings):
    runs("old", theirs, **settings)
    assert find_twin(runs("new", CURVE, learning_rate=1e-3)) is None


def test_a_loss_that_stands_still_tells_nothing(runs):
    runs("old", [0.6931] * 20, learning_rate=1e-5)
    assert find_twin(runs("new", [0.6931] * 20, learning_rate=1e-3)) is None


def test_only_the_newest_are_looked_at_and_garbage_is_passed_over(runs, monkeypatch):
    monkeypatch.setattr("tunewatch.supervisor.twins.RUNS", 2)
    runs("oldest", CURVE, age=900.0, learning_rate=1e-5)
    for number in range(2):
        folder = runs(f"other-{number}", CURVE[::-1], age=float(number), learning_rate=1e-5)
        folder.events.write_bytes(b"\xff{\n[]\n" + folder.events.read_bytes())
    new = runs("new", CURVE, learning_rate=1e-3)
    assert find_twin(new) is None
    monkeypatch.setattr("tunewatch.supervisor.twins.RUNS", 3)
    os.utime(runs("newest", CURVE, learning_rate=2e-5).events, (1.7e9, 1.7e9))
    assert find_twin(new) == Twin("newest", ("learning_rate",))

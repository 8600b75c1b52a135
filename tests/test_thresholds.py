"""What a user may set about the verdicts of a run, signals off and limits moved, and what that can not silence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from story import Story
from typer.testing import CliRunner

from tunewatch import TunewatchCallback
from tunewatch.cli import _kept, app
from tunewatch.health import SIGNALS, ThresholdError, Thresholds
from tunewatch.healthdoc import LIMITS, MEANINGS, document
from tunewatch.probe import ownruns
from tunewatch.supervisor.view import verdict_json
from tunewatch.supervisor.watch import Options
from tunewatch.trainjob import prepare

PAGE = Path(__file__).resolve().parents[1] / "docs" / "health.md"


# -- names and numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "off", "said"),
    [
        ({"flat_log": 3}, (), "no such threshold: flat_log; there are nonfinite_streak, .*; did you mean 'flat_logs'"),
        ({"xyzzy": 3}, (), r"no such threshold: xyzzy; there are .*\w$"),
        ({7: 3}, (), "no such threshold: 7; there are"),
        ({"flat_logs": 3.5}, (), "threshold flat_logs: 3.5 is not a whole number above 0"),
        ({"flat_logs": 0}, (), "threshold flat_logs: 0 is not a whole number above 0"),
        ({"lr_jump": -1.0}, (), "threshold lr_jump: -1.0 is not a number above 0"),
        ({"lr_jump": float("nan")}, (), "threshold lr_jump: nan is not a number above 0"),
        ({"lr_jump": float("inf")}, (), "threshold lr_jump: inf is not a number above 0"),
        ({"lr_jump": True}, (), "threshold lr_jump: True is not a number above 0"),
        ({"lr_jump": "2"}, (), "threshold lr_jump: '2' is not a number above 0"),
        ({}, ["overfiting"], "no such signal: overfiting; there are nonfinite, .*; did you mean 'overfitting'"),
        ({}, [5], "no such signal: 5; there are"),
    ],
)  # fmt: skip
def test_a_wrong_one_is_named_with_the_nearest(limits, off, said):
    with pytest.raises(ThresholdError, match=said):
        Thresholds.chosen(limits, off)


def test_what_is_set_and_what_is_not():
    chosen = Thresholds.chosen({"flat_logs": 50.0, "lr_jump": 2, "spike_hits": 2}, ["flat", "slow"])
    assert (chosen.flat_logs, chosen.lr_jump, chosen.off) == (50, 2.0, {"flat", "slow"})
    assert type(chosen.flat_logs) is int
    assert chosen.set_by_user() == {"flat_logs": 50, "lr_jump": 2.0}, "two hits are the default"
    assert Thresholds.chosen() == Thresholds()


def test_what_an_older_supervisor_was_given_is_taken_as_far_as_it_still_means_something():
    known = {"off": ["flat", "no_longer"], "thresholds": {"flat_logs": 40, "gone": 1.0}}
    assert _kept(known) == ({"flat_logs": 40}, ["flat"])
    assert _kept({}) == ({}, [])
    assert _kept({"off": None, "thresholds": None}) == ({}, [])


# -- what off means ---------------------------------------------------------------------------------------


@pytest.fixture
def telling(tmp_path, monkeypatch):
    stories = []

    def tell(*off, **limits):
        story = Story(tmp_path / str(len(stories)), monkeypatch, thresholds=Thresholds.chosen(limits, off))
        stories.append(story)
        story.open_session()
        story.train_begin()
        story.beat("data", max_steps=100.0)
        return story

    yield tell
    for story in stories:
        story.close()


def series(story):
    lines = [line for line in story.exposition().splitlines() if line.startswith("tunewatch_health{")]
    return {line.split('signal="')[1].split('"')[0] for line in lines}


def test_a_signal_that_is_off_is_in_no_verdict_and_has_no_series(telling):
    story = telling("nonfinite", "flat")
    story.steps(1, 5)
    story.event("nonfinite", step=5, loss=True, grad_norm=True, norm_seen=True)
    told = verdict_json(story.tick())
    assert (told["health"], told["act"], told["signals"]) == ("ok", "keep", [])
    assert series(story) == SIGNALS.keys() - {"nonfinite", "flat"}


def test_the_end_tells_of_damaged_weights_all_the_same(telling):
    story = telling("nonfinite")
    story.steps(1, 20)
    story.checkpoint(20)
    story.steps(21, 100)
    story.event("nonfinite", step=90, loss=True, grad_norm=True, norm_seen=True)
    story.checkpoint(100)
    story.event("train_end", step=100, max_steps=100, requested_stop=False)
    story.event("train_return")
    story.event("exit")
    story.tick()
    told = verdict_json(story.finish())
    assert (told["ending"]["state"], told["ending"]["reason"]) == ("failed", "nan")
    assert (told["health"], told["resume_from"]) == ("bad", "checkpoint-20")


def test_the_end_tells_of_a_stall_all_the_same(telling):
    story = telling("stalled")
    story.steps(1, 20)
    snapshot = story.wait(400)
    assert (snapshot.health, snapshot.verdicts) == ("ok", ())
    assert snapshot.phase_seconds["stalled"] > 60, "the time is counted"
    story.supervisor._process.poll = lambda: True
    assert story.finish().ending.reason == "stalled"


def test_a_limit_that_is_moved_counts(telling):
    def still(story):
        for step in range(1, 13):
            story.log(step, loss=3.0 + 0.02 * (step % 2))  # all within 0.67 % of each other
        return {verdict.signal for verdict in story.tick().verdicts}

    assert still(telling()) == set()
    assert still(telling(still_spread=0.007)) == {"flat"}
    assert still(telling(still_spread=0.006)) == set()


# -- where they are set -----------------------------------------------------------------------------------

CONFIG = """
model: tunewatch:tiny
dataset: rows.jsonl
output_dir: out
health:
  off: [flat, slow]
  thresholds:
    overfit_ratio: 1.2
    flat_logs: 50
"""


def test_the_command_line_goes_before_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "home"))
    (tmp_path / "run.yaml").write_text(CONFIG)
    options = Options(thresholds=Thresholds.chosen({"overfit_ratio": 1.3}, ["spikes"]))
    job = prepare(
        tmp_path / "run.yaml", name=None, run_id=None, options=options, patience={}, thresholds={"overfit_ratio": 1.3}
    )  # fmt: skip
    assert job.options.thresholds == Thresholds.chosen(
        {"overfit_ratio": 1.3, "flat_logs": 50}, ["flat", "slow", "spikes"]
    )


@pytest.mark.parametrize("command", [["exec"], ["train", "run.yaml"], ["adopt", "run"], ["replay", "file"]])
def test_each_command_has_both_flags(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = CliRunner().invoke(app, [command[0], "--help"]).output
    assert "--off" in text and "--threshold" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--off", "overfiting"), "no such signal: overfiting; there are"),
        (("--off", "overfiting"), "did you mean 'overfitting'?"),
        (("--threshold", "flat_log=3"), "did you mean 'flat_logs'?"),
        (("--threshold", "flat_logs"), "expected NAME=VALUE with one of nonfinite_streak"),
        (("--threshold", "flat_logs=many"), "--threshold 'flat_logs=many': expected a number above 0"),
        (("--threshold", "flat_logs=2.5"), "threshold flat_logs: 2.5 is not a whole number above 0"),
    ],
)  # fmt: skip
def test_wrong_flags(flags, said, monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(app, ["exec", *flags, "--", "true"])
    assert said in str(result.exception)
    assert not (tmp_path / "home").exists(), "before anything is made"


def test_the_callback_hands_them_to_its_supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(ownruns.subprocess, "Popen", lambda command, **rest: started.append(command))
    callback = TunewatchCallback(off=["flat"], thresholds={"flat_logs": 40, "lr_jump": 2.5})
    ownruns._start_supervisor(
        type("Writer", (), {"run_id": "r", "session": "s"}), callback._asked.tuning
    )  # fmt: skip
    (command,) = started
    assert command[-3:] == ["--off=flat", "--threshold=flat_logs=40.0", "--threshold=lr_jump=2.5"]


def test_the_callback_says_what_is_wrong_where_it_is_built():
    with pytest.raises(ValueError, match=r"no such signal: flatt; .* did you mean 'flat'"):
        TunewatchCallback(off=["flatt"])
    with pytest.raises(ValueError, match="threshold flat_logs: 0 is not a whole number above 0"):
        TunewatchCallback(thresholds={"flat_logs": 0})
    assert TunewatchCallback(off="flat")._asked.tuning.off == ("flat",)


def test_they_are_kept_for_the_next_supervisor(telling):
    story = telling("flat", lr_jump=2.0)
    known = story.folder.read("supervisor.json")
    assert (known["off"], known["thresholds"]) == (["flat"], {"lr_jump": 2.0})
    assert _kept(known) == ({"lr_jump": 2.0}, ["flat"])


# -- the page ---------------------------------------------------------------------------------------------


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == document() + "\n", (
        "write it anew: python -m tunewatch.healthdoc > docs/health.md"
    )


def test_the_command_writes_the_page():
    done = subprocess.run(
        [sys.executable, "-m", "tunewatch.healthdoc"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == document() + "\n"


def test_each_signal_and_each_limit_is_explained():
    assert MEANINGS.keys() == SIGNALS.keys()
    assert LIMITS.keys() == {field.name for field in fields(Thresholds)} - {"off"}
    for signals, text in LIMITS.values():
        assert set(signals) <= SIGNALS.keys() and signals and text
    text = document()
    for name in (*MEANINGS, *LIMITS):
        assert f"| `{name}` |" in text
    assert "| `overfit_ratio` | 1.1 |" in text
    assert "| `nonfinite` | bad | `resume` |" in text

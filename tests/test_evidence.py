"""What is kept beside a run at its first anomaly: told by stories, with the numbers worked out by hand."""

from __future__ import annotations

import json
import os
import re

import pytest
from story import EFFECTIVE, START, Story

from tunewatch.health import SIGNALS, Thresholds
from tunewatch.supervisor import evidence as module
from tunewatch.supervisor.evidence import MAX_FILES, POINTS, EvidenceFiles
from tunewatch.supervisor.view import verdict_json

SECRET = "hf_AbCdEfGhIjKlMnOp"
PLAIN = "swordfish"


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def begun(story, **fields):
    story.open_session()
    story.train_begin(**fields)
    story.beat("data", max_steps=100.0)


def kept(story, name):
    text = (story.folder.path / "evidence" / name).read_text(encoding="utf-8")

    def refuse(constant):
        raise AssertionError(f"{constant} is no strict JSON")

    return json.loads(text, parse_constant=refuse)


def names(story):
    return sorted(path.name for path in (story.folder.path / "evidence").glob("*"))


def nan_at(story, step):
    story.event("nonfinite", step=step, loss=True, grad_norm=True, norm_seen=True)


def test_a_healthy_run_leaves_none(story):
    begun(story)
    story.steps(1, 20)
    story.log(20, loss=3.0)
    story.tick()
    assert not (story.folder.path / "evidence").exists()
    assert verdict_json(story.tick())["evidence"] == []


def test_what_it_holds(story):
    story.event("provenance", info={"base_model": "tiny", "lora_r": 8}, environment={"torch": "2.6.0"})
    begun(story, requested={"logging_steps": 10})
    for step in (10, 20):
        story.steps(step - 9, step)
        story.log(step, loss=4.0 - step / 10, learning_rate=1e-3, grad_norm=1.5, num_tokens=step * 100.0)
    story.log(20, eval_loss=2.25, eval_poems_loss=3.0)
    story.event("memory", context="evaluate", memory={"rss": 5e8, "peak": 2e9})
    story.checkpoint(20)
    story.tick()
    story.steps(21, 25)
    nan_at(story, 25)
    story.log(25, {"grad_norm": "nan"}, loss=0.0, learning_rate=9e-4, num_tokens=2500.0)
    story.tick()

    assert names(story) == ["25-nonfinite.json"]
    told = kept(story, "25-nonfinite.json")
    assert told["verdict"] == verdict_json(story.supervisor.snapshot)["signals"][0]
    assert (told["signal"], told["ending"], told["run_id"]) == ("nonfinite", None, "story-1")
    assert told["glance"]["resume_from"] == "checkpoint-20"
    assert (told["step"], told["max_steps"], told["state"], told["phase"]) == (25, 100, "training", "data")
    train = told["points"]["train"]
    # 10 steps of 2 s between the first two logs, 100 tokens a step; the filter made the last loss up.
    assert train[1] == {
        "step": 20, "time": START + 40, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.5,
        "seconds_per_step": 2.0, "tokens_per_second": 50.0,
    }  # fmt: skip
    assert train[0]["seconds_per_step"] is None
    assert (train[2]["loss"], train[2]["grad_norm"]) == (None, None)
    assert train[2]["nonfinite"] == {"loss": "nan", "grad_norm": "nan"}
    assert told["nan_filter"] is True
    assert told["points"]["evaluation"] == [
        {"dataset": "eval", "step": 20, "time": START + 40, "loss": 2.25},
        {"dataset": "poems", "step": 20, "time": START + 40, "loss": 3.0},
    ]
    (memory,) = told["points"]["memory"]
    assert (memory["context"], memory["rss"], memory["peak"], memory["allocated"]) == (
        "evaluate",
        5e8,
        2e9,
        None,
    )
    assert told["ranks"]["0"]["step"] == 25
    assert told["ranks"]["0"]["phase_seconds"]["compute"] == 25 * 2 * 0.75
    assert told["ranks"]["0"]["memory_bytes"] == {"rss": 5e8}
    assert [item["name"] for item in told["checkpoints"]] == ["checkpoint-20"]
    assert told["config"]["info"] == {"base_model": "tiny", "lora_r": 8}
    assert told["config"]["effective"] == EFFECTIVE
    assert told["config"]["requested"] == {"logging_steps": 10}
    assert told["versions"]["torch"] == "2.6.0" and "tunewatch" in told["versions"]
    assert told["watched_with"] == {"patience": told["watched_with"]["patience"], "off": [], "thresholds": {}}
    assert told["watched_with"]["patience"]["step"] == 300.0


def test_verdict_json_and_a_next_supervisor_name_the_files(story):
    begun(story)
    story.steps(1, 5)
    nan_at(story, 5)
    assert verdict_json(story.tick())["evidence"] == ["5-nonfinite.json"]
    assert story.folder.read("verdict.json")["evidence"] == ["5-nonfinite.json"], (
        "in the very write that tells"
    )
    before = (story.folder.path / "evidence" / "5-nonfinite.json").stat().st_mtime_ns
    story.close()
    story.watch()  # adopted: the same session, whose events are read again
    assert verdict_json(story.tick())["evidence"] == ["5-nonfinite.json"]
    assert names(story) == ["5-nonfinite.json"]
    assert (story.folder.path / "evidence" / "5-nonfinite.json").stat().st_mtime_ns == before


def test_once_for_each_signal_and_session(story):
    begun(story)
    story.steps(1, 5)
    nan_at(story, 5)
    story.tick()
    story.event("finite", step=6)
    story.steps(6, 40)
    for step in range(6, 41):
        story.log(step, loss=3.0 - step / 100)
    story.tick()
    assert "nonfinite" not in {verdict.signal for verdict in story.supervisor.snapshot.verdicts}
    story.steps(41, 41)
    nan_at(story, 41)
    story.tick()
    assert names(story) == ["5-nonfinite.json"]

    (story.folder.path / "pulse.0").unlink()
    story.close()
    story.watch(new_session=True)
    story.open_session("s2")
    story.train_begin(step=4)
    story.beat("data", step=4.0, max_steps=100.0)
    story.tick()
    story.steps(5, 5)
    nan_at(story, 5)
    story.tick()
    assert "5-nonfinite-2.json" in names(story), "the same step again, in another session"


def test_a_failed_end_is_kept_and_no_other(story):
    begun(story)
    story.steps(1, 30)
    story.event("exception", during="train", type="RuntimeError", reason="unknown", frames=["train.py:1 f"])
    story.tick()
    story.finish()
    told = kept(story, "30-failed.json")
    assert (told["verdict"], told["ending"]["state"], told["signal"]) == (None, "failed", "failed")
    assert told["glance"]["act"] == "restart"
    assert verdict_json(story.supervisor.snapshot)["evidence"] == ["30-failed.json"]


def test_a_completed_run_keeps_none(story):
    begun(story)
    story.steps(1, 100)
    story.event("train_end", step=100, max_steps=100, requested_stop=False)
    story.event("train_return")
    story.event("exit")
    story.tick()
    assert story.finish().ending.state == "completed"
    assert not (story.folder.path / "evidence").exists()


def test_no_path_no_secret_no_text(story):
    row = "the row says canary-77"
    story.event(
        "provenance",
        info={"base_model": "/home/someone/models/tiny", "dataset": "poems"},
        environment={"python": "3.11"},
        arguments={
            "hub_token": SECRET,
            "vault_password": PLAIN,
            "output_dir": "/home/someone/out",
            "learning_rate": 1e-3,
            "note": row,
        },
    )
    begun(story)
    story.event("log", step=1, epoch=0.1, values={"loss": 3.0, "completion": row}, nonfinite={})
    story.event("memory", context=row, memory={"rss": 1.0})
    story.steps(1, 5)
    nan_at(story, 5)
    story.tick()
    told = kept(story, "5-nonfinite.json")
    assert told["config"]["arguments"]["output_dir"] == "out"
    assert told["config"]["arguments"]["learning_rate"] == 1e-3
    del told["config"]["arguments"]["note"]  # what the probe lets through is its matter
    text = json.dumps(told)
    assert SECRET not in text and PLAIN not in text and "/home" not in text and "canary" not in text
    assert str(story.output) not in text and str(story.folder.path) not in text
    assert not re.search(r'"[^"]*(?<!\w)/\w+/', text), "no absolute path"


def test_points_and_size_are_bounded(story):
    story.event("provenance", info={}, arguments={f"argument_{i}": "x" * 200 for i in range(400)})
    begun(story)
    for step in range(1, 301):
        sets = {f"eval_set{number}_loss": 1.0 for number in range(40)}
        story.log(step, loss=3.0 + 1e-9 * step, learning_rate=1.2345678901234e-5, grad_norm=1.0, **sets)
        story.event("memory", context="save", memory={"rss": 1e9 + step})
    story.steps(1, 3)
    nan_at(story, 3)
    story.tick()
    told = kept(story, "3-nonfinite.json")
    assert [point["step"] for point in told["points"]["train"]] == list(range(251, 301))
    assert len(told["points"]["memory"]) == POINTS
    rows = [row["dataset"] for row in told["points"]["evaluation"]]
    assert {rows.count(name) for name in rows} == {POINTS} and len(set(rows)) == module.MAX_SETS
    assert (story.folder.path / "evidence" / "3-nonfinite.json").stat().st_size < 300_000


def test_a_note_leaves_none(story):
    begun(story, effective={**EFFECTIVE, "logging_steps": 500})
    story.steps(1, 5)
    assert [verdict.signal for verdict in story.tick().verdicts] == ["never_logs"]
    assert not (story.folder.path / "evidence").exists()


def test_a_signal_that_is_off_leaves_none(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch, thresholds=Thresholds(off=frozenset({"nonfinite"})))
    begun(story)
    story.steps(1, 5)
    nan_at(story, 5)
    story.tick()
    assert not (story.folder.path / "evidence").exists()
    story.close()


# -- the files themselves ---------------------------------------------------------------------------------


def write_some(files, count, session):
    for number, signal in enumerate(list(SIGNALS)[:count]):
        files.tell(signal, number, session, lambda: {"session_start": session})


def test_a_bounded_number_of_files(tmp_path):
    files = EvidenceFiles(tmp_path)
    write_some(files, MAX_FILES + 5, 1.0)
    assert len(files.names) == MAX_FILES
    assert len(list((tmp_path / "evidence").iterdir())) == MAX_FILES
    assert files.names[0] == "0-nonfinite.json", "of one session the first ones stay"

    for number, name in enumerate(files.names):
        os.utime(tmp_path / "evidence" / name, (1000.0 + number, 1000.0 + number))
    later = EvidenceFiles(tmp_path)
    assert later.names == files.names
    later.tell("stalled", 7, 2.0, lambda: {"session_start": 2.0})
    assert len(later.names) == MAX_FILES
    assert "0-nonfinite.json" not in later.names and later.names[-1] == "7-stalled.json"
    assert len(list((tmp_path / "evidence").iterdir())) == MAX_FILES


def test_modes_are_private(tmp_path):
    write_some(EvidenceFiles(tmp_path), 1, 1.0)
    assert (tmp_path / "evidence").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "evidence" / "0-nonfinite.json").stat().st_mode & 0o777 == 0o600


def test_before_the_first_step(tmp_path):
    files = EvidenceFiles(tmp_path)
    files.tell("stalled", None, 1.0, dict)
    assert files.names == ("start-stalled.json",)


def test_files_of_others_do_no_harm(tmp_path):
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / "3-flat.json").write_text("{torn")
    (folder / "notes.json").write_text("[1]")
    (folder / "4-slow.json").mkdir()
    files = EvidenceFiles(tmp_path)
    files.tell("flat", 3, 1.0, lambda: {"session_start": 1.0})
    assert {"3-flat-2.json", "notes.json"} <= set(files.names)


def test_what_can_not_be_written_is_counted_and_said_once(story, capfd):
    (story.folder.path / "evidence").write_text("in the way")
    begun(story)
    story.steps(1, 5)
    story.tick()
    nan_at(story, 5)
    story.log(5, {"eval_loss": "nan"})
    story.clock.passed += 1
    story.tick()
    snapshot = story.tick()
    assert snapshot.health == "bad", "the watching goes on"
    assert snapshot.evidence == ()
    # nonfinite, eval_nonfinite, no_best_checkpoint
    assert snapshot.probe_errors["evidence"] == 3.0
    assert snapshot.probe_error_times == {"evidence": story.clock.time()}
    assert 'tunewatch_probe_errors_total{kind="evidence",run_id="story-1"} 3.0' in story.exposition()
    assert capfd.readouterr().err.count("evidence can not be written") == 1

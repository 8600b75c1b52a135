"""One glance: health, reason and act, by hand, by stories, and in agreement with what verdicts and endings advise."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from story import Story

from tunewatch.health import ACTS, SIGNALS, Glance, Standing, Thresholds, Verdict, at_a_glance
from tunewatch.health import verdict as signals_module
from tunewatch.health.glance import ACT_OF
from tunewatch.progressview import describe
from tunewatch.supervisor.ending import ADVICE, Ending, Evidence, judge
from tunewatch.supervisor.view import verdict_json

HEALTH = Path(signals_module.__file__).parent
CHECKPOINTS = [(20, "checkpoint-20"), (40, "checkpoint-40"), (60, "checkpoint-60")]


def raised(signal: str, step: int | None = 50, message: str = "It is so.") -> Verdict:
    return Verdict(signal, SIGNALS[signal], step, message, "Do this.")


def live(*verdicts: Verdict, **facts) -> Glance:
    level = next((name for name in ("bad", "attention") if name in {one.level for one in verdicts}), "ok")
    standing = {"state": "training", "level": level, "checkpoints": CHECKPOINTS, "steps_per_log": 1, **facts}
    return at_a_glance(Standing(verdicts=verdicts, **standing))


# -- the table --------------------------------------------------------------------------------------------


def test_each_signal_has_its_act():
    assert ACT_OF.keys() == SIGNALS.keys()
    assert set(ACT_OF.values()) == set(ACTS)
    assert {ACT_OF[signal] for signal, level in SIGNALS.items() if level == "info"} == {"keep"}
    assert "keep" not in {ACT_OF[signal] for signal, level in SIGNALS.items() if level == "bad"}


def advice_of_each_signal() -> dict[str, list[str]]:
    """The beginnings of what `hold` and `note` are given as advice, out of the source of the detectors."""
    found: dict[str, list[str]] = {}
    for file in sorted(HEALTH.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in ("hold", "note")
                and len(call.args) == 4
                and isinstance(call.args[0], ast.Constant)
            ):
                found.setdefault(str(call.args[0].value), []).extend(_beginnings(call.args[3]))
    return found


def _beginnings(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.JoinedStr(values=[first, *_]):
            return _beginnings(first)
        case ast.IfExp():
            return [*_beginnings(node.body), *_beginnings(node.orelse)]
        case ast.BinOp():
            return _beginnings(node.left)
    return []


def test_acts_agree_with_the_advice():
    advice = advice_of_each_signal()
    assert len(advice) > 30
    for signal, texts in advice.items():
        for text in texts:
            if text.startswith("Stop"):
                assert ACT_OF[signal] != "keep", (signal, text)
            if text.startswith("Keep it"):
                assert ACT_OF[signal] == "keep", (signal, text)


# -- while it lives ---------------------------------------------------------------------------------------


def test_nothing_is_known_then_nothing_is_wrong():
    unknown = at_a_glance(Standing(state="preparing", level="unknown"))
    assert (unknown.health, unknown.act, unknown.resume_from) == ("unknown", "keep", None)
    fine = live(step=30, max_steps=100, eta=140.0)
    assert fine == Glance(
        "ok", "It trains: step 30 of 100, 2 min 20 s left.", "keep", "keep it running", None
    )
    assert live(state="preparing", doing="tokenizing").reason == "It prepares: tokenizing."
    assert live(state="validating", step=40, max_steps=100).reason == "It evaluates at step 40 of 100."
    assert live(state="training").reason == "It trains."


def test_notes_change_nothing():
    assert live(raised("spike")).health == "ok"
    assert live(raised("spike")).reason == "It trains."


@pytest.mark.parametrize(
    ("verdict", "act", "text", "checkpoint"),
    [
        (raised("nonfinite"), "resume", "stop it and resume from checkpoint-40", "checkpoint-40"),
        (raised("nonfinite", 40), "resume", "stop it and resume from checkpoint-20", "checkpoint-20"),
        (raised("nonfinite", 15), "restart", "stop it and restart with other settings", None),
        (raised("labels_masked"), "restart", "stop it and restart with other settings", None),
        (raised("overfitting"), "stop", "stop it", None),
        (raised("hub_push_failed"), "keep", "keep it running", None),
        # A stall and a learning rate of 0 do no harm to what was saved.
        (raised("stalled", 61), "resume", "stop it and resume from checkpoint-60", "checkpoint-60"),
        (raised("lr_zero", 50), "resume", "stop it and resume from checkpoint-60", "checkpoint-60"),
        (raised("lr_restarted", 60), "resume", "stop it and resume from checkpoint-40", "checkpoint-40"),
        # What it began from, without its optimizer, was told at step 40; the one of step 60 is no better.
        (raised("resume_lost", 40), "resume", "stop it and resume from checkpoint-40", "checkpoint-40"),
    ],
    ids=lambda value: value.signal + f"-{value.step}" if isinstance(value, Verdict) else None,
)
def test_each_act(verdict, act, text, checkpoint):
    assert live(verdict) == Glance(verdict.level, "It is so.", act, text, checkpoint)


def test_a_stall_without_a_checkpoint_needs_no_other_settings():
    assert live(raised("stalled"), checkpoints=()).act_text == "stop it and start it again"


def test_diverging_goes_back_to_before_the_rise():
    """The verdict comes ten logs after the smoothed loss has risen, and that began up to ten before."""
    assert live(raised("diverging", 61)).resume_from == "checkpoint-40"
    assert live(raised("diverging", 60)).resume_from == "checkpoint-20", "40 = 60 - 20 is too late"
    assert live(raised("diverging", 61), steps_per_log=10).act == "restart"
    assert live(raised("diverging", 61), steps_per_log=None).act == "restart", "who knows how far back"
    assert live(raised("diverging", 61), limits=Thresholds(diverging_logs=1)).resume_from == "checkpoint-40"
    assert live(raised("diverging", 63), limits=Thresholds(diverging_logs=1)).resume_from == "checkpoint-60"


def test_a_rising_evaluation_goes_back_to_the_best_one():
    assert live(raised("eval_rising", 60), best_step=40).resume_from == "checkpoint-40"
    assert live(raised("eval_rising", 60), best_step=39).resume_from == "checkpoint-20"
    assert live(raised("eval_rising", 60)).act == "restart"


def test_an_overfitted_run_names_its_best_checkpoint_while_it_is_there(story):
    begun(story)
    for number, loss in enumerate((2.1, 2.0, 2.5, 3.0, 3.5), 1):
        step = 15 * number
        story.steps(step - 14, step)
        story.log(step, loss=3.0 - step / 100)
        story.log(step, eval_loss=loss)
        story.checkpoint(step)
    glance = story.tick().glance
    assert (glance.health, glance.act, glance.act_text) == (
        "attention",
        "stop",
        "stop it and keep checkpoint-30",
    )
    (story.output / "checkpoint-30").rename(story.output / "gone")
    story.clock.passed += 60
    assert story.tick().glance.act_text == "stop it; of the best step 30 there is no checkpoint"


def test_a_completed_run_that_overfitted_keeps_its_best_checkpoint():
    ending = Ending("completed", "", "late", "It is over.", "")
    run = Standing(
        state="completed", level="attention", ending=ending, verdicts=[raised("overfitting")], best_step=40,
        best_checkpoint="checkpoint-40",
    )  # fmt: skip
    assert (at_a_glance(run).act, at_a_glance(run).act_text) == ("keep", "keep checkpoint-40")


def test_the_worst_verdict_speaks():
    first, worse = raised("flat", message="Flat."), raised("zero_loss", message="Zero.")
    assert live(first, worse).reason == "Zero."
    keep, stop = raised("hub_push_failed", message="Push."), raised("overfitting", message="Overfits.")
    assert live(keep, stop).reason == live(stop, keep).reason == "Overfits.", "of two alike the one to act on"
    assert live(raised("lr_zero", message="First."), worse).reason == "First."


# -- how it ended -----------------------------------------------------------------------------------------


def ended(state="failed", reason="", when="late", verdicts=(), level="ok", checkpoints=CHECKPOINTS) -> Glance:
    ending = Ending(state, reason, when, "It is over.", "")
    return at_a_glance(
        Standing(state=state, level=level, ending=ending, verdicts=verdicts, checkpoints=checkpoints, steps_per_log=1)
    )  # fmt: skip


RESUME = "resume from checkpoint-60"
MEND = f"change what stopped it, then {RESUME}"
ANEW, AGAIN = "restart with other settings", "start it again"


@pytest.mark.parametrize(
    ("reason", "when", "health", "text", "without"),
    [
        ("oom_gpu", "early", "bad", ANEW, ANEW),
        ("oom_gpu", "late", "bad", MEND, ANEW),
        ("config", "early", "bad", ANEW, ANEW),
        ("data", "early", "bad", ANEW, ANEW),
        ("data", "late", "bad", MEND, ANEW),
        ("unknown", "early", "bad", ANEW, ANEW),
        ("unknown", "late", "bad", RESUME, AGAIN),
        ("nan", "early", "bad", MEND, ANEW),
        ("nan", "late", "bad", MEND, ANEW),
        ("killed_signal_9", "early", "bad", RESUME, AGAIN),
        ("killed_signal_11", "early", "bad", RESUME, ANEW),
        ("gpu_lost", "late", "bad", RESUME, AGAIN),
        ("stalled", "late", "bad", RESUME, AGAIN),
        ("preempted", "early", "attention", RESUME, AGAIN),
        ("preempted", "late", "attention", RESUME, AGAIN),
        ("hangup", "late", "attention", RESUME, AGAIN),
    ],
)
def test_failures(reason, when, health, text, without):
    act = "resume" if text in (RESUME, MEND) else "restart"
    checkpoint = "checkpoint-60" if act == "resume" else None
    assert ended(reason=reason, when=when) == Glance(health, "It is over.", act, text, checkpoint)
    assert ended(reason=reason, when=when, checkpoints=()) == Glance(
        health, "It is over.", "restart", without
    )


def test_preempted_with_damaged_weights_is_bad():
    found = ended(reason="preempted", verdicts=[raised("nonfinite")], level="bad")
    assert (found.health, found.reason) == ("bad", "It is over.")


def test_completed_and_cancelled():
    assert ended("completed") == Glance("ok", "It is over.", "keep", "keep the result")
    assert ended("completed", level="unknown").health == "unknown"
    push = ended("completed", verdicts=[raised("overfitting")], level="attention")
    assert push == Glance("attention", "It is so.", "keep", "keep the result")
    dead = ended("completed", verdicts=[raised("labels_masked")], level="bad")
    assert dead == Glance("bad", "It is so.", "restart", ANEW), "nothing to keep"
    stopped = ended("cancelled", reason="cancelled")
    assert (stopped.health, stopped.act) == ("ok", "keep")
    assert stopped.act_text == "nothing to do; it can go on from checkpoint-60"
    assert ended("cancelled", reason="cancelled", checkpoints=()).act_text == "nothing to do"


ALL_REASONS = [
    name for name in (*ADVICE, "killed_signal_9", "killed_signal_11") if name not in ("cancelled", "shm")
]


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("reason", ALL_REASONS)
def test_the_act_agrees_with_the_advice_of_the_ending(reason, when):
    evidence = Evidence(
        1, "exec", attached=True, trained=True, exited=True, step=65, max_steps=100,
        session_steps=5 if when == "early" else 65, exceptions=[{"type": "Error", "reason": reason}],
        last_resumable="checkpoint-60", newest_complete="checkpoint-60", resume_pick="checkpoint-64",
    )  # fmt: skip
    ending = judge(evidence)
    assert (ending.state, ending.reason, ending.when) == ("failed", reason, when)
    found = at_a_glance(Standing(state="failed", level="ok", ending=ending, checkpoints=CHECKPOINTS))
    assert ("checkpoint-60" in ending.advice) == (found.act == "resume")
    assert ("checkpoint-60" in ending.advice) == ("checkpoint-60" in found.act_text)


# -- where it is shown ------------------------------------------------------------------------------------


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def begun(story):
    story.open_session()
    story.train_begin()
    story.beat("data", max_steps=100.0)


def acts(story) -> dict[str, str]:
    lines = [line for line in story.exposition().splitlines() if line.startswith("tunewatch_suggested_act{")]
    return {line.split('"')[1]: line.split()[-1] for line in lines}


def test_verdict_json_and_metrics_say_the_same(story):
    assert acts(story) == {}, "unknown"
    begun(story)
    story.steps(1, 25)
    told = verdict_json(story.tick())
    assert (told["health"], told["act"], told["act_text"]) == ("ok", "keep", "keep it running")
    assert told["reason"] == "It trains: step 25 of 100, 2 min 30 s left."
    assert acts(story) == {"keep": "1.0", "stop": "0.0", "restart": "0.0", "resume": "0.0"}

    story.event("nonfinite", step=26, loss=True, grad_norm=True, norm_seen=True)
    story.steps(26, 26)
    told = verdict_json(story.tick())
    assert (told["health"], told["act"], told["resume_from"]) == ("bad", "restart", None)
    assert told["reason"] == told["signals"][0]["message"]
    assert acts(story)["restart"] == "1.0"


def test_a_checkpoint_makes_it_a_resume(story):
    begun(story)
    story.steps(1, 20)
    story.checkpoint(20)
    story.steps(21, 30)
    story.event("nonfinite", step=30, loss=True, grad_norm=True, norm_seen=True)
    story.checkpoint(30)
    snapshot = story.tick()
    told = verdict_json(snapshot)
    assert (told["act"], told["resume_from"]) == ("resume", "checkpoint-20"), "that of step 30 is damaged"
    assert acts(story)["resume"] == "1.0"
    assert describe(snapshot).endswith("stop it and resume from checkpoint-20")
    (story.output / "checkpoint-20" / "optimizer.pt").unlink()
    story.clock.passed += 60
    assert verdict_json(story.tick())["act_text"] == "stop it and restart with other settings"

    final = verdict_json(story.finish())
    assert (final["state"], final["health"], final["act"]) == ("failed", "bad", "restart")
    assert acts(story)["restart"] == "1.0"


def test_a_corrupt_checkpoint_names_the_one_that_its_advice_names(story):
    """A new run into the folder of an earlier one, which dies of loading its newest checkpoint."""
    story.open_session()
    story.beat("prepare")
    story.clock.passed -= 3600
    for step in (20, 40):
        story.checkpoint(step)
    story.clock.passed += 3600
    (story.output / "checkpoint-40" / "trainer_state.json").unlink()
    story.event("resume", output_dir=str(story.output))
    story.event("exception", during="train", type="SafetensorError", reason="checkpoint_corrupt")
    story.tick()
    snapshot = story.finish()
    assert snapshot.ending.reason == "checkpoint_corrupt"
    assert "resume from checkpoint-20 by name" in snapshot.ending.advice
    assert snapshot.glance.resume_from == "checkpoint-20"

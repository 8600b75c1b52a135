"""What a run looks like from outside, told by stories; every number is worked out by hand."""

from __future__ import annotations

import http.client
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
from harness import TESTS, Machine, parse_metrics, scrape
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from story import Story

from tunewatch import states
from tunewatch.health import Patience
from tunewatch.metrics import RunCollector
from tunewatch.probe.progress import ProgressTracker
from tunewatch.probe.pulse import FIELDS, PHASES, UNKNOWN_AT_START, Pulse
from tunewatch.supervisor import disk
from tunewatch.supervisor.ending import ADVICE, Ending
from tunewatch.supervisor.view import RunView, verdict_json


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def begun(story, **fields):
    story.open_session()
    story.beat("prepare")
    story.clock.passed += 30
    story.train_begin(**fields)
    story.beat("data", max_steps=100.0)


def signals(snapshot):
    return {verdict.signal: verdict for verdict in snapshot.verdicts}


def test_a_clock_that_is_set_is_noted_and_bends_no_duration(story):
    begun(story)
    story.steps(1, 10)
    before = story.tick()
    assert (before.elapsed, before.clock_jumps_total) == (50.0, 0)
    story.clock.set_by = -3600.0
    story.steps(11, 20)
    after = story.tick()
    assert (after.elapsed, after.session_elapsed, after.clock_jumps_total) == (70.0, 70.0, 1)
    assert after.eta == pytest.approx(80 * 2.0)
    assert after.deadline == pytest.approx(story.clock.time() + 300.0)
    assert story.tick().clock_jumps_total == 1


def test_work_at_risk(story):
    begun(story)
    assert story.tick().work_at_risk_steps == 0
    story.steps(1, 20)
    assert (story.tick().work_at_risk_steps, story.tick().work_at_risk_seconds) == (20, 40.0)
    story.checkpoint(20)
    story.steps(21, 27)
    snapshot = story.tick()
    assert (snapshot.work_at_risk_steps, snapshot.work_at_risk_seconds) == (7, 14.0)
    (story.output / "checkpoint-20" / "optimizer.pt").unlink()  # good for inference, but not to go on from
    story.clock.passed += 60
    assert story.tick().work_at_risk_steps == 27


def test_room_for_checkpoints_is_limited_by_bytes_or_by_files(story):
    begun(story)
    story.steps(1, 20)
    story.checkpoint(20)
    snapshot = story.tick()
    size = sum(file.stat().st_size for file in (story.output / "checkpoint-20").iterdir())
    assert snapshot.checkpoint_size == size
    # 4096000 bytes are free, room for many thousands of them; but 500 files are, and a checkpoint has five.
    assert 4096000 // size > 100
    assert snapshot.checkpoints_that_fit == 100


def test_written_and_present_are_two_numbers(story):
    begun(story)
    for step in (20, 40):
        story.steps(step - 19, step)
        story.checkpoint(step)
    (story.output / "checkpoint-20").rename(story.output / "gone")  # save_total_limit=1
    snapshot = story.tick()
    assert (snapshot.checkpoints_saved_total, snapshot.checkpoints_present) == (2, 1)


def test_the_best_checkpoint_is_named_while_it_exists(story):
    begun(story)
    story.steps(1, 20)
    story.log(20, eval_loss=2.0)
    story.checkpoint(20)
    story.steps(21, 40)
    story.log(40, eval_loss=2.5)
    story.checkpoint(40)
    snapshot = story.tick()
    assert (snapshot.best_step, snapshot.checkpoint_best_step, snapshot.evals_since_best) == (20, 20, 1)
    (story.output / "checkpoint-20").rename(story.output / "gone")
    story.wait(30)
    assert (story.tick().best_step, story.tick().checkpoint_best_step) == (20, None)


def test_a_long_evaluation_is_no_stall_as_long_as_batches_come(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch, patience=Patience(evaluate=60.0))
    begun(story)
    story.steps(1, 20)
    last_step = story.tick().ranks[0].last_step_time
    for _ in range(5):
        story.beat("evaluate")
        assert signals(story.wait(50)) == {}
    after = story.tick()
    assert after.ranks[0].last_step_time == last_step, "a sign of life is no step"
    assert after.last_activity == pytest.approx(story.clock.time() - 50)
    assert "in an evaluation" in signals(story.wait(20))["stalled"].message
    story.close()


def test_a_broken_checkpoint_is_told(story):
    begun(story)
    story.steps(1, 20)
    story.checkpoint(20)
    story.steps(21, 30)
    story.checkpoint(30)
    (story.output / "checkpoint-30" / "trainer_state.json").write_bytes(b"")
    snapshot = story.tick()
    assert (snapshot.checkpoints_present, snapshot.checkpoints_broken) == (1, 1)
    assert (snapshot.checkpoint_resumable_step, snapshot.work_at_risk_steps) == (20, 10)


def test_arguments_that_a_resume_overrides(story):
    begun(story, step=4, requested={"logging_steps": 3, "eval_steps": 20, "save_steps": 0.1})
    intervals = story.tick().intervals
    assert (intervals["log", "requested"], intervals["log", "effective"]) == (3.0, 10.0)
    assert ("save", "requested") not in intervals, "a share of the run, not steps"


def test_what_it_prepares(story):
    story.open_session()
    story.beat("prepare")
    story.event("phase", phase="prepare", detail="tokenizing", ratio=0.6, activity="tokenize")
    snapshot = story.tick()
    assert (snapshot.phase, snapshot.activity, snapshot.phase_ratio) == ("prepare", "tokenize", 0.6)
    assert verdict_json(snapshot)["activity"] == "tokenize"
    story.event("phase", phase="prepare", detail="", ratio=None, activity="what a dataset calls itself")
    assert story.tick().activity is None


def test_ranks_side_by_side(story):
    begun(story)
    story.steps(1, 10)
    other = Pulse(str(story.folder.path / "pulse.1"), rank=1)
    other.update(step=9.0, data_seconds=18.0, compute_seconds=2.0)
    ranks = story.tick().ranks
    assert {rank: values.step for rank, values in ranks.items()} == {0: 10, 1: 9}
    assert {rank: values.phase_seconds["data"] for rank, values in ranks.items()} == {0: 5.0, 1: 18.0}
    assert 'tunewatch_rank_step{rank="1",run_id="story-1"} 9.0' in story.exposition()


def test_samples_and_who_read_them(story):
    begun(story)
    assert story.tick().samples_reviewed is None
    story.event("samples", generated=20)
    story.clock.passed += 5
    story.tick()
    assert story.supervisor.snapshot.samples_reviewed == 0
    story.folder.write("review.json", {"reviewed": 12, "generated": 20, "at": 1.0})
    story.clock.passed += 5
    story.tick()
    assert story.tick().samples_reviewed == 12


def test_overlap_of_evaluation_and_training_rows(story):
    begun(story)
    assert story.tick().eval_overlap_rows is None
    story.event("provenance", info={"eval_overlap_rows": 3})
    assert story.tick().eval_overlap_rows == 3


def test_the_last_phase_does_not_vanish_with_the_process(story):
    begun(story)
    story.steps(1, 10)
    story.event("train_end", step=10, max_steps=10, requested_stop=False)
    story.beat("package")
    story.clock.passed += 12
    before = story.tick().phase_seconds
    after = story.finish().phase_seconds
    assert before["package"] == after["package"] == 12.0


def test_a_slow_save_is_no_stall_as_long_as_it_grows(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch, patience=Patience(save=60.0))
    begun(story)
    story.steps(1, 20)
    story.beat("save")
    story.event("phase", phase="save", detail="checkpoint-20", ratio=None)
    folder = story.output / "checkpoint-20"
    folder.mkdir()
    for megabytes in (1, 2, 3, 4):
        (folder / "optimizer.pt").write_bytes(b"0" * megabytes * 1_000_000)
        assert signals(story.wait(50)) == {}, "50 s without a sign of the training, but the file grows"
    stalled = signals(story.wait(40))["stalled"]
    assert "saving a checkpoint (checkpoint-20, 4.0 MB so far)" in stalled.message
    story.close()


def test_a_hang_at_the_end_of_an_epoch_says_so(story):
    begun(story)
    story.steps(1, 50)  # of 50 an epoch
    assert (
        "waiting for the next batch (at the end of an epoch)" in signals(story.wait(1000))["stalled"].message
    )
    story.steps(51, 52)
    assert "waiting for the next batch." in signals(story.wait(1000))["stalled"].message


def test_a_checkpoint_that_was_left_unfinished_is_told_once_nobody_writes_it(story):
    begun(story)
    story.steps(1, 20)
    story.checkpoint(20)
    story.steps(21, 30)
    story.checkpoint(30)
    (story.output / "checkpoint-30" / "trainer_state.json").unlink()
    assert "checkpoint_broken" not in signals(story.tick()), "it may be under way in a thread"
    story.clock.passed += 30
    story.beat()
    story.tick()
    verdict = signals(story.tick())["checkpoint_broken"]
    assert "A resume would pick checkpoint-30, which is not complete" in verdict.message
    assert "the newest complete one is checkpoint-20" in verdict.message


def test_a_full_disk_is_told_before_the_save_that_would_fail(story, monkeypatch):
    begun(story)
    story.steps(1, 20)
    story.checkpoint(20)
    assert "will_not_fit" not in signals(story.tick())
    monkeypatch.setattr(
        disk.os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=4096, f_files=0)
    )
    story.clock.passed += 30
    story.beat()
    story.tick()
    assert "will_not_fit" in signals(story.tick())


@pytest.mark.parametrize(
    ("activity", "allowed"), [("tokenize", 900), ("download", 900), ("load", 1800), (None, 3600)]
)
def test_what_it_prepares_has_a_patience_of_its_own(story, activity, allowed):
    story.open_session()
    story.beat("prepare")
    story.event("phase", phase="prepare", detail="so and so", ratio=0.6, activity=activity)
    assert signals(story.wait(allowed - 1)) == {}
    assert "while preparing (so and so)" in signals(story.wait(2))["stalled"].message


def test_a_schedule_that_a_resume_reshapes_is_told(story):
    begun(story, max_steps=8)
    story.steps(1, 4)
    story.log(4, loss=2.0, learning_rate=0.00067)
    story.clock.passed += 60
    story.close()
    story.watch(new_session=True)
    story.open_session("s2")
    story.train_begin(step=4, max_steps=12)
    story.beat("data")
    message = signals(story.tick())["schedule_reshaped"].message
    assert "8" in message and "12" in message


# -- whatever comes, in whatever order --------------------------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**20),
    st.floats(),
    st.text(max_size=5),
    st.just([1]),
    st.just({}),
)
STEP = st.one_of(st.integers(0, 30), ODD)
NUMBERS = st.dictionaries(
    st.sampled_from(
        [
            "loss",
            "grad_norm",
            "learning_rate",
            "eval_loss",
            "eval_a_loss",
            "num_tokens",
            "train_loss",
            "kl",
            "x/y",
        ]
    ),
    st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=32), ODD),
    max_size=4,
)
KINDS = {
    "session": {
        "pid": ODD, "process_start": ODD, "world_size": st.one_of(st.just(1), ODD), "interactive": st.booleans(),
    },
    "phase": {"phase": st.sampled_from([*PHASES, "?"]), "detail": ODD, "ratio": ODD, "activity": ODD},
    "state": {"state": st.sampled_from(["preparing", "packaging", "completed", "?"])},
    "provenance": {"info": st.one_of(NUMBERS, ODD), "environment": st.one_of(NUMBERS, ODD)},
    "device": {"gpus": st.one_of(st.just(["GPU-1"]), ODD)},
    "train_begin": {
        "step": STEP, "max_steps": STEP, "effective": st.one_of(st.just({"batch_size": 8, "logging_steps": 5}), ODD),
        "requested": ODD, "restored": st.one_of(st.just({"optimizer": False}), ODD), "restart": st.booleans(),
        "nan_filter": st.booleans(), "trainable_parameters": ODD, "nan_visibility": ODD, "trainer": ODD,
    },
    "log": {
        "step": STEP, "epoch": ODD, "values": st.one_of(NUMBERS, ODD), "tokens_seen": ODD, "skipped": ODD,
        "nonfinite": st.one_of(st.just({}), st.just({"loss": "nan", "grad_norm": "inf"}), ODD),
        "tokens": st.one_of(st.just({"all": 100, "loss": 0}), ODD),
    },
    "evaluate": {"step": STEP, "seconds": ODD, "batches": ODD},
    "save": {"step": STEP, "seconds": ODD},
    "nonfinite": {"step": STEP, "loss": st.booleans(), "grad_norm": st.booleans(), "norm_seen": st.booleans()},
    "finite": {"step": STEP},
    "train_end": {"step": STEP, "requested_stop": st.booleans()},
    "train_return": {},
    "exception": {"type": ODD, "reason": ODD, "during": st.sampled_from(["train", "process"])},
    "samples": {"generated": ODD},
    "hub_push": {"ok": ODD, "type": ODD, "reason": ODD, "step": STEP},
    "package": {"ok": ODD, "push": st.sampled_from(["done", "failed", "none"])},
    "exit": {},
    "of another version": {"x": ODD},
}  # fmt: skip
EVENT = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.fixed_dictionaries(
        {
            "event": st.just(kind),
            "rank": st.sampled_from([0, 0, 0, 1]),
            "session": st.sampled_from(["a", "b"]),
        },
        optional=KINDS[kind],
    )
)
COUNTED = [
    name for name in FIELDS if name.endswith(("_total", "_seconds")) or "bucket" in name or name == "saves"
]
BEAT = st.fixed_dictionaries(
    {
        "phase": st.integers(0, len(PHASES) - 1),
        "more": st.dictionaries(st.sampled_from(COUNTED), st.floats(0, 50)),
    },
    optional={"step": st.integers(0, 40), "max_steps": st.integers(1, 40), "epoch": st.floats(0, 3)},
)
MOVES = st.lists(
    st.tuples(st.one_of(EVENT, BEAT, st.just("history ends")), st.floats(0, 4000)), min_size=1, max_size=12
)
ENDING = st.sampled_from(
    [Ending("completed", "", "late", "", ""), Ending("cancelled", "cancelled", "early", "", "")]
    + [Ending("failed", reason, "late", "It failed.", "Look.") for reason in ("nan", "unknown")]
)


class Told:
    """A run that is told move by move, and what must hold after each of them."""

    def __init__(self):
        self.now = 1000.0
        self.view = RunView("r1", {"way": "exec"}, Patience(), now=self.now, wall=self.wall)
        self.view.enter(states.PREPARING, self.wall)
        self.pulse = dict.fromkeys(FIELDS, 0.0) | dict.fromkeys(UNKNOWN_AT_START, math.nan) | {"pid": 7.0}
        self.tracker = ProgressTracker()
        self.counters = {}
        self.state = states.PREPARING

    @property
    def wall(self):
        return self.now + 1.7e9

    def move(self, what):
        since = self.now
        if what == "history ends":
            if self.view.record.history:
                self.view.record.begin_session()
        elif "event" in what:
            self.view.event({"t": self.wall, "m": self.now, **what})
            values = what.get("values")
            self.tracker.update(step=what.get("step"), **(values if isinstance(values, dict) else {}))
        else:
            self.beat(**what)
        self.view.tick(self.now, self.wall, since=since)
        self.check()

    def beat(self, phase, more, **positions):
        since = self.pulse["phase_monotonic"] or self.now
        self.pulse[f"{PHASES[int(self.pulse['phase'])]}_seconds"] += self.now - since  # as the writer does
        self.pulse.update(
            phase=float(phase), activity_monotonic=self.now, phase_monotonic=self.now, **positions
        )
        for name, amount in more.items():
            self.pulse[name] = (0.0 if math.isnan(self.pulse[name]) else self.pulse[name]) + amount
        if not self.view.record.history:
            self.view.record.pulse({0: dict(self.pulse)})

    def check(self):
        snapshot = self.view.snapshot(self.now, self.wall)
        if snapshot.state != self.state:
            assert states.may_follow(self.state, snapshot.state), (self.state, snapshot.state)
            self.state = snapshot.state
        for name in (
            "elapsed",
            "session_elapsed",
            "eta",
            "work_at_risk_steps",
            "progress_ratio",
            "samples_seen",
        ):
            value = getattr(snapshot, name)
            assert value is None or value >= 0, name
        assert snapshot.progress_ratio is None or snapshot.progress_ratio <= 1
        for verdict in snapshot.verdicts:
            assert verdict.message and verdict.level in ("info", "attention", "bad")
        for family in RunCollector(lambda: [snapshot], lambda: self.wall).collect():
            for sample in family.samples:
                if family.type == "counter" or sample.name.endswith(("_bucket", "_count", "_sum")):
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    assert math.isfinite(sample.value), key
                    assert sample.value >= self.counters.get(key, 0.0) - 1e-6, (key, self.counters.get(key))
                    self.counters[key] = sample.value
        assert len(verdict_json(snapshot)) > 10


@settings(
    max_examples=int(os.environ.get("TUNEWATCH_SEQUENCES", "400")),
    report_multiple_bugs=False,
    phases=[p for p in Phase if p is not Phase.shrink or "TUNEWATCH_SHRINK" in os.environ],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(MOVES, ENDING)
def test_any_order_of_any_events(moves, ending):
    told = Told()
    for what, pause in moves:
        told.now += pause
        told.move(what)
    told.now += 1.0
    told.view.end(ending, told.now, told.wall)
    told.check()
    assert told.view.state == ending.state or not states.may_follow(told.state, ending.state)
    told.move({"event": "train_begin", "rank": 0, "session": "a", "step": 1})
    assert told.view.state in states.TERMINAL, "what comes after the end changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_events_in_front_of_a_real_supervisor(tmp_path, seed):
    machine = Machine(tmp_path)
    try:
        command = machine.start(
            "exec", "--no-linger", "--", sys.executable, str(TESTS / "scripts" / "any_events.py"), str(seed)
        )
        address = json.loads((machine.run_folder() / "supervisor.json").read_text())["address"]
        counters: dict[object, float] = {}
        while command.process.poll() is None:
            try:
                text = scrape(address)
            except (OSError, http.client.HTTPException):
                continue  # it has just ended, perhaps in the middle of an answer
            if f'run_id="{machine.run_folder().name}"' not in text:
                continue  # it has ended, and its port is another run's now
            for (name, labels), value in parse_metrics(text).items():
                # The phase under way is told anew with each pulse of this script, which lends it no time.
                if name.endswith("_total") and "phase_seconds" not in name:
                    assert math.isfinite(value)
                    assert value >= counters.get((name, labels), 0.0), (name, labels)
                    counters[name, labels] = value
            (machine.run_folder() / "seen").touch()
        assert command.wait() in (0, 1, 3), command.output
        assert "Traceback" not in command.output
        verdict = machine.verdict()
        assert verdict["state"] in states.TERMINAL
        assert verdict["ending"]["reason"] in {"", *ADVICE}
        assert len(counters) >= 15
    finally:
        machine.close()

"""Scripted events and pulses, folded into what is known of a run; every number is worked out by hand."""

from __future__ import annotations

import json
import math
import os
import subprocess

import pytest
from story import START, Story

from tunewatch.health import Patience
from tunewatch.probe.pulse import FIELDS
from tunewatch.probe.writer import process_start
from tunewatch.runfolder import create_run
from tunewatch.supervisor.record import MAX_EVAL_SETS, MAX_METRICS, Record
from tunewatch.supervisor.watch import AlreadyWatched, Options, Supervisor


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def begun(story, **fields):
    """The story up to a training that has begun."""
    story.open_session()
    story.beat("prepare")
    story.clock.passed += 30
    story.train_begin(**fields)
    story.beat("data")


def feed(record, event, **fields):
    record.event({"t": START, "m": 1.0, "event": event, "rank": 0, "session": "s", **fields})


def log(record, step, nonfinite=None, **values):
    feed(record, "log", step=step, values=values, nonfinite=nonfinite or {})


def in_session():
    record = Record()
    record.begin_session()
    feed(record, "session", pid=1)
    feed(record, "train_begin", step=0, max_steps=100)
    return record


class TestHistory:
    def test_what_came_before_the_session_tells_of_the_run_and_not_of_the_session(self):
        record = Record()
        feed(record, "session", pid=1)
        feed(record, "train_begin", step=0, max_steps=100)
        log(record, 10, loss=3.0, num_tokens=1000.0)
        log(record, 10, eval_loss=2.5)
        log(record, 20, {"eval_loss": "nan"})
        feed(record, "exception", type="X", reason="data")
        record.begin_session()
        assert (record.attached, record.trained, record.exceptions, record.sessions) == (False, False, [], {})
        assert (record.best_eval_loss, record.best_step, record.evals_since_best) == (2.5, 10, 1)
        assert record.nonfinite_evals == 0
        assert record.loss is None
        assert record.tokens_seen == {"non_padding": 1000.0}
        assert record.session_tokens == {}
        assert record.phase_detail == ""

    def test_a_clock_that_is_set_back_changes_nothing(self, story):
        """The session is told by its place in the file, not by its time."""
        story.clock.passed -= 3600
        begun(story)
        story.steps(1, 3)
        snapshot = story.tick()
        assert snapshot.attached
        assert (snapshot.state, snapshot.step, snapshot.steps_total) == ("training", 3, 3)
        assert snapshot.elapsed == 0.0
        assert snapshot.session_elapsed >= 0.0
        assert snapshot.eta == pytest.approx(97 * 2.0)

    def test_a_second_supervisor_knows_the_same(self, story):
        begun(story)
        story.steps(1, 20)
        story.log(20, loss=2.0, num_tokens=3000.0)
        story.checkpoint(20)
        first = story.tick()
        story.close()
        story.watch()
        second = story.tick()
        for name in ("step", "steps_total", "tokens_total", "tokens_seen", "loss", "resumes_total",
                     "checkpoints_present", "state", "step_buckets", "session_start"):  # fmt: skip
            assert getattr(second, name) == getattr(first, name), name


class TestTokens:
    def test_they_go_on_after_a_resume_and_the_counter_begins_anew(self):
        """TRL's num_tokens begins at 0 in each session; the run's position does not."""
        record = Record()
        feed(record, "train_begin", step=0)
        for step in range(1, 8):
            log(record, step, num_tokens=100.0 * step)
            if step in (2, 4, 6):
                feed(record, "save", step=step, checkpoint=f"checkpoint-{step}", seconds=1.0)
        record.begin_session()
        feed(record, "session", pid=1)
        feed(record, "train_begin", step=4)
        log(record, 5, num_tokens=100.0)
        assert record.tokens_seen["non_padding"] == 500.0
        assert record.session_tokens["non_padding"] == 100.0

    def test_a_save_between_two_logs_counts_up_to_the_log_before(self):
        record = Record()
        feed(record, "train_begin", step=0)
        for step in (10, 20):
            log(record, step, num_tokens=100.0 * step)
        feed(record, "save", step=25, seconds=1.0)
        log(record, 30, num_tokens=3000.0)
        feed(record, "train_begin", step=25)
        log(record, 40, num_tokens=50.0)
        assert record.tokens_seen["non_padding"] == 2050.0

    def test_memory_is_bounded(self, monkeypatch):
        monkeypatch.setattr("tunewatch.supervisor.record.MAX_UNSAVED", 50)
        record = in_session()
        for step in range(1, 2000):
            log(record, step, num_tokens=float(step))
            if step % 100 == 0:
                feed(record, "save", step=step, seconds=1.0)
        assert len(record._tokens_at) <= 19 + 50
        assert record._tokens_at[1900] == {"non_padding": 1900.0}

    def test_transformers_count_is_of_the_whole_run(self):
        record = in_session()
        feed(record, "log", step=5, values={}, nonfinite={}, tokens_seen=777)
        assert record.tokens_seen == {"all": 777.0}

    def test_each_kind_is_counted_for_itself(self):
        """Rows of 1 and 1023 tokens padded to 1024, of which 300 are answers: three numbers, never mixed."""
        record = in_session()
        counted = {"all": 2048, "non_padding": 1024, "loss": 300}
        feed(record, "log", step=1, values={"num_tokens": 1024.0}, nonfinite={}, tokens=counted)
        assert record.tokens_seen == {"all": 2048.0, "non_padding": 1024.0, "loss": 300.0}

    def test_transformers_count_of_what_is_no_padding_is_called_so(self):
        record = in_session()
        feed(record, "train_begin", step=0, effective={"include_num_input_tokens_seen": "non_padding"})
        feed(record, "log", step=5, values={}, nonfinite={}, tokens_seen=777)
        assert record.tokens_seen == {"non_padding": 777.0}

    def test_a_resume_of_what_nobody_watched_leaves_the_position_unknown(self):
        """A billion tokens before this session, a million in it: neither 1e6 nor a spike of 1e9."""
        record = in_session()
        feed(record, "train_begin", step=900, max_steps=1000)
        feed(record, "log", step=910, values={}, nonfinite={}, tokens={"all": 1_000_000})
        assert record.tokens_seen == {}
        known = {"tokens": {"all": 2_000_000}, "tokens_seen": 1_002_000_000}
        feed(record, "log", step=920, values={}, nonfinite={}, **known)
        assert record.tokens_seen == {"all": 1.002e9}

    def test_the_pulses_count_the_session_and_every_rank(self):
        record = in_session()
        pulse = dict.fromkeys(FIELDS, 0.0) | {"tokens_loss_total": math.nan, "tokens_all_total": 700.0}
        record.pulse({0: pulse, 1: pulse | {"tokens_non_padding_total": 5.0}})
        assert record.session_tokens == {"all": 1400.0, "non_padding": 5.0}

    def test_a_second_training_in_one_process_begins_at_nothing(self):
        record = in_session()
        first = {"all": 1000, "non_padding": 800}
        feed(record, "log", step=5, values={"num_tokens": 800.0}, nonfinite={}, tokens=first)
        feed(record, "train_end", step=5)
        feed(record, "train_begin", step=0, tokens={"all": 1200, "non_padding": 960})
        feed(
            record,
            "log",
            step=1,
            values={"num_tokens": 80.0},
            nonfinite={},
            tokens={"all": 1300, "non_padding": 1040},
        )
        assert record.tokens_seen == {"all": 100.0, "non_padding": 80.0}

    def test_a_save_between_two_logs_tells_what_it_holds(self):
        record = Record()
        feed(record, "train_begin", step=0)
        feed(record, "log", step=10, values={}, nonfinite={}, tokens={"all": 1000})
        feed(record, "save", step=15, seconds=1.0, tokens={"all": 1500})
        feed(record, "log", step=20, values={}, nonfinite={}, tokens={"all": 2000})
        record.begin_session()
        feed(record, "session", pid=1)
        feed(record, "train_begin", step=15)
        assert record.tokens_seen == {"all": 1500.0}, "right before the first log of the new session"
        feed(record, "log", step=20, values={}, nonfinite={}, tokens={"all": 500})
        assert record.tokens_seen == {"all": 2000.0}

    def test_a_search_for_the_batch_size_goes_on_counting(self):
        record = in_session()
        feed(record, "log", step=2, values={"num_tokens": 90.0}, nonfinite={})
        feed(record, "train_begin", step=0, max_steps=8, restart=True)
        feed(record, "log", step=1, values={"num_tokens": 112.0}, nonfinite={})
        assert record.tokens_seen["non_padding"] == record.session_tokens["non_padding"] == 112.0


class TestLogs:
    def test_known_keys_have_series_of_their_own(self):
        record = in_session()
        log(
            record,
            10,
            loss=2.0,
            learning_rate=1e-3,
            grad_norm=0.5,
            epoch=0.1,
            entropy=4.0,
            mean_token_accuracy=0.3,
        )
        assert (record.loss, record.learning_rate, record.grad_norm) == (2.0, 1e-3, 0.5)
        assert record.other == {"entropy": 4.0, "mean_token_accuracy": 0.3}

    def test_not_finite_is_kept_as_it_is(self):
        record = in_session()
        log(record, 10, {"loss": "nan", "grad_norm": "inf", "entropy": "-inf"})
        assert record.loss != record.loss
        assert (record.grad_norm, record.other["entropy"]) == (float("inf"), float("-inf"))

    def test_other_keys_are_bounded_and_the_rest_is_counted(self):
        record = in_session()
        for step in range(3):
            log(record, step, **{f"key{number}": 1.0 for number in range(MAX_METRICS + 5)})
        assert len(record.other) == MAX_METRICS
        assert record.dropped_total == 3 * 5

    def test_evaluation_sets(self):
        record = in_session()
        log(
            record,
            10,
            eval_a_loss=3.0,
            eval_a_runtime=9.0,
            eval_a_samples_per_second=1.0,
            eval_a_accuracy=0.5,
        )
        log(record, 10, eval_b_loss=1.0)
        log(record, 20, eval_a_loss=2.0)
        log(record, 20, eval_b_loss=5.0)
        log(record, 30, {"eval_a_loss": "nan"})
        assert record.eval_loss == pytest.approx({"a": float("nan"), "b": 5.0}, nan_ok=True)
        assert (record.best_eval_loss, record.best_step, record.evals_since_best) == (2.0, 20, 1), (
            "of the first set"
        )
        assert record.nonfinite_evals == 1
        assert record.other == {"eval_a_accuracy": 0.5}

    def test_evaluation_sets_are_bounded(self):
        record = in_session()
        for number in range(MAX_EVAL_SETS + 3):
            log(record, 1, **{f"eval_set{number}_loss": 1.0})
        assert len(record.eval_loss) == MAX_EVAL_SETS

    def test_the_summary(self):
        record = in_session()
        record.pulse({0: dict.fromkeys(FIELDS, 0.0) | {"steps_total": 5.0}})
        log(record, 100, train_loss=2.2, train_runtime=5.0, total_flos=7.0)
        assert (record.train_loss_mean, record.other) == (2.2, {})

    def test_a_log_that_tells_the_time_is_no_summary(self):
        """With include_num_input_tokens_seen each log has a train_runtime; only the summary has a train_loss."""
        record = in_session()
        log(record, 10, loss=2.0, train_runtime=5.0, train_tokens_per_second=100.0)
        assert (record.loss, record.train_loss_mean) == (2.0, None)

    def test_the_summary_of_a_finished_run_is_not_a_loss_of_zero(self):
        record = in_session()
        log(record, 100, train_loss=0.0, train_runtime=5.0)
        assert record.train_loss_mean is None

    def test_a_new_training_forgets_what_was_logged_before(self):
        record = in_session()
        record.pulse({0: dict.fromkeys(FIELDS, 0.0) | {"steps_total": 5.0}})
        log(record, 10, loss=2.0, learning_rate=1e-3, grad_norm=0.5, entropy=1.0)
        log(record, 10, train_loss=2.0)
        feed(record, "train_begin", step=5)
        known = (record.loss, record.learning_rate, record.grad_norm, record.train_loss_mean, record.other)
        assert known == (None, None, None, None, {})


class TestHub:
    def test_pushes_are_counted_and_the_last_good_one_is_dated(self):
        record = in_session()
        assert (record.hub_failures, record.hub_last_success) == (0, None)
        feed(record, "hub_push", ok=False, type="HfHubHTTPError", reason="hub", step=10)
        record.event(
            {"t": 77.0, "m": 1.0, "event": "hub_push", "rank": 0, "session": "s", "ok": True, "step": 20}
        )
        feed(record, "hub_push", ok=False, type="ConnectError", reason="hub", step=30)
        feed(record, "package", ok=True, push="failed")
        assert (record.hub_failures, record.hub_last_success) == (3, 77.0)

    def test_those_of_an_earlier_session_are_not_of_this_one(self):
        record = Record()
        feed(record, "hub_push", ok=False, step=10)
        record.begin_session()
        assert record.hub_failures == 0


class TestAttempts:
    def test_a_batch_size_restart_is_no_resume_and_wastes_nothing(self):
        record = in_session()
        log(record, 3, loss=1.0)
        feed(record, "train_begin", step=0, max_steps=150, restart=True)
        assert (record.resumes, record.wasted_seconds, record.max_steps) == (0, 0.0, 150)

    def test_steps_that_are_done_again(self):
        """61 steps of 2 s each are lost between the checkpoint and the crash."""
        record = Record()
        feed(record, "train_begin", step=0)
        for step in range(1, 162):
            feed(record, "log", step=step, values={"loss": 1.0}, nonfinite={}, m=100.0 + 2.0 * step)
        record.begin_session()
        feed(record, "session", pid=1)
        feed(record, "train_begin", step=100, m=9999.0)
        assert (record.steps_redone, record.wasted_seconds) == (61, pytest.approx(61 * 2.0))
        assert record.resumes == 1
        assert record.resumed_at == 100

    def test_the_pulse_knows_of_steps_that_were_never_logged(self):
        record = Record()
        feed(record, "train_begin", step=0)
        for step in (10, 20):
            feed(record, "log", step=step, values={"loss": 1.0}, nonfinite={}, m=2.0 * step)
        record.begin_session(last_step=27)
        feed(record, "train_begin", step=20)
        assert (record.steps_redone, record.wasted_seconds) == (7, pytest.approx(14.0))

    def test_rows_of_sessions_with_other_batches(self):
        """20 steps of 8 rows, then 10 of 6 that begin behind 5 of them: 15 * 8 + 10 * 6 = 180."""
        record = Record()
        feed(record, "train_begin", step=0, effective={"batch_size": 8})
        log(record, 20, loss=1.0)
        assert record.samples_seen == 160.0
        record.begin_session()
        feed(record, "train_begin", step=15, effective={"batch_size": 6})
        log(record, 25, loss=1.0)
        assert record.samples_seen == 180.0

    def test_rows_before_an_unwatched_resume_are_unknown(self):
        record = in_session()
        feed(record, "train_begin", step=900, effective={"batch_size": 8})
        log(record, 910, loss=1.0)
        assert record.samples_seen is None

    def test_what_an_earlier_session_did_again_is_not_counted_in_this_one(self):
        record = Record()
        for start in (0, 100):
            feed(record, "train_begin", step=start)
            for step in (110, 160):
                feed(record, "log", step=step, values={"loss": 1.0}, nonfinite={}, m=float(step))
        record.begin_session()
        assert record.wasted_seconds == 0.0

    def test_a_second_training_in_one_script_is_no_waste(self):
        record = in_session()
        for step in (10, 20):
            feed(record, "log", step=step, values={"loss": 1.0}, nonfinite={}, m=float(step))
        feed(record, "train_end", step=20, requested_stop=False)
        feed(record, "train_return")
        feed(record, "train_begin", step=0)
        assert record.wasted_seconds == 0.0

    def test_a_failed_attempt_that_was_tried_again_is_no_cause(self):
        record = in_session()
        feed(record, "exception", type="OutOfMemoryError", reason="oom_gpu")
        assert [error["reason"] for error in record.exceptions] == ["oom_gpu"]
        feed(record, "train_begin", step=0)
        assert record.exceptions == []

    def test_torchruns_second_attempt_forgets_the_first_but_not_its_own_ranks(self):
        record = in_session()
        feed(record, "exception", type="KeyError", reason="data", session="rank1-a", rank=1, m=2.0)
        feed(record, "session", session="b", pid=2, m=10.0)
        feed(record, "exception", type="ValueError", reason="config", session="rank1-b", rank=1, m=11.0)
        feed(record, "train_begin", session="b", step=0, m=12.0)
        assert [error["session"] for error in record.exceptions] == ["rank1-b"]

    def test_another_rank_that_returns_first_does_not_end_the_training(self):
        record = in_session()
        feed(record, "train_return", rank=1, session="r1")
        assert (record.training, record.train_returned) == (True, False)

    def test_the_process_that_counts_is_the_one_that_trains(self):
        """A script may run a Python before (tokenizing) and beside (a worker that imports the same)."""
        record = Record()
        record.begin_session()
        feed(record, "session", session="tokenize", pid=1)
        feed(record, "exit", session="tokenize")
        feed(record, "session", session="train", pid=2)
        feed(record, "train_begin", session="train", step=0)
        feed(record, "session", session="worker", pid=3)
        assert record.main_session == "train"
        assert record.main_session not in record.exited_sessions

    def test_the_pace_after_a_restart_is_of_the_new_batch_size(self):
        record = in_session()

        def pulse(count, seconds):
            record.pulse(
                {
                    0: dict.fromkeys(FIELDS, 0.0)
                    | {"pid": 1.0, "step_seconds_count": count, "step_seconds_sum": seconds}
                }
            )

        pulse(20, 200.0)
        assert record.pace.seconds_per_step == pytest.approx(10.0)
        feed(record, "train_begin", step=0, restart=True)
        assert record.pace.seconds_per_step is None
        pulse(24, 208.0)
        assert record.pace.seconds_per_step == pytest.approx(2.0)


class TestPhase:
    def test_words_that_are_out_of_date_are_not_shown(self, story):
        begun(story)
        story.event("phase", phase="data", detail="first batch", ratio=None)
        assert story.tick().phase_detail == "first batch"
        story.steps(1, 2)
        assert story.tick().phase_detail == ""
        story.event("phase", phase="save", detail="checkpoint-2", ratio=None)
        story.beat("save")
        assert story.tick().phase_detail == "checkpoint-2"
        story.beat("compute")
        assert story.tick().phase_detail == ""

    def test_how_much_of_it_is_done(self, story):
        story.open_session()
        story.beat("prepare")
        story.event("phase", phase="prepare", detail="tokenizing", ratio=0.6)
        snapshot = story.tick()
        assert (snapshot.state, snapshot.phase_detail, snapshot.phase_ratio) == (
            "preparing",
            "tokenizing",
            0.6,
        )

    def test_time_goes_to_the_phase_that_is_under_way(self, story):
        begun(story)
        story.steps(1, 10)
        story.tick()
        story.clock.passed += 7
        seconds = story.tick().phase_seconds
        assert seconds["compute"] == pytest.approx(15.0)
        assert seconds["data"] == pytest.approx(5.0 + 7.0)
        assert seconds["stalled"] == 0.0


class TestStall:
    def test_a_hang_is_seen_and_its_time_is_told_apart(self, tmp_path, monkeypatch):
        patience = Patience(step=10.0, step_factor=3.0, first_step=40.0)
        story = Story(tmp_path, monkeypatch, patience=patience)
        begun(story)
        story.clock.passed += 39
        assert story.tick().verdicts == ()
        story.steps(1, 5)
        snapshot = story.tick()
        assert snapshot.deadline == pytest.approx(story.clock.time() + 10.0)
        for _ in range(4):
            story.clock.passed += 2.6
            snapshot = story.tick()
        assert [verdict.signal for verdict in snapshot.verdicts] == ["stalled"]
        assert "after step 5, waiting for the next batch" in snapshot.verdicts[0].message
        story.clock.passed += 3.0
        assert story.tick().phase_seconds["stalled"] == pytest.approx(3.0)
        story.steps(6, 6)
        snapshot = story.tick()
        assert (snapshot.verdicts, snapshot.health) == ((), "ok")
        story.close()

    def test_our_own_absence_proves_nothing(self, tmp_path, monkeypatch):
        """Stopped for two minutes together with the training (a suspended machine): it gets its time once more."""
        story = Story(tmp_path, monkeypatch, patience=Patience(step=10.0, step_factor=3.0))
        begun(story)
        story.steps(1, 5)
        story.tick()
        story.clock.passed += 120
        assert story.tick().verdicts == ()
        for _ in range(3):
            story.clock.passed += 3
            assert story.tick().verdicts == ()
        story.clock.passed += 3
        assert [verdict.signal for verdict in story.tick().verdicts] == ["stalled"]
        story.close()


class TestEnd:
    def test_completed(self, story):
        begun(story)
        story.steps(1, 100)
        story.event("train_end", step=100, max_steps=100, requested_stop=False)
        story.event("train_return")
        story.beat("package")
        assert story.tick().state == "packaging"
        story.event("exit", code=None)
        snapshot = story.finish()
        assert (snapshot.state, snapshot.ending.reason) == ("completed", "")
        assert (snapshot.run_end, snapshot.eta, snapshot.deadline) == (story.clock.time(), None, None)

    def test_a_nan_run_is_told_which_checkpoint_is_sound(self, story):
        begun(story)
        for last in (20, 40, 60):
            story.steps(last - 19, last)
            story.checkpoint(last)
        story.event("nonfinite", step=41, loss=True, grad_norm=True)
        story.event("train_end", step=60, max_steps=60, requested_stop=False)
        story.event("train_return")
        story.event("exit", code=None)
        ending = story.finish().ending
        assert (ending.state, ending.reason) == ("failed", "nan")
        assert "since step 41" in ending.message
        assert "Resume from checkpoint-40." in ending.advice

    def test_a_nan_that_healed_is_no_failure(self, story):
        begun(story, max_steps=14)
        story.steps(1, 12)
        story.event("nonfinite", step=12, loss=True, grad_norm=True)
        assert story.tick().health == "bad"
        story.event("finite", step=13)
        story.steps(13, 14)
        story.event("train_end", step=14, max_steps=14, requested_stop=True)
        story.event("train_return")
        story.event("exit", code=None)
        assert story.finish().ending.reason == ""

    def test_checkpoints_of_another_run_in_the_same_folder_are_not_advised(self, story):
        begun(story)
        story.clock.passed -= 100_000
        story.checkpoint(500)
        story.clock.passed += 100_000
        story.steps(1, 15)
        story.tick()
        assert "checkpoint" not in story.finish().ending.advice.lower().replace("checkpointing", "")

    def test_a_run_that_was_resumed_may_go_back_to_where_it_came_from(self, story):
        story.open_session()
        story.beat("prepare")
        story.clock.passed -= 100_000
        story.checkpoint(40)
        story.clock.passed += 100_000
        story.train_begin(step=40)
        story.steps(41, 55)
        story.tick()
        assert "Resume from checkpoint-40." in story.finish().ending.advice

    def test_checkpoints_are_unknown_until_somebody_looked(self, story):
        story.open_session()
        assert story.tick().checkpoints_present is None
        story.beat("prepare")
        story.train_begin()
        assert story.tick().checkpoints_present == 0

    def test_verdict_json_is_strict(self, story):
        begun(story)
        story.steps(1, 1)
        story.log(1, {"loss": "nan"})
        story.tick()
        story.supervisor._write_verdict()

        def refuse(constant):
            raise AssertionError(constant)

        verdict = json.loads((story.folder.path / "verdict.json").read_text(), parse_constant=refuse)
        assert (verdict["loss"], verdict["loss_nonfinite"], verdict["state"]) == (None, True, "training")


def test_a_command_that_can_not_be_run_leaves_nothing_behind(tmp_path, monkeypatch):
    """Else Prometheus would go on asking for a target that is gone."""
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path))
    folder = create_run(run_id="r1", way="exec")
    supervisor = Supervisor(folder, Options(port=0))
    assert folder.target_file.is_file()
    with pytest.raises(FileNotFoundError):
        supervisor.start([str(tmp_path / "nothing")], {})
    assert not folder.target_file.exists()
    verdict = folder.read("verdict.json")
    assert (verdict["state"], verdict["ending"]["reason"]) == ("failed", "missing_file")
    Supervisor(folder, Options(port=0)).close()  # the lock is free again


class TestRanks:
    @pytest.fixture
    def gone(self):
        process = subprocess.Popen(["true"])
        start = process_start(process.pid)
        process.wait()
        return {"pid": process.pid, "process_start": start}

    def of_two(self, story):
        begun(story)
        story.event(
            "session", rank=0, pid=os.getpid(), process_start=process_start(os.getpid()), world_size=2
        )

    def test_one_that_died_without_a_word_is_noticed(self, story, gone):
        self.of_two(story)
        story.event("session", session="r1", rank=1, world_size=2, **gone)
        story.tick()
        assert story.finish().ending.reason == "rank_killed"

    @pytest.mark.parametrize("last_words", ["exit", "exception"])
    def test_one_that_left_in_order_or_raised_is_not(self, story, gone, last_words):
        self.of_two(story)
        story.event("session", session="r1", rank=1, world_size=2, **gone)
        story.event(last_words, session="r1", rank=1, reason="data", type="KeyError")
        story.tick()
        assert story.supervisor._dead_ranks == []

    def test_a_helper_that_is_gone_is_no_rank(self, story, gone):
        """A Python that tokenized before, and left with os._exit."""
        story.event("session", session="helper", world_size=1, **gone)
        begun(story)
        story.tick()
        assert story.supervisor._dead_ranks == []


def test_two_supervisors_of_one_run(story):
    with pytest.raises(
        AlreadyWatched, match=f"run story-1 is watched already, by process {os.getpid()} at 127"
    ):
        Supervisor(story.folder, Options(port=0))


def test_a_callback_session_is_found_by_its_process(tmp_path, monkeypatch):
    """A notebook that runs twice under one id: the first one's exception is history."""
    story = Story(tmp_path, monkeypatch, way="callback")
    story.open_session("old", pid=1, process_start=1)
    story.event("exception", type="X", reason="data")
    story.event("train_begin", step=0, max_steps=10)
    assert story.tick().attached is False
    story.open_session("new")
    story.beat("prepare")
    snapshot = story.tick()
    assert (snapshot.attached, snapshot.state) == (True, "preparing")
    assert story.supervisor._record.exceptions == []
    story.close()


def test_a_helper_programs_exception_is_no_cause_and_ends_no_training():
    """A script may run another Python program, and handle its failure."""
    record = Record()
    record.begin_session()
    feed(record, "session", session="main", pid=1, world_size=1)
    feed(record, "train_begin", session="main", step=0)
    feed(record, "session", session="helper", pid=2, world_size=1)
    feed(record, "exception", session="helper", type="KeyError", reason="data")
    assert record.exceptions == []
    assert record.training
    feed(record, "exception", session="main", type="ValueError", reason="config")
    assert [error["session"] for error in record.exceptions] == ["main"]
    assert not record.training


def test_a_loss_that_the_filter_made_up_is_nan():
    """logging_nan_inf_filter logs 0.0 for a dead run, and too little for a window with one bad micro-batch."""
    record = Record()
    record.begin_session()
    feed(record, "session", session="s", pid=1, world_size=1)
    feed(record, "train_begin", step=0, nan_filter=True, nan_visibility="each step")
    log(record, 2, loss=4.2)
    assert record.loss == 4.2
    feed(record, "nonfinite", step=3, loss=True, grad_norm=False)
    feed(record, "finite", step=4)
    log(record, 4, loss=2.1)  # half of the truth
    assert math.isnan(record.loss)
    log(record, 6, loss=4.1)
    assert record.loss == 4.1
    feed(record, "nonfinite", step=7, loss=True, grad_norm=True)
    for step in (8, 10, 12):
        log(record, step, loss=0.0)
        assert math.isnan(record.loss)


def test_without_the_filter_a_logged_loss_is_what_it_was():
    record = Record()
    record.begin_session()
    feed(record, "train_begin", step=0, nan_filter=False, nan_visibility="each step")
    feed(record, "nonfinite", step=3, loss=True, grad_norm=False)
    log(record, 4, nonfinite={"loss": "nan"})
    assert math.isnan(record.loss)
    feed(record, "finite", step=5)
    log(record, 6, loss=3.0)
    assert record.loss == 3.0


def test_a_probing_program_before_the_training_is_no_cause():
    """python -c "import something" that failed, and was expected to."""
    record = Record()
    record.begin_session()
    feed(record, "session", session="main", pid=1, world_size=1, m=1.0)
    feed(record, "session", session="probe", pid=2, world_size=1, m=2.0)
    feed(record, "exception", session="probe", type="ModuleNotFoundError", reason="config", m=2.1)
    feed(record, "train_begin", session="main", step=0, m=3.0)
    assert record.exceptions == []

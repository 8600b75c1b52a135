"""The reporter on scripted sequences of trainer events, with a clock of the test's own."""

from __future__ import annotations

import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import wait_for

from tunewatch.probe import background
from tunewatch.probe import reporter as reporter_module
from tunewatch.probe.progress import ProgressTracker
from tunewatch.probe.pulse import PHASES, STEP_BUCKETS, read_pulse
from tunewatch.probe.reporter import Reporter, claim
from tunewatch.probe.writer import RunWriter


class Clock:
    """Stands in for the module `time`; every clock of it shows the same, plus an offset."""

    def __init__(self):
        self.now = 0.0
        self.set_by = 0.0  # seconds by which somebody has set the wall clock

    def perf_counter(self):
        return 50.0 + self.now

    def monotonic(self):
        return 1000.0 + self.now

    def time(self):
        return 1.7e9 + self.now + self.set_by

    def thread_time(self):
        return 0.0


class Optimizer:
    def __init__(self, entries=0):
        self.state = dict.fromkeys(range(entries))
        self.step_was_skipped = False
        self.param_groups = [{"lr": 1e-3, "betas": (0.9, 0.999)}]


class Loop:
    """A training loop as transformers runs it, reduced to its events. Numbers are seconds."""

    def __init__(self, folder, clock, *, rank=0, max_steps=4, step=0, **arguments):
        self.folder, self.clock = folder, clock
        self.writer = RunWriter(str(folder))
        self.writer.rank = rank
        self.tracker = ProgressTracker()
        self.reporter = Reporter(self.writer, self.tracker)
        self.args = SimpleNamespace(**{
            "output_dir": "/somewhere/out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
            "world_size": 2, "learning_rate": 1e-3, "bf16": True, "n_gpu": 1, "logging_nan_inf_filter": True,
            "ignore_data_skip": False, "save_total_limit": 3, **arguments,
        })  # fmt: skip
        self.state = SimpleNamespace(global_step=step, max_steps=max_steps, epoch=0.0, num_train_epochs=1)
        self.control = SimpleNamespace(should_evaluate=False, should_save=False, should_training_stop=False)
        self.optimizer, self.scheduler = Optimizer(), SimpleNamespace(last_epoch=0)

    def wait(self, seconds):
        self.clock.now += seconds

    def begin(self, **objects):
        self.reporter.train_begin(
            self.args, self.state, optimizer=self.optimizer, lr_scheduler=self.scheduler, **objects
        )

    def step(self, *, data=0.0, compute=1.0, evaluate=False, save=False, skipped=False):
        self.wait(data)
        self.reporter.step_begin()
        self.wait(compute)
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / 10
        self.control.should_evaluate, self.control.should_save = evaluate, save
        self.optimizer.step_was_skipped = skipped
        self.reporter.step_end(self.args, self.state, self.control, optimizer=self.optimizer)

    def evaluation(self, seconds, batches=2, prefix="eval"):
        for _ in range(batches):
            self.wait(seconds / batches)
            self.reporter.prediction_step()
        self.reporter.log(self.args, self.state, {f"{prefix}_loss": 2.5})
        self.control.should_evaluate = False
        self.reporter.evaluate(self.state, self.control)

    def saving(self, seconds):
        self.wait(seconds)
        self.control.should_save = False
        self.reporter.save(self.args, self.state)

    def end(self, *, stopped=False):
        self.control.should_training_stop = stopped
        self.reporter.train_end(self.state, self.control)

    def events(self, kind=None):
        self.writer.deliver()
        found = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event for event in found if kind in (None, event["event"])]

    @property
    def pulse(self):
        self.writer.deliver()
        return read_pulse(str(self.folder / f"pulse.{self.writer.rank}"))

    @property
    def phase(self):
        return PHASES[int(self.pulse["phase"])]


@pytest.fixture
def loop(tmp_path, monkeypatch):
    clock = Clock()
    for module in ("reporter", "writer", "pulse"):
        monkeypatch.setattr(f"tunewatch.probe.{module}.time", clock)
    made = []

    def make(**arguments):
        made.append(Loop(tmp_path / f"run{len(made)}", clock, **arguments))
        return made[-1]

    yield make
    for one in made:
        assert one.writer.errors == 0


def durations(loop):
    """Sum, count and the non-empty buckets of the step histogram."""
    pulse = loop.pulse
    buckets = {
        (*STEP_BUCKETS, math.inf)[i]: pulse[f"step_bucket_{i}"]
        for i in range(len(STEP_BUCKETS) + 1)
        if pulse[f"step_bucket_{i}"]
    }
    return pulse["step_seconds_sum"], pulse["step_seconds_count"], buckets


def test_a_plain_run(loop):
    one = loop()
    one.wait(30)  # imports, model
    one.begin()
    assert (one.phase, one.pulse["first_step"], one.pulse["step"]) == ("data", 1.0, 0.0)
    one.step(data=8.0, compute=2.0)  # the first batch's wait is no part of a step
    one.step(data=0.5, compute=1.0)
    one.step(data=0.0, compute=700.0)
    total, count, buckets = durations(one)
    assert (total, count) == (pytest.approx(2.0 + 1.5 + 700.0), 3)
    assert buckets == {2.5: 2, math.inf: 1}
    pulse = one.pulse
    assert (pulse["step"], pulse["max_steps"], pulse["epoch"]) == (3.0, 4.0, 0.3)
    assert pulse["first_step"] == 0.0
    assert pulse["step_time"] == 1.7e9 + one.clock.now
    assert pulse["data_seconds"] == pytest.approx(8.5)
    assert pulse["compute_seconds"] == pytest.approx(703.0)
    one.end()
    assert one.phase == "package"
    begin, end = one.events("train_begin")[0], one.events("train_end")[0]
    assert begin["effective"]["batch_size"] == 2 * 4 * 2
    assert begin["effective"]["precision"] == "bf16"
    assert begin["output_dir"] == "/somewhere/out"
    assert begin["restored"] == dict.fromkeys(("optimizer", "scheduler", "rng", "data_order"))
    assert (begin["nan_visibility"], begin["nan_filter"], begin["restart"]) == ("logs only", True, False)
    assert (end["step"], end["max_steps"], end["requested_stop"]) == (3, 4, False)


def test_a_bucket_bound_belongs_to_its_bucket(loop):
    one = loop(max_steps=9)
    one.begin()
    for seconds in (0.05, 0.25, 600.0):
        one.step(compute=seconds)
    assert durations(one)[2].keys() <= {0.05, 0.1, 0.25, 0.5, 600.0, math.inf}
    assert durations(one)[1] == 3


def test_evaluation_and_saving_are_no_part_of_a_step(loop):
    one = loop(max_steps=10)
    one.begin()
    one.step(compute=1.0)
    one.step(compute=1.0, evaluate=True, save=True)
    assert one.phase == "evaluate"
    one.evaluation(40.0)
    assert one.phase == "save"
    one.saving(9.0)
    assert one.phase == "data"
    one.step(data=0.5, compute=1.0)
    total, count, _ = durations(one)
    assert (total, count) == (pytest.approx(1.0 + 1.0 + 1.5), 3)
    pulse = one.pulse
    assert pulse["evaluate_seconds"] == pytest.approx(40.0)
    assert pulse["save_seconds"] == pytest.approx(9.0)
    assert (pulse["evaluations"], pulse["eval_batches"], pulse["saves"]) == (1.0, 2.0, 1.0)
    assert [(e["step"], e["seconds"], e["batches"]) for e in one.events("evaluate")] == [(2, 40.0, 2)]
    assert [(e["step"], e["checkpoint"], e["seconds"]) for e in one.events("save")] == [
        (2, "checkpoint-2", 9.0)
    ]
    # 7 steps are left; 3.5 s for the three until now, and 49 s of pauses spread over three steps.
    assert one.tracker.progress.eta_seconds == pytest.approx(7 * (3.5 / 3 + 49.0 / 3))


def test_several_evaluation_sets(loop):
    one = loop(max_steps=10)
    one.begin()
    one.step(compute=1.0, evaluate=True, save=True)
    one.evaluation(10.0, batches=5, prefix="eval_a")
    one.evaluation(20.0, batches=2, prefix="eval_b")
    one.saving(3.0)
    one.step(compute=1.0)
    assert durations(one)[0] == pytest.approx(2.0)
    assert [(e["step"], e["seconds"], e["batches"]) for e in one.events("evaluate")] == [
        (1, 10.0, 5),
        (1, 20.0, 2),
    ]
    assert [list(e["values"]) for e in one.events("log")] == [["eval_a_loss"], ["eval_b_loss"]]
    assert one.events("save")[0]["seconds"] == pytest.approx(3.0)
    one.step(compute=1.0, evaluate=True)  # and without a save behind them
    one.evaluation(10.0, prefix="eval_a")
    one.evaluation(20.0, prefix="eval_b")
    one.step(compute=1.0)
    assert durations(one)[0] == pytest.approx(4.0)


def test_what_a_later_callback_asks_for_is_no_part_of_a_step_either(loop):
    """Our callback comes before the user's: at on_step_end nobody has asked yet."""
    one = loop(max_steps=10)
    one.begin()
    one.step(compute=1.0)
    one.evaluation(12.0)
    one.saving(5.0)
    one.step(compute=1.0)
    assert durations(one)[0] == pytest.approx(2.0)
    assert one.events("evaluate")[0]["seconds"] == pytest.approx(12.0)
    assert one.events("save")[0]["seconds"] == pytest.approx(5.0)
    one.step(compute=1.0, save=True)  # asked for, and taken back by a later callback
    one.step(data=2.0, compute=1.0)
    assert durations(one)[0] == pytest.approx(2.0 + 1.0 + 3.0)
    assert len(one.events("save")) == 1


def test_evaluation_on_start(loop):
    one = loop(max_steps=10)
    one.begin()
    one.evaluation(60.0)
    assert (one.phase, one.events("evaluate")[0]["step"], one.events("log")[0]["step"]) == ("data", 0, 0)
    one.step(data=1.0, compute=3.0)
    assert durations(one)[0] == pytest.approx(3.0)
    assert one.tracker.progress.eta_seconds == pytest.approx(9 * 3.0)


def test_epoch_strategy(loop):
    one = loop(max_steps=4)
    one.begin()
    for epoch in (1, 2):
        one.step(compute=1.0)
        one.step(compute=1.0)
        one.state.epoch = float(epoch)
        one.control.should_evaluate = one.control.should_save = True
        one.reporter.epoch_end(one.state, one.control)
        assert one.phase == "evaluate"
        one.evaluation(30.0)
        assert one.phase == "save"
        one.saving(10.0)
    one.end()
    assert durations(one)[:2] == (pytest.approx(4.0), 4)
    story = [
        (e["event"], e["step"])
        for e in one.events()
        if e["event"] in ("epoch", "evaluate", "save", "train_end")
    ]
    assert story == [
        ("epoch", 2), ("evaluate", 2), ("save", 2), ("epoch", 4), ("evaluate", 4), ("save", 4), ("train_end", 4),
    ]  # fmt: skip
    assert [e["epoch"] for e in one.events("epoch")] == [1.0, 2.0]
    assert one.pulse["evaluate_seconds"] == pytest.approx(60.0)


def test_the_batch_size_search_starts_again(loop):
    """on_train_begin once more without an on_train_end, another number of steps."""
    one = loop(max_steps=4)
    one.begin()
    one.step(compute=100.0)
    one.step(compute=100.0)
    for max_steps in (6, 8):
        one.state.global_step, one.state.max_steps = 0, max_steps
        one.wait(7.0)
        one.begin()
        assert (one.pulse["step"], one.pulse["max_steps"], one.pulse["first_step"]) == (0.0, max_steps, 1.0)
    one.step(compute=1.0)
    one.end()
    assert [event["restart"] for event in one.events("train_begin")] == [False, True, True]
    assert one.pulse["batch_size_restarts_total"] == 2.0
    assert one.pulse["steps_total"] == 3.0
    assert durations(one)[0] == pytest.approx(201.0)
    assert one.tracker.progress.max_steps == 8
    one.state.global_step = 0
    one.begin()  # a second train() is none of these
    assert one.events("train_begin")[-1]["restart"] is False
    assert one.pulse["batch_size_restarts_total"] == 2.0


def test_the_time_left_forgets_the_larger_batch(loop):
    one = loop(max_steps=4)
    one.begin()
    one.step(compute=100.0)
    one.state.global_step, one.state.max_steps = 0, 8
    one.begin()
    one.step(compute=2.0)
    assert one.tracker.progress.eta_seconds == pytest.approx(7 * 2.0)
    assert one.tracker.progress.elapsed_seconds == pytest.approx(2.0)


@pytest.mark.parametrize("unknown", [None, sys.maxsize, 0, -1])
def test_the_number_of_steps_may_be_unknown(loop, unknown):
    one = loop(max_steps=unknown)
    one.state.num_train_epochs = sys.maxsize
    one.begin()
    one.step()
    one.end()
    assert math.isnan(one.pulse["max_steps"])
    assert one.events("train_begin")[0]["max_steps"] is None
    assert one.events("train_begin")[0]["num_train_epochs"] is None
    assert one.tracker.progress.max_steps is None
    assert one.tracker.progress.eta_seconds is None


def test_the_number_of_steps_may_change_in_mid_run(loop):
    one = loop(max_steps=10)
    one.begin()
    one.step()
    one.state.max_steps = 20
    one.step()
    assert one.pulse["max_steps"] == 20.0
    assert one.tracker.progress.eta_seconds == pytest.approx(18.0)


def test_early_stopping_is_said(loop):
    one = loop(max_steps=10)
    one.begin()
    one.step()
    one.end(stopped=True)
    assert (
        one.events("train_end")[0] | {"step": 1, "max_steps": 10, "requested_stop": True}
        == one.events("train_end")[0]
    )


def test_logs_are_kept_as_they_came(loop):
    one = loop()
    one.begin()
    one.step()
    logs = {
        "loss": 1.5,
        "grad_norm": math.nan,
        "learning_rate": 0.0,
        "rewards/chosen": 2,
        "note": "x",
        "flag": True,
    }
    before = dict(logs)
    one.reporter.log(one.args, one.state, logs)
    one.reporter.log(one.args, one.state, {"eval_loss": 2.0, "epoch": 0.1})
    one.reporter.log(one.args, one.state, {"train_loss": 9.0, "train_runtime": 1.0})
    one.reporter.log(one.args, one.state, None)
    assert logs.items() == before.items()
    first = one.events("log")[0]
    assert first["values"] == {"loss": 1.5, "learning_rate": 0.0, "rewards/chosen": 2}
    assert first["nonfinite"] == {"grad_norm": "nan"}
    assert first["step"] == 1
    assert [event["values"] for event in one.events("log")[1:]] == [
        {"eval_loss": 2.0, "epoch": 0.1}, {"train_loss": 9.0, "train_runtime": 1.0}, {},
    ]  # fmt: skip
    progress = one.tracker.progress  # evaluation and summary take nothing away
    assert (progress.loss, progress.learning_rate, progress.eval_loss) == (1.5, 0.0, 2.0)
    assert math.isnan(progress.grad_norm)
    one.reporter.log(one.args, one.state, {"loss": 1.25, "num_tokens": 90.0})
    assert (one.tracker.progress.loss, one.tracker.progress.tokens_seen) == (1.25, 90)


def test_other_ranks_say_how_they_are_but_not_what_is_logged(loop):
    one = loop(rank=1)
    one.begin()
    one.step(evaluate=True, save=True)
    one.reporter.log(one.args, one.state, {"loss": 1.0})
    one.evaluation(3.0)
    one.saving(2.0)
    one.reporter.epoch_end(one.state, one.control)
    one.end()
    assert {event["event"] for event in one.events()} == {"session", "phase"}
    assert {event["rank"] for event in one.events()} == {1}
    pulse = one.pulse
    assert (pulse["rank"], pulse["step"], pulse["steps_total"], pulse["saves"]) == (1.0, 1.0, 1.0, 1.0)
    assert pulse["evaluate_seconds"] == pytest.approx(3.0)


def test_nan_on_another_rank_is_told(loop):
    one = loop(rank=1)
    one.begin()
    one.reporter.micro_batch(math.nan, None)
    one.step()
    assert [event["step"] for event in one.events("nonfinite")] == [1]


def test_other_ranks_tell_their_own_exception(loop):
    one = loop(rank=1)
    one.begin()
    one.step(data=4.0, compute=2.0)
    one.reporter.training_raised(ZeroDivisionError())
    assert [(event["type"], event["rank"]) for event in one.events("exception")] == [("ZeroDivisionError", 1)]
    assert (one.pulse["data_seconds"], one.pulse["compute_seconds"]) == (
        pytest.approx(4.0),
        pytest.approx(2.0),
    )


def test_a_rank_that_hangs_says_in_what(loop):
    one = loop(rank=3)
    one.begin()
    one.step()
    one.wait(2.0)
    one.reporter.step_begin()
    one.wait(900.0)
    pulse = one.pulse
    assert (PHASES[int(pulse["phase"])], pulse["step"]) == ("compute", 1.0)
    assert pulse["phase_monotonic"] == pytest.approx(1000.0 + one.clock.now - 900.0)


@pytest.mark.parametrize("by", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_changes_no_duration(loop, by):
    one = loop(max_steps=10)
    one.begin()
    one.step(data=1.0, compute=2.0)
    one.clock.set_by = by
    one.step(data=1.0, compute=2.0, evaluate=True, save=True)
    one.evaluation(5.0)
    one.clock.set_by = 0.0
    one.saving(3.0)
    pulse = one.pulse
    assert durations(one)[0] == pytest.approx(2.0 + 3.0)
    assert (pulse["data_seconds"], pulse["compute_seconds"]) == (pytest.approx(2.0), pytest.approx(4.0))
    assert (one.events("evaluate")[0]["seconds"], one.events("save")[0]["seconds"]) == (5.0, 3.0)
    assert one.tracker.progress.elapsed_seconds == pytest.approx(6.0)


def test_whatever_is_logged_is_a_number_or_left_out(loop):
    one = loop()
    one.begin()
    one.step()
    logs = {
        "loss": torch.tensor(1.5), "grad_norm": np.float32(0.5), "learning_rate": "5e-05", "a": None, "b": True,
        "c": [1.0], "d": {"loss": 1.0}, "e": "1_000", "f": object(), "g": torch.ones(2), "h": np.float64("nan"),
        "rewards/chosen": 2, "train.loss": 3.0, "loss ": 4.0, 7: 5,
    }  # fmt: skip
    one.reporter.log(one.args, one.state, logs)
    told = one.events("log")[0]
    assert told["values"] == {
        "loss": 1.5, "grad_norm": 0.5, "learning_rate": 5e-05, "rewards/chosen": 2, "train.loss": 3.0, "loss ": 4.0,
        "7": 5,
    }  # fmt: skip
    assert told["nonfinite"] == {"h": "nan"}
    assert one.tracker.progress.learning_rate == 5e-05
    one.reporter.log(one.args, one.state, [1])  # no logs at all: a fault that is ours to bear
    assert one.writer.errors == 1
    one.writer.errors = 0
    assert one.pulse["hook_errors"] == 1.0


def test_a_log_tells_the_skipped_steps_of_this_session(loop):
    one = loop(step=100, max_steps=200)
    one.begin()
    for skipped in (True, False, True):
        one.step(skipped=skipped)
        one.reporter.log(one.args, one.state, {"loss": 1.0})
    assert [event["skipped"] for event in one.events("log")] == [1, 1, 2]


def test_a_listener_sees_each_step_and_a_reader_the_last(loop):
    one = loop(max_steps=9)
    one.begin()
    seen = []
    one.tracker.add_progress_callback(seen.append)
    for step in (1, 2):
        one.step()
        assert one.tracker.progress.step == step
    one.reporter.log(one.args, one.state, {"loss": 1.0})
    assert one.tracker.progress.loss == 1.0
    wait_for(lambda: len(seen) == 3)
    assert [(progress.step, progress.loss) for progress in seen] == [(1, None), (2, None), (2, 1.0)]
    assert seen[0].updated_at == pytest.approx(1.7e9 + 1.0)


def test_the_hooks_are_counted(loop):
    one = loop(max_steps=200)
    one.begin()
    for _ in range(3):
        one.step()
    one.reporter.log(one.args, one.state, {})
    one.end()
    assert one.pulse["hook_calls"] >= 1 + 2 * 3 + 1
    assert one.pulse["hook_seconds"] == 0.0  # by a clock that stood still meanwhile


def test_what_the_hooks_take_is_estimated_from_a_sample_of_the_steps(loop):
    """The first step's are counted as they are: they stand for no other step."""
    one = loop(max_steps=200)

    class Slow(SimpleNamespace):
        @property
        def should_save(self):
            one.wait(5.0 if one.state.global_step == 1 else 0.001)
            return False

        @should_save.setter
        def should_save(self, value):
            pass

    one.begin()
    one.control = Slow(should_evaluate=False, should_training_stop=False)
    calls = one.pulse["hook_calls"]
    for steps in (1, 3, 70, 130):
        while one.state.global_step < steps:
            one.step()
        pulse = one.pulse
        assert pulse["hook_seconds"] == pytest.approx(5.0 + 0.001 * (steps - 1), abs=1e-9)
        assert pulse["hook_calls"] == calls + 2 * steps


def test_a_step_without_a_word_for_long_is_seen_when_it_goes_on(loop, monkeypatch):
    """The hooks call nobody: the background thread stays awake while a training is under way, and only then."""
    monkeypatch.setattr(background, "PERIOD", 0.01)
    monkeypatch.setattr(background, "_IDLE", 1)
    rounds = []
    work = RunWriter._work
    monkeypatch.setattr(RunWriter, "_work", lambda writer: rounds.append(1) or work(writer))
    one = loop()
    one.begin()
    wait_for(lambda: len(rounds) > 10)
    one.reporter.step_begin()
    wait_for(lambda: read_pulse(str(one.folder / "pulse.0"))["phase"] == PHASES.index("compute"))
    one.end()
    wait_for(lambda: one.writer._background.asleep, what="a sleeping thread")


def test_a_forked_child_marks_no_step_and_keeps_nothing(loop):
    one = loop()
    one.begin()
    one.step()
    one.writer.deliver()
    before = (one.folder / "pulse.0").read_bytes()
    child = os.fork()
    if child == 0:
        try:
            one.step()
            os._exit(len(one.writer._later))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (one.folder / "pulse.0").read_bytes() == before


def test_a_loss_that_waits_to_be_looked_at_keeps_no_graph_in_memory(loop):
    one = loop()
    weight = torch.ones(3, requires_grad=True)
    one.reporter.micro_batch((weight * 2).sum(), {})
    (loss, _) = one.writer._later[-1][2]
    assert (loss.item(), loss.requires_grad) == (6.0, False)


def test_a_streak_is_thinned_out_and_its_end_told(loop):
    one = loop(max_steps=200)
    one.begin()
    for _ in range(130):
        one.reporter.micro_batch(math.inf, {})
        one.reporter.gradient_norm(1.0)
        one.step()
    one.reporter.gradient_norm(math.nan)  # the fp16 scaler skips it: neither bad nor clean
    one.step(skipped=True)
    assert not one.events("finite")
    one.step()
    one.step()
    told = [event["step"] for event in one.events("nonfinite")]
    assert told == [*range(1, 51), 64, 128]
    assert [event["step"] for event in one.events("finite")] == [132]
    pulse = one.pulse
    assert (pulse["nonfinite_loss_steps"], pulse["nonfinite_grad_norm_steps"]) == (130.0, 0.0)
    assert (pulse["first_nonfinite_step"], pulse["nonfinite_streak"]) == (1.0, 0.0)
    assert pulse["steps_skipped_total"] == 1.0


def test_a_new_attempt_does_not_inherit_the_nan_of_the_one_before(loop):
    one = loop()
    one.begin()
    one.reporter.micro_batch(math.nan, None)  # then the step died of an out of memory
    one.begin()
    one.step()
    assert not one.events("nonfinite")


def checkpoint(folder, *names):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).mkdir() if name.startswith("global_step") else (folder / name).write_bytes(b"x")
    return folder


ALL = ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json")


@pytest.mark.parametrize(
    ("files", "entries", "last_epoch", "skip", "restored"),
    [
        (ALL, 8, 6, False, (True, True, True, True)),
        (ALL, 0, 6, False, (True, True, True, True)),  # plain SGD has no state of its own
        (("trainer_state.json",), 0, 0, False, (False, False, False, True)),
        (("optimizer.pt", "rng_state_0.pth"), 0, 0, False, (False, False, True, True)),
        (ALL, 8, 6, True, (True, True, True, False)),
        (("optimizer_0", "scheduler.pt", "rng_state_0.pth"), 0, 6, False, (True, True, True, True)),  # FSDP
        (
            ("global_step4", "scheduler.pt", "rng_state_0.pth"),
            0,
            6,
            False,
            (None, True, True, True),
        ),  # DeepSpeed
    ],
)
def test_a_resume_says_what_came_back(loop, tmp_path, files, entries, last_epoch, skip, restored):
    one = loop(step=6, max_steps=10, ignore_data_skip=skip)
    folder = checkpoint(tmp_path / "out" / "checkpoint-6", *files)
    one.reporter.training_begins(object(), str(folder))
    one.optimizer, one.scheduler.last_epoch = Optimizer(entries), last_epoch
    one.state.epoch = 6 * 4 / 40
    one.begin(train_dataloader=range(40))
    found = one.events("train_begin")[0]["restored"]
    assert tuple(found[part] for part in ("optimizer", "scheduler", "rng", "data_order")) == restored
    details = [event["detail"] for event in one.events("phase")]
    assert details == ["restoring the checkpoint", "first batch" if skip else "skipping data"]
    one.step(compute=6.0)
    assert one.tracker.progress.eta_seconds == pytest.approx(3 * 6.0)  # this session's pace
    assert one.pulse["steps_total"] == 1.0


def test_a_resume_seen_by_the_callback_alone(loop):
    one = loop(step=6)
    one.optimizer, one.scheduler.last_epoch = Optimizer(8), 6
    one.begin()
    assert one.events("train_begin")[0]["restored"] == {
        "optimizer": True, "scheduler": True, "rng": None, "data_order": None,
    }  # fmt: skip
    one.optimizer = Optimizer()  # without state, and no folder to look into: not known
    one.begin()
    assert one.events("train_begin")[1]["restored"]["optimizer"] is None


def test_odd_objects_take_no_event_away(tmp_path, monkeypatch):
    class Odd:
        peft_config = "no dictionary"

    one = Loop(tmp_path / "run", Clock())
    one.begin(model=Odd())
    begin = one.events("train_begin")[0]
    assert (begin["trainable_parameters"], begin["total_parameters"]) == (None, None)
    assert one.writer.errors == 1  # the provenance that could not be told
    one.state.epoch = "x"
    one.step()
    assert one.pulse["step"] == 1.0


def test_what_is_known_of_the_model(loop):
    class Parameter:
        def __init__(self, count, trains):
            self.requires_grad, self._count = trains, count

        def numel(self):
            return self._count

    lora = SimpleNamespace(
        base_model_name_or_path="/models/mine/tiny-llama/", peft_type="LORA", r=8, lora_alpha=16
    )
    model = SimpleNamespace(
        parameters=lambda: [Parameter(100, False), Parameter(7, True)],
        peft_config={"default": lora},
        config=None,
    )
    one = loop()
    one.begin(model=model)
    begin, known = one.events("train_begin")[0], one.events("provenance")[0]
    assert (begin["trainable_parameters"], begin["total_parameters"]) == (7, 107)
    expected = {"base_model": "tiny-llama", "method": "lora", "lora_r": 8, "lora_alpha": 16, "batch_size": 16,
                "learning_rate": 1e-3, "precision": "bf16"}  # fmt: skip
    assert known["info"] == expected
    assert known["environment"]["python"] == sys.version.split()[0]


def test_a_stop_of_the_machine_makes_no_negative_step(loop, monkeypatch):
    one = loop()
    one.begin()
    one.step()
    one.wait(-5.0)
    one.step(compute=1.0)
    assert durations(one)[0] == pytest.approx(1.0)


def test_one_reporter_for_one_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "_tunewatch_probe", {}, raising=False)
    first, second = (Reporter(RunWriter(None)) for _ in range(2))
    controls = [object() for _ in range(20)]
    assert claim(first, controls[0])
    assert not claim(second, controls[0])
    assert claim(first, controls[0])
    for control in controls[1:]:
        assert claim(second, control)
    assert len(reporter_module.process_globals()["owners"]) <= 9


def test_memory_is_told_at_each_turn(loop, monkeypatch):
    """An accelerator's numbers are those of torch's allocator; the host's are the kernel's."""
    one = loop()
    one.begin()
    stats = {
        "allocated_bytes.all.current": 3e9,
        "reserved_bytes.all.current": 4e9,
        "allocated_bytes.all.peak": 5e9,
    }
    torch = SimpleNamespace(
        cuda=SimpleNamespace(memory_stats=lambda device: stats), is_tensor=lambda value: False
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    one.reporter._memory_device = 0
    one.step(evaluate=True)
    one.evaluation(2.0)
    one.step(save=True)
    one.saving(3.0)
    one.end()
    told = {event["context"]: event["memory"] for event in one.events("memory")}
    assert list(told) == ["train_begin", "evaluate", "save", "train_end"]
    assert told["train_begin"].keys() == {"rss"}, "a CPU has no allocator of its own"
    assert {key: told["save"][key] for key in ("allocated", "reserved", "peak")} == {
        "allocated": 3e9, "reserved": 4e9, "peak": 5e9,
    }  # fmt: skip
    assert 1e6 < told["save"]["rss"] < 1e12
    assert (one.pulse["memory_allocated_bytes"], one.pulse["memory_peak_bytes"]) == (3e9, 5e9)

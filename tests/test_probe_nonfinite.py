"""NaN and infinity where they arise: the watch, its device path, and the tap on a real trainer."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tunewatch.probe import nonfinite
from tunewatch.probe.callback import TunewatchCallback
from tunewatch.probe.nonfinite import SLOTS, NonFiniteWatch, StepFinding
from tunewatch.probe.pulse import read_pulse
from tunewatch.probe.tap import install

NAN, INF = float("nan"), float("inf")

# -- host --------------------------------------------------------------------------------------------------


class Sharded(torch.Tensor):
    """Like a DTensor: only a part of it is here, and putting it together takes all ranks."""

    def full_tensor(self):
        raise AssertionError("a collective")

    def to_local(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        (1.0, False), (0, False), (NAN, True), (-INF, True), (torch.tensor(2.0), False), (torch.tensor(INF), True),
        (torch.tensor([1.0, NAN]), True), (torch.tensor([1.0, 2.0]), False), (torch.tensor([]), False),
        (torch.tensor(NAN, dtype=torch.bfloat16), True), (torch.tensor(3.0, requires_grad=True), False),
        (torch.tensor([1.0, NAN]).as_subclass(Sharded), True), (torch.tensor(1.0).as_subclass(Sharded), False),
    ],
)  # fmt: skip
def test_host_values(value, bad):
    watch = NonFiniteWatch()
    watch.loss(value)
    watch.grad_norm(1.0)
    assert watch.step_end(1, skipped=False) == [StepFinding(1, bad, False, False)]
    watch.loss(1.0)
    watch.grad_norm(value)
    assert watch.step_end(2, skipped=False) == [StepFinding(2, False, bad, False)]
    assert watch.flush() == []


def test_one_bad_micro_batch_of_many_is_enough_and_ends_with_its_step():
    watch = NonFiniteWatch()
    for value in (1.0, NAN, 2.0):
        watch.loss(value)
    watch.grad_norm(None)  # DeepSpeed may have none
    assert watch.step_end(1, skipped=False)[0].bad
    watch.loss(1.0)
    assert not watch.step_end(2, skipped=False)[0].bad
    assert (watch.losses_seen, watch.norms_seen) == (4, 0)


def test_a_skipped_step_is_not_bad():
    assert StepFinding(1, False, True, skipped=False).bad
    assert not StepFinding(1, True, True, skipped=True).bad
    assert not StepFinding(1, False, False, skipped=False).bad


# -- device ------------------------------------------------------------------------------------------------


class Queue:
    """A device whose work is done when the test says so. Events are done in the order they were recorded."""

    def __init__(self):
        self.recorded = 0
        self.done = 0

    def event(self):
        queue = self

        class Event:
            def record(self):
                queue.recorded += 1
                self.number = queue.recorded

            def query(self):
                return queue.done >= self.number

            def synchronize(self):
                queue.done = max(queue.done, self.number)

        return Event()


class Device:
    """One step after the other through the device path, on CPU tensors."""

    def __init__(self, queue):
        make = queue.event if queue is not None else None
        self.flags = nonfinite._DeviceFlags(torch, torch.device("cpu"), make)

    def step(self, number, loss=1.0, norm=1.0, *, skipped=False, host=(False, False)):
        self.flags.mark(0, torch.tensor(loss))
        self.flags.mark(1, torch.tensor(norm))
        return self.flags.step_end(number, list(host), skipped)


def test_findings_come_when_the_device_has_got_there_and_in_order():
    queue = Queue()
    device = Device(queue)
    assert device.step(1) == []
    assert device.step(2, loss=NAN) == []
    queue.done = 1
    assert device.step(3, norm=INF, skipped=True) == [StepFinding(1, False, False, False)]
    queue.done = 3
    assert device.step(4) == [StepFinding(2, True, False, False), StepFinding(3, False, True, True)]
    assert device.flags.flush() == [StepFinding(4, False, False, False)]
    assert device.flags.flush() == []


def test_a_device_far_behind_has_its_steps_reported_together():
    queue = Queue()
    device = Device(queue)
    for number in range(1, SLOTS + 1):
        assert device.step(number) == []
    assert device.step(SLOTS + 1, loss=NAN) == []  # no slot is free: the flag waits on the device
    assert queue.recorded == SLOTS
    queue.done = SLOTS
    found = device.step(SLOTS + 2)
    assert [finding.step for finding in found] == list(range(1, SLOTS + 1))
    assert not any(finding.bad for finding in found)
    device.step(SLOTS + 3)  # this copy tells of the two before it, too
    queue.done = queue.recorded
    found = device.step(SLOTS + 4)
    assert [(finding.step, finding.loss, finding.grad_norm) for finding in found] == [
        (SLOTS + 3, True, False),
        (SLOTS + 4, False, False),
    ][: len(found)]
    assert len(found) == 1
    assert device.flags.flush() == [StepFinding(SLOTS + 4, False, False, False)]


def test_what_is_held_and_skipped_does_not_turn_bad():
    queue = Queue()
    device = Device(queue)
    for number in range(1, SLOTS + 1):
        device.step(number)
    device.step(SLOTS + 1, norm=INF, skipped=True)
    queue.done = SLOTS
    device.step(SLOTS + 2)  # the slots become free
    device.step(SLOTS + 3)  # its copy tells of the two before it, of which one was skipped
    assert device.flags.flush() == [StepFinding(SLOTS + 3, False, True, True)]
    for number in range(1, SLOTS + 1):
        device.step(number)
    device.step(SLOTS + 1, norm=INF, skipped=True)
    assert device.flags.flush()[-1] == StepFinding(SLOTS + 1, False, True, True)


def test_flush_tells_of_every_step_and_of_what_the_host_saw():
    queue = Queue()
    device = Device(queue)
    for number in range(1, SLOTS + 2):
        device.step(number, loss=NAN if number == 3 else 1.0, host=(False, number == SLOTS + 1))
    found = device.flags.flush()
    assert [finding.step for finding in found if finding.loss] == [3]
    assert [finding.step for finding in found if finding.grad_norm] == [SLOTS + 1]
    assert [finding.step for finding in found] == list(range(1, SLOTS + 2))
    assert device.flags.flush() == []


def test_a_device_without_events_tells_at_a_flush(monkeypatch):
    monkeypatch.setattr(nonfinite, "_event_factory", lambda torch, device: None)
    device = Device(None)
    assert not device.flags.asynchronous
    assert device.step(1) == []
    assert device.step(2, loss=INF) == []
    assert device.flags.flush() == [StepFinding(2, True, False, False)]
    assert device.step(3) == []
    assert device.flags.flush() == []


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on an accelerator."""

    @property
    def device(self):
        return torch.device("cuda", 0)


def test_the_watch_takes_device_tensors_there(monkeypatch):
    queue = Queue()

    class Flags(nonfinite._DeviceFlags):
        def __init__(self, torch, device):
            assert device.type == "cuda"
            super().__init__(torch, torch.device("cpu"), queue.event)

        def mark(self, which, value):
            super().mark(which, value.as_subclass(torch.Tensor))

    monkeypatch.setattr(nonfinite, "_DeviceFlags", Flags)
    watch = NonFiniteWatch()
    watch.loss(torch.tensor(NAN).as_subclass(OnDevice))
    watch.grad_norm(1.0)  # one of them may be a plain number
    assert watch.step_end(1, skipped=False) == []
    watch.loss(torch.tensor(1.0).as_subclass(OnDevice))
    watch.grad_norm(NAN)
    queue.done = 1
    assert watch.step_end(2, skipped=False) == [StepFinding(1, True, False, False)]
    assert watch.flush() == [StepFinding(2, False, True, False)]
    assert watch.asynchronous


# -- the tap, on a real trainer ----------------------------------------------------------------------------


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, input_ids=None, labels=None):
        loss = ((self.layer(input_ids.float()) - labels.float()) ** 2).mean()
        return {"loss": loss, "logits": self.layer.weight.sum().expand(len(input_ids))}


ROWS = [{"input_ids": [i, i + 1], "labels": [1]} for i in range(16)]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder that this process reports to, as if a supervisor had started it."""
    import sys

    monkeypatch.setenv("TUNEWATCH_RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "_tunewatch_probe", {}, raising=False)
    return tmp_path / "run"


def trainer(tmp_path, cls=Trainer, callbacks=None, **arguments):
    arguments = {
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, **arguments,
    }  # fmt: skip
    callbacks = [TunewatchCallback()] if callbacks is None else callbacks
    return cls(
        model=Net(), args=TrainingArguments(str(tmp_path / "out"), **arguments), train_dataset=ROWS,
        eval_dataset=ROWS[:4], callbacks=callbacks,
    )  # fmt: skip


def events(run, kind=None):
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in found if kind in (None, event["event"])]


class Own(Trainer):
    """A trainer of the user's: the loss that counts is the one it returns."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        return loss * NAN if self.state.global_step == 1 else loss


def test_a_subclass_shows_the_loss_it_returns(run, tmp_path):
    own = trainer(tmp_path, Own)
    own.train()
    assert [(e["step"], e["loss"], e["grad_norm"]) for e in events(run, "nonfinite")] == [(2, True, False)]
    assert [e["step"] for e in events(run, "finite")] == [3]
    pulse = read_pulse(str(run / "pulse.0"))
    assert (pulse["nonfinite_loss_steps"], pulse["nonfinite_grad_norm_steps"]) == (1.0, 0.0)
    assert (pulse["first_nonfinite_step"], pulse["nonfinite_streak"]) == (2.0, 0.0)
    assert pulse["grad_norm_seen"] == 1.0
    assert pulse["samples_total"] == 3 * 2 * 2
    assert pulse["tokens_all_total"] == 3 * 2 * 2 * 2
    assert pulse["hook_errors"] == 0
    assert events(run, "train_begin")[0]["nan_visibility"] == "each step"
    assert not any(
        "nan" in event["nonfinite"].values() for event in events(run, "log")
    )  # the trainer hides it


def test_nothing_stays_on_the_trainer_and_the_norms_are_the_trainers(run, tmp_path):
    mine = trainer(tmp_path)
    seen = []
    mine._callback_norms = seen
    during = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            during.append(("training_step" in vars(mine), "clip_grad_norm_" in vars(mine.accelerator)))

    mine.add_callback(Look())
    mine.train()
    assert during == [(True, True)] * 3
    assert "training_step" not in vars(mine)
    assert "clip_grad_norm_" not in vars(mine.accelerator)
    logged = [event["values"]["grad_norm"] for event in events(run, "log") if "grad_norm" in event["values"]]
    assert logged == [entry["grad_norm"] for entry in mine.state.log_history if "grad_norm" in entry]
    assert len(logged) == 3


def test_a_method_that_was_on_the_instance_is_there_again(run, tmp_path):
    mine = trainer(tmp_path)
    calls = []
    original = mine.training_step

    def theirs(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    mine.training_step = theirs
    mine.train()
    assert len(calls) == 6
    assert vars(mine)["training_step"] is theirs


@pytest.mark.parametrize("error", [ZeroDivisionError("CANARY"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_exceptions_pass_through_and_are_told_once(run, tmp_path, error):
    class Raises(Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 1:
                raise error
            return super().training_step(*args, **kwargs)

    mine = trainer(tmp_path, Raises)
    with pytest.raises(type(error)) as caught:
        mine.train()
    assert caught.value is error
    assert "training_step" not in vars(mine)
    told = events(run, "exception")
    assert [(e["type"], e["during"]) for e in told] == [(type(error).__name__, "train")]
    assert "CANARY" not in (run / "events.jsonl").read_text()
    assert events(run, "train_end") == events(run, "train_return") == []
    error.__init__()
    mine.training_step = lambda *args, **kwargs: Trainer.training_step(mine, *args, **kwargs)
    mine.train()  # again, and sound this time
    assert len(events(run, "train_return")) == 1
    assert [event["restart"] for event in events(run, "train_begin")] == [False, False]


def test_train_twice_and_a_second_trainer(run, tmp_path):
    first = trainer(tmp_path)
    first.train()
    first.train()
    second = trainer(tmp_path, max_steps=5)
    second.train()
    assert [event["max_steps"] for event in events(run, "train_begin")] == [3, 3, 5]
    assert [event["step"] for event in events(run, "train_end")] == [3, 3, 5]
    assert [event["restart"] for event in events(run, "train_begin")] == [False] * 3
    assert len(events(run, "session")) == 1
    assert len(events(run, "train_return")) == 3
    assert read_pulse(str(run / "pulse.0"))["steps_total"] == 11
    assert read_pulse(str(run / "pulse.0"))["batch_size_restarts_total"] == 0


def test_a_training_inside_a_training_is_not_mixed_into_it(run, tmp_path):
    inner = trainer(tmp_path, max_steps=2)

    class Nest(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                inner.train()
                trainer(tmp_path, max_steps=1).train()

    outer = trainer(tmp_path, max_steps=4, callbacks=[Nest(), TunewatchCallback()])
    outer.train()
    assert inner.state.global_step == 2
    assert [event["max_steps"] for event in events(run, "train_begin")] == [4]
    assert [event["step"] for event in events(run, "train_end")] == [4]
    assert read_pulse(str(run / "pulse.0"))["steps_total"] == 4
    inner.train()  # alone, it is watched
    assert [event["max_steps"] for event in events(run, "train_begin")] == [4, 2]


@pytest.mark.parametrize("how", ["class", "instance", "added later", "added later as a class"])
def test_every_way_of_passing_the_callback(run, tmp_path, how):
    callbacks = {"class": [TunewatchCallback], "instance": [TunewatchCallback()]}.get(how, [])
    mine = trainer(tmp_path, callbacks=callbacks)
    if how == "added later":
        mine.add_callback(TunewatchCallback())
    elif how == "added later as a class":
        mine.add_callback(TunewatchCallback)
    mine.train()
    assert [event["nan_visibility"] for event in events(run, "train_begin")] == ["each step"]
    assert read_pulse(str(run / "pulse.0"))["grad_norm_seen"] == 1.0
    assert len([event for event in events(run, "log") if "loss" in event["values"]]) == 3


def test_two_of_our_callbacks_report_once(run, tmp_path):
    trainer(tmp_path, callbacks=[TunewatchCallback(), TunewatchCallback()]).train()
    assert len(events(run, "train_begin")) == len(events(run, "train_end")) == 1
    assert len([event for event in events(run, "log") if "loss" in event["values"]]) == 3
    assert read_pulse(str(run / "pulse.0"))["steps_total"] == 3


def test_evaluate_and_predict_without_training_leave_no_phase_behind(run, tmp_path):
    mine = trainer(tmp_path)
    mine.evaluate()
    assert read_pulse(str(run / "pulse.0"))["phase"] == 0  # prepare
    mine.predict(ROWS[:4])
    pulse = read_pulse(str(run / "pulse.0"))
    assert pulse["phase"] == 0
    assert pulse["evaluations"] == 1.0
    mine.train()
    mine.evaluate()
    mine.predict(ROWS[:4])
    pulse = read_pulse(str(run / "pulse.0"))
    assert pulse["phase"] == 5  # package: the script goes on after its training
    assert [event["step"] for event in events(run, "evaluate")] == [0, 3]
    assert pulse["hook_errors"] == 0


def test_arguments_and_callback_can_be_copied_and_pickled(run, tmp_path):
    mine = trainer(tmp_path)
    mine.train()
    assert (
        copy.deepcopy(mine.args).to_dict()
        == pickle.loads(pickle.dumps(mine.args)).to_dict()
        == mine.args.to_dict()
    )
    callback = TunewatchCallback("a name", run_id="an-id", supervise=False)
    callback.add_progress_callback(print)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert (twin._asked, twin.run_id) == (callback._asked, "an-id")
        assert twin.tracker is not callback.tracker
    assert any(isinstance(c, TunewatchCallback) for c in copy.deepcopy(mine.callback_handler.callbacks))


def test_installing_twice_wraps_once():
    before = Trainer.train
    install(Trainer)
    install(Trainer)
    assert Trainer.train is before or Trainer.train.__wrapped__ is before
    assert not hasattr(Trainer.train.__wrapped__, "_tunewatch_tap")


def test_the_listener_sees_the_trainers_values(run, tmp_path):
    callback = TunewatchCallback()
    mine = trainer(tmp_path, callbacks=[callback])
    mine.train()
    progress = callback.tracker.progress
    last = [entry for entry in mine.state.log_history if "loss" in entry][-1]
    assert (progress.step, progress.max_steps, progress.run_id) == (3, 3, "run")
    assert (progress.loss, progress.grad_norm) == (last["loss"], last["grad_norm"])
    assert progress.learning_rate == last["learning_rate"]
    assert progress.epoch == pytest.approx(mine.state.epoch)
    assert (progress.state, progress.eta_seconds, progress.eval_loss) == ("packaging", None, None)
    assert math.isfinite(progress.elapsed_seconds) and progress.elapsed_seconds > 0


def test_a_fault_of_ours_does_not_reach_the_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tunewatch.probe.facts.effective_arguments", lambda *a: 1 / 0)
    monkeypatch.setattr("tunewatch.probe.reporter.NonFiniteWatch.loss", lambda *a: 1 / 0)
    monkeypatch.setattr("tunewatch.probe.reporter.Reporter._step_ends", lambda *a: 1 / 0)
    mine = trainer(tmp_path)
    assert mine.train().global_step == 3
    assert read_pulse(str(run / "pulse.0"))["hook_errors"] > 3
    assert "ZeroDivisionError" in (run / "probe-errors.log").read_text()
    assert len([event for event in events(run, "log") if "loss" in event["values"]]) == 3

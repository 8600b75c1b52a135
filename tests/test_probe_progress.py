"""TrainingProgress, its tracker, numbers out of logs, and the time left."""

from __future__ import annotations

import dataclasses
import math
import sys
import threading

import numpy as np
import pytest
import torch
from harness import wait_for

from tunewatch.probe import values
from tunewatch.probe.pace import Pace
from tunewatch.probe.progress import ProgressTracker, TrainingProgress
from tunewatch.probe.values import as_number, split_finite

# -- numbers -----------------------------------------------------------------------------------------------


class Item:
    """An object with `item`, as array libraries have it."""

    size = 1

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return f"Item({self.value!r})"

    def item(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize(
    ("raw", "number"),
    [
        (0, 0),
        (3, 3),
        (2.5, 2.5),
        ("4.19", 4.19),
        ("5e-05", 5e-05),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (np.array([1.5]), 1.5),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([4]), 4),
        (Item(9.0), 9.0),
        (None, None),
        (True, None),
        (np.bool_(True), None),
        (torch.tensor(True), None),
        (Item(True), None),
        (torch.tensor(1j), None),
        (torch.tensor([1.0, 2.0]), None),
        (np.array([1.0, 2.0]), None),
        (torch.tensor([]), None),
        (torch.empty((), device="meta"), None),
        (Item(ValueError("a row of the data")), None),
        (Item("text"), None),
        ([1.0], None),
        ({"loss": 1.0}, None),
        ("", None),
        ("tensor(4.1)", None),
        ("1_000", None),
        (10**400, None),
    ],
    ids=repr,
)
def test_as_number(raw, number):
    found = as_number(raw)
    assert found == number
    assert type(found) in (int, float, type(None)) or isinstance(raw, float)


def test_zero_is_a_number_and_strings_may_spell_nan():
    assert as_number(0) == 0
    assert type(as_number(0)) is int
    for text in ("nan", "NaN"):
        assert math.isnan(as_number(text))
    assert as_number("-inf") == -math.inf


def test_split_finite_keeps_what_is_sound_beside_what_is_not():
    logs = {
        "loss": float("nan"), "grad_norm": torch.tensor(float("inf")), "a": "-inf", "learning_rate": 0,
        "note": "text", "flag": True, "rows": [1, 2], "odd": Item(RuntimeError()), 7: 1.5, "k" * 300: 2.0,
    }  # fmt: skip
    finite, nonfinite = split_finite(logs)
    assert nonfinite == {"loss": "nan", "grad_norm": "inf", "a": "-inf"}
    assert finite == {"learning_rate": 0, "7": 1.5, "k" * 128: 2.0}


class Device:
    type = "cuda"


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on an accelerator."""

    @property
    def device(self):
        return Device


def on_device(value):
    return torch.tensor(value).as_subclass(OnDevice)


def test_a_device_is_waited_for_once_a_second_and_then_read_in_full(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(values.time, "monotonic", lambda: now)
    monkeypatch.setattr(values, "_last_device_read", -math.inf)
    logs = {"loss": on_device(1.5), "grad_norm": on_device(2.5), "learning_rate": 0.1}
    assert split_finite(logs)[0] == {"loss": 1.5, "grad_norm": 2.5, "learning_rate": 0.1}
    now += 0.5
    assert split_finite(logs)[0] == {"learning_rate": 0.1}
    assert split_finite({"loss": 1.0})[0] == {"loss": 1.0}
    now += 0.6
    assert split_finite(logs)[0] == {"loss": 1.5, "grad_norm": 2.5, "learning_rate": 0.1}
    assert as_number(logs["loss"]) is None


# -- the record --------------------------------------------------------------------------------------------


def test_the_record_is_immutable_and_unknown_at_first():
    progress = TrainingProgress()
    assert set(dataclasses.asdict(progress).values()) == {None}
    with pytest.raises(dataclasses.FrozenInstanceError):
        progress.step = 1


def test_unknown_names_and_wrong_types_are_ignored():
    tracker = ProgressTracker()
    tracker.update(step=4, loss=2.0, message="fine")
    progress = tracker.update(
        foo=1, loss="abc", step="x", max_steps=math.nan, tokens_seen=math.inf, message=3, state=["a"],
        grad_norm=True, epoch=10**400, updated_at=1.0, eval_loss=[1],
    )  # fmt: skip
    assert (progress.step, progress.loss, progress.message) == (4, 2.0, "fine")
    assert (progress.max_steps, progress.tokens_seen, progress.state) == (None, None, None)
    assert (progress.grad_norm, progress.epoch, progress.eval_loss) == (None, None, None)
    assert progress.updated_at > 1.6e9
    progress = tracker.update(
        loss=torch.tensor(1.5), learning_rate="0.0", step=5.0, tokens_seen=np.float64(12.0)
    )
    assert (progress.loss, progress.learning_rate, progress.step, progress.tokens_seen) == (1.5, 0.0, 5, 12)
    assert type(progress.step) is int
    assert tracker.update(loss=None).loss is None


def test_a_reader_never_sees_half_an_update():
    tracker = ProgressTracker()
    stop, wrong = threading.Event(), []

    def read():
        while not stop.is_set():
            seen = tracker.progress
            if seen.step is not None and not (
                seen.loss == seen.step * 0.5 and seen.max_steps == seen.step + 7
            ):
                wrong.append(seen)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for step in range(3000):
        tracker.update(step=step, loss=step * 0.5, max_steps=step + 7)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_each_listener_gets_each_update_once_and_in_order():
    tracker = ProgressTracker()
    first, second = [], []
    tracker.add_progress_callback(lambda progress: first.append(progress.step))
    tracker.add_progress_callback(lambda progress: second.append(progress.step))
    for step in range(500):
        tracker.update(step=step)
    wait_for(lambda: len(first) >= 500 and len(second) >= 500, seconds=20)
    assert first == second == list(range(500))
    assert tracker.dropped == 0


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_listener_that_raises_is_alone_with_it(error):
    tracker = ProgressTracker()
    seen, calls = [], []

    def bad(progress):
        calls.append(progress.step)
        raise error

    tracker.add_progress_callback(bad)
    tracker.add_progress_callback(lambda progress: seen.append(progress.step))
    for step in range(5):
        tracker.update(step=step)
    wait_for(lambda: tracker.listener_errors == 5 and len(seen) == 5, seconds=20)
    assert calls == seen == [0, 1, 2, 3, 4]


def test_a_listener_that_blocks_delays_nobody_and_loses_the_oldest():
    tracker = ProgressTracker(queue_size=10)
    blocked, release, late, seen = threading.Event(), threading.Event(), [], []

    def blocking(progress):
        late.append(progress.step)
        blocked.set()
        release.wait(60)

    tracker.add_progress_callback(blocking)
    tracker.update(step=0)
    assert blocked.wait(20)
    tracker.add_progress_callback(lambda progress: seen.append(progress.step))
    for step in range(1, 101):
        tracker.update(step=step)  # the blocking one stands in update 0: this returns at once all the same
        if step % 10 == 0:
            wait_for(lambda step=step: seen[-1:] == [step], seconds=20)
    assert not release.is_set()
    assert tracker.dropped == 90
    release.set()
    wait_for(lambda: late[-1] == 100, seconds=20)
    assert late == [0, *range(91, 101)]
    assert seen == list(range(1, 101))


@pytest.mark.parametrize("how", ["returned function", "remove_progress_callback"])
def test_a_removed_listener_is_not_called_again(how):
    tracker = ProgressTracker(queue_size=3)
    inside, release, seen, others, threads = threading.Event(), threading.Event(), [], [], []

    def listener(progress):
        threads.append(threading.current_thread())
        seen.append(progress.step)
        inside.set()
        release.wait(60)

    remove = tracker.add_progress_callback(listener)
    tracker.add_progress_callback(lambda progress: others.append(progress.step))
    tracker.update(step=1)
    assert inside.wait(20)
    for step in (2, 3, 4):  # its queue is full now
        tracker.update(step=step)
    if how == "returned function":
        remove()
        remove()  # a second time is no error
    else:
        tracker.remove_progress_callback(listener)
        tracker.remove_progress_callback(listener)
    tracker.update(step=5)
    release.set()
    wait_for(lambda: others[-1:] == [5], seconds=20)
    threads[0].join(20)
    assert not threads[0].is_alive()
    assert seen == [1]


def test_a_listener_may_remove_itself_and_be_added_again():
    tracker = ProgressTracker()
    seen = []

    def once(progress):
        seen.append(progress.step)
        tracker.remove_progress_callback(once)

    tracker.add_progress_callback(once)
    tracker.update(step=1)
    wait_for(lambda: seen == [1], seconds=20)
    wait_for(lambda: not tracker._listeners, seconds=20)
    tracker.update(step=2)
    tracker.add_progress_callback(once)
    tracker.update(step=3)
    wait_for(lambda: seen == [1, 3], seconds=20)


# -- pace --------------------------------------------------------------------------------------------------


def test_unknown_before_the_first_step():
    pace = Pace()
    pace.pause(5.0)
    assert pace.seconds_per_step is None
    assert pace.eta(900, 1000) is None


def test_a_resume_counts_only_its_own_steps():
    """Resumed at 900 of 1000, ten steps in 60 s: 90 steps of 6 s are left."""
    pace = Pace()
    for _ in range(10):
        pace.step(6.0)
    assert pace.eta(910, 1000) == pytest.approx(540.0)
    several = Pace()
    several.step(6.0, count=10)
    assert several.eta(910, 1000) == pytest.approx(540.0)


def test_a_slow_first_step_is_left_out_once_three_others_are_known():
    pace = Pace()
    pace.step(100.0)
    assert pace.eta(1, 11) == pytest.approx(1000.0)
    pace.step(2.0)
    pace.step(2.0)
    assert pace.seconds_per_step == pytest.approx(104 / 3)
    pace.step(2.0)
    assert pace.seconds_per_step == pytest.approx(2.0)
    assert pace.eta(4, 11) == pytest.approx(14.0)


def test_pauses_are_spread_over_the_steps():
    pace = Pace()
    pace.pause(1000.0)  # an evaluation before the first step does not come again
    for _ in range(10):
        pace.step(1.0)
    pace.pause(20.0)
    pace.pause(-5.0)
    assert pace.eta(10, 20) == pytest.approx(10 * (1.0 + 20.0 / 10))


@pytest.mark.parametrize(
    ("step", "max_steps", "eta"),
    [(12, 10, 0.0), (10, 10, 0.0), (5, 0, None), (5, -1, None), (5, None, None), (None, 10, None),
     (math.nan, 10, None), (5, math.nan, None)],
)  # fmt: skip
def test_the_time_left_is_never_negative_and_may_be_unknown(step, max_steps, eta):
    pace = Pace()
    pace.step(1.0)
    assert pace.eta(step, max_steps) == eta


def test_only_the_recent_steps_count_and_reset_forgets():
    pace = Pace()
    for seconds in (*[9.0] * 60, *[1.0] * 50):
        pace.step(seconds)
    assert pace.seconds_per_step == pytest.approx(1.0)
    pace.reset()
    assert pace.eta(1, 2) is None


def test_numbers_need_no_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert as_number(np.float64(2.5)) == 2.5
    assert split_finite({"loss": np.float32("nan"), "a": 1}) == ({"a": 1}, {"loss": "nan"})

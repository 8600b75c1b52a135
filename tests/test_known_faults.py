"""What people reported of trainings whose numbers lied, each made to happen again and held against what is shown.

The trainings are real ones below `tunewatch exec`; several faults that leave each other alone share one. Scripted are
only those that need an accelerator, and moments that have to be exact.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import TESTS, Machine, Samples, scrape, wait_for
from story import EFFECTIVE, Story

from tunewatch.binaries import find_binary

SCRIPT = TESTS / "scripts" / "fault_train.py"
ODD_NAME = 'sev\'eral "quotes", a back\\slash, a new\nline, 🦙, and ' + "long " * 60
SCRAPE_SECONDS = 0.2


class Run:
    """A training that was watched to its end: every scrape on the way, the last one, the events, the verdict."""

    def __init__(
        self, machine: Machine, *flags: str, options: tuple[str, ...] = (), output: str = "out"
    ) -> None:
        self.output = machine.folder / output
        self._home = machine.home
        before = set(machine.home.glob("runs/*/supervisor.json")) if "--run-id" not in options else set()
        target = [sys.executable, str(SCRIPT), str(self.output), *flags]
        command = machine.start("exec", *options, "--", *target)
        self.texts: list[str] = []
        self._follow(command.process, before)
        self.code = command.wait()
        self.words = command.output
        assert self.texts, self.words[-3000:]
        self.verdict: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())

    def _follow(self, process: subprocess.Popen[bytes], before: set[Path]) -> None:
        """Scrape as a Prometheus would, until nobody is there any more."""
        supervisor = None
        while process.poll() is None:
            supervisor = supervisor or next(
                iter(set(self._home.glob("runs/*/supervisor.json")) - before), None
            )
            try:
                known = json.loads(supervisor.read_text()) if supervisor else {}
                if known.get("pid") == process.pid:
                    self.texts.append(scrape(known["address"]))
            except OSError:  # it begins, or has just ended
                pass
            time.sleep(SCRAPE_SECONDS)
        assert supervisor is not None
        self.folder = supervisor.parent

    @property
    def last(self) -> Samples:
        return Samples(self.texts[-1])

    @property
    def scrapes(self) -> list[Samples]:
        return [Samples(text) for text in self.texts]

    @property
    def signals(self) -> dict[str, dict[str, Any]]:
        return {item["signal"]: item for item in self.verdict["signals"]}

    @property
    def alarms(self) -> set[str]:
        return {name for name, item in self.signals.items() if item["level"] != "info"}

    @property
    def facts(self) -> dict[str, Any]:
        """What the trainer itself knew in the end."""
        return json.loads((self.output / "facts.json").read_text())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def train_logs(self) -> list[dict[str, Any]]:
        return [event for event in self.events("log") if "loss" in {**event["values"], **event["nonfinite"]}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each training once, when it is first asked for; `home` names a machine that several of them share."""
    machines: dict[str, Machine] = {}
    known: dict[tuple[Any, ...], Run] = {}

    def run(*flags: str, home: str = "", **how: Any) -> Run:
        key = (*flags, home, repr(how))
        if key not in known:
            machine = machines.setdefault(home or repr(key), Machine(tmp_path_factory.mktemp("machine")))
            known[key] = Run(machine, *flags, **how)
        return known[key]

    yield run
    for machine in machines.values():
        machine.close()


# -- numbers that are none ------------------------------------------------------------------------------------------


@pytest.fixture
def dead(runs):
    """A huge first loss; the gradients of step 6 are NaN, and so are the weights from then on."""
    return runs(
        "--steps",
        "10",
        "--save-steps",
        "2",
        "--eval-steps",
        "2",
        "--fault",
        "huge=1",
        "--fault",
        "nan-gradient=6",
    )


def test_a_run_whose_loss_is_logged_as_0_is_bad_from_the_first_bad_gradient(dead):
    logged = {event["step"]: (event["values"].get("loss"), event["nonfinite"]) for event in dead.train_logs()}
    assert logged[6][0] > 4 and logged[6][1] == {"grad_norm": "nan"}, "the first bad line has a good loss"
    assert logged[7] == (0.0, {"grad_norm": "nan"})
    assert dead.signals["nonfinite"]["level"] == "bad"
    assert dead.signals["nonfinite"]["step"] == 6
    assert dead.last.get("health_level") == 2
    assert dead.last.get("health", signal="nonfinite") == 1
    assert dead.last.get("first_nonfinite_step") == 6
    assert dead.last.get("nonfinite_steps_total", what="grad_norm") == 5
    assert dead.last.get("nonfinite_steps_total", what="loss") == 4
    assert (dead.code, dead.verdict["state"], dead.verdict["ending"]["reason"]) == (0, "failed", "nan")


def test_a_loss_of_0_that_a_filter_made_up_is_neither_shown_nor_the_best(dead):
    assert math.isnan(dead.last.get("loss"))
    assert dead.verdict["loss"] is None
    finite = {e["step"]: e["values"]["eval_loss"] for e in dead.events("log") if "eval_loss" in e["values"]}
    assert set(finite) == {2, 4}
    assert dead.last.get("best_eval_loss") == min(finite.values()) > 4
    assert dead.last.get("best_step") == min(finite, key=finite.get)
    assert math.isnan(dead.last.get("eval_loss", dataset="eval"))


def test_a_dead_run_names_the_checkpoint_from_before_it_died(dead):
    assert dead.last.get("checkpoint_last_step") == 10
    assert dead.last.get("checkpoint_resumable_step") == 4
    assert "checkpoint-4" in dead.verdict["ending"]["advice"]


def test_a_huge_first_loss_is_attention_before_anything_is_nan(dead):
    assert dead.signals["loss_huge"]["level"] == "attention"
    assert dead.signals["loss_huge"]["step"] == 1


@pytest.fixture
def one_bad_batch(runs):
    """The first half of step 2 is NaN and its gradients are dropped in time; every evaluation is NaN."""
    return runs(
        "--steps", "9", "--accumulation", "2", "--logging-steps", "3", "--save-steps", "3", "--eval-steps", "3",
        "--fault", "zeroed-nan=2", "--fault", "nan-eval",
    )  # fmt: skip


def test_one_nan_step_that_no_log_shows_is_counted_and_is_not_bad(one_bad_batch):
    assert all(not event["nonfinite"] for event in one_bad_batch.train_logs()), (
        "the trainer shows nothing of it"
    )
    assert one_bad_batch.last.get("nonfinite_steps_total", what="loss") == 1
    assert one_bad_batch.last.get("first_nonfinite_step") == 2
    assert one_bad_batch.last.get("nan_filter_active") == 1
    assert one_bad_batch.last.get("health_level") == 1
    assert one_bad_batch.signals["nonfinite_isolated"]["step"] == 2
    assert (one_bad_batch.code, one_bad_batch.verdict["state"]) == (0, "completed")


def test_the_window_that_holds_the_nan_step_is_not_shown_as_a_low_loss(one_bad_batch):
    losses = [event["values"]["loss"] for event in one_bad_batch.train_logs()]
    assert losses[0] < losses[1], "what the filter leaves looks like progress"
    assert one_bad_batch.last.get("loss") == losses[-1]
    shown = {samples.get("loss") for samples in one_bad_batch.scrapes}
    assert losses[0] not in shown


def test_an_evaluation_that_is_nan_every_time_leaves_no_best_checkpoint(one_bad_batch):
    assert one_bad_batch.alarms == {"nonfinite_isolated", "eval_nonfinite", "no_best_checkpoint"}
    assert math.isnan(one_bad_batch.last.get("eval_loss", dataset="eval"))
    assert one_bad_batch.last.get("nonfinite_steps_total", what="eval_loss") == 3
    for name in ("best_eval_loss", "best_step", "checkpoint_best_step"):
        assert one_bad_batch.last.get(name) is None, name
    assert one_bad_batch.facts["best"] is None, "the trainer kept the last weights without a word"


# -- runs that learn nothing ----------------------------------------------------------------------------------------


@pytest.fixture
def idle(runs):
    """No gradient; no new data from step 8 on; no learning rate from step 12 on; a KeyboardInterrupt in step 20."""
    return runs(
        "--steps", "40", "--fault", "no-gradient", "--fault", "no-new-data=8", "--fault", "zero-rate=12",
        "--fault", "interrupt=20",
    )  # fmt: skip


def test_a_gradient_that_is_0_in_every_log_is_bad(idle):
    assert {event["values"]["grad_norm"] for event in idle.train_logs()} == {0.0}
    assert idle.last.get("parameters", kind="trainable") > 0
    assert idle.signals["no_gradient"]["level"] == "bad"
    # the learning rate is 0 in the first log of the warm-up, which therefore does not count
    assert idle.signals["no_gradient"]["step"] == 6


def test_a_learning_rate_of_0_in_the_middle_is_bad_after_two_logs(idle):
    assert idle.signals["lr_zero"]["level"] == "bad"
    assert idle.signals["lr_zero"]["step"] == 13


def test_steps_without_new_tokens_are_attention(idle):
    tokens = {event["step"]: event["tokens"]["all"] for event in idle.train_logs()}
    assert tokens[19] == tokens[12] == idle.last.get("tokens_total", kind="all")
    assert idle.last.get("steps_total") == 19
    assert idle.signals["data_not_consumed"]["level"] == "attention"


def test_a_keyboard_interrupt_inside_of_the_training_is_cancelled(idle):
    assert idle.code == 130
    assert idle.verdict["state"] == "cancelled"
    assert idle.verdict["step"] == 19
    assert not idle.events("train_end")


def test_an_adapter_that_is_frozen_fails_early_and_says_why(runs):
    run = runs("--steps", "8", "--fault", "frozen")
    assert run.last.get("parameters", kind="trainable") == 0
    assert run.last.get("parameters", kind="total") > 0
    assert run.signals["nothing_trainable"]["level"] == "bad"
    assert (run.code, run.verdict["state"], run.verdict["ending"]["when"]) == (1, "failed", "early")


# -- an ordinary training, and its twin -----------------------------------------------------------------------------

ORDINARY = (
    "--rows", "20", "--epochs", "4", "--accumulation", "4", "--fault", "zero-rate=12", "--fault", "spike=8",
)  # fmt: skip
"""20 rows in 10 batches of 2, four to a step: two whole steps and half of one in each of four epochs."""


@pytest.fixture
def ordinary(runs):
    return runs(*ORDINARY, home="twins", output="first")


def test_zeros_of_the_learning_rate_at_both_ends_and_one_spike_are_notes(ordinary):
    rates = [event["values"]["learning_rate"] for event in ordinary.train_logs()]
    assert [step for step, rate in enumerate(rates, 1) if rate == 0.0] == [1, 12]
    assert ordinary.alarms == set()
    assert "to 11.99" in ordinary.signals["spike"]["message"]
    assert "at step 8" in ordinary.signals["spike"]["message"]
    assert ordinary.last.get("health_level") == 0
    assert ordinary.verdict["state"] == "completed"


def test_an_epoch_that_ends_in_half_a_step_raises_nothing(ordinary):
    assert ordinary.facts["step"] == ordinary.last.get("step") == ordinary.last.get("max_steps") == 4 * 3
    assert ordinary.last.get("epoch") == ordinary.facts["epoch"]
    for samples in ordinary.scrapes:
        if samples.get("progress_ratio") is not None:
            assert samples.get("progress_ratio") == samples.get("step") / samples.get("max_steps")


def test_padding_text_and_labels_are_three_counts_of_tokens(ordinary):
    lengths = [4 + row % 9 for row in range(20)]
    assert ordinary.last.get("tokens_total", kind="all") == 4 * 20 * 16
    assert ordinary.last.get("tokens_total", kind="non_padding") == 4 * sum(lengths)
    assert ordinary.last.get("tokens_total", kind="loss") == 4 * sum(length - 2 for length in lengths)


@pytest.mark.slow
def test_the_same_losses_under_another_learning_rate_are_attention(runs, ordinary):
    other = runs(
        *ORDINARY, "--learning-rate", "0.05", "--fault", "ignores-rate", home="twins", output="second"
    )  # fmt: skip
    assert other.alarms == {"settings_without_effect"}
    message = other.signals["settings_without_effect"]["message"]
    assert ordinary.folder.name in message
    assert "learning_rate" in message
    assert other.last.get("health", signal="settings_without_effect") == 1


# -- a loss on another scale ----------------------------------------------------------------------------------------


@pytest.fixture
def inflated(runs):
    return runs(
        "--steps", "24", "--accumulation", "8", "--eval-on-start", "--eval-steps", "12", "--eval-sets", "alpaca,flan",
        "--fault", "inflated", "--fault", "spike=12", "--fault", "spike=20",
    )  # fmt: skip


@pytest.mark.slow
def test_a_loss_that_is_summed_over_the_accumulation_is_attention(inflated):
    first = inflated.train_logs()[0]["values"]["loss"]
    assert inflated.signals["loss_scale"]["level"] == "attention"
    assert inflated.signals["loss_scale"]["step"] == 1
    assert first > 30, "about eight times ln 64"
    losses = [event["values"]["loss"] for event in inflated.train_logs()]
    assert inflated.last.get("loss") == losses[-1], "shown as it was logged"


def test_a_second_spike_is_attention(inflated):
    assert inflated.signals["spikes"]["level"] == "attention"
    assert inflated.signals["spikes"]["step"] == 20


def test_several_evaluation_sets_are_told_apart(inflated):
    logged = {key: value for event in inflated.events("log") for key, value in event["values"].items()}
    for name in ("alpaca", "flan"):
        assert inflated.last.get("eval_loss", dataset=name) == logged[f"eval_{name}_loss"]
    assert logged["eval_alpaca_loss"] != logged["eval_flan_loss"]
    assert {labels["dataset"] for labels in inflated.last.labels("eval_loss")} == {"alpaca", "flan"}
    assert [e["step"] for e in inflated.events("evaluate")] == [0, 0, 12, 12, 24, 24]
    best = min(
        e["values"]["eval_alpaca_loss"] for e in inflated.events("log") if "eval_alpaca_loss" in e["values"]
    )
    assert inflated.last.get("best_eval_loss") == best


def test_logs_of_one_step_are_all_kept(inflated):
    at_12 = [event["values"] for event in inflated.events("log") if event["step"] == 12]
    assert [sorted(key for key in values if key.endswith("loss")) for values in at_12] == [
        ["loss"], ["eval_alpaca_loss"], ["eval_flan_loss"],
    ]  # fmt: skip


# -- odd things in logs and names -----------------------------------------------------------------------------------


@pytest.fixture
def odd(runs):
    return runs(
        "--steps", "30", "--model-name", ODD_NAME, "--data-name", ODD_NAME, "--fault", "odd-logs",
        "--fault", "shorten=13", options=("--name", ODD_NAME),
    )  # fmt: skip


def test_numbers_that_come_as_tensors_strings_or_nothing(odd):
    logs = {event["step"]: event["values"] for event in odd.train_logs()}
    assert len(logs) == 13
    assert all(type(values["learning_rate"]) is float for values in logs.values())
    assert logs[3]["learning_rate"] == odd_rate(3)
    spelled, tensor, nothing = logs[12], logs[13], logs[11]  # by the step modulo three
    assert spelled["grad_norm"] > 0 and tensor["grad_norm"] > 0
    assert "grad_norm" not in nothing
    assert odd.last.get("grad_norm") == tensor["grad_norm"]
    assert odd.last.get("learning_rate") == pytest.approx(odd_rate(13))
    assert odd.alarms == set()


def odd_rate(step: int) -> float:
    """Two steps of warm-up from 0, then a straight line to 0 at step 30; a float32 in between."""
    import struct

    rate = 1e-3 * (step - 1) / 2 if step <= 2 else 1e-3 * (30 - (step - 1)) / 28
    return struct.unpack("f", struct.pack("f", rate))[0]


def test_keys_that_look_like_others_do_not_replace_the_loss(odd):
    logs = [event["values"] for event in odd.train_logs()]
    assert odd.last.get("loss") == logs[-1]["loss"] < 5
    names = {"rewards/chosen": 1.5, "eval/loss": 7.0, "train.loss": 8.0, "loss ": 9.0, "Loss": 10.0}
    assert {name: odd.last.get("metric", name=name) for name in names} == names
    assert odd.last.labels("eval_loss") == []
    assert "note" not in {labels["name"] for labels in odd.last.labels("metric")}


def test_names_of_any_kind_make_a_valid_exposition(odd):
    for text in odd.texts:
        checked = subprocess.run(
            [str(find_binary("promtool")), "check", "metrics"], input=text.encode(), capture_output=True, check=False
        )  # fmt: skip
        assert checked.returncode == 0, checked.stderr.decode()
    (info,) = odd.last.labels("run_info")
    shown = ODD_NAME.replace("\n", "")[:128]
    assert (info["name"], info["base_model"], info["dataset"]) == (shown, shown, shown)


def test_a_number_of_steps_that_a_callback_changes_is_followed(odd):
    assert odd.facts["max_steps"] == odd.last.get("max_steps") == odd.last.get("step") == 13
    assert odd.last.get("progress_ratio") == 1
    assert odd.verdict["state"] == "completed"
    assert {samples.get("max_steps") for samples in odd.scrapes} <= {None, 30.0, 13.0}


# -- a crash and a resume -------------------------------------------------------------------------------------------


@pytest.fixture
def resumed(runs):
    """Killed in step 47 of 60, then resumed from step 40 with other arguments."""
    known = {"home": "resumed", "options": ("--run-id", "again")}
    first = runs("--steps", "60", "--save-steps", "20", "--fault", "kill=47", **known)
    assert first.code == 137
    assert first.verdict["step"] == 46
    return runs(
        "--steps", "66", "--save-steps", "100", "--logging-steps", "3", "--step-seconds", "0.2", "--resume", **known
    )  # fmt: skip


def test_the_time_left_after_a_resume_is_that_of_the_steps_of_this_session(resumed):
    moments = {event["step"]: event["m"] for event in resumed.train_logs()}
    took = [moments[step + 1] - moments[step] for step in range(42, 65)]
    told = 0
    for samples in resumed.scrapes:
        step, eta = samples.get("step"), samples.get("eta_seconds")
        if eta is None or step < 44:
            continue
        told += 1
        assert 0.8 * min(took) * (66 - step) <= eta <= 1.2 * max(took) * (66 - step), step
    assert told >= 3
    idle = [samples for samples in resumed.scrapes if samples.get("steps_total") == 0]
    assert {samples.get("eta_seconds") for samples in idle} == {None}, (
        "unknown before this session made a step"
    )


def test_counters_after_a_resume_begin_with_this_session(resumed):
    counted = [
        (samples.get("tokens_total", kind="all"), samples.get("steps_total"))
        for samples in resumed.scrapes
        if samples.get("tokens_total", kind="all") is not None
    ]
    assert all(tokens <= 2 * 16 * (steps + 2) for tokens, steps in counted), "a spike in tokens a second"
    assert all(before <= after for before, after in pairwise(counted))
    assert counted[-1] == (2 * 16 * 26, 26)
    assert resumed.last.get("resumes_total") == 1
    assert resumed.last.get("tokens_seen", kind="all") == 2 * 16 * 66


def test_a_step_that_goes_back_is_shown_and_the_lost_steps_are_counted(resumed):
    shown = {(samples.get("step"), samples.get("steps_total")) for samples in resumed.scrapes}
    assert {step - done for step, done in shown if done} == {40}, (
        "never held up at the 46 that had been reached"
    )
    logged = [event["step"] for event in resumed.train_logs()]
    assert logged == [*range(1, 47), *range(41, 67)], "both are kept"
    assert resumed.last.get("steps_redone_total") == 6
    assert resumed.last.get("wasted_seconds_total") > 0
    assert resumed.last.get("step") == 66


def test_what_a_resume_overrides_and_reshapes_is_told(resumed):
    asked = {
        what: resumed.last.get("interval_steps", what=what, kind="requested") for what in ("log", "save")
    }
    got = {what: resumed.last.get("interval_steps", what=what, kind="effective") for what in ("log", "save")}
    assert (asked, got) == ({"log": 3, "save": 100}, {"log": 1, "save": 20})
    assert resumed.signals["arguments_overridden"]["level"] == "info"
    assert resumed.signals["schedule_reshaped"]["level"] == "attention"
    assert "60 steps and goes on for 66" in resumed.signals["schedule_reshaped"]["message"]
    assert resumed.alarms == {"schedule_reshaped"}
    assert [
        resumed.last.get("resume_lost", part=part) for part in ("optimizer", "scheduler", "rng", "data_order")
    ] == [0] * 4


# -- batches and totals that the trainer works out ------------------------------------------------------------------


@pytest.fixture
def searched(runs):
    """32 rows, packed to fewer; the batch of 4 and that of 3 do not fit."""
    return runs(
        "--packing",
        "--rows",
        "32",
        "--epochs",
        "2",
        "--batch",
        "4",
        "--step-seconds",
        "0.1",
        "--fault",
        "out-of-memory",
    )


@pytest.mark.slow
def test_the_number_of_steps_is_that_of_the_packed_rows(searched):
    packed = searched.facts["rows"]
    assert packed < 32
    assert searched.last.get("max_steps") == 2 * math.ceil(packed / 2) == searched.facts["max_steps"]
    before = [samples for samples in searched.scrapes if samples.get("step") is None]
    assert all(samples.get("max_steps") is None for samples in before), "unknown before the training begins"


@pytest.mark.slow
def test_a_batch_that_is_made_smaller_twice_is_no_crash(searched):
    packed = searched.facts["rows"]
    begun = searched.events("train_begin")
    assert [event["restart"] for event in begun] == [False, True, True]
    assert [event["max_steps"] for event in begun] == [2 * math.ceil(packed / size) for size in (4, 3, 2)]
    assert searched.last.get("batch_size_restarts_total") == 2
    assert searched.last.get("batch_size") == 2
    assert searched.last.get("steps_total") == searched.last.get("step") == searched.last.get("max_steps")
    assert searched.last.get("resumes_total") == 0
    assert searched.last.get("steps_redone_total") == 0
    assert searched.alarms == set()
    assert (searched.code, searched.verdict["state"]) == (0, "completed")
    for samples in searched.scrapes:
        eta = samples.get("eta_seconds")
        assert eta is None or eta >= 0
        assert samples.get("run_state", state="failed") == 0


# -- a port that an orphan holds ------------------------------------------------------------------------------------

FORKING = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
open(sys.argv[1] + f".{os.getpid()}", "w").close()
time.sleep(600)
"""


def test_an_orphan_of_a_killed_run_holds_no_port(machine):
    program = (sys.executable, "-c", FORKING, str(machine.folder / "pid"))
    command = machine.start("exec", "--", *program)
    pids = wait_for(
        lambda: (found := list(machine.folder.glob("pid.*"))) and len(found) == 2 and found, what="two"
    )
    address = machine.json("supervisor.json")["address"]
    command.process.kill()
    command.wait()
    orphans = [psutil.Process(int(path.suffix[1:])) for path in pids]
    try:
        assert all(orphan.is_running() for orphan in orphans)
        assert [orphan.net_connections() for orphan in orphans] == [[], []]
        next_one = machine.start(
            "exec",
            "--no-linger",
            "--run-id",
            "next",
            "--listen",
            address,
            "--",
            sys.executable,
            "-c",
            "input()",
        )
        wait_for(lambda: (machine.home / "runs" / "next" / "supervisor.json").exists(), what="the next run")
        assert next_one.wait() == 1  # there is nothing to read
    finally:
        for orphan in orphans:
            orphan.kill()


# -- scripted: exact moments, and what needs an accelerator ---------------------------------------------------------


@pytest.fixture
def story(tmp_path, monkeypatch):
    story = Story(tmp_path, monkeypatch)
    yield story
    story.close()


def begun(story: Story, **fields: Any) -> None:
    story.open_session()
    story.beat("prepare")
    story.train_begin(**fields)
    story.beat("data", step=float(fields.get("step", 0)), max_steps=float(fields["max_steps"]))


def test_ten_steps_after_a_resume_at_900_of_1000_leave_540_seconds(story):
    begun(story, step=900, max_steps=1000)
    assert story.tick().eta is None
    for step in range(901, 911):
        story.steps(step, step, seconds=6.0)
        story.beat("data", max_steps=1000.0)
    assert story.tick().eta == pytest.approx(540.0)
    story.steps(911, 1005, seconds=6.0)
    story.beat("data", max_steps=1000.0)
    assert story.tick().eta == 0.0


def scaler_run(story: Story, steps: int, skips: Any) -> Any:
    """Steps in fp16, with a log each; `skips` says whether a step is skipped. The scheduler waits with the scaler."""
    begun(
        story,
        max_steps=1000,
        effective={**EFFECTIVE, "precision": "fp16", "warmup_steps": 0, "logging_steps": 1},
    )
    skipped = 0
    for step in range(1, steps + 1):
        story.steps(step, step)
        skipped += skips(step)
        story.beat("data", max_steps=1000.0, steps_skipped_total=float(skipped))
        rate = 0.0 if skipped == step else 1e-4
        values = {"loss": 2.0 - step / 1000, "learning_rate": rate, "grad_norm": 1.0}
        story.event("log", step=step, epoch=step / 50, values=values, nonfinite={}, skipped=skipped)
        story.tick()
    return story.tick()


def test_the_first_skips_of_an_fp16_scaler_are_a_note(story):
    snapshot = scaler_run(story, 24, lambda step: step <= 15)
    levels = {verdict.signal: verdict.level for verdict in snapshot.verdicts}
    assert levels == {"fp16_skips": "info", "lr_zero_expected": "info"}
    assert snapshot.health == "ok"
    assert 'tunewatch_optimizer_steps_skipped_total{run_id="story-1"} 15.0' in story.exposition()


def test_a_scaler_that_skips_for_ever_is_bad_and_explains_the_learning_rate_of_0(story):
    snapshot = scaler_run(story, 60, lambda step: True)
    signals = {verdict.signal: verdict for verdict in snapshot.verdicts}
    assert signals["fp16_overflow"].level == "bad"
    assert snapshot.health == "bad"
    assert "lr_zero" not in signals
    assert snapshot.steps_skipped_total == 60

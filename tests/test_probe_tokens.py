"""Tokens of micro-batches: what is counted, what is unknown, and counts that arrive from an accelerator."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from test_probe_nonfinite import Queue
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tunewatch.probe import nonfinite
from tunewatch.probe.callback import TunewatchCallback
from tunewatch.probe.pulse import read_pulse
from tunewatch.probe.reporter import Reporter
from tunewatch.probe.tokens import TokenTotals, batch_of
from tunewatch.probe.writer import RunWriter

IDS = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
LABELS = torch.tensor([[-100, 6, 7, -100], [-100, -100, -100, -100]])
ROW = torch.tensor([[5, 6, 7, 8, 9]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, (8, 4, 2)),
        ({"input_ids": IDS, "attention_mask": MASK.bool(), "labels": LABELS}, (8, 4, 2)),
        ({"input_ids": IDS, "attention_mask": MASK * torch.tensor([[1], [2]]), "labels": LABELS}, (8, 4, 2)),
        ({"input_ids": IDS, "attention_mask": MASK}, (8, 4, None)),
        ({"input_ids": IDS, "labels": LABELS}, (8, None, 2)),  # padded or not, nobody knows
        ({"input_ids": IDS, "labels": torch.tensor([1, 0])}, (8, None, None)),  # a classification
        ({"input_ids": IDS, "attention_mask": MASK[:, None, None, :]}, (8, None, None)),
        ({"input_ids": IDS, "attention_mask": {"full": MASK}}, (8, None, None)),
        ({"input_ids": ROW, "position_ids": POSITIONS, "labels": ROW}, (5, 5, 5)),  # padding-free
        ({"input_ids": ROW, "cu_seq_lens_q": torch.tensor([0, 3, 5])}, (5, 5, None)),
        ({"input_ids": ROW}, (5, None, None)),
        ({"input_ids": IDS, "position_ids": torch.arange(4).repeat(2, 1)}, (8, None, None)),
    ],
)  # fmt: skip
def test_what_a_batch_tells(inputs, expected):
    counts = batch_of(inputs).counts()
    assert tuple(None if number is None else int(number) for number in counts) == expected


@pytest.mark.parametrize(
    "inputs", [None, 3, {}, {"prompt_input_ids": IDS, "chosen_input_ids": IDS, "rejected_input_ids": IDS}]
)
def test_a_batch_of_another_kind_tells_nothing(inputs):
    assert batch_of(inputs) is None


def test_a_sum_without_one_batch_is_no_sum():
    totals = TokenTotals()
    assert totals.known() == {}
    totals.add(0, 8)
    totals.add(1, 4)
    totals.add(2, 0)
    assert totals.known() == {"all": 8, "non_padding": 4, "loss": 0}
    totals.add(1, None)
    totals.add(1, 4)
    totals.add(0, 8)
    assert totals.known() == {"all": 16, "loss": 0}


# -- through the reporter ----------------------------------------------------------------------------------


def lines(folder, kind):
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["event"] == kind]


def test_a_real_training_with_padding_counts_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWATCH_RUN_FOLDER", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "_tunewatch_probe", {}, raising=False)
    # Row i: i+1 tokens of 8, of which the first is a prompt.
    rows = [
        {
            "input_ids": [1] * (i + 1) + [0] * (7 - i), "attention_mask": [1] * (i + 1) + [0] * (7 - i),
            "labels": [-100] + [1] * i + [-100] * (7 - i),
        }
        for i in range(8)
    ]  # fmt: skip
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[TunewatchCallback()]).train()
    logged = [event["tokens"] for event in lines(tmp_path / "run", "log") if "loss" in event["values"]]
    assert logged[0]["all"] == 4 * 8
    # Two steps of four rows are all eight: 1 + 2 + ... + 8 tokens, of which 8 are prompts.
    assert logged[1] == {"all": 64, "non_padding": 36, "loss": 28}
    pulse = read_pulse(str(tmp_path / "run" / "pulse.0"))
    found = [pulse[f"tokens_{kind}_total"] for kind in ("all", "non_padding", "loss")]
    assert found == [64.0, 36.0, 28.0]
    assert (pulse["samples_total"], pulse["hook_errors"]) == (8.0, 0.0)


def test_a_preference_trainer_has_no_tokens_rather_than_none(tmp_path):
    writer = RunWriter(str(tmp_path))
    writer.open_pulse()
    reporter = Reporter(writer)
    reporter.micro_batch(torch.tensor(1.0), {"prompt_input_ids": IDS, "chosen_input_ids": IDS})
    writer.deliver()
    pulse = read_pulse(str(tmp_path / "pulse.0"))
    assert all(math.isnan(pulse[f"tokens_{kind}_total"]) for kind in ("all", "non_padding", "loss"))


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on an accelerator."""

    is_cpu = False

    @property
    def device(self):
        return torch.device("cuda", 0)

    def item(self):
        raise AssertionError("waited for the device")

    __int__ = __float__ = __bool__ = tolist = item


def on_device(tensor):
    return tensor.as_subclass(OnDevice)


class State:
    global_step, max_steps, epoch = 0, 9, 0.0


class Control:
    should_evaluate = should_save = False


def test_counts_on_an_accelerator_arrive_with_the_flags_and_nothing_waits(tmp_path, monkeypatch):
    queue = Queue()

    class Flags(nonfinite._DeviceFlags):
        def __init__(self, torch, device):
            super().__init__(torch, torch.device("cpu"), queue.event)

        def mark(self, which, value):
            super().mark(which, value.as_subclass(torch.Tensor))

        def count(self, which, number):
            super().count(which, number.as_subclass(torch.Tensor))

    monkeypatch.setattr(nonfinite, "_DeviceFlags", Flags)
    writer = RunWriter(str(tmp_path))
    writer.open_pulse()
    reporter = Reporter(writer)
    inputs = {
        "input_ids": on_device(IDS), "attention_mask": on_device(MASK), "labels": on_device(LABELS)
    }  # fmt: skip

    def step():
        State.global_step += 1
        for _ in range(2):
            reporter.micro_batch(on_device(torch.tensor(1.0)), inputs)
        reporter.step_end(None, State, Control)
        writer.deliver()
        pulse = read_pulse(str(tmp_path / "pulse.0"))
        return [pulse[f"tokens_{kind}_total"] for kind in ("all", "non_padding", "loss")]

    first = step()
    assert first[0] == 16.0
    assert math.isnan(first[1]) and math.isnan(first[2])  # under way
    queue.done = 1
    assert step() == [32.0, 8.0, 4.0]
    queue.done = 2
    reporter.log(None, State, {"loss": 1.0})
    writer.deliver()
    assert lines(tmp_path, "log")[-1]["tokens"] == {"all": 32, "non_padding": 16, "loss": 8}
    # A new attempt (a smaller batch) goes on counting, and takes over what was still under way.
    step()
    reporter._leave_attempt()
    assert reporter.session.tokens.known() == {"all": 48, "non_padding": 24, "loss": 12}
    assert writer.errors == 0

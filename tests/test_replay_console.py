"""Console output: which logs are found in it, with which values and steps, and where a run ends."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tunewatch.replay.console import console_events
from tunewatch.replay.runs import NEXT_RUN, Notes


def runs(text: str, piece: int = 1 << 20) -> list[list[dict[str, Any]]]:
    """The log events of each run in `text`, which comes in pieces of that many characters."""
    found: list[list[dict[str, Any]]] = [[]]
    for event in console_events((text[at : at + piece] for at in range(0, len(text), piece)), Notes()):
        if event is NEXT_RUN:
            found.append([])
        elif event["event"] == "log":
            found[-1].append(event)
    return found


def logs(text: str) -> list[dict[str, Any]]:
    (run,) = runs(text)
    return run


def values(text: str) -> list[dict[str, Any]]:
    return [event["values"] for event in logs(text)]


def steps(text: str) -> list[int | None]:
    return [event["step"] for event in logs(text)]


def bar(done: int, total: int) -> str:
    return f"\r{100 * done // total:3}%|{'█' * 3:10}| {done}/{total} [00:01<00:10,  9.50it/s]"


def tqdm_write(text: str, done: int, total: int) -> str:
    """How tqdm prints a line between its bars: it wipes the bar, writes, and draws the bar anew."""
    return f"\r{' ' * 60}\r{text}\n{bar(done, total)}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'loss': 4.19, 'epoch': 0.1}", {"loss": 4.19, "epoch": 0.1}),
        ("{'loss': '4.19', 'grad_norm': '5e-05', 'epoch': '0.1'}", {"loss": 4.19, "grad_norm": 5e-5, "epoch": 0.1}),
        ("{'loss': tensor(1.2), 'epoch': 1}", {"loss": 1.2, "epoch": 1.0}),
        ("{'loss': tensor(0.5, device='cuda:0'), 'epoch': 1}", {"loss": 0.5, "epoch": 1.0}),
        ("{'loss': tensor([2.5000e-01], grad_fn=<MeanBackward0>), 'epoch': 1}", {"loss": 0.25, "epoch": 1.0}),
        ("{'loss': np.float64(1.0), 'epoch': np.float32(0.5)}", {"loss": 1.0, "epoch": 0.5}),
        ("{'loss': 5., 'x': None, 'flag': True, 'note': 'a', 'epoch': 2}", {"loss": 5.0, "epoch": 2.0}),
        ("{'loss': 1.5, 'sub': {'loss': 9.0, 'deep': {'a': 1}}, 'sizes': [1, 2]}", {"loss": 1.5}),
        ('{"loss": 1.5, "train/loss": 9.0}', {"loss": 1.5}),
        ("{'train/loss': 1.5, 'eval/loss': 2.5}", {"loss": 1.5, "eval_loss": 2.5}),
        ("\x1b[32m{'loss'\x1b[0m: 1.5, \x1b[1;31m'epoch': 0.5}\x1b[0m", {"loss": 1.5, "epoch": 0.5}),
        ("2024-12-08 01:10:34 INFO [rank0] trainer >> {'loss': 1.5} # {'a': 1}", {"loss": 1.5}),
        ("01:10:34.123 | INFO     | __main__:log:10 - {'loss': 1.5}", {"loss": 1.5}),
        ("{'loss': 2, 'epoch': 1}", {"loss": 2.0, "epoch": 1.0}),
        ("{'loss': '2', 'a': '1_0', 'b': 'x'}", {"loss": 2.0}),
        ("{'loss': '2', 'a': '1_0'}", {"loss": 2.0}),
        ("{'loss': '2', 'a': '1_0', 'b': \"it's\", 'c': [1.5], 'd': '7/9'}", {"loss": 2.0, "d": 7.0}),
        ('{"loss": 1.5, "note": "a, b: {}", "epoch": null}', {"loss": 1.5}),
        ("{'loss': +1.5, 'a': .5, 'b': 1e400}", {"loss": 1.5, "a": 0.5, "b": math.inf}),
        ("{'loss': Decimal('0.5'), 'a': Array(2.0, dtype=float32)}", {"loss": 0.5, "a": 2.0}),
        ("{'loss': 1.5, 'lr': 1.25e-\n05,\n 'ep\noch': 0.5}", {"loss": 1.5, "lr": 1.25e-5, "epoch": 0.5}),
        ("{\n  'loss': 1.5,\n  'epoch': 0.5\n}\n", {"loss": 1.5, "epoch": 0.5}),
        ("{'loss': 1.5, 'epoch': 0.5}\r\n", {"loss": 1.5, "epoch": 0.5}),
    ],
)  # fmt: skip
def test_reads_a_dict_as_it_was_printed(text: str, expected: dict[str, float]) -> None:
    assert values(text) == [expected]


@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("nan", math.nan), ("NaN", math.nan), ("NAN", math.nan), ("-nan", math.nan), ("np.nan", math.nan),
        ("'nan'", math.nan), ("'NaN'", math.nan), ("tensor(nan, device='cuda:0')", math.nan),
        ("np.float32(nan)", math.nan), ("float('nan')", math.nan), ("inf", math.inf), ("Infinity", math.inf),
        ("'inf'", math.inf), ("INF", math.inf), ("-inf", -math.inf), ("'-inf'", -math.inf), ("-Infinity", -math.inf),
    ],
)  # fmt: skip
def test_numbers_that_are_none_stay_what_they_are(spelled: str, value: float) -> None:
    (found,) = values(f"{{'loss': {spelled}, 'epoch': 0.5}}")
    assert found["epoch"] == 0.5
    assert found["loss"] == value or (math.isnan(value) and math.isnan(found["loss"]))


def test_two_dicts_in_one_line_are_two_logs() -> None:
    assert values("{'loss': 1.5, 'epoch': 0.1} {'loss': 1.25, 'epoch': 0.2}\n") == [
        {"loss": 1.5, "epoch": 0.1}, {"loss": 1.25, "epoch": 0.2},
    ]  # fmt: skip


def test_of_several_ranks_the_first_one_counts() -> None:
    text = "".join(
        f"[rank{rank}]: {{'loss': {loss + rank / 10}, 'epoch': {epoch}}}\n"
        for loss, epoch in ((3.0, 0.1), (2.0, 0.2))
        for rank in (1, 0)
    )
    assert [found["loss"] for found in values(text)] == [3.1, 2.1]
    assert [found["loss"] for found in values(text.replace("[rank", "[default"))] == [3.1, 2.1]


def test_a_dict_of_one_rank_that_another_breaks_off_costs_only_itself() -> None:
    text = "[rank0]: {'loss': 3.0, 'grad_[rank1]: {'loss': 2.5, 'epoch': 0.1}\n[rank1]: {'loss': 2.0, 'epoch': 0.2}\n"
    assert [found["loss"] for found in values(text)] == [2.5, 2.0]


def test_the_output_of_a_notebook_is_read() -> None:
    line = "{'loss': 1.5, 'learning_rate': 1e-05, 'epoch': 0.5}"
    text = json.dumps(
        {"cells": [{"outputs": [{"text": [f"{line}\n", "\r 50%|█  | 5/10 [00:01<00:01]\n"]}]}]}, indent=1
    )
    assert values(text) == [{"loss": 1.5, "learning_rate": 1e-5, "epoch": 0.5}]


def begins(text: str) -> list[dict[str, Any]]:
    return [event for event in console_events(iter([text]), Notes()) if event["event"] == "train_begin"]


def test_what_the_output_says_of_a_training_is_known_to_the_detectors() -> None:
    text = (
        "***** Running training *****\n  Num examples = 64\n  Num Epochs = 2\n  Gradient Accumulation steps = 4\n"
        "  Total optimization steps = 1,000\n  Number of trainable parameters = 0\n{'loss': 1.5, 'epoch': 0.5}\n"
    )
    assert begins(text) == [
        {
            "event": "train_begin", "max_steps": 1000, "num_train_epochs": 2, "trainable_parameters": 0,
            "effective": {"gradient_accumulation_steps": 4},
        }
    ]  # fmt: skip
    unsloth = "Num examples = 1,000 | Num Epochs = 1 | Total steps = 60\n{'loss': 1.5}\n"
    assert [begin["max_steps"] for begin in begins(unsloth)] == [60]
    assert [begin["max_steps"] for begin in begins(bar(9, 40) + tqdm_write("{'loss': 1.5}", 10, 40))] == [40]
    assert begins("{'loss': 1.5}\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "{'learning_rate': 5e-5, 'batch_size': 8}",
        "{'loss': 'cross_entropy'}",
        "{'role': 'user', 'content': 'what is loss'}",
        "{'loss': 1.5, 'epoch': ",
        "12.5\n13.5\n",
        "loss 1.5 at step 3",
    ],
)
def test_what_is_no_log_is_none(text: str) -> None:
    assert logs(text) == []


def test_says_that_bare_numbers_mean_nothing() -> None:
    notes = Notes()
    assert list(console_events(iter(["1 2.5\n2 2.4\n"]), notes)) == []
    assert notes.nothing == "only numbers: nothing says what they are"


def test_a_dict_behind_a_bar_and_a_logger_is_found_once() -> None:
    """LLaMA-Factory and transformers print the same log, each in its own digits."""
    text = (
        "  1%|▏         | 75/6249 [08:38<11:33:05,  6.74s/it][INFO|2024-12-08 01:10:34] llamafactory.callbacks:157"
        " >> {'loss': 0.0000, 'learning_rate': 4.9982e-05, 'epoch': 0.04}\n"
        "\r      \r{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.99823e-05, 'epoch': 0.036}\n"
        "\r  1%|▏         | 75/6249 [08:38<11:33:05,  6.74s/it]"
    )
    (event,) = logs(text)
    assert event["step"] == 75
    assert event["values"]["loss"] == 0.0 and math.isnan(event["values"]["grad_norm"])


def test_the_same_line_of_two_ranks_is_one_log() -> None:
    line = "{'loss': 1.5, 'grad_norm': 2.5, 'epoch': 0.1}\n"
    assert len(logs(line * 2)) == 1


@pytest.mark.parametrize("values", ["'loss': 0.0, 'grad_norm': nan", "'loss': 11.9, 'grad_norm': 0.0"])
def test_a_dead_run_that_logs_the_same_again_and_again_keeps_its_logs(values: str) -> None:
    assert len(logs(f"{{{values}, 'epoch': 0.1}}\n" * 3)) == 3


def test_the_same_values_at_another_step_are_another_log() -> None:
    text = "".join(
        bar(step - 1, 100) + tqdm_write("{'loss': 1.5, 'epoch': 0.1}", step, 100) for step in (10, 20)
    )
    assert steps(text) == [10, 20]


def test_train_and_evaluation_of_one_step_are_both_kept() -> None:
    text = "{'loss': 1.5, 'epoch': 0.1}\n{'eval_loss': 1.5, 'epoch': 0.1}\n"
    assert values(text) == [{"loss": 1.5, "epoch": 0.1}, {"eval_loss": 1.5, "epoch": 0.1}]


def test_a_dict_that_a_bar_cuts_in_two_is_whole_again() -> None:
    text = "{'loss': 1.5, 'grad_" + bar(10, 100) + "norm': 2.5,\n 'learning_rate': 1e-4, 'epoch': 0.1}\n"
    assert values(text) == [{"loss": 1.5, "grad_norm": 2.5, "learning_rate": 1e-4, "epoch": 0.1}]


def test_a_dict_that_was_never_finished_does_not_swallow_the_next() -> None:
    assert values("{'loss': 1.5, 'gra\n{'loss': 1.25, 'epoch': 0.2}\n") == [{"loss": 1.25, "epoch": 0.2}]


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_pieces_of_the_file_make_no_difference(piece: int) -> None:
    text = "".join(
        tqdm_write(f"{{'loss': {1 / step}, 'epoch': {step / 10}}}", step, 9) for step in range(1, 9)
    )
    assert runs(text, piece) == runs(text)
    assert len(runs(text)[0]) == 8


def test_the_step_is_that_of_the_bar_drawn_behind_the_line() -> None:
    """The bar before it may be late (tqdm draws ten times a second); the next one is drawn with the line."""
    text = bar(3, 40) + tqdm_write("{'loss': 1.5, 'epoch': 0.25}", 10, 40) + bar(12, 40)
    text += tqdm_write("{'loss': 1.25, 'epoch': 0.5}", 20, 40)
    assert steps(text) == [10, 20]


def test_bars_of_an_evaluation_and_of_the_data_are_not_taken_for_steps() -> None:
    text = "Map: 100%|███| 500/500 [00:01<00:00, 400 examples/s]\n" + bar(5, 5)
    text += bar(9, 40) + tqdm_write("{'loss': 1.5, 'epoch': 0.25}", 10, 40)
    text += bar(1, 3) + bar(3, 3) + "\r   \r{'eval_loss': 1.25, 'epoch': 0.25}\n" + bar(3, 3) + bar(19, 40)
    text += "\r   \r{'loss': 1.0, 'epoch': 0.5}\n"
    assert steps(text) == [10, 10, 19]


def test_a_bar_with_a_name_is_not_the_training() -> None:
    text = "".join(f"Epoch {n}: {bar(n, 10).strip()}\n{{'loss': 1.{n}, 'epoch': 0.{n}}}\n" for n in (5, 7))
    assert steps(text) == [1, 2]


def test_a_bar_that_stands_still_gives_no_step() -> None:
    """Standard output that was buffered comes in blocks."""
    text = bar(10, 40) + "\n" + "".join(f"{{'loss': 1.{n}, 'epoch': 0.{n}}}\n" for n in (1, 2, 3))
    assert steps(text) == [10, None, None]


def test_without_bars_the_epoch_gives_the_step_where_the_length_was_said() -> None:
    text = "***** Running training *****\n  Num Epochs = 2\n  Total optimization steps = 1,000\n"
    text += "{'loss': 1.5, 'epoch': 0.5}\n{'eval_loss': 1.5, 'epoch': 0.5}\n{'loss': 1.25, 'epoch': 1.5}\n"
    assert steps(text) == [250, 250, 750]


def test_without_anything_logs_are_counted() -> None:
    text = "{'eval_loss': 2.5}\n{'loss': 1.5}\n{'loss': 1.25}\n{'eval_loss': 1.5}\n"
    assert steps(text) == [None, 1, 2, 2]
    notes = Notes()
    list(console_events(iter([text]), notes))
    assert notes.step_source == "counted"


def losses(text: str) -> list[list[float]]:
    return [[event["values"]["loss"] for event in run if "loss" in event["values"]] for run in runs(text)]


def test_a_summary_ends_a_run_and_an_evaluation_behind_it_still_belongs_to_it() -> None:
    text = "{'loss': 1.5, 'epoch': 0.5}\n{'train_runtime': 9.5, 'train_loss': 1.5, 'epoch': 1.0}\n"
    text += "{'eval_loss': 1.5, 'epoch': 1.0}\n{'loss': 1.25, 'epoch': 1.5}\n"
    assert losses(text) == [[1.5], [1.25]]
    assert "eval_loss" in runs(text)[0][-1]["values"]


def test_a_training_that_is_announced_is_a_run() -> None:
    line = "***** Running training *****\n{'loss': 1.5, 'epoch': 0.5}\n"
    assert losses(line + line.replace("1.5", "1.25")) == [[1.5], [1.25]]


def test_an_epoch_that_begins_again_is_another_run() -> None:
    text = "".join(f"{{'loss': {loss}, 'epoch': {epoch}}}\n" for loss, epoch in
                   [(3, 0.1), (2, 0.2), (1, 0.3), (6, 0.1), (5, 0.2)])  # fmt: skip
    assert losses(text) == [[3, 2, 1], [6, 5]]


def test_a_step_that_goes_back_in_the_middle_is_no_other_run() -> None:
    text = "".join(f"{{'loss': {step}, 'step': {step}}}\n" for step in (10, 20, 30, 40, 30, 40, 50))
    assert losses(text) == [[10, 20, 30, 40, 30, 40, 50]]

"""Each form of a history: what is read of it, and that one run is judged alike whatever form it comes in."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tunewatch.health import Thresholds
from tunewatch.replay import Report, replay
from tunewatch.replay.history import entries_of_list
from tunewatch.replay.pieces import MAX_LINE, lines
from tunewatch.replay.runs import Notes
from tunewatch.replay.tensorboard import masked_crc, tensorboard_events

Entry = dict[str, Any]


def reports(path: Path) -> list[Report]:
    return list(replay(str(path), Thresholds()))


def report(path: Path) -> Report:
    (found,) = reports(path)
    return found


def signals(found: Report) -> dict[str, int | None]:
    """Each signal beyond notes, with its step."""
    return {item.verdict.signal: item.verdict.step for item in found.raised if item.verdict.level != "info"}


def counts(found: Report) -> tuple[int, int, int, int | None]:
    return found.logs, found.losses, found.evals, found.steps


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


# -- a run that falls, overfits, and then breaks ---------------------------------------------------------------


def overfitting_then_nan() -> list[Entry]:
    """Evaluations at 20, 40, 60, 80, best at 20 and 11 % above it at 60 and more at 80; norm NaN from 90 on."""
    history: list[Entry] = []
    evals = {20: 2.0, 40: 2.1, 60: 2.25, 80: 2.5}
    for step in range(10, 101, 10):
        dead = step >= 90
        history.append({
            "loss": 0.0 if dead else 3.0 - step / 50, "grad_norm": math.nan if dead else 1.0 + step / 1000,
            "learning_rate": 1e-4 * (1 - step / 200), "epoch": step / 100, "step": step,
        })  # fmt: skip
        if step in evals:
            history.append({"eval_loss": evals[step], "eval_runtime": 1.5, "epoch": step / 100, "step": step})
    return history


EXPECTED = {"overfitting": 80, "nonfinite": 90}


def trainer_state(history: list[Entry]) -> str:
    return json.dumps({"best_metric": None, "epoch": 1.0, "log_history": history, "max_steps": 100}, indent=2)


def console_v5(history: list[Entry]) -> str:
    """transformers 5: strings of four digits, written by tqdm between its bars."""
    text = ""
    for entry in history:
        shown = {key: f"{value:.4g}" for key, value in entry.items() if key != "step"}
        text += (
            f"\r{' ' * 40}\r{shown}\n\r {entry['step']}%|##   | {entry['step']}/100 [00:10<00:10,  1.23it/s]"
        )
    return text


def console_v4(history: list[Entry]) -> str:
    return console_v5(history).replace(": '", ": ").replace("', ", ", ").replace("'}", "}")


def event_log(history: list[Entry]) -> str:
    """As the probe writes it: numbers that are not finite are null, and named beside."""
    lines = [{"t": 1.0, "m": 1.0, "rank": 0, "session": "a", "event": "train_begin", "step": 0}]
    for entry in history:
        values = {key: value for key, value in entry.items() if key != "step" and math.isfinite(value)}
        nonfinite = {
            key: "nan" for key, value in entry.items() if isinstance(value, float) and math.isnan(value)
        }
        lines.append({"t": 1.0, "m": 1.0, "rank": 0, "session": "a", "event": "log", "step": entry["step"],
                      "epoch": entry["epoch"], "values": values, "nonfinite": nonfinite})  # fmt: skip
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def trainer_log(history: list[Entry]) -> str:
    """LLaMA-Factory: its own names, null for what is not known, durations as text."""
    lines = []
    for entry in history:
        known = {
            "loss": None,
            "eval_loss": None,
            "predict_loss": None,
            "reward": None,
            "accuracy": None,
            **entry,
        }
        known["current_steps"], known["lr"] = known.pop("step"), known.pop("learning_rate", None)
        lines.append(json.dumps({**known, "total_steps": 100, "elapsed_time": "0:01:00"}) + "\n")
    return "".join(lines)


def json_lines(history: list[Entry]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in history)


@pytest.mark.parametrize(
    ("write", "form"),
    [
        (trainer_state, "trainer_state"),
        (json.dumps, "trainer_state"),
        (lambda history: json.dumps({"log_history": history}), "trainer_state"),
        (console_v5, "console"),
        (console_v4, "console"),
        (event_log, "events"),
        (trainer_log, "trainer_log"),
        (json_lines, "jsonl"),
    ],
)
def test_one_run_is_judged_alike_in_each_form(
    write: Callable[[list[Entry]], str], form: str, tmp_path: Path
) -> None:
    found = report(written(tmp_path / "run", write(overfitting_then_nan())))
    assert found.format == form
    assert signals(found) == EXPECTED
    assert counts(found) == (14, 10, 4, 100)
    assert found.health == "bad" and found.problem is None


# -- TensorBoard -----------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def block(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def simple(tag: str, value: float) -> bytes:
    return block(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value)


def tensor(tag: str, value: float) -> bytes:
    """A double in the raw content of a tensor without dimensions, as add_scalar(double_precision=True) writes it."""
    content = varint(1 << 3) + varint(2) + block(2, b"") + block(4, struct.pack("<d", value))
    return block(1, tag.encode()) + block(8, content)


def event(step: int, *values: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", 1.7e9) + varint(2 << 3) + varint(step) + block(5, b"".join(
        block(1, value) for value in values))  # fmt: skip


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


VERSION = record(b"\x09" + struct.pack("<d", 1.7e9) + block(3, b"brain.Event:2"))
TAGS = {"eval_loss": "eval/loss", "eval_runtime": "eval/runtime"}


def event_file(history: Iterable[Entry], scalar: Callable[[str, float], bytes] = simple) -> bytes:
    """One event for each number, as SummaryWriter writes them."""
    events = [
        record(event(entry["step"], scalar(TAGS.get(key, f"train/{key}"), value)))
        for entry in history for key, value in entry.items() if key != "step"
    ]  # fmt: skip
    return VERSION + b"".join(events)


def test_the_checksum_is_that_of_the_format() -> None:
    """CRC-32C of "123456789" is 0xE3069283 (RFC 3720); masked: rotated right by 15, plus 0xA282EAD8."""
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("scalar", [simple, tensor])
def test_tensorboard_gives_the_same_verdicts(scalar: Callable[[str, float], bytes], tmp_path: Path) -> None:
    path = tmp_path / "a name that says nothing"
    path.write_bytes(event_file(overfitting_then_nan(), scalar))
    found = report(path)
    assert found.format == "tensorboard"
    assert signals(found) == EXPECTED
    assert counts(found) == (14, 10, 4, 100)


def test_scalars_of_one_step_and_group_are_one_log(tmp_path: Path) -> None:
    """transformers files the epoch of an evaluation under train/."""
    tags = [(1, "train/loss"), (1, "train/epoch"), (1, "eval/loss"), (1, "train/epoch"), (2, "train/grad_norm"),
            (2, "train/loss"), (3, "eval/loss")]  # fmt: skip
    path = tmp_path / "a"
    path.write_bytes(VERSION + b"".join(record(event(step, simple(tag, 1.5))) for step, tag in tags))
    assert counts(report(path)) == (4, 2, 2, 3)


def test_event_files_of_one_folder_go_on_in_each_other(tmp_path: Path) -> None:
    history = overfitting_then_nan()
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host").write_bytes(event_file(history[:5]))
    (folder / "events.out.tfevents.2.host").write_bytes(event_file(history[5:]))
    found = report(tmp_path)
    assert (found.file, signals(found), counts(found)) == (str(folder), EXPECTED, (14, 10, 4, 100))


def test_a_second_training_in_a_folder_of_event_files_is_a_run_of_its_own(tmp_path: Path) -> None:
    history = overfitting_then_nan()[:8]
    (tmp_path / "events.out.tfevents.1").write_bytes(event_file(history))
    (tmp_path / "events.out.tfevents.2").write_bytes(event_file(history))
    assert [(found.run, found.losses) for found in reports(tmp_path)] == [(1, 6), (2, 6)]


def test_a_torn_event_file_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(event_file([{"loss": 1.5, "step": 10}, {"loss": 1.25, "step": 20}])[:-5])
    found = report(path)
    assert counts(found) == (1, 1, 0, 10)
    assert found.problem == "it ends in the middle of an entry or list"


def test_other_records_are_passed_over(tmp_path: Path) -> None:
    """Text (a tensor of strings), a record that is no event, a vector."""
    words = block(1, b"args/text_summary") + block(8, varint(1 << 3) + varint(7) + block(8, b"{}"))
    vector = block(1, b"train/loss") + block(
        8, varint(1 << 3) + varint(1) + block(4, struct.pack("<ff", 1, 2))
    )
    path = tmp_path / "a"
    path.write_bytes(
        VERSION
        + record(event(1, words, vector))
        + record(b"\xff\xff\xff")
        + record(event(2, simple("loss", 1.5)))
    )
    found = report(path)
    assert counts(found) == (1, 1, 0, 2)
    assert found.problem == "1 malformed or oversized entry left out"


# -- JSON ------------------------------------------------------------------------------------------------------


def test_a_history_is_never_taken_for_several_runs(tmp_path: Path) -> None:
    """transformers keeps one history for one training; a resume that replays it is for the detectors."""
    history = [{"loss": 2.0, "step": step} for step in (10, 20, 30, 10, 20, 30)]
    found = report(written(tmp_path / "a", json.dumps({"log_history": history})))
    assert (found.losses, [item.verdict.signal for item in found.raised]) == (6, ["step_back"])


def test_two_processes_that_append_to_one_log_stay_visible(tmp_path: Path) -> None:
    """The second begins when the first is at 50: that looks like a new run, but then they alternate."""
    steps = [*range(1, 51)]
    for other in range(1, 40):
        steps += [other, 50 + other]
    lines = "".join(json.dumps({"current_steps": step, "loss": 2.0 - step / 100}) + "\n" for step in steps)
    found = reports(written(tmp_path / "a", lines))
    assert [item.run for item in found] == [1, 2]
    assert "two_writers" in signals(found[-1]) and found[-1].health == "attention"


def test_a_log_that_another_run_was_appended_to_is_two_runs(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"current_steps": step, "loss": 2.0}) + "\n" for step in [5, 10, 15, 20] * 2)
    assert [(item.run, item.losses, item.steps) for item in reports(written(tmp_path / "a", lines))] == [
        (1, 4, 20), (2, 4, 20),
    ]  # fmt: skip


def test_a_reward_that_is_null_makes_no_reinforcement_learning(tmp_path: Path) -> None:
    """Off for rewards: a loss that goes up and stays up. LLaMA-Factory writes the key into each line."""
    losses = [2.0 - step / 50 for step in range(30)] + [4.0] * 20
    lines = [{"current_steps": step, "loss": loss, "reward": None} for step, loss in enumerate(losses, 1)]
    assert "diverging" in signals(report(written(tmp_path / "a", json_lines(lines))))
    rewarded = [{**line, "reward": 0.5} for line in lines]
    assert "diverging" not in signals(report(written(tmp_path / "b", json_lines(rewarded))))


def test_malformed_entries_cost_only_themselves(tmp_path: Path) -> None:
    text = (
        '{"log_history": [{"loss": 1.5, "step": 1}, {"loss": 1.4, oops}, 7, {"loss": NaN, "step": 3},'
        ' {"loss": -Infinity, "step": 4}, {"loss": 1.25, "step": 5}], "max_steps": 5}'
    )
    found = report(written(tmp_path / "a", text))
    assert counts(found) == (4, 4, 0, 5)
    assert found.problem == "2 malformed or oversized entries left out"
    assert signals(found) == {"nonfinite": 3}


def test_a_history_that_is_cut_short_is_judged_up_to_there(tmp_path: Path) -> None:
    text = trainer_state(overfitting_then_nan())
    found = report(written(tmp_path / "a", text[: text.index('"step": 100') - 40]))
    assert signals(found) == EXPECTED and found.losses == 9
    assert found.problem == "it ends in the middle of an entry or list"


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    text = '{"loss": 1.5, "step": 1}\n{"loss": 1.4, "st\nhello\n\n[1]\n{"loss": 1.25, "step": 3}'
    found = report(written(tmp_path / "a", text))
    assert counts(found) == (2, 2, 0, 3)
    assert found.problem == "3 malformed or oversized entries left out"


def test_steps_of_ms_swift_and_of_an_export_are_read(tmp_path: Path) -> None:
    swift = '{"loss": 1.5, "global_step/max_steps": "5/100"}\n'
    export = '{"train/loss": 1.5, "train/global_step": 7, "_step": 3}\n'
    assert counts(report(written(tmp_path / "a", swift))) == (1, 1, 0, 5)
    assert counts(report(written(tmp_path / "b", export))) == (1, 1, 0, 7)


def test_a_healed_signal_still_counts(tmp_path: Path) -> None:
    """Rising evaluations at 60 and 80 are taken back long before the end; the report keeps them."""
    history = [entry for entry in overfitting_then_nan() if entry["step"] < 90]
    for step in range(90, 600, 10):
        history += [{"loss": 1.0, "step": step}, {"eval_loss": 1.0, "step": step}]
    found = report(written(tmp_path / "a", json.dumps(history)))
    assert (found.health, signals(found)) == ("attention", {"overfitting": 80})


def test_notes_do_not_change_the_health(tmp_path: Path) -> None:
    history = [{"loss": 2.0 - step / 100, "step": step, "grad_norm": 1.0} for step in range(1, 40)]
    history[20]["grad_norm"] = math.inf
    found = report(written(tmp_path / "a", json.dumps(history)))
    assert (found.health, [item.verdict.signal for item in found.raised]) == ("ok", ["norm_overflow"])


def test_a_signal_keeps_its_first_step(tmp_path: Path) -> None:
    """It is taken back ten logs after step 21, and raised again at 60."""
    history = [{"loss": 2.0 - step / 100, "step": step, "grad_norm": 1.0} for step in range(1, 80)]
    history[20]["grad_norm"] = history[59]["grad_norm"] = math.inf
    found = report(written(tmp_path / "a", json.dumps(history)))
    assert [(item.verdict.step, item.log) for item in found.raised] == [(21, 21)]


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_pieces_of_a_history_make_no_difference(piece: int) -> None:
    text, notes = trainer_state(overfitting_then_nan()), Notes()
    texts = (text[at : at + piece] for at in range(0, len(text), piece))
    assert len(list(entries_of_list(texts, notes, bare=False))) == 14
    assert notes.problem() is None


def test_a_line_without_end_is_left_out() -> None:
    text = ["a\n", "b" * MAX_LINE, "b", "b\nc", "\n", "d"]
    assert list(lines(iter(text))) == ["a", None, "c", "d"]


@pytest.mark.parametrize("text", ['{"log_history": []}', "[]"])
def test_an_empty_history_is_unknown(text: str, tmp_path: Path) -> None:
    found = report(written(tmp_path / "a", text))
    assert (found.health, found.problem) == ("unknown", "no log of a training in it")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_other_encodings_with_a_mark_are_read(encoding: str, tmp_path: Path) -> None:
    found = report(written(tmp_path / "a", trainer_state(overfitting_then_nan()), encoding))
    assert signals(found) == EXPECTED


def zeros_at_the_end() -> list[Entry]:
    """A learning rate that is 0 in the last four of a hundred logs, step by step."""
    return [
        {"loss": 3.0 - step / 100, "learning_rate": 0.0 if step > 96 else 1e-4, "step": 10 * step}
        for step in range(1, 101)
    ]


@pytest.mark.parametrize(
    ("max_steps", "expected"),
    [(None, {"lr_zero": 990}), (1000, {}), (980, {}), (100_000, {"lr_zero": 990})],
)
def test_the_length_behind_the_history_tells_the_end_of_a_schedule(
    max_steps: int | None, expected: dict[str, int], tmp_path: Path
) -> None:
    """In the last 2 % of the steps a learning rate of 0 is usual; three of them elsewhere are not."""
    state: dict[str, Any] = {"best_metric": None, "log_history": zeros_at_the_end()}
    if max_steps is not None:
        state |= {
            "logging_steps": 10,
            "max_steps": max_steps,
            "num_train_epochs": 1,
            "stateful_callbacks": {"a": [1]},
        }
    path = written(tmp_path / "a", json.dumps(state, indent=2))
    assert signals(report(path)) == expected


def test_the_length_in_a_training_log_is_known_too(tmp_path: Path) -> None:
    entries = [
        {
            "current_steps": entry["step"],
            "total_steps": 970,
            "loss": entry["loss"],
            "lr": entry["learning_rate"],
        }
        for entry in zeros_at_the_end()
    ]
    assert (
        signals(report(written(tmp_path / "a", "".join(json.dumps(entry) + "\n" for entry in entries)))) == {}
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda line: {"log": line + "\n", "stream": "stderr", "time": "2026-01-01T00:00:00Z"},
        lambda line: {"message": f"INFO {line}", "level": "info"},
        lambda line: {"text": line + "\n", "record": {"level": {"name": "INFO"}}},
        lambda line: {"event": line, "level": "info", "timestamp": "2026-01-01"},
    ],
)
def test_output_that_a_logger_or_a_container_wrapped_in_json_is_read(
    wrap: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    output = ["starting", "{'loss': 1.5, 'epoch': 0.5}", "{'loss': 1.25, 'epoch': 1.0}"]
    path = written(tmp_path / "a", "".join(json.dumps(wrap(line)) + "\n" for line in output))
    assert (report(path).format, counts(report(path))) == ("console", (2, 2, 0, 2))


def test_what_is_remembered_of_one_record_is_not_taken_for_another(tmp_path: Path) -> None:
    """Records of one tag differ in the last bytes only, unless another field comes last, or there are two numbers."""

    def backwards(tag: str, value: float) -> bytes:
        return varint(2 << 3 | 5) + struct.pack("<f", value) + block(1, tag.encode())

    written_as = [
        [simple("train/loss", 4.0), simple("train/grad_norm", 0.5)],
        [simple("train/loss", 3.0), simple("train/grad_norm", 0.25)],
        [backwards("train/loss", 2.0)],
        [backwards("train/loss", 1.5)],
        [simple("train/loss", 1.0)],
        [simple("train/loss", 0.5)],
        [simple("train/loss", 0.25) + block(7, b"\x15name")],
        [simple("train/loss", 0.25) + block(7, b"\x15name")],
    ]
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"".join(record(event(step, *values)) for step, values in enumerate(written_as, 300)))
    with path.open("rb") as file:
        found = [(log["step"], log["values"]) for log in tensorboard_events([file], Notes())]
    assert found == [
        (300, {"loss": 4.0, "grad_norm": 0.5}), (301, {"loss": 3.0, "grad_norm": 0.25}), (302, {"loss": 2.0}),
        (303, {"loss": 1.5}), (304, {"loss": 1.0}), (305, {"loss": 0.5}), (306, {"loss": 0.25}), (307, {"loss": 0.25}),
    ]  # fmt: skip


@pytest.mark.parametrize("piece", [1, 40, 1000])
def test_pieces_of_an_event_file_make_no_difference(
    piece: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event_file(overfitting_then_nan()))
    whole = report(path)
    monkeypatch.setattr("tunewatch.replay.tensorboard.PIECE", piece)
    assert report(path) == whole and counts(whole) == (14, 10, 4, 100)

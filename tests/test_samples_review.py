"""Samples for a person to read, and the word that they were read."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Machine

from tunewatch import cli
from tunewatch.review import (
    ReviewError,
    ReviewState,
    mark_reviewed,
    read_samples,
    review_state,
    was_evaluated,
)
from tunewatch.runfolder import RunFolder

TEXT = "answer-5d1c"


def event(kind: str, **fields: object) -> str:
    return json.dumps({"t": 1.0, "event": kind, "rank": 0, "session": "s", **fields}) + "\n"


def ended_run(
    machine: Machine, run_id: str = "run-1", *, samples: int | None = 3, evaluated: bool = True
) -> RunFolder:
    """A completed run as it lies on the disk."""
    folder = RunFolder(machine.home / "runs" / run_id)
    output = machine.folder / f"out-{run_id}"
    folder.path.mkdir(parents=True)
    output.mkdir()
    info = {"eval_rows": 10, "eval_overlap_rows": 4, "dataset": "rows.jsonl"}
    folder.write("run.json", {"run_id": run_id, "name": "sums", "output_dir": str(output), "info": info})
    ending = {"state": "completed", "message": "Completed 8 of 8 steps.", "advice": ""}
    folder.write(
        "verdict.json",
        {"state": "completed", "health": "ok", "step": 8, "max_steps": 8, "ending": ending},
    )
    lines = [event("log", step=8, values={"loss": 1.0})]
    if evaluated:
        lines.append(event("log", step=8, values={"eval_loss": 1.0}))
    if samples is not None:
        lines.append(event("samples", generated=samples))
        rows = [
            {
                "run_id": run_id,
                "index": i,
                "prompt": [{"role": "user", "content": f"question {i}"}],
                "reference": "r",
                "generated": f"{TEXT} {i} \x1b[2J",
            }
            for i in range(samples)
        ]
        (output / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.events.write_text("".join(lines))
    return folder


def test_runs_say_whether_anybody_has_read_the_samples(machine: Machine):
    ended_run(machine)
    ended_run(machine, "run-2", samples=None, evaluated=False)
    shown = {line.split()[0]: line for line in machine.run("runs")[1].splitlines()}
    assert shown["run-1"].endswith("step 8/8 (100%), evaluated, 3 samples, none reviewed")
    assert shown["run-2"].endswith("step 8/8 (100%), not evaluated, no samples")

    code, output = machine.run("samples", "review", "run-1", "--through", "2")
    assert (code, output) == (0, "tunewatch: run run-1: 3 samples, 2 reviewed\n")
    assert "3 samples, 2 reviewed" in machine.run("runs")[1]
    machine.run("samples", "review", "run-1", "--all")
    assert "3 samples, all reviewed" in machine.run("runs")[1]
    code, output = machine.run("runs", "run-1")
    assert code == 0
    told = {line[:20].strip(): line[21:] for line in output.splitlines()}
    assert (told["evaluation"], told["samples"]) == ("evaluated", "3 samples, all reviewed")
    assert (told["state"], told["progress"], told["dataset"]) == (
        "completed",
        "step 8/8 (100%)",
        "rows.jsonl",
    )
    assert told["warning"].startswith("4 of 10 evaluation rows also occur in the training data")


def test_a_review_is_counts_and_can_be_taken_back(machine: Machine):
    folder = ended_run(machine)
    assert review_state(folder) == ReviewState(3, 0)
    mark_reviewed(folder, 2)
    written = json.loads((folder.path / "review.json").read_text())
    assert (written["reviewed"], written["generated"]) == (2, 3) and written["at"] > 1.7e9
    assert set(written) == {"reviewed", "generated", "at"}
    assert TEXT not in "".join(path.read_text() for path in folder.path.iterdir())
    mark_reviewed(folder, 0)
    assert review_state(folder) == ReviewState(3, 0)
    mark_reviewed(folder)
    assert review_state(folder) == ReviewState(3, 3)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ((0, 0), "no samples"),
        ((1, 0), "1 sample, none reviewed"),
        ((1, 1), "1 sample, all reviewed"),
        ((20, 7), "20 samples, 7 reviewed"),
    ],
)
def test_in_words(state: tuple[int, int], words: str):
    assert str(ReviewState(*state)) == words


def test_list_and_show(machine: Machine):
    ended_run(machine)
    code, output = machine.run("samples", "list", "run-1")
    assert code == 0
    lines = output.splitlines()
    assert len(lines) == 4 and lines[3] == "tunewatch: run run-1: 3 samples, none reviewed"
    assert lines[1].split() == ["2", "[user]", "question", "1", TEXT, "1", "\N{REPLACEMENT CHARACTER}[2J"]

    code, output = machine.run("samples", "show", "run-1", "3")
    assert code == 0
    assert "=== sample 3 of 3 ===" in output and f"{TEXT} 2" in output and f"{TEXT} 1" not in output
    assert "\x1b" not in output, "what a model writes is not for the terminal to obey"
    assert machine.run("samples", "show", str(machine.folder / "out-run-1"))[0] == 2, "no run.json lies there"
    assert machine.run("samples", "show", "run-1")[1].count("=== sample") == 3


def test_on_a_terminal_it_is_a_pager_that_shows_them(machine: Machine):
    ended_run(machine)
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tunewatch", "samples", "show", "run-1"],
        env={**machine.environment, "PAGER": "cat", "TERM": "dumb"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    try:
        while data := os.read(main, 4096):
            output += data
    except OSError:  # the other side is closed
        pass
    os.close(main)
    assert process.wait(30) == 0
    assert output.count(b"=== sample") == 3
    assert b"tunewatch samples review run-1 --all" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "nobody"), ["no run 'nobody'", "run-1"]),
        (("review", "nobody", "--all"), ["no run 'nobody'"]),
        (("show", "run-2"), ["run run-2 has no samples"]),
        (("review", "run-2", "--all"), ["run run-2 has no samples"]),
        (("show", "run-3"), ["run run-3 has no samples"]),
        (("show", "run-1", "4"), ["samples 1 to 3", "found 4"]),
        (("show", "run-1", "0"), ["samples 1 to 3", "found 0"]),
        (("review", "run-1", "--through", "4"), ["run run-1 has 3 samples", "found 4", "allowed: 0 to 3"]),
        (("review", "run-1", "--through", "-1"), ["found -1", "allowed: 0 to 3"]),
        (("review", "run-1"), ["--all or --through N"]),
        (("review", "run-1", "--all", "--through", "2"), ["--all or --through N"]),
    ],
)
def test_errors_say_what_is_wrong(
    machine: Machine, arguments: tuple[str, ...], words: list[str], monkeypatch: Any, capsys: Any
):
    folder = ended_run(machine)
    ended_run(machine, "run-2", samples=None)
    ended_run(machine, "run-3", samples=0)
    monkeypatch.setenv("TUNEWATCH_HOME", str(machine.home))
    monkeypatch.setattr(sys, "argv", ["tunewatch", "samples", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    output = capsys.readouterr().err
    for word in words:
        assert word in output
    assert "Traceback" not in output and not (folder.path / "review.json").exists()


def test_samples_of_a_later_run_in_the_same_output_are_not_taken_for_these(machine: Machine):
    folder = ended_run(machine)
    path = Path(json.loads((folder.path / "run.json").read_text())["output_dir"]) / "samples.jsonl"
    assert len(read_samples(folder)) == 3
    path.write_text(path.read_text().replace('"run-1"', '"run-9"'))
    with pytest.raises(ReviewError, match=r"samples of run run-1 are gone: .* is of run run-9"):
        read_samples(folder)
    path.write_text("not JSON\n")
    with pytest.raises(ReviewError, match="can not be read as samples"):
        read_samples(folder)
    path.unlink()
    with pytest.raises(ReviewError, match="are gone: there is no"):
        read_samples(folder)


def test_what_counts_is_the_last_session(machine: Machine):
    folder = ended_run(machine)
    with folder.events.open("a") as file:
        file.write(event("samples", generated=5) + '{"t": 3, "event": "samples", "gener')
    assert review_state(folder) == ReviewState(5, 0)


def test_a_loss_that_is_nan_was_an_evaluation_all_the_same(machine: Machine):
    folder = ended_run(machine, evaluated=False)
    assert not was_evaluated(folder)
    with folder.events.open("a") as file:
        file.write(event("log", step=8, values={"eval_b_loss": None}, nonfinite={"eval_b_loss": "nan"}))
    assert was_evaluated(folder)

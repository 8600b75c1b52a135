"""One real training, by all it left behind: the same verdicts."""

from __future__ import annotations

import pytest
from harness import Machine

from tunewatch.health import Thresholds
from tunewatch.replay import Report, replay


def alarms(found: Report) -> list[tuple[str, str]]:
    return sorted(
        (item.verdict.signal, item.verdict.level) for item in found.raised if item.verdict.level != "info"
    )


@pytest.mark.slow
def test_console_history_and_events_of_a_real_training_agree(machine: Machine) -> None:
    command = machine.exec_tiny(
        "--steps", "40", "--logging-steps", "2", "--save-steps", "20", "--eval-steps", "10", "--poison-at", "30",
        options=("--no-linger",),
    )  # fmt: skip
    command.wait()
    console = machine.folder / "console.txt"
    console.write_text(command.output)
    paths = [
        machine.run_folder() / "events.jsonl",
        machine.folder / "out" / "checkpoint-40" / "trainer_state.json",
        console,
    ]
    found = [report for path in paths for report in replay(str(path), Thresholds())]
    assert [report.format for report in found] == ["events", "trainer_state", "console"]
    for report in found:
        assert alarms(report) == [("eval_nonfinite", "attention"), ("nonfinite", "bad")]
        assert (report.losses, report.evals) == (20, 4)
    # The weights are poisoned from step 30 on. The console names no steps here: 30 is the 15th log.
    steps = [next(item.verdict.step for item in report.raised) for report in found]
    assert steps == [30, 30, 15]

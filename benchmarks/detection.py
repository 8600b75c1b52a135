"""How well the detectors do on labelled logs of real trainings.

    python benchmarks/detection.py FOLDER [--missed]      # or TUNEWATCH_CORPUS=FOLDER

FOLDER holds index.csv (columns id, label, ambiguous, secondary, start_step, end_step) and runs/ID.json. `start_step`
is where the trouble begins: a step, `log#N` for the Nth training log counted from 0, or empty. No such logs come with
tunewatch. A run is flagged when a signal of level attention or bad was ever raised. The delay is the number of log
entries from the one where the trouble begins (not counted) to the one that raised the first of the label's own signals.
Precision: sick among flagged, without ambiguous runs, which have a line of their own.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunewatch.health import Thresholds
from tunewatch.replay import Raised, Report, replay
from tunewatch.replay.entries import is_train_log, logged_step
from tunewatch.replay.history import entries_of_list
from tunewatch.replay.pieces import pieces
from tunewatch.replay.runs import Notes

OWN = {
    "nan": {"nonfinite", "nonfinite_isolated", "zero_loss", "eval_nonfinite"},
    "spike": {"spike", "spikes"},
    "diverged": {"diverging"},
    "overfit": {"overfitting", "eval_rising"},
    "flat": {"flat", "no_gradient", "lr_zero", "nothing_trainable", "labels_masked"},
    "lr_reset": {"lr_restarted"},
    "grad_explode": {"grad_explosion", "grad_spike"},
    "other": {"two_writers"},
}
"""The signals that name what a label says, notes among them."""


@dataclass(frozen=True)
class Case:
    """One labelled run, and what was raised on it."""

    name: str
    label: str
    secondary: str
    raised: tuple[Raised, ...]
    start: int | None
    """Number of the log entry, from 1, at which the trouble begins."""

    @property
    def alarms(self) -> list[Raised]:
        return [raised for raised in self.raised if raised.verdict.level != "info"]

    @property
    def own(self) -> list[Raised]:
        return [raised for raised in self.raised if raised.verdict.signal in OWN.get(self.label, ())]

    @property
    def delay(self) -> int | None:
        if self.start is None or not self.own:
            return None
        return max(0, min(raised.log for raised in self.own) - self.start)


def start_entry(path: Path, start: str) -> int | None:
    """Which entry `start_step` means."""
    if not start:
        return None
    counted = start.startswith("log#")
    wanted, trained = int(float(start.removeprefix("log#"))), -1
    with path.open("rb") as file:
        for number, entry in enumerate(entries_of_list(pieces(file, "utf-8"), Notes(), bare=False), 1):
            trained += is_train_log(entry)
            step = trained if counted else logged_step(entry)
            if step is not None and step >= wanted and (is_train_log(entry) or not counted):
                return number
    return None


def cases(folder: Path) -> Iterator[tuple[Case, bool]]:
    """Each run of the index, and whether its label is ambiguous."""
    with (folder / "index.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        path = folder / "runs" / f"{row['id']}.json"
        reports: list[Report] = list(replay(str(path), Thresholds()))
        raised = tuple(raised for report in reports for raised in report.raised)
        start = start_entry(path, row["start_step"])
        yield Case(row["id"], row["label"], row["secondary"], raised, start), row["ambiguous"] == "1"


def print_label(label: str, group: list[Case]) -> None:
    delays = [case.delay for case in group if case.delay is not None]
    shown = f"{statistics.median(delays):g} / {max(delays)}" if delays else "-"
    flagged, own = sum(bool(case.alarms) for case in group), sum(bool(case.own) for case in group)
    print(f"| {label} | {len(group)} | {flagged} | {own} | {shown} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Recall and precision of the detectors on labelled logs.")
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get("TUNEWATCH_CORPUS"))
    parser.add_argument(
        "--missed", action="store_true", help="name the runs that were missed or flagged wrongly"
    )
    options = parser.parse_args()
    if options.folder is None:
        print("no folder of labelled logs given: nothing to measure (see the head of this file)")
        return 0
    clear: list[Case] = []
    ambiguous: list[Case] = []
    for case, unclear in cases(Path(options.folder)):
        (ambiguous if unclear else clear).append(case)
    healthy = [case for case in clear if case.label == "healthy"]
    sick = [case for case in clear if case.label != "healthy"]

    print("| label | runs | flagged | by own signals | delay in log entries: median / max |")
    print("| --- | --- | --- | --- | --- |")
    for label in sorted({case.label for case in sick}):
        print_label(label, [case for case in sick if case.label == label])
    print_label("all sick", sick)
    print_label("healthy", healthy)
    print_label("ambiguous", ambiguous)
    true, false = sum(bool(case.alarms) for case in sick), sum(bool(case.alarms) for case in healthy)
    print(
        f"\nhealthy flagged: {false} of {len(healthy)} ({100 * false / max(1, len(healthy)):.1f} %); "
        f"recall {true} of {len(sick)}; precision {true / max(1, true + false):.3f}"
    )
    print(
        f"precision with every ambiguous run counted as healthy: {with_ambiguous(true, false, ambiguous):.3f}"
    )
    notes = Counter(
        item.verdict.signal for case in healthy for item in case.raised if item not in case.alarms
    )
    print(
        f"notes on healthy runs: {', '.join(f'{name} {count}' for name, count in notes.most_common()) or 'none'}"
    )
    if options.missed:
        for case in clear:
            signals = {raised.verdict.signal: raised.log for raised in case.raised}
            if (case.label == "healthy") == bool(case.alarms) or (case.label != "healthy" and not case.own):
                print(
                    f"{'flagged' if case.alarms else 'missed'} {case.name} {case.label}: {signals or 'nothing raised'}"
                )
    return 0


def with_ambiguous(true: int, false: int, ambiguous: list[Case]) -> float:
    flagged = sum(bool(case.alarms) for case in ambiguous)
    return true / max(1, true + false + flagged)


if __name__ == "__main__":
    sys.exit(main())

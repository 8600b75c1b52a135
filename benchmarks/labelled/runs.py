"""A folder of labelled logs: runs/ID.json, and index.csv with id, label, ambiguous, secondary, start_step, end_step.

`start_step` is where the trouble begins: a step, `log#N` for the Nth training log counted from 0, or empty.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewatch.replay.entries import is_train_log
from tunewatch.replay.history import list_events
from tunewatch.replay.pieces import pieces
from tunewatch.replay.runs import Notes

Event = dict[str, Any]

NOTHING_TO_MEASURE = "no folder of labelled logs given: nothing to measure (see the head of this file)"


@dataclass(frozen=True)
class LabelledRun:
    """One row of the index and the events of its log."""

    name: str
    label: str
    ambiguous: bool
    secondary: str
    start_step: str
    path: Path
    events: list[Event]

    @property
    def start(self) -> int | None:
        """Number of the log entry, from 1, at which the trouble begins."""
        if not self.start_step:
            return None
        counted = self.start_step.startswith("log#")
        wanted, trained = int(float(self.start_step.removeprefix("log#"))), -1
        for number, event in enumerate(self.events, 1):
            train = is_train_log(event["values"])
            trained += train
            step = trained if counted else event["step"]
            if step is not None and step >= wanted and (train or not counted):
                return number
        return None


def labelled_runs(folder: Path) -> Iterator[LabelledRun]:
    with (folder / "index.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        path = folder / "runs" / f"{row['id']}.json"
        with path.open("rb") as log:
            events = list(list_events(pieces(log, "utf-8"), Notes(), bare=False))
        yield LabelledRun(
            row["id"],
            row["label"],
            row["ambiguous"] == "1",
            row["secondary"],
            row["start_step"],
            path,
            events,
        )


def folder_argument(parser: argparse.ArgumentParser) -> None:
    """FOLDER, or TUNEWATCH_CORPUS; None without either."""
    named = os.environ.get("TUNEWATCH_CORPUS")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(named) if named else None)

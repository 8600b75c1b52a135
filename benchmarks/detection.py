"""How well the detectors do on labelled logs of real trainings.

    python benchmarks/detection.py [FOLDER] [--missed]      # or TUNEWATCH_CORPUS=FOLDER

FOLDER holds index.csv and runs/ID.json (labelled/runs.py says what is in them). No such logs come with tunewatch.
A run is flagged when a signal of level attention or bad was ever raised. The delay is the number of log entries from
the one where the trouble begins (not counted) to the one that raised the first of the label's own signals. Precision:
sick among flagged, without ambiguous runs, which have a line of their own. Beside ours stands what simple rules of the
usual form do on the same logs (labelled/reference.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labelled.reference import NOTES, Reference
from labelled.runs import NOTHING_TO_MEASURE, LabelledRun, folder_argument, labelled_runs

from tunewatch.health import Thresholds
from tunewatch.replay import Raised, Report, replay

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
    """One labelled run, what was raised on it, and what the simple rules raised."""

    run: LabelledRun
    raised: tuple[Raised, ...]
    simple: frozenset[str]

    @property
    def label(self) -> str:
        return self.run.label

    @property
    def alarms(self) -> list[Raised]:
        return [raised for raised in self.raised if raised.verdict.level != "info"]

    @property
    def own(self) -> list[Raised]:
        return [raised for raised in self.raised if raised.verdict.signal in OWN.get(self.label, ())]

    @property
    def delay(self) -> int | None:
        start = self.run.start
        if start is None or not self.own:
            return None
        return max(0, min(raised.log for raised in self.own) - start)


def cases(folder: Path) -> Iterator[Case]:
    for run in labelled_runs(folder):
        reports: list[Report] = list(replay(str(run.path), Thresholds()))
        rules, simple = Reference(), set[str]()
        for event in run.events:
            rules.event(event)
            simple |= rules.active
        yield Case(run, tuple(raised for report in reports for raised in report.raised), frozenset(simple))


def print_label(label: str, group: list[Case]) -> None:
    delays = [case.delay for case in group if case.delay is not None]
    shown = f"{statistics.median(delays):g} / {max(delays)}" if delays else "-"
    flagged, own = sum(bool(case.alarms) for case in group), sum(bool(case.own) for case in group)
    simple = sum(bool(case.simple - NOTES) for case in group)
    simple_own = sum(bool(case.simple & OWN.get(case.label, set())) for case in group)
    print(f"| {label} | {len(group)} | {flagged} | {own} | {shown} | {simple} | {simple_own} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Recall and precision of the detectors on labelled logs.")
    folder_argument(parser)
    parser.add_argument(
        "--missed", action="store_true", help="name the runs that were missed or flagged wrongly"
    )
    options = parser.parse_args()
    if options.folder is None:
        print(NOTHING_TO_MEASURE)
        return 0
    everything = list(cases(options.folder))
    clear = [case for case in everything if not case.run.ambiguous]
    ambiguous = [case for case in everything if case.run.ambiguous]
    healthy = [case for case in clear if case.label == "healthy"]
    sick = [case for case in clear if case.label != "healthy"]

    print(
        "| label | runs | flagged | by own signals | delay in log entries: median / max | simple rules: flagged "
        "| by own signals |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
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
                how = "flagged" if case.alarms else "missed"
                print(f"{how} {case.run.name} {case.label}: {signals or 'nothing raised'}")
    return 0


def with_ambiguous(true: int, false: int, ambiguous: list[Case]) -> float:
    flagged = sum(bool(case.alarms) for case in ambiguous)
    return true / max(1, true + false + flagged)


if __name__ == "__main__":
    sys.exit(main())

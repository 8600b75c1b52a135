"""How long it takes from the end of a step that made the weights NaN to the message about it.

    python benchmarks/time_to_detect.py [--repetitions 20] [--time-scale 15] [--at-once 4]

Each repetition is a real training of a tiny Llama under `tunewatch exec`, whose weights become NaN at a random moment
of Prometheus' cycle. The training itself notes when that step ended; the receiver of Alertmanager's webhook notes when
the message came. The rules and routes are the shipped ones with every interval divided by the time scale: with 1 they
are the shipped intervals themselves, and 20 repetitions take half an hour. `--at-once` trainings start together and run
side by side; none starts while a time is taken.

Exit code 1 when the median is above scrape interval + evaluation interval + group_wait + 1 s, or a message does not
come.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from harness import Machine, wait_for  # noqa: E402
from pager import Pager  # noqa: E402

from tunewatch.durations import parse_duration  # noqa: E402
from tunewatch.stack import Stack  # noqa: E402

SCRIPT = TESTS / "scripts" / "verdict_train.py"
ALERT = "TunewatchRunNonFinite"
STEPS_BEFORE = 10
PROBE_SECONDS = 0.3
"""The probe's writer thread takes at most a tenth of a second, the supervisor looks every fifth of one."""
SLACK = 1.0
SENDING_SECONDS = SLACK - PROBE_SECONDS
PATIENCE = 300.0


@dataclass(frozen=True)
class Intervals:
    """What the running stack was told, in seconds."""

    scrape: float
    evaluation: float
    group_wait: float

    @classmethod
    def of(cls, stack: Stack) -> Intervals:
        prometheus = yaml.safe_load((stack.folder / "prometheus.yml").read_text())["global"]
        routes = yaml.safe_load((stack.folder / "alertmanager.yml").read_text())["route"]["routes"]
        critical = next(
            route
            for parent in routes
            for route in parent.get("routes", ())
            if 'severity="critical"' in route["matchers"]
        )
        return cls(
            parse_duration(prometheus["scrape_interval"]),
            parse_duration(prometheus["evaluation_interval"]),
            parse_duration(critical["group_wait"]),
        )

    @property
    def bound(self) -> float:
        return self.scrape + self.evaluation + self.group_wait + SLACK


@dataclass(frozen=True)
class Times:
    """One repetition, all by the clock of this machine (Unix seconds)."""

    ended: float
    scraped: float
    evaluated: float
    received: float


class Repetition:
    """One training that will be poisoned."""

    def __init__(self, folder: Path, stack: Stack, number: int) -> None:
        self.run_id = f"detect-{number}"
        self._pager = Pager(stack)
        self._machine = Machine(folder / self.run_id, home=stack.home, run_id=self.run_id)
        self._machine.folder.mkdir()
        self._output = self._machine.folder / "out"
        target = [sys.executable, str(SCRIPT), str(self._output), "nan"]
        self._command = self._machine.start("exec", "--run-id", self.run_id, "--no-linger", "--", *target)

    def wait_until_trains(self) -> None:
        self._machine.run_folder(PATIENCE)
        self._machine.wait_step(STEPS_BEFORE, seconds=PATIENCE)
        wait_for(
            lambda: self._pager.scraped(self.run_id), seconds=PATIENCE, what=f"a scrape of {self.run_id}"
        )

    def poison(self) -> None:
        (self._output / "poison").touch()

    def times(self) -> Times:
        alert = self._pager.wait(self.run_id, ALERT, seconds=PATIENCE)
        poisoned = json.loads((self._output / "poisoned").read_text())
        health = f'tunewatch_health{{signal="nonfinite", run_id="{self.run_id}"}}[1h]'
        values = [sample for series in self._pager.query(health) for sample in series["values"]]
        return Times(
            ended=poisoned["ended"],
            scraped=min(moment for moment, value in values if value == "1"),
            evaluated=datetime.fromisoformat(alert.starts_at).timestamp(),
            received=self._received(),
        )

    def end(self) -> None:
        self._command.send(signal.SIGINT)
        self._command.wait(PATIENCE)

    def close(self) -> None:
        self._machine.close()

    def _received(self) -> float:
        assert self._pager.stack.inbox is not None
        return next(
            notification.received_at
            for notification in self._pager.stack.inbox.notifications
            if any(
                alert.name == ALERT and alert.labels.get("run_id") == self.run_id
                for alert in notification.alerts
            )
        )


def measure(folder: Path, stack: Stack, numbers: Sequence[int], scrape: float) -> list[Times]:
    """Trainings side by side: all are started, then one after the other is poisoned."""
    chance = random.Random(numbers[0])
    repetitions = [Repetition(folder, stack, number) for number in numbers]
    try:
        for repetition in repetitions:
            repetition.wait_until_trains()
        for repetition in repetitions:
            time.sleep(chance.uniform(0.0, scrape))
            repetition.poison()
        times = [repetition.times() for repetition in repetitions]
        for repetition in repetitions:
            repetition.end()
    finally:
        for repetition in repetitions:
            repetition.close()
    return times


def show(what: str, seconds: Sequence[float], expected: float) -> None:
    ordered = sorted(seconds)
    p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    print(
        f"{what:<34} {statistics.median(ordered):7.2f} {p90:7.2f} {ordered[-1]:7.2f}   {expected:6.2f}",
        flush=True,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--time-scale", type=float, default=15.0)
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    times: list[Times] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Stack(folder / "home", time_scale=options.time_scale) as stack:
            intervals = Intervals.of(stack)
            print(
                f"{options.repetitions} repetitions, {options.at_once} side by side; a scrape every "
                f"{intervals.scrape:g} s, an evaluation every {intervals.evaluation:g} s, group_wait "
                f"{intervals.group_wait:g} s (the shipped ones / {options.time_scale:g})",
                flush=True,
            )
            for first in range(0, options.repetitions, options.at_once):
                numbers = range(first, min(first + options.at_once, options.repetitions))
                times += measure(folder, stack, numbers, intervals.scrape)
    print(f"{'seconds':<34} {'median':>7} {'p90':>7} {'max':>7}   {'expected at most':>6}")
    show(
        "end of the step to the scrape",
        [t.scraped - t.ended for t in times],
        PROBE_SECONDS + intervals.scrape,
    )
    show("the scrape to the evaluation", [t.evaluated - t.scraped for t in times], intervals.evaluation)
    sending = intervals.group_wait + SENDING_SECONDS
    show("the evaluation to the webhook", [t.received - t.evaluated for t in times], sending)
    whole = [t.received - t.ended for t in times]
    show("end of the step to the webhook", whole, intervals.bound)
    return 0 if statistics.median(whole) <= intervals.bound else 1


if __name__ == "__main__":
    sys.exit(main())

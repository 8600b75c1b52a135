"""How many of the faults that are put into healthy logs of real trainings the detectors find.

    python benchmarks/injected_faults.py [FOLDER] [--seed N] [--missed FAULT]     # or TUNEWATCH_CORPUS=FOLDER

FOLDER is one of labelled logs, as benchmarks/detection.py has it. Real troubles are rare in it, so faults are made:
into each clear healthy log (no reward or preference training) of at least 50 losses, at three random places between
30 % and 70 % of it. Found is what a signal of the fault says within 50 training logs, and had not said there without
it. Of what is a single log, a note counts; of what lasts, attention is asked for.

- dead from there on: loss and gradient norm NaN, or the 0.0 and NaN that transformers' filter logs;
- the loss is raised by a multiple of its present level (median of the 20 logs before): one log to the threefold;
  five logs to the twofold; divergence: to the threefold over 10 logs, where it stays; slow: to 1.6 times over 30 logs,
  where 50 follow;
- gradient norm: 50 times for 5 logs; 1000 times once;
- the learning rate starts anew (20 rates at least, not constant), as it does without scheduler.pt;
- the loss never falls: each log is the mean of the first ten, with the noise that the logs of the second half have
  around their neighbours (no limit of 50);
- the evaluation loss (8 at least) grows from its last value by 5 % with each evaluation, with the noise it has around
  its neighbours, from a place between 30 % and 60 %; to be found within 10 evaluations.

Beside ours stands what simple rules find (labelled/reference.py) in the same logs, and what such rules were reported to
find in a larger collection of the same kind, whose faults may have been put in a little differently.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labelled.reference import Reference
from labelled.runs import NOTHING_TO_MEASURE, Event, folder_argument, labelled_runs

from tunewatch.health import Health

WITHIN = 50
MIN_LOSSES, MIN_RATES, MIN_EVALS = 50, 20, 8
PLACES = 3
LEVEL = 20

NAN = math.nan


class Trace:
    """A healthy log that faults are put into."""

    def __init__(self, name: str, events: list[Event]) -> None:
        self.name, self.events = name, events
        self.losses, self.norms, self.rates, self.evals = (
            self._with(key) for key in ("loss", "grad_norm", "learning_rate", "eval_loss")
        )

    def _with(self, key: str) -> list[int]:
        return [
            number
            for number, event in enumerate(self.events)
            if isinstance(value := event["values"].get(key), (int, float)) and math.isfinite(value)
        ]

    def value(self, number: int, key: str) -> float:
        return float(self.events[number]["values"][key])

    def changed(self, changes: dict[int, dict[str, float]]) -> list[Event]:
        """The events, some with other values."""
        return [
            {**event, "values": {**event["values"], **changes[number]}} if number in changes else event
            for number, event in enumerate(self.events)
        ]


Changes = tuple[int, dict[int, dict[str, float]]]
"""Number of the entry at which a fault begins, and the values it changes."""


@dataclass(frozen=True)
class Fault:
    name: str
    signals: frozenset[str]
    make: Callable[[Trace, random.Random], Changes | None]
    """None where the log is not fit for it."""
    reported: float
    within: int | None = WITHIN
    """Logs (evaluations) in which it has to be found; None: no limit."""
    places: int = PLACES


def _place(numbers: list[int], rng: random.Random, low: float = 0.3, high: float = 0.7) -> int:
    return int(len(numbers) * rng.uniform(low, high))


def _raised(
    factor: Callable[[int], float], logs: int | None, *, room: int = 0
) -> Callable[..., Changes | None]:
    """Add factor(0) - 1, factor(1) - 1, ... times the present level, for so many logs (None: to the end).

    Where fewer than `room` logs would follow it begins earlier, or not at all if that is before log LEVEL.
    """

    def make(trace: Trace, rng: random.Random) -> Changes | None:
        at = min(_place(trace.losses, rng), len(trace.losses) - room)
        if at < LEVEL and room:
            return None
        level = statistics.median(trace.value(n, "loss") for n in trace.losses[max(0, at - LEVEL) : at])
        chosen = trace.losses[at:] if logs is None else trace.losses[at : at + logs]
        return chosen[0], {
            n: {"loss": trace.value(n, "loss") + level * (factor(i) - 1.0)} for i, n in enumerate(chosen)
        }

    return make


def _norm_times(factor: float, logs: int) -> Callable[..., Changes | None]:
    def make(trace: Trace, rng: random.Random) -> Changes | None:
        if len(trace.norms) < 0.9 * len(trace.losses):
            return None
        at = _place(trace.norms, rng)
        chosen = trace.norms[at : at + logs]
        return chosen[0], {n: {"grad_norm": trace.value(n, "grad_norm") * factor} for n in chosen}

    return make


def _dead(loss: float) -> Callable[..., Changes | None]:
    def make(trace: Trace, rng: random.Random) -> Changes | None:
        at = _place(trace.losses, rng)
        with_norm = set(trace.norms)
        return trace.losses[at], {
            n: {"loss": loss, "grad_norm": NAN} if n in with_norm else {"loss": loss}
            for n in trace.losses[at:]
        }

    return make


def _rate_restarts(trace: Trace, rng: random.Random) -> Changes | None:
    rates = [trace.value(n, "learning_rate") for n in trace.rates]
    if len(rates) < MIN_RATES or max(rates) == min(rates):
        return None
    at = _place(trace.rates, rng, 0.5, 0.7)
    return trace.rates[at], {n: {"learning_rate": rates[i]} for i, n in enumerate(trace.rates[at:])}


def _never_falls(trace: Trace, rng: random.Random) -> Changes | None:
    losses = [trace.value(n, "loss") for n in trace.losses]
    start = statistics.fmean(losses[:10])
    settled = losses[len(losses) // 2 :]
    noise = []
    for i in range(3, len(settled) - 3):
        around = statistics.fmean(settled[i - 3 : i + 4])
        noise.append(settled[i] / around if around else 1.0)
    return 0, {n: {"loss": start * noise[i % len(noise)]} for i, n in enumerate(trace.losses)}


def _eval_rises(trace: Trace, rng: random.Random) -> Changes | None:
    if len(trace.evals) < MIN_EVALS:
        return None
    at = _place(trace.evals, rng, 0.3, 0.6)
    losses = [trace.value(n, "eval_loss") for n in trace.evals]
    changes = {}
    for i, n in enumerate(trace.evals[at:], at):
        around = statistics.fmean(losses[i - 1 : i + 2])
        noise = losses[i] / around if around else 1.0
        changes[n] = {"eval_loss": losses[at - 1] * 1.05 ** (i - at + 1) * noise}
    return trace.evals[at], changes


def _ramp(to: float, logs: int) -> Callable[[int], float]:
    return lambda i: 1.0 + (to - 1.0) * min(1.0, (i + 1) / logs)


_DEAD = frozenset({"nonfinite", "zero_loss"})
_UP = frozenset({"spikes", "diverging"})

FAULTS = (
    Fault("loss NaN", _DEAD, _dead(NAN), 1.00),
    Fault("loss 0.0, norm NaN", _DEAD, _dead(0.0), 0.96),
    Fault("one log x3", _UP | {"spike"}, _raised(lambda i: 3.0, 1), 0.92),
    Fault("five logs x2", _UP, _raised(lambda i: 2.0, 5), 0.78),
    Fault("divergence, 10 logs", _UP, _raised(_ramp(3.0, 10), None), 1.00),
    Fault("slow divergence", _UP, _raised(_ramp(1.6, 30), None, room=WITHIN), 0.60),
    Fault("slow divergence, any time", _UP, _raised(_ramp(1.6, 30), None, room=WITHIN), 0.92, within=None),
    Fault("norm x50, 5 logs", frozenset({"grad_explosion"}), _norm_times(50.0, 5), 0.84),
    Fault(
        "norm x1000, once", frozenset({"grad_explosion", "grad_spike"}),
        _norm_times(1000.0, 1), 0.96,
    ),
    Fault("rate restarts", frozenset({"lr_restarted"}), _rate_restarts, 1.00),
    Fault("loss never falls", frozenset({"flat"}), _never_falls, 0.89, within=None, places=1),
    Fault("evaluation +5 % each", frozenset({"overfitting", "eval_rising"}), _eval_rises, 0.75, within=10),
)  # fmt: skip


def ours() -> Callable[[Event], dict[str, Any]]:
    health = Health()

    def take(event: Event) -> dict[str, Any]:
        health.event(event)
        return {verdict.signal: verdict.step for verdict in health.verdicts}

    return take


def simple_rules() -> Callable[[Event], dict[str, Any]]:
    rules = Reference()

    def take(event: Event) -> dict[str, Any]:
        rules.event(event)
        return dict.fromkeys(rules.active)

    return take


def raised(detectors: Callable[[Event], dict[str, Any]], events: list[Event]) -> Iterator[tuple[int, str]]:
    """Number of the entry and name of each signal as it is raised, or raised again at another step."""
    before: dict[str, Any] = {}
    for number, event in enumerate(events):
        now = detectors(event)
        for signal, step in now.items():
            if signal not in before or step != before[signal]:
                yield number, signal
        before = now


def _last_chance(fault: Fault, trace: Trace, begin: int) -> int:
    """Number of the last entry at which the fault may still be found."""
    if fault.within is None:
        return len(trace.events)
    numbers = trace.evals if "overfitting" in fault.signals else trace.losses
    after = [n for n in numbers if n >= begin][: fault.within]
    return after[-1]


def found(detectors: Any, fault: Fault, trace: Trace, changes: Changes, known: set[tuple[int, str]]) -> bool:
    """Whether a signal of the fault is raised in time, and was not there without it."""
    begin, values = changes
    last = _last_chance(fault, trace, begin)
    return any(
        begin <= number and signal in fault.signals and (number, signal) not in known
        for number, signal in raised(detectors, trace.changed(values)[: last + 1])
    )


def known(trace: Trace) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """What we and the simple rules raise without a fault."""
    return set(raised(ours(), trace.events)), set(raised(simple_rules(), trace.events))


Known = dict[str, tuple[set[tuple[int, str]], set[tuple[int, str]]]]


def measure(traces: list[Trace], fault: Fault, seed: int, before: Known) -> tuple[int, int, int, list[str]]:
    """Faults made, found by us, found by the simple rules; and where we missed one."""
    made = mine = theirs = 0
    missed = []
    for trace in traces:
        our_own, their_own = before[trace.name]
        for place in range(fault.places):
            changes = fault.make(trace, random.Random(f"{seed}:{trace.name}:{place}"))
            if changes is None:
                continue
            made += 1
            hit = found(ours(), fault, trace, changes, our_own)
            mine += hit
            theirs += found(simple_rules(), fault, trace, changes, their_own)
            if not hit:
                missed.append(f"{trace.name} at entry {changes[0]} of {len(trace.events)}")
    return made, mine, theirs, missed


def main() -> int:
    parser = argparse.ArgumentParser(description="Share of injected faults that are found.")
    folder_argument(parser)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missed", default="", help="name the logs in which a fault of this name was missed")
    options = parser.parse_args()
    if options.folder is None:
        print(NOTHING_TO_MEASURE)
        return 0
    healthy = [
        Trace(run.name, run.events)
        for run in labelled_runs(options.folder)
        if run.label == "healthy" and not run.ambiguous and "rl" not in run.secondary.split(";")
    ]
    long = [trace for trace in healthy if len(trace.losses) >= MIN_LOSSES]
    before = {trace.name: known(trace) for trace in healthy}
    print("| fault | made | found | simple rules, same logs | simple rules, as reported |")
    print("| --- | --- | --- | --- | --- |")
    for fault in FAULTS:
        short_too = fault.name in ("rate restarts", "evaluation +5 % each")
        made, mine, theirs, missed = measure(healthy if short_too else long, fault, options.seed, before)
        print(
            f"| {fault.name} | {made} | {mine / max(1, made):.2f} | {theirs / max(1, made):.2f} "
            f"| {fault.reported:.2f} |"
        )
        if options.missed == fault.name:
            print("\n".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())

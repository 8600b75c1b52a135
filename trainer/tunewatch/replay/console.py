"""Console output with the trainer's dicts in it, between progress bars and whatever else a program prints."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunewatch.health.reading import is_eval_loss
from tunewatch.replay.dicts import MAX_DICT, START, close, numbers
from tunewatch.replay.entries import Entries, Steps, is_summary, is_train_log, log_event, logged_step
from tunewatch.replay.pieces import segments
from tunewatch.replay.runs import NEXT_RUN, Boundary, Notes

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,400}\|\s*(\d{1,15})/(\d{1,15})\s\[[^\]]{0,400}\]")
_BEGINS = "Running training *****"
"""transformers, at the level INFO: ***** Running training *****"""
_TOTAL = re.compile(r"(Num Epochs|Total optimization steps) = ([\d,]{1,20})")
_NUMBERS_ONLY = re.compile(r"[\s\d.,;:eE+-]*\d[\s\d.,;:eE+-]*")

MAX_LINES = 500
"""Pieces (lines, and what bars cut them into) that one dict may come in."""

EPOCH_DIGITS = 0.0051
"""Half of the last digit of an epoch that is printed with two."""
LOSS_DIGITS = 5.1e-5
"""Half of the last digit of a loss that is printed with four behind the point."""
PRINTED_DIGITS = 1e-3
"""What four digits may be off, relatively."""


@dataclass
class Dict:
    """One dict of a log, and the bar's position (done, total) before and directly behind it."""

    values: dict[str, Any]
    style: tuple[Any, ...]
    before: tuple[int, int] | None
    after: tuple[int, int] | None = None
    bare: bool = True
    """Nothing but blanks has come behind it so far."""
    styles: set[tuple[Any, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.styles.add(self.style)

    def repeats(self, other: Dict) -> bool:
        """Whether this is `other` once more: by another logger, which rounds differently, or by another rank."""
        mine, its = self.values, other.values
        if self.style not in other.styles:
            shared = mine.keys() & its.keys()
            told = (shared & {"epoch", "learning_rate", "step"}) and any(map(_is_loss, shared))
            return bool(told) and all(_printed_alike(key, mine[key], its[key]) for key in shared)
        moved = self.before is not None and self.before != other.before and self.before != other.after
        return mine == its and not moved and all(its.get(key, 1.0) != 0.0 for key in ("loss", "grad_norm"))


def _is_loss(key: str) -> bool:
    return key == "loss" or is_eval_loss(key)


def _printed_alike(key: str, one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    least = EPOCH_DIGITS if key == "epoch" else LOSS_DIGITS if _is_loss(key) else 0.0
    return abs(one - other) <= max(least, PRINTED_DIGITS * max(abs(one), abs(other)))


def is_log(values: Mapping[str, Any]) -> bool:
    """Whether a dict of numbers is one of a training: a configuration or a sample has none of these."""
    return (
        is_train_log(values) or is_summary(values) or "grad_norm" in values or "reward" in values
        or any(map(is_eval_loss, values))
    )  # fmt: skip


class Dicts:
    """Finds the dicts in console output.

    Escapes and bars are taken out first, and what a dict lacks may follow behind them or on the next line: tqdm writes
    into the same stream. The position of a bar belongs to the dict before it when it follows at once (tqdm.write draws
    the bar anew, with the true position), else to the next one. Bars with a name (`Map: 10%|...`) are others'.
    """

    def __init__(self) -> None:
        self._entries = Entries()
        self._open = ""
        self._carried = 0
        """Pieces that the open dict has been waiting for its end."""
        self._bar: tuple[int, int] | None = None
        self._held: Dict | None = None
        self.per_epoch: float | None = None
        self._totals: dict[str, float] = {}
        self.begun = False
        """A training was announced since the last dict."""
        self.only_numbers: bool | None = None
        """None while nothing was read."""

    def feed(self, segment: str) -> Iterable[Dict]:
        """Take in the text between two line ends; what it completes comes out."""
        if "\x1b" in segment:
            segment = _ESCAPE.sub("", segment)
        if not segment or segment.isspace():
            return ()
        return self._feed(segment)

    def _feed(self, segment: str) -> Iterator[Dict]:
        if self.only_numbers is not False:
            self.only_numbers = _NUMBERS_ONLY.fullmatch(segment[:200]) is not None
        at = 0
        if "%|" in segment:
            for bar in _BAR.finditer(segment):
                text = segment[at : bar.start()].rstrip()
                yield from self._text(text)
                if not _is_labelled(text):
                    self._position(int(bar[1]), int(bar[2]))
                at = bar.end()
        yield from self._text(segment[at:] if at else segment)

    def end(self) -> Iterator[Dict]:
        if self._held is not None:
            yield self._held
            self._held = None

    def _position(self, done: int, total: int) -> None:
        self._bar = (done, total)
        if self._held is not None and self._held.bare and self._held.after is None:
            self._held.after, self._held.bare = self._bar, False

    def _text(self, text: str) -> Iterator[Dict]:
        if not self._open and "{" not in text:
            if text and not text.isspace():
                self._other(text)
            return
        self._carried = self._carried + 1 if self._open else 0
        text = self._open + text
        self._open, at = "", 0
        while start := START.search(text, at):
            if text[at : start.start()].strip():
                self._other(text[at : start.start()])
            end = close(text, start.start())
            if end is None:
                broken = _later_start(text, start.end())
                if broken is None:
                    if len(text) - start.start() < MAX_DICT and self._carried < MAX_LINES:
                        self._open = text[start.start() :]
                    return
                at = broken
                continue
            if end - start.start() <= MAX_DICT:
                yield from self._dict(
                    text[start.start() : end], prefix=bool(text[at : start.start()].strip())
                )
            at = end
        if text[at:].strip():
            self._other(text[at:])

    def _other(self, text: str) -> None:
        if self._held is not None:
            self._held.bare = False
        if _BEGINS in text:
            self.begun = True
            self._totals.clear()
            self.per_epoch = None
        elif " = " in text and (told := _TOTAL.search(text)):
            self._totals[told[1]] = float(told[2].replace(",", ""))
            steps, epochs = self._totals.get("Total optimization steps"), self._totals.get("Num Epochs")
            self.per_epoch = steps / epochs if steps and epochs else None

    def _dict(self, text: str, *, prefix: bool) -> Iterator[Dict]:
        values = self._entries.values(numbers(text))
        if not is_log(values):
            return
        found = Dict(values, (prefix, text.count('"') > text.count("'"), *values), self._bar)
        held = self._held
        if held is not None and found.repeats(held):
            held.values = {**found.values, **held.values}
            held.styles.add(found.style)
            held.bare = held.after is None
            return
        self._held = found
        if held is not None:
            yield held


def _is_labelled(text: str) -> bool:
    """Whether a bar behind this text has a name: `Map: `, and not the key of a dict that it cuts in two."""
    return text.endswith(":") and not text.endswith(("':", '":'))


def _later_start(text: str, at: int) -> int | None:
    """Where another dict opens that is no value of the one before: that one was never finished."""
    for start in START.finditer(text, at):
        if text[: start.start()].rstrip()[-1:] not in (":", "[", "("):
            return start.start()
    return None


class Bars:
    """Which of the bars is that of the training: the one whose position stands at the first training log."""

    def __init__(self) -> None:
        self._total: int | None = None
        self._done: int | None = None

    def position(self, found: Dict, *, train: bool) -> int | None:
        for bar in (found.before, found.after):
            if bar is not None and bar[1] == self._total:
                self._done = bar[0]
        if self._total is None and train:
            bar = found.after or found.before
            # Before the first log, a full bar is that of what came before the training.
            if bar is not None and bar[0] > 0 and (found.after or bar[0] < bar[1]):
                self._done, self._total = bar
        return self._done


def console_events(texts: Iterator[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """The logs of all runs in a console's output."""
    dicts, boundary = Dicts(), Boundary()
    steps, bars = Steps(), Bars()
    seen = False
    for found in _all(dicts, texts, boundary):
        values, train = found.values, is_train_log(found.values)
        seen = True
        if boundary.passed(values, logged_step(values)):
            yield NEXT_RUN
            steps, bars = Steps(), Bars()
        bar = bars.position(found, train=train)
        event = log_event(values, steps.of(values, train=train, bar=bar, per_epoch=dicts.per_epoch))
        notes.step_source = steps.source
        yield event
    if not seen:
        notes.nothing = (
            "only numbers: nothing says what they are" if dicts.only_numbers else "no log of a training in it"
        )


def _all(dicts: Dicts, texts: Iterator[str], boundary: Boundary) -> Iterator[Dict]:
    for segment in segments(texts):
        yield from dicts.feed(segment)
        if dicts.begun:
            yield from dicts.end()
            boundary.close()
            dicts.begun = False
    yield from dicts.end()

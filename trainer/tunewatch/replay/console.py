"""Console output with the trainer's dicts in it, between progress bars and whatever else a program prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tunewatch.health.reading import is_eval_loss
from tunewatch.replay.dicts import MAX_DICT, START, close, closings, numbers
from tunewatch.replay.entries import (
    Entries,
    Steps,
    is_summary,
    is_train_log,
    log_event,
    logged_step,
    train_begin,
)
from tunewatch.replay.pieces import lines, segments
from tunewatch.replay.runs import NEXT_RUN, Boundary, Notes

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,400}\|\s*(\d{1,15})/(\d{1,15})\s\[[^\]]{0,400}\]")
_BEGINS = "Running training *****"
"""transformers, at the level INFO: ***** Running training *****"""
_TOLD = re.compile(
    r"(?i:(Num Epochs|Total optimization steps|Total steps|Gradient Accumulation steps"
    r"|Number of trainable parameters|Trainable parameters)) = (\d[\d,]{0,20})"
)
"""What transformers (at the level INFO) and Unsloth say of a training that begins."""
_RANK = re.compile(r"\[(?:rank|default)?(\d{1,6})\]")
"""How torch, torchrun and the log of a script name the rank that a line is of: [rank1], [default1], [1]."""
_NUMBERS_ONLY = re.compile(r"[\s\d.,;:eE+-]*\d[\s\d.,;:eE+-]*")

MAX_LINES = 500
"""Pieces (lines, and what bars cut them into) that one dict may come in."""

EPOCH_DIGITS = 0.0051
"""Half of the last digit of an epoch that is printed with two."""
LOSS_DIGITS = 5.1e-5
"""Half of the last digit of a loss that is printed with four behind the point."""
PRINTED_DIGITS = 1e-3
"""What four digits may be off, relatively."""


class Dict:
    """One dict of a log, and the bar's position (done, total) before and directly behind it."""

    __slots__ = ("after", "bare", "before", "others", "style", "values")

    def __init__(
        self, values: dict[str, Any], style: tuple[Any, ...], before: tuple[int, int] | None
    ) -> None:
        self.values = values
        self.style = style
        """How it is printed: another logger prints other keys, quotes or a prefix."""
        self.others: tuple[tuple[Any, ...], ...] = ()
        """The styles in which it came once more."""
        self.before = before
        self.after: tuple[int, int] | None = None
        self.bare = True
        """Nothing but blanks has come behind it so far."""

    def repeats(self, other: Dict) -> bool:
        """Whether this is `other` once more: by another logger, which rounds differently, or by another rank."""
        mine, its = self.values, other.values
        if self.style != other.style and self.style not in other.others:
            shared = mine.keys() & its.keys()
            told = (shared & {"epoch", "learning_rate", "step"}) and any(map(_is_loss, shared))
            return bool(told) and all(_printed_alike(key, mine[key], its[key]) for key in shared)
        if mine != its:
            return False
        moved = self.before is not None and self.before != other.before and self.before != other.after
        return not moved and all(its.get(key, 1.0) != 0.0 for key in ("loss", "grad_norm"))


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
    the bar anew, with the true position), else to the next one. Bars with a name (`Map: 10%|...`) are others'. Where
    lines name their rank, those of the first rank that logs count: the others have losses of their own.
    """

    def __init__(self) -> None:
        self.begin: dict[str, Any] | None = None
        """What the output said of the training that begins, as a `train_begin`; None since the last announcement."""
        self.per_epoch: float | None = None
        self.begun = False
        """A training was announced since the last dict."""
        self.only_numbers: bool | None = None
        """None while nothing was read."""
        self._entries = Entries()
        self._ready: list[Dict] = []
        self._open = self._open_before = ""
        """A dict without its end, and what stood before it."""
        self._carried = 0
        """Pieces that the open dict has been waiting for its end."""
        self._bar: tuple[int, int] | None = None
        self._held: Dict | None = None
        self._told: dict[str, int] = {}
        self._rank: str | None = None

    def feed(self, segment: str) -> Iterable[Dict]:
        """Take in the text between two line ends; what it completes comes out."""
        if "\x1b" in segment:
            segment = _ESCAPE.sub("", segment)
        if self.only_numbers is not False:
            self.only_numbers = _NUMBERS_ONLY.fullmatch(segment[:200]) is not None
        at = 0
        if "%|" in segment:
            for bar in _BAR.finditer(segment):
                text = segment[at : bar.start()].rstrip()
                self._text(text)
                if not _is_labelled(text):
                    self._position(int(bar[1]), int(bar[2]))
                at = bar.end()
        if at < len(segment):
            self._text(segment[at:] if at else segment)
        return self._take() if self._ready else ()

    def end(self) -> Iterable[Dict]:
        """The last dict, which nothing can repeat any more."""
        if self._held is not None:
            self._ready.append(self._held)
            self._held = None
        return self._take()

    def _take(self) -> list[Dict]:
        ready, self._ready = self._ready, []
        return ready

    def _position(self, done: int, total: int) -> None:
        self._bar = (done, total)
        if self._held is not None and self._held.bare and self._held.after is None:
            self._held.after, self._held.bare = self._bar, False

    def _text(self, text: str) -> None:
        before = ""
        if not self._open:
            if "{" not in text:
                if text and not text.isspace():
                    self._other(text)
                return
            self._carried = 0
        else:
            self._carried += 1
            text, self._open, before = self._open + text, "", self._open_before
        at = 0
        ends: dict[int, int] | None = None
        while start := START.search(text, at):
            opens = start.start()
            if opens > at:
                before = text[at:opens].strip()
                if before:
                    self._other(before)
            end = close(text, opens) if ends is None else None
            if end is None:
                ends = closings(text, opens) if ends is None else ends
                end = ends.get(opens)
            if end is None:
                broken = _later_start(text, start.end())
                if broken is None:
                    if len(text) - opens < MAX_DICT and self._carried < MAX_LINES:
                        self._open = text[opens:]
                        self._open_before = before
                    return
                before, at = text[start.end() : broken].strip(), broken
                continue
            if end - opens <= MAX_DICT:
                self._dict(text[opens:end], text[start.end()], before)
            at, before = end, ""
        if at < len(text) and (behind := text[at:].strip()):
            self._other(behind)

    def _other(self, text: str) -> None:
        if self._held is not None:
            self._held.bare = False
        if _BEGINS in text:
            self.begun = True
            self._told.clear()
            self.begin = self.per_epoch = None
        elif " = " in text:
            for told in _TOLD.finditer(text):
                self._told[told[1].lower()] = int(told[2].replace(",", ""))
                self._announced()

    def _announced(self) -> None:
        told = self._told
        steps = told.get("total optimization steps", told.get("total steps"))
        epochs = told.get("num epochs")
        self.per_epoch = steps / epochs if steps and epochs else None
        accumulation = told.get("gradient accumulation steps")
        self.begin = train_begin(
            steps,
            num_train_epochs=epochs,
            effective={} if accumulation is None else {"gradient_accumulation_steps": accumulation},
            trainable_parameters=told.get("number of trainable parameters", told.get("trainable parameters")),
        )

    def _dict(self, text: str, quote: str, before: str) -> None:
        values = self._entries.values(numbers(text))
        if not is_log(values) or (before and not self._is_of_first_rank(before)):
            return
        found = Dict(values, (bool(before), quote, *values), self._bar)
        held = self._held
        if held is not None:
            if found.repeats(held):
                held.values = {**found.values, **held.values}
                if found.style != held.style:
                    held.others += (found.style,)
                held.bare = held.after is None
                return
            self._ready.append(held)
        self._held = found

    def _is_of_first_rank(self, before: str) -> bool:
        named = _RANK.search(before) if "[" in before else None
        if named is None:
            return True
        if self._rank is None:
            self._rank = named[1]
        return named[1] == self._rank


_VALUE = re.compile(r"""(?:['"]\s*:|[\[(,])\s*$""")
"""What stands before a dict that is a value in another one: its key, or a list."""
MAX_BEFORE = 16


def _is_labelled(text: str) -> bool:
    """Whether a bar behind this text has a name: `Map: `, and not the key of a dict that it cuts in two."""
    return text.endswith(":") and not text.endswith(("':", '":'))


def _later_start(text: str, at: int) -> int | None:
    """Where another dict opens that is no value of the one before: that one was never finished."""
    for start in START.finditer(text, at):
        if not _VALUE.search(text[max(at, start.start() - MAX_BEFORE) : start.start()]):
            return start.start()
    return None


class Bars:
    """Which of the bars is that of the training: the one whose position stands at the first training log."""

    def __init__(self) -> None:
        self.total: int | None = None
        self._done: int | None = None

    def position(self, found: Dict, *, train: bool) -> int | None:
        for bar in (found.before, found.after):
            if bar is not None and bar[1] == self.total:
                self._done = bar[0]
        if self.total is None and train:
            bar = found.after or found.before
            # Before the first log, a full bar is that of what came before the training.
            if bar is not None and bar[0] > 0 and (found.after or bar[0] < bar[1]):
                self._done, self.total = bar
        return self._done


def console_events(texts: Iterator[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """The logs of all runs in a console's output, each run behind a `train_begin` where the output told of it."""
    dicts, boundary = Dicts(), Boundary()
    steps, bars = Steps(), Bars()
    begun = False
    seen = False
    for found in _all(dicts, texts, boundary):
        values, train = found.values, is_train_log(found.values)
        seen = True
        logged = logged_step(values)
        if boundary.passed(values, logged):
            yield NEXT_RUN
            steps, bars, begun = Steps(), Bars(), False
        bar = bars.position(found, train=train)
        if not begun:
            begun = True
            if dicts.begin is not None:
                yield dicts.begin
            elif bars.total is not None:
                yield train_begin(bars.total)
        event = log_event(values, steps.of(values, logged, train=train, bar=bar, per_epoch=dicts.per_epoch))
        notes.step_source = steps.source
        yield event
    if not seen:
        notes.nothing = (
            "only numbers: nothing says what they are" if dicts.only_numbers else "no log of a training in it"
        )


_OUTPUT_KEYS = ("log", "message", "msg", "text", "event")
"""Where loggers and containers (docker, structlog, loguru) put the text that they write as JSON."""


def wrapped(entry: Mapping[str, Any]) -> str | None:
    """The text in an object that is no log of a training itself; None where there is none."""
    if is_log(entry):
        return None
    return next((text for key in _OUTPUT_KEYS if isinstance(text := entry.get(key), str)), None)


def unwrapped(texts: Iterator[str]) -> Iterator[str]:
    """Console output whose lines are objects with the text in them; a line that is none stays."""
    for line in lines(texts):
        if line is None:
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        text = wrapped(entry) if isinstance(entry, dict) else None
        yield line + "\n" if text is None else text if text.endswith("\n") else text + "\n"


def _all(dicts: Dicts, texts: Iterator[str], boundary: Boundary) -> Iterator[Dict]:
    for segment in segments(texts):
        yield from dicts.feed(segment)
        if dicts.begun:
            yield from dicts.end()
            boundary.close()
            dicts.begun = False
    yield from dicts.end()

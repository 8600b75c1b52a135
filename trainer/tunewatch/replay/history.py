"""JSON histories: trainer_state.json, a bare list of its entries, and one entry a line (LLaMA-Factory, exports).

The standard library's scanner reads one entry at a time out of the text at hand, so a history of any size needs the
memory of a piece. It takes NaN and Infinity, which Python writes and streaming JSON libraries refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunewatch.health.reading import finite, whole
from tunewatch.replay.dicts import first_dict, scan_json
from tunewatch.replay.entries import Entries, Steps, is_train_log, log_event, logged_step, train_begin
from tunewatch.replay.pieces import MAX_LINE, lines
from tunewatch.replay.runs import NEXT_RUN, Boundary, Notes

LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_LIST = re.compile(r"\s*\[")
_GAP = re.compile(r"[\s,]*")
_END = re.compile(r"\}\s*(?=[,\]])")
_scan = json.JSONDecoder().raw_decode


class _Text:
    """The part of a text that is at hand."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.text = ""
        self.at = 0

    def more(self) -> bool:
        """Drop what is behind, and take in another piece; False at the end."""
        piece = next(self._texts, None)
        if piece is None:
            return False
        self.text = self.text[self.at :] + piece
        self.at = 0
        return True

    def find(self, pattern: re.Pattern[str], overlap: int) -> bool:
        """Go behind the first match; `overlap` characters may have to wait for their rest."""
        while not (found := pattern.search(self.text, self.at)):
            self.at = max(self.at, len(self.text) - overlap)
            if not self.more():
                return False
        self.at = found.end()
        return True


def entries_of_list(texts: Iterator[str], notes: Notes, *, bare: bool) -> Iterator[dict[str, Any]]:
    """The entries of `log_history`, or of a list that is the whole file."""
    source = _Text(texts)
    if not source.find(_LIST if bare else LOG_HISTORY, overlap=64):
        notes.nothing = "JSON without a log_history"
        return
    while True:
        gap = _GAP.match(source.text, source.at)
        source.at = gap.end() if gap else source.at
        if source.at == len(source.text):
            if not source.more():
                notes.cut_short = True
                return
            continue
        if source.text[source.at] == "]":
            return
        try:
            entry, source.at = _scan(source.text, source.at)
        except (ValueError, RecursionError) as error:
            if _may_be_cut(error, source) and source.more():
                continue
            if not _skip_entry(source, notes):
                return
            continue
        if isinstance(entry, dict):
            yield entry
        else:
            notes.malformed += 1


def _may_be_cut(error: Exception, source: _Text) -> bool:
    """Whether the entry may be whole with more of the text."""
    if len(source.text) - source.at > MAX_LINE:
        return False
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= len(source.text) - 16 or error.msg.startswith("Unterminated string")


def _skip_entry(source: _Text, notes: Notes) -> bool:
    """Go behind the next end of an object; False where there is none."""
    while not (found := _END.search(source.text, source.at)):
        source.at = max(source.at, len(source.text) - 64)
        if not source.more():
            notes.cut_short = True
            return False
    notes.malformed += 1
    source.at = found.end()
    return True


def list_events(texts: Iterator[str], notes: Notes, *, bare: bool) -> Iterator[dict[str, Any]]:
    """One run: a history belongs to one training, also where it was resumed, and whatever its steps do."""
    entries, steps = Entries(), Steps()
    for entry in entries_of_list(texts, notes, bare=bare):
        values = entries.values(entry)
        event = log_event(values, steps.of(values, logged_step(values), train=is_train_log(values)))
        notes.step_source = steps.source
        yield event


_FACT = re.compile(r'"(max_steps|num_train_epochs|logging_steps|eval_steps|save_steps)"\s*:\s*(\d{1,15})\b')


def facts_behind(tail: str) -> dict[str, Any] | None:
    """What stands behind the history in a trainer_state.json, as a `train_begin`; None where nothing does.

    The keys are sorted: max_steps comes after log_history.
    """
    facts = {name: int(value) for name, value in _FACT.findall(tail)}
    steps = facts.pop("max_steps", None)
    if not steps:
        return None
    return train_begin(steps, num_train_epochs=facts.pop("num_train_epochs", None), effective=facts)


def line_events(texts: Iterator[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """One entry a line; several runs where one was appended to another."""
    entries, steps, boundary = Entries(), Steps(), Boundary()
    begun = False
    for entry in entries_of_lines(texts, notes):
        values = entries.values(entry)
        logged = logged_step(values)
        if boundary.passed(values, logged):
            yield NEXT_RUN
            steps, begun = Steps(), False
        if not begun:
            begun = True
            if (total := _total_steps(values)) is not None:
                yield train_begin(total)
        event = log_event(values, steps.of(values, logged, train=is_train_log(values)), _unix_time(entry))
        if (elapsed := entry.get("elapsed_time")) is not None:
            event["elapsed_time"] = elapsed
        notes.step_source = steps.source
        yield event


def _total_steps(values: Mapping[str, Any]) -> int | None:
    """The length of the training, as LLaMA-Factory and ms-swift log it."""
    share = values.get("global_step/max_steps")
    return whole(share.partition("/")[2] if isinstance(share, str) else values.get("total_steps"))


def _unix_time(entry: Mapping[str, Any]) -> float | None:
    """When an entry was written, as W&B (`_timestamp`) and other exports say it."""
    moment = entry.get("_timestamp")
    return finite(entry.get("timestamp") if moment is None else moment)


def entries_of_lines(texts: Iterator[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text, one a line."""
    for line in lines(texts):
        if line is None:
            notes.malformed += 1
            continue
        if not line or line.isspace():
            continue
        entry = _entry(line)
        if isinstance(entry, dict):
            yield entry
        else:
            notes.malformed += 1


def _entry(line: str) -> Any:
    """What a line holds: JSON, or the first dict in it."""
    try:
        # json.loads does the same after checks that take longer than the scan.
        entry, end = scan_json(line, 0)
        if end == len(line) or line[end:].isspace():
            return entry
    except (StopIteration, ValueError, RecursionError):
        pass
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return first_dict(line)

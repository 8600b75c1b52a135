"""Our own events.jsonl: all sessions of a run, with what they say beside the logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunewatch.events import checked
from tunewatch.replay.history import entries_of_lines
from tunewatch.replay.runs import Notes


def event_log_events(texts: Iterator[str], notes: Notes) -> Iterator[dict[str, Any]]:
    """The events as the supervisor would have read them; a torn line is left out."""
    notes.step_source = "logged"
    for entry in entries_of_lines(texts, notes):
        event = checked(entry)
        if "event" in event:
            yield event
        else:
            notes.malformed += 1

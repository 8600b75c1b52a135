"""What befalls simulated GPUs, and when: a small YAML file that may be changed while the sidecar runs.

docs/simulation.md describes the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tunewatch_gpu.card_state import CardState
from tunewatch_gpu.fields import LOST_TIME_REASONS, RECOVERY_ACTIONS

_SIZE_LIMIT = 1 << 20  # bytes
_RUN_ID = re.compile(r"|[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ECC_KINDS = ("corrected", "uncorrected")


class ScenarioError(Exception):
    """A file that is no scenario; the message says where and what is allowed."""


@dataclass(frozen=True, slots=True)
class Event:
    """From `at` to `until`, in seconds of the scenario, `effects` hold for `card` (None: for every card)."""

    at: float
    until: float
    card: int | None
    effects: Mapping[str, Any]

    def befalls(self, card: int) -> bool:
        """Whether it is about `card`."""
        return self.card in (None, card)


@dataclass(frozen=True, slots=True)
class DueXid:
    """An Xid error at `at` seconds; `number` is its event's place in the file."""

    number: int
    card: int
    code: int
    at: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """The events, in the order of the file: of two that contradict each other the later one holds."""

    events: tuple[Event, ...] = ()

    def state(self, card: int, now: float) -> CardState:
        """What holds for `card` at `now` seconds."""
        state = CardState()
        for event in self.events:
            if not event.befalls(card) or event.at > now:
                continue
            for kind, errors in event.effects.get("ecc", {}).items():
                state.ecc[kind] = state.ecc.get(kind, 0.0) + errors
            if now < event.until:
                for effect in _HOLDING & event.effects.keys():
                    setattr(state, effect, event.effects[effect])
        state.throttled = self._throttled(card, now)
        return state

    def _throttled(self, card: int, now: float) -> dict[str, float]:
        """Seconds by reason up to `now`: the share in force between each two moments at which it may change."""
        events = [
            event
            for event in self.events
            if "throttle" in event.effects and event.befalls(card) and event.at < now
        ]
        edges = sorted({event.at for event in events} | {min(event.until, now) for event in events})
        seconds: dict[str, float] = {}
        for start, end in pairwise(edges):
            in_force = [event.effects["throttle"] for event in events if event.at <= start < event.until]
            for reason, share in in_force[-1].items() if in_force else ():
                seconds[reason] = seconds.get(reason, 0.0) + share * (end - start)
        return seconds

    def xids(self, now: float, cards: int) -> list[DueXid]:
        """All Xid errors up to `now` seconds."""
        return [
            DueXid(number, card, event.effects["xid"], event.at)
            for number, event in enumerate(self.events)
            if "xid" in event.effects and event.at <= now
            for card in range(cards)
            if event.befalls(card)
        ]


_HOLDING = {
    "lost",
    "reset_required",
    "recovery_action",
    "temperature",
    "utilization",
    "power",
    "run_memory",
    "throttle",
}


def _number(low: float, high: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ScenarioError(f"is {value!r}; a number from {low:g} to {high:g} is allowed")
        return value

    return check


def _whole(low: int, high: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ScenarioError(f"is {value!r}; a whole number from {low} to {high} is allowed")
        return value

    return check


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ScenarioError(f"is {value!r}; true and false are allowed")
    return value


def _action(value: Any) -> Any:
    if value not in RECOVERY_ACTIONS:
        raise ScenarioError(f"is {value!r}; allowed are {', '.join(RECOVERY_ACTIONS)}")
    return value


def _mapping(
    allowed: Callable[[str], bool], keys: str, check: Callable[[Any], Any]
) -> Callable[[Any], Mapping[str, Any]]:
    def check_mapping(value: Any) -> Mapping[str, Any]:
        if not isinstance(value, dict) or not value:
            raise ScenarioError(f"is {value!r}; a mapping of {keys} is allowed")
        for key, part in value.items():
            if not isinstance(key, str) or not allowed(key):
                raise ScenarioError(f"has {key!r}; allowed are {keys}")
            try:
                check(part)
            except ScenarioError as error:
                raise ScenarioError(f"of {key!r} {error}") from None
        return value

    return check_mapping


_EFFECTS: dict[str, Callable[[Any], Any]] = {
    "lost": _flag,
    "reset_required": _flag,
    "xid": _whole(1, 999),
    "throttle": _mapping(lambda key: key in LOST_TIME_REASONS, ", ".join(LOST_TIME_REASONS), _number(0, 1)),
    "temperature": _number(1, 150),
    "ecc": _mapping(lambda key: key in _ECC_KINDS, ", ".join(_ECC_KINDS), _whole(0, 10**9)),
    "recovery_action": _action,
    "utilization": _number(0, 1),
    "power": _number(0, 2000),
    "run_memory": _mapping(
        lambda key: _RUN_ID.fullmatch(key) is not None, 'run ids ("" for strangers)', _number(0, 80)
    ),
}


def parse(text: str, cards: int) -> Scenario:
    """The scenario in `text` for so many cards, or ScenarioError."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ScenarioError(f"{where}this is no YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict) or data.keys() != {"events"} or not isinstance(data["events"], list):
        raise ScenarioError("a scenario is `events:` and a list below it, nothing else")
    events = []
    for number, entry in enumerate(data["events"], start=1):
        try:
            events.append(_event(entry, cards))
        except ScenarioError as error:
            raise ScenarioError(f"event {number}: {error}") from None
    return Scenario(tuple(events))


def _event(entry: Any, cards: int) -> Event:
    if not isinstance(entry, dict):
        raise ScenarioError(f"{entry!r} is no mapping such as {{at: 60, card: 0, lost: true}}")
    checks = {
        "at": _number(0, math.inf),
        "for": _number(0, math.inf),
        "card": _whole(0, cards - 1),
        **_EFFECTS,
    }
    for key, value in entry.items():
        if key not in checks:
            raise ScenarioError(f"{key!r} is not known; allowed are {', '.join(checks)}")
        try:
            checks[key](value)
        except ScenarioError as error:
            raise ScenarioError(f"{key} {error}") from None
    effects = {key: value for key, value in entry.items() if key in _EFFECTS}
    if not effects:
        raise ScenarioError(f"nothing happens in it; give one of {', '.join(_EFFECTS)}")
    at = float(entry.get("at", 0))
    return Event(at, at + entry.get("for", math.inf), entry.get("card"), effects)


def read_scenario(path: Path, cards: int) -> Scenario:
    """The scenario in a file, or ScenarioError."""
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
    except OSError as error:
        raise ScenarioError(f"can not be read: {error.strerror}") from None
    if len(data) > _SIZE_LIMIT:
        raise ScenarioError(f"is larger than {_SIZE_LIMIT} bytes")
    try:
        return parse(data.decode(), cards)
    except UnicodeDecodeError:
        raise ScenarioError("is no UTF-8 text") from None


class ScenarioFile:
    """A scenario that is read anew when its file changes. Its clock starts at `origin`, a Unix time.

    A version that is wrong is told in `complaint`, and the one before it stays in force.
    """

    def __init__(self, path: Path, cards: int, began: float) -> None:
        self._path = path
        self._cards = cards
        self._began = began
        self._version: tuple[int, int, int] | None = None
        self.scenario = Scenario()
        self.origin = began
        self.complaint = ""

    def refresh(self) -> bool:
        """Read the file if it has changed; whether another scenario is in force now."""
        try:
            status = self._path.stat()
        except OSError as error:
            self._version, self.complaint = None, f"scenario {self._path.name}: {error.strerror}"
            return False
        version = status.st_mtime_ns, status.st_size, status.st_ino
        if version == self._version:
            return False
        self._version = version
        try:
            self.scenario = read_scenario(self._path, self._cards)
        except ScenarioError as error:
            self.complaint = f"scenario {self._path.name}: {error}; the one before it stays in force"
            return False
        self.complaint = ""
        self.origin = max(self._began, status.st_mtime)
        return True

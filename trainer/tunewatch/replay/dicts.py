"""Dicts of numbers in text, as Python prints them: strings, tensors and numpy scalars as values, nan and inf bare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from json.scanner import make_scanner
from typing import Any

MAX_DICT = 1 << 16
"""Characters of the longest dict that is looked for."""

START = re.compile(r"""\{\s*(?=['"]|$)""")
_BRACE = re.compile(r"[{}]")
_NESTED = re.compile(r"\{[^{}]*\}")
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|(?i:nan|inf(?:inity)?)\b)"
_PAIR = re.compile(
    r"""(?P<quote>['"])(?P<key>[^'"]{1,128})(?P=quote)\s*:\s*"""
    rf"""(?:(?:[A-Za-z_]\w*\.)?(?P<bare>{_NUMBER})(?=\s*[,}}])"""
    rf"""|['"]\s*(?P<text>{_NUMBER})\s*['"]"""
    rf"""|['"](?P<share>\d+)/\d+['"]"""
    rf"""|[A-Za-z_][\w.]*\(\s*(?:\[\s*(?P<item>{_NUMBER})\s*\]|['"]?(?P<scalar>{_NUMBER})['"]?(?=\s*[,)])))"""
)
_SHARE = re.compile(r"(\d+)/\d+")
_FLOAT, _SPELLED = frozenset({float}), frozenset({float, int, str})
_UNDERSCORED = re.compile(r"\d_\d")
"""What Python's float() takes for a number, and no trainer prints."""
scan_json: Callable[[str, int], tuple[Any, int]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
"""The JSON value at a place of a text, and where it ends. StopIteration, ValueError, RecursionError."""


def close(text: str, start: int) -> int | None:
    """Where the dict that opens at `start` ends, if none opens within it; else None, and `closings` tells."""
    end = text.find("}", start)
    return end + 1 if end >= 0 and text.find("{", start + 1, end) < 0 else None


def closings(text: str, start: int) -> dict[int, int]:
    """Where each dict that opens at or behind `start` ends, by its start; those that do not are left out.

    One look at the text, however many open in it and never end.
    """
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text, start):
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened:
            found[opened.pop()] = brace.end()
    return found


def numbers(text: str) -> dict[str, float]:
    """The numbers of a dict by key, without those of dicts in it; what is no number is left out."""
    if text.find("{", 1) > 0:
        inner = text[1:-1]
        while True:
            inner, replaced = _NESTED.subn("None", inner)
            if not replaced:
                break
        text = f"{{{inner}}}"
    elif (plain := _plain(text)) is not None:
        return plain
    found: dict[str, float] = {}
    for pair in _PAIR.finditer(text):
        _, key, bare, quoted, share, item, scalar = pair.groups()
        found[key] = float(bare or quoted or share or item or scalar)
    return found


def _plain(text: str) -> dict[str, float] | None:
    """The same by JSON's scanner, which takes a third of the time; None for what only Python writes (nan, tensors)."""
    try:
        found, _ = scan_json(text.replace("'", '"'), 0)
        kinds = set(map(type, found.values()))
        if kinds <= _FLOAT:
            return found
        if kinds <= _SPELLED and not _UNDERSCORED.search(text):
            with suppress(ValueError):
                return dict(zip(found, map(float, found.values()), strict=True))
        return {key: number for key, value in found.items() if (number := _number(value)) is not None}
    except (StopIteration, ValueError, OverflowError, RecursionError):
        return None


def _number(value: object) -> float | None:
    kind = type(value)
    if kind is float or kind is int:
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str) or "_" in value:
        return None
    try:
        return float(value)
    except ValueError:
        share = _SHARE.fullmatch(value)
        return float(share[1]) if share else None


def first_dict(text: str) -> dict[str, float] | None:
    """The numbers of the first dict in a line; None where there is no whole one."""
    text = text[:MAX_DICT]
    start = START.search(text)
    if start is None:
        return None
    opens = start.start()
    end = close(text, opens) or closings(text, opens).get(opens)
    return (numbers(text[opens:end]) or None) if end else None

"""A file as text, a piece at a time: no line and no file is too long to be read."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import BinaryIO

PIECE = 1 << 20
MAX_LINE = 1 << 20
"""Characters of the longest line that is looked at as a whole."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


def encoding_of(head: bytes) -> str:
    """UTF-8, unless a byte order mark says otherwise (PowerShell writes UTF-16)."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


def pieces(file: BinaryIO, encoding: str) -> Iterator[str]:
    """The file's text; a byte that is none in this encoding becomes U+FFFD."""
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    while data := file.read(PIECE):
        if text := decoder.decode(data):
            yield text
    if text := decoder.decode(b"", final=True):
        yield text


def lines(texts: Iterator[str]) -> Iterator[str | None]:
    """The lines of a text without their newline; None for one that is longer than MAX_LINE."""
    rest, dropped = "", False
    for text in texts:
        *whole, rest = (rest + text).split("\n")
        for line in whole:
            yield None if dropped or len(line) > MAX_LINE else line
            dropped = False
        if len(rest) > MAX_LINE:
            rest, dropped = "", True
    if dropped or rest:
        yield None if dropped else rest


def segments(texts: Iterator[str]) -> Iterator[str]:
    """What stands between line ends and carriage returns, blank ones left out; a longer one comes in parts."""
    rest = ""
    for text in texts:
        *whole, rest = (rest + text).replace("\r", "\n").split("\n")
        yield from filter(str.strip, whole)
        if len(rest) > MAX_LINE:
            yield rest
            rest = ""
    if rest:
        yield rest

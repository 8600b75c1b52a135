"""How many rows of the evaluation set are rows of the training set too: their loss says nothing about new data."""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from tunewatch.finetune.data import COLUMNS, Format, LoadedData, is_streamed

MAX_EVAL_ROWS = 1_000_000
"""Larger evaluation sets are not compared: each row of them takes about 100 bytes of memory."""

MAX_SECONDS = 120.0
"""The comparison is given up after this time, at some ten thousand training rows a second."""

_BATCH = 1000


def eval_rows_in_train(data: LoadedData, report: Callable[[float | None], None]) -> int | None:
    """The number of evaluation rows whose like is in the training set; each row of a duplicate counts.

    Two rows are alike when all their text is: messages with their roles, or prompt and completion. Spaces and line
    ends do not matter, nor does how Unicode spells a letter; upper and lower case do. A row that is only nearly the
    same is not found. Rows are compared by 8 bytes of a hash, so that the memory it takes is that of the evaluation
    set's digests.

    None while it is unknown: there is no evaluation set, rows are streamed, or there are too many of them.
    `report` takes the part of the training rows that was looked at.
    """
    if data.eval is None or is_streamed(data.eval) or len(data.eval) > MAX_EVAL_ROWS:
        return None
    give_up = time.monotonic() + MAX_SECONDS
    rows: dict[bytes, int] = {}
    for digest in _digests(data.eval, data.format):
        rows[digest] = rows.get(digest, 0) + 1
    found = 0
    for done, digest in enumerate(_digests(data.train, data.format)):
        found += rows.pop(digest, 0)
        if done % _BATCH == 0:
            if time.monotonic() > give_up:
                return None
            report(done / len(data.train))
    return found


def _digests(rows: Any, kind: Format) -> Iterator[bytes]:
    for batch in rows.iter(batch_size=_BATCH):
        for row in zip(*(batch[column] for column in COLUMNS[kind]), strict=True):
            text = json.dumps(_plain(row), ensure_ascii=False, sort_keys=True)
            yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _plain(value: Any) -> Any:
    """A row's content as it is compared. Fields that are null are those that only other rows have."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | bool | None) else str(value)

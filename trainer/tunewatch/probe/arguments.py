"""All arguments of a training for the record: JSON scalars without secrets, paths and texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"
MAX_ARGUMENTS = 400
MAX_LENGTH = 200

_SECRET = re.compile(r"(?i)(^|[_\-.])(\w*token|\w*secret|\w*password|passwd|\w*credentials?|\w*key)$")
_SPECIAL_TOKEN = re.compile(
    r"(?i)(^|.*[_\-.])(eos|bos|pad|unk|sep|cls|mask|eot|eom|stop|image|video|audio|response|special)_?token$"
)
"""Words of a tokenizer's vocabulary."""
_TEXT = re.compile(r"(?i)(prompt|template|instruction|message)s?$")
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{8,}|\bsk-[\w-]{16,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abp]-[\w-]{10,}"
)
_URL_CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
_URL_SECRET = re.compile(r"(?i)([?&][\w.-]*(?:token|secret|password|key|signature)=)[^&\s]+")
_PATH = re.compile(
    r"(?:file://|(?<![\w.:/~-])~?|(?<![\w])[A-Za-z]:)[/\\](?:[^/\\\s,;:'\"]+[/\\]+)*([^/\\\s,;:'\"]+)[/\\]*"
)


def recorded(args: Any) -> dict[str, Any]:
    """All arguments of a trainer as JSON scalars; nested ones as `outer.inner`, lists as one text.

    Left out: what is None, objects, and texts (prompts, templates). Masked: secrets, by their name or their shape, and
    credentials in URLs. Of an absolute path the last component is left.
    """
    found: dict[str, Any] = {}
    for name, value in _leaves("", args, depth=0):
        if len(found) >= MAX_ARGUMENTS:
            break
        shown = _shown(name, value)
        if shown is not None:
            found[name[:MAX_LENGTH]] = shown
    return found


def _leaves(prefix: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The values below a dataclass or a mapping with their dotted names."""
    value = getattr(value, "value", value)
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, vars(value).get(field.name)) for field in dataclasses.fields(value)]
    else:
        yield prefix, value
        return
    if depth < 4:
        for name, item in items:
            yield from _leaves(f"{prefix}.{name}" if prefix else name, item, depth + 1)


def _shown(name: str, value: Any) -> str | int | float | bool | None:
    if isinstance(value, (bool, int, float)):
        return value if isinstance(value, bool) or abs(value) < 2**63 or value != value else None
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [getattr(item, "value", item) for item in value]
        if not items or not all(isinstance(item, (str, int, float)) for item in items):
            return None
        texts = [str(item) for item in items]
        value = ", ".join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)
    if not isinstance(value, str) or not value:
        return None
    if _SECRET.search(name) and not _SPECIAL_TOKEN.match(name):
        return MASK
    if "\n" in value or (_TEXT.search(name) and re.search(r"\s|\{", value)):
        return None
    return clean(value)


def clean(text: str) -> str:
    """A text without secrets, credentials and absolute paths, and not long."""
    text = _SECRET_VALUE.sub(MASK, _URL_SECRET.sub(rf"\1{MASK}", _URL_CREDENTIALS.sub(r"\1", text)))
    return _PATH.sub(r"\1", text)[:MAX_LENGTH]

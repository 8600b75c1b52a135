"""TensorBoard event files, without TensorBoard: the record framing and the few protobuf fields that hold scalars.

A record is its length (uint64), a checksum of that, the data, and a checksum of the data; the second one is not
computed here (in Python it would take longer than all else). A record holds an Event: wall_time (1), step (2),
summary (5), which holds values (1): tag (1), simple_value (2), tensor (8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from tunewatch.replay.entries import Entries, Steps, is_train_log, log_event
from tunewatch.replay.pieces import PIECE
from tunewatch.replay.runs import NEXT_RUN, Boundary, Notes

HEADER, FOOTER = 12, 4
MAX_RECORD = 1 << 26
"""Bytes; a larger record (images, graphs) is passed over."""
MAX_REMEMBERED = 4096
"""Frames, and shapes of summaries, that are remembered."""

_TIME, _STEP, _SIMPLE_VALUE = b"\x09", b"\x10", b"\x15"
"""Keys of the fields of an Event that are looked at first, and of a summary's value."""
_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")

_POLYNOMIAL = 0x82F63B78


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord does it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_record(head: bytes) -> bool:
    """Whether a file begins with the frame of a record."""
    return len(head) >= HEADER and masked_crc(head[:8]) == struct.unpack_from("<I", head, 8)[0]


class Records:
    """The records of a file, up to where it is cut short or damaged. Iterating gives the data of each."""

    def __init__(self, file: BinaryIO, notes: Notes) -> None:
        self._file, self._notes = file, notes
        self._frames: dict[bytes, int] = {}
        """Lengths by their frames, for those that were checked: few lengths come again and again."""

    def __iter__(self) -> Iterator[bytes]:
        data, at, notes = b"", 0, self._notes
        while True:
            if len(data) - at < HEADER:
                data, at = data[at:] + self._file.read(max(PIECE, HEADER)), 0
                if len(data) < HEADER:
                    notes.cut_short = notes.cut_short or bool(data)
                    return
            frame = data[at : at + HEADER]
            length = self._frames.get(frame)
            if length is None:
                if not is_record(frame):
                    notes.malformed += 1
                    return
                length = self._remember(frame)
            end = at + HEADER + length
            if length > MAX_RECORD:
                notes.malformed += 1
                self._file.seek(end + FOOTER - len(data), 1)
                data, at = b"", 0
                continue
            if end + FOOTER > len(data):
                data = data[at:] + self._file.read(max(PIECE, length + FOOTER))
                at, end = 0, HEADER + length
                if end + FOOTER > len(data):
                    notes.cut_short = True
                    return
            yield data[at + HEADER : end]
            at = end + FOOTER

    def _remember(self, frame: bytes) -> int:
        (length,) = struct.unpack_from("<Q", frame)
        if len(self._frames) < MAX_REMEMBERED:
            self._frames[frame] = length
        return int(length)


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number, and its integer or its bytes. ValueError where it is none."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if size < 0 or at + size > end:
            raise ValueError("no protobuf message")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("no protobuf message")


_FORMS = {1: "<f", 2: "<d", 3: "<i", 9: "<q", 19: "<e"}
"""How the content of a tensor is laid out, by its type: float, double, int32, int64, half."""


def tensor_scalar(data: bytes) -> float | None:
    """The number in a tensor of one element; None for any other tensor."""
    dtype, content = 1, b""
    for number, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number in (4, 5, 6) and isinstance(value, bytes):  # raw content, floats, doubles
            content = value
        elif number in (7, 10):  # int32, int64: packed or not
            return float(value if isinstance(value, int) else _varint(value, 0)[0])
    form = _FORMS.get(dtype)
    if form is None or len(content) != struct.calcsize(form):
        return None
    return float(struct.unpack(form, content)[0])


class Event(NamedTuple):
    """One record: Unix time, step and scalars."""

    time: float | None
    step: int
    scalars: list[tuple[str, float]]


class Events:
    """Reads records. What torch writes is, for one tag, always the same but for time, step and value."""

    def __init__(self) -> None:
        self._tags: dict[bytes, str] = {}
        """Tags by what stands between the step and the value, which is the last four bytes."""

    def read(self, data: bytes) -> Event:
        """The event in a record. ValueError where it is none."""
        if data[:1] != _TIME or data[9:10] != _STEP:
            return event_of(data)
        step, at = _varint(data, 10)
        tag = self._tags.get(data[at:-4])
        if tag is not None:
            return Event(_DOUBLE.unpack_from(data, 1)[0], step, [(tag, _FLOAT.unpack(data[-4:])[0])])
        event = event_of(data)
        if data[-5:-4] == _SIMPLE_VALUE and len(event.scalars) == 1 and len(self._tags) < MAX_REMEMBERED:
            tag = event.scalars[0][0]
            # Where those bytes are the value, and nothing else, another value changes the value, and nothing else.
            if all(
                event_of(data[:-4] + _FLOAT.pack(other)).scalars == [(tag, other)] for other in (1.0, 2.0)
            ):
                self._tags[data[at:-4]] = tag
        return event


def event_of(data: bytes) -> Event:
    """The event in a record, whatever its fields and their order. ValueError where it is none."""
    time, step, found = None, 0, []
    for number, value in fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            time = float(_DOUBLE.unpack(value)[0])
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes) and (scalar := _scalar(item)):
                    found.append(scalar)
    return Event(time, step, found)


def _scalar(data: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for key, value in fields(data):
        if not isinstance(value, bytes):
            continue
        if key == 1:
            tag = value.decode("utf-8", "replace")
        elif key == 2 and len(value) == 4:
            number = float(struct.unpack("<f", value)[0])
        elif key == 8:
            number = tensor_scalar(value)
    return (tag, number) if tag and number is not None else None


def _entries(file: BinaryIO, notes: Notes) -> Iterator[tuple[Event, dict[str, float]]]:
    """What was logged together: scalars of one step and one group (train, eval), which come one after the other."""
    reader = Events()
    entry: dict[str, float] = {}
    first: Event | None = None
    group = ""
    for data in Records(file, notes):
        try:
            event = reader.read(data)
        except ValueError:
            notes.malformed += 1
            continue
        for tag, number in event.scalars:
            if first is not None and event.step == first.step:
                # transformers files the epoch of an evaluation under train/, too.
                its = group if tag == "train/epoch" else _group(tag)
                if its == group and tag not in entry:
                    entry[tag] = number
                    continue
            if first is not None:
                yield first, entry
            first, group, entry = event, _group(tag), {tag: number}
    if first is not None:
        yield first, entry


def _group(tag: str) -> str:
    return "eval" if tag.startswith(("eval/", "test/")) else "train"


def tensorboard_events(files: Iterable[BinaryIO], notes: Notes) -> Iterator[dict[str, Any]]:
    """The logs in event files of one folder, in their order; a later training in it is another run."""
    entries, steps, boundary = Entries(), Steps(), Boundary()
    for file in files:
        for first, entry in _entries(file, notes):
            values: dict[str, Any] = entries.values(entry)
            if boundary.passed(values, first.step):
                yield NEXT_RUN
                steps = Steps()
            notes.step_source = "logged"
            yield log_event(values, steps.of(values, first.step, train=is_train_log(values)), first.time)

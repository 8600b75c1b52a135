"""TensorBoard event files, without TensorBoard: the record framing and the few protobuf fields that hold scalars.

A record is its length (uint64), a checksum of that, the data, and a checksum of the data; the second one is not
computed here (in Python it would take longer than all else). A record holds an Event: wall_time (1), step (2),
summary (5), which holds values (1): tag (1), simple_value (2), tensor (8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from tunewatch.replay.entries import Entries, Steps, is_train_log, log_event
from tunewatch.replay.runs import NEXT_RUN, Boundary, Notes

HEADER = 12
MAX_RECORD = 1 << 26
"""Bytes; a larger record (images, graphs) is passed over."""

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


def records(file: BinaryIO, notes: Notes) -> Iterator[bytes]:
    """The records of a file, up to where it is cut short or damaged."""
    while header := file.read(HEADER):
        if len(header) < HEADER:
            notes.cut_short = True
            return
        if not is_record(header):
            notes.malformed += 1
            return
        (length,) = struct.unpack_from("<Q", header)
        if length > MAX_RECORD:
            notes.malformed += 1
            file.seek(length + 4, 1)
            continue
        data = file.read(length)
        if len(data) < length or len(file.read(4)) < 4:
            notes.cut_short = True
            return
        yield data


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


def scalars(data: bytes) -> tuple[int, list[tuple[str, float]]]:
    """Step and scalars of an Event. ValueError where it is none."""
    step, found = 0, []
    for number, value in fields(data):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for inner, item in fields(value):
                if inner == 1 and isinstance(item, bytes) and (scalar := _scalar(item)):
                    found.append(scalar)
    return step, found


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


def _entries(file: BinaryIO, notes: Notes) -> Iterator[tuple[int, dict[str, float]]]:
    """What was logged together: scalars of one step and one group (train, eval), which come one after the other."""
    entry: dict[str, float] = {}
    last: tuple[int, str] = (0, "")
    for data in records(file, notes):
        try:
            step, found = scalars(data)
        except ValueError:
            notes.malformed += 1
            continue
        for tag, number in found:
            group = "eval" if tag.startswith(("eval/", "test/")) else "train"
            # transformers files the epoch of an evaluation under train/, too.
            if tag == "train/epoch" and step == last[0]:
                group = last[1]
            if entry and ((step, group) != last or tag in entry):
                yield last[0], entry
                entry = {}
            last = (step, group)
            entry[tag] = number
    if entry:
        yield last[0], entry


def tensorboard_events(files: Iterable[BinaryIO], notes: Notes) -> Iterator[dict[str, Any]]:
    """The logs in event files of one folder, in their order; a later training in it is another run."""
    entries, steps, boundary = Entries(), Steps(), Boundary()
    for file in files:
        for step, entry in _entries(file, notes):
            values: dict[str, Any] = entries.values(entry)
            if boundary.passed(values, step):
                yield NEXT_RUN
                steps = Steps()
            notes.step_source = "logged"
            yield log_event(values, steps.of({"step": step}, train=is_train_log(values)))

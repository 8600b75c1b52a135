"""Xid errors in the kernel log: NVML's events miss some, and tell nothing once the driver hangs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")

_READ_SIZE = 65536  # of /dev/kmsg, one read returns one record
_MOST_READS = 20_000  # in one poll; the kernel keeps some thousand records
_LONGEST_LINE = 8192

# "priority,sequence,microseconds,flags;message"; a facility (priority / 8) other than 0 is not the kernel's.
_RECORD = re.compile(rb"(\d+),\d+,(\d+),[^;]*;(.*)")
_BUS = rb"((?:[0-9A-Fa-f]{4,8}:)[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?)"
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?" + _BUS + rb"\): (\d{1,4})\b")
_OFF_THE_BUS = re.compile(rb"NVRM: GPU " + _BUS + rb": GPU has fallen off the bus")
_OFF_THE_BUS_XID = 79
_SAME_FALL = 60_000_000  # microseconds within which both lines about a fall off the bus tell of one


class KernelLog:
    """What the kernel says from now on; reads without waiting, and nothing where it may not be read.

    `/dev/kmsg` needs root or CAP_SYSLOG where kernel.dmesg_restrict is 1, and is missing in most containers.
    """

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        self._rest = b""
        self._falls: dict[str, int] = {}
        self._descriptor = -1
        self.unreadable = ""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError as error:
            self.unreadable = error.strerror or type(error).__name__
            self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def poll(self) -> list[tuple[str, int]]:
        """PCI bus id, as the kernel spells it, and code of each Xid error since the last poll."""
        return [found for line in self._lines() if (found := self._parse(line)) is not None]

    def _lines(self) -> Iterator[bytes]:
        for _ in range(_MOST_READS if self._descriptor >= 0 else 0):
            try:
                data = os.read(self._descriptor, _READ_SIZE)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read is of the oldest left
            except OSError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-_LONGEST_LINE:]
            yield from lines

    def _parse(self, line: bytes) -> tuple[str, int] | None:
        record = _RECORD.match(line)
        if record is None or int(record[1]) >= 8:
            return None
        microseconds, message = int(record[2]), record[3]
        if xid := _XID.match(message):
            bus, code = xid[1].decode(), int(xid[2])
        elif off := _OFF_THE_BUS.match(message):
            bus, code = off[1].decode(), _OFF_THE_BUS_XID
        else:
            return None
        if code == _OFF_THE_BUS_XID:
            key = bus.partition(".")[0].lower()
            before = self._falls.get(key)
            self._falls[key] = microseconds
            if before is not None and microseconds - before <= _SAME_FALL:
                return None
        return bus, code

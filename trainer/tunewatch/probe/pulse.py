"""The pulse: the numbers of this instant, in a small file that survives the death of its writer.

A file of little-endian doubles behind their checksum, written as one: a reader of another process that comes in the
middle of a write finds that the sum is wrong, and reads again. Behind them a record of the last step's end, which is
written at once where the rest may come a tenth of a second later. Unknown is NaN.

It is written with pwrite and not through an mmap: a store to a mapped page that the disk can not take (a full
btrfs, which gives every write new blocks; a file that somebody truncated) is a SIGBUS, the death of the training.
"""

from __future__ import annotations

import errno
import math
import os
import struct
import threading
import time
import zlib
from collections.abc import Mapping

MAGIC = 0x5457_5055_4C53_4532  # "TWPULSE2"

PHASES = ("prepare", "data", "compute", "evaluate", "save", "package")
"""What a training process can be busy with; "data" is waiting for the next batch."""

STEP_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds, in seconds, of the step duration histogram; one more bucket counts the rest."""

FIELDS: tuple[str, ...] = (
    "pid",
    "rank",
    "step",  # optimizer step of the whole run
    "max_steps",
    "epoch",
    "step_time",  # Unix seconds of the last step's end
    "step_monotonic",
    "activity_time",  # Unix seconds of the last sign of life: step, micro-batch, evaluation batch, row, phase
    "activity_monotonic",
    "phase",  # index into PHASES
    "phase_monotonic",  # when the phase began
    "step_stage",  # how far this step is: one for each micro-batch begun, one for its loss; 0 for a single process
    "first_step",  # 1 while no step of this session has ended
    "steps_total",
    "samples_total",
    "tokens_all_total",  # elements of input_ids given to this rank, padding included
    "tokens_non_padding_total",  # of these, what the attention mask lets through
    "tokens_loss_total",  # labels that count in the loss
    "steps_skipped_total",  # optimizer steps that the fp16 loss scaler skipped
    "batch_size_restarts_total",
    "nonfinite_loss_steps",
    "nonfinite_grad_norm_steps",
    "nonfinite_streak",
    "first_nonfinite_step",
    "grad_norm_seen",  # 1 when the norm of each step is looked at, not only the logged ones
    "eval_batches",
    "evaluations",
    "saves",
    *(f"{phase}_seconds" for phase in PHASES),
    "step_seconds_sum",
    "step_seconds_count",
    *(f"step_bucket_{index}" for index in range(len(STEP_BUCKETS) + 1)),
    "memory_allocated_bytes",
    "memory_reserved_bytes",
    "memory_peak_bytes",
    "events_written",
    "append_errors",
    "hook_calls",  # estimated, as hook_seconds is
    "hook_seconds",  # wall time in our code on the training thread; of the hooks of a step, one step in 61 is measured
    "hook_max_seconds",  # the longest single call of what is measured, less the time in which others ran
    "hook_errors",
)
INDEX = {name: position for position, name in enumerate(FIELDS)}
UNKNOWN_AT_START = frozenset(
    {
        "step", "max_steps", "epoch", "step_time", "step_monotonic", "first_nonfinite_step",
        "tokens_non_padding_total", "tokens_loss_total",
        "memory_allocated_bytes", "memory_reserved_bytes", "memory_peak_bytes",
    }
)  # fmt: skip

_HEADER = struct.Struct("<QQ")  # magic, CRC-32 of what follows
_MARK = struct.Struct("<5d")  # steps_total, step, step_time, step_monotonic, steps_total once more
_BODY = struct.Struct(f"<{len(FIELDS)}d")
_NO_MARK = (0.0, math.nan, math.nan, math.nan, 0.0)
_MARK_AT = -(-(_HEADER.size + _BODY.size) // 64) * 64  # in one cache line
SIZE = _MARK_AT + _MARK.size

_GETFLAGS, _SETFLAGS = 0x8008_6601, 0x4008_6602  # linux/fs.h: FS_IOC_GETFLAGS, FS_IOC_SETFLAGS on 64 bits
_NOCOW = 0x0080_0000  # FS_NOCOW_FL


class Pulse:
    """The writing side, of one process: its training thread, and the thread that publishes what can wait.

    Each field is set by one of the two. A write that the disk does not take raises nothing; it is counted in
    `append_errors`.
    """

    def __init__(self, path: str, *, rank: int) -> None:
        """Create `path` anew. Raises OSError where the disk has no room for it or can not be written."""
        self.values = [0.0] * len(FIELDS)
        for name in UNKNOWN_AT_START:
            self.values[INDEX[name]] = math.nan
        self.stale = False
        """Whether something was set that no `publish` has shown yet; kept by those who set it."""
        self._publishing = threading.Lock()  # an older copy must not be written over a newer one
        temporary = f"{path}.{os.getpid()}"
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_in_place(self._fd)
            if os.pwrite(self._fd, b"\0" * SIZE, 0) < SIZE:  # not sparse: later writes need no new blocks
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        except BaseException:
            os.close(self._fd)
            os.unlink(temporary)
            raise
        self.mark(*_NO_MARK[1:])
        now = time.monotonic()
        self.update(
            pid=os.getpid(), rank=rank, first_step=1.0, phase_monotonic=now,
            activity_time=time.time(), activity_monotonic=now,
        )  # fmt: skip
        os.rename(temporary, path)

    def update(self, **values: float) -> None:
        """Set fields by name, all of them visible to a reader at once."""
        for name, value in values.items():
            self.values[INDEX[name]] = value
        self.publish()

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a field; a reader sees it with the next `publish` or `update`."""
        self.values[INDEX[name]] += amount

    def get(self, name: str) -> float:
        return self.values[INDEX[name]]

    def publish(self) -> None:
        """Show the values to readers: one write, which a kill in the middle does not tear (it is within a page)."""
        try:
            with self._publishing:
                self.stale = False
                body = _BODY.pack(*self.values)
                os.pwrite(self._fd, _HEADER.pack(MAGIC, zlib.crc32(body)) + body, 0)
        except OSError:
            self.values[INDEX["append_errors"]] += 1

    def mark(self, step: float, wall: float, monotonic: float, steps_total: float) -> None:
        """Show that a step has ended, by a small record of its own behind the values, which follow later."""
        try:
            os.pwrite(self._fd, _MARK.pack(steps_total, step, wall, monotonic, steps_total), _MARK_AT)
        except OSError:
            self.values[INDEX["append_errors"]] += 1

    def close(self) -> None:
        """Give the file back; the pulse must not be used afterwards."""
        os.close(self._fd)


def _write_in_place(fd: int) -> None:
    """Ask a copy-on-write filesystem (btrfs) to overwrite the file's blocks, which works on a full disk too."""
    try:
        import fcntl

        (flags,) = struct.unpack("@l", fcntl.ioctl(fd, _GETFLAGS, struct.pack("@l", 0)))
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("@l", flags | _NOCOW))
    except (ImportError, OSError):
        pass  # most filesystems overwrite in place anyway


_PATIENCE = 0.02
"""Seconds after which a record whose checksum stays wrong is taken for that of a writer that died."""


def read_pulse(path: str) -> Mapping[str, float] | None:
    """Return a consistent copy of the pulse at `path`, or None where there is none (yet).

    A machine that died in the middle of a write may leave a record that fits no checksum for ever; after a while in
    which it does not change, the values are taken as they are, for they are all that will ever be known.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        seen, since = b"", time.monotonic()
        while True:
            raw = os.pread(fd, SIZE, 0)
            if len(raw) < _HEADER.size + _BODY.size:
                return None
            if _HEADER.unpack_from(raw)[0] != MAGIC:
                return None
            body = raw[_HEADER.size : _HEADER.size + _BODY.size]
            mark = _MARK.unpack_from(raw, _MARK_AT) if len(raw) >= SIZE else _NO_MARK
            if zlib.crc32(body) == _HEADER.unpack_from(raw)[1] and mark[0] == mark[-1]:
                break
            if raw != seen:
                seen, since = raw, time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                break
            else:
                time.sleep(0.001)
    finally:
        os.close(fd)
    values = dict(zip(FIELDS, _BODY.unpack(body), strict=True))
    steps_total, step, wall, monotonic, _ = mark
    if monotonic > max(
        values["activity_monotonic"], values["phase_monotonic"]
    ):  # this step's values are not here yet
        values.update(
            step=step, steps_total=steps_total, first_step=0.0, step_time=wall, step_monotonic=monotonic,
            activity_time=wall, activity_monotonic=monotonic,
            phase=float(PHASES.index("data")), phase_monotonic=monotonic,
        )  # fmt: skip
    return values

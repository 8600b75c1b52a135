"""The sidecar's end of the reader process: one question, one answer, one deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tunewatch_gpu.process import end_children, reap_orphans
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.snapshot import Request, Snapshot

_ANSWER_LIMIT = 8 << 20  # bytes; some hundred slices need less than one MiB


@dataclass(eq=False)
class ReaderFailure(Exception):
    """A collection without a snapshot.

    `reason` is a word for a label. `source` and `index` name what the reader was at, where it hung or died.
    """

    reason: str
    message: str
    source: str = ""
    index: int | None = None

    def __str__(self) -> str:
        return self.message


class Stopped(Exception):
    """The sidecar was asked to end while it waited."""


@dataclass(frozen=True, slots=True)
class ToldXid:
    """An Xid error as the reader told of it, at Unix time `time`."""

    source: str
    uuid: str
    code: int
    time: float


class ReaderProcess:
    """Starts the reader when needed and replaces it after every failure.

    `wake` is a descriptor that turns readable when the sidecar should end. `starts` counts the processes.
    """

    def __init__(self, options: ReaderOptions, wake: int) -> None:
        self._options = options
        self._wake = wake
        self._child: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._buffer = bytearray()
        self._xids: list[ToldXid] = []
        self.starts = 0

    def read(self, request: Request, deadline: float) -> Snapshot:
        """One collection until `deadline` (monotonic); ReaderFailure or Stopped otherwise."""
        try:
            if self._child is None:
                self._start()
            snapshot = self._exchange(request, deadline)
        except ReaderFailure:
            self.kill()
            raise
        if self._child is not None:
            reap_orphans(self._child.pid)
        return snapshot

    def take_xids(self) -> list[ToldXid]:
        """The Xid errors told since the last call; those of a reader that was killed are among them."""
        taken, self._xids = self._xids, []
        return taken

    def stop(self, patience: float) -> None:
        """Ask the reader to release the driver and end; kill it after `patience` seconds."""
        if self._child is not None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(patience)
        self.kill()

    def kill(self) -> None:
        """End the reader and all it started, now."""
        if self._child is not None:
            self._child.kill()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(0.2)
            if self._child.stdin is not None:
                with suppress(BrokenPipeError):
                    self._child.stdin.close()
            self._take_last_words()
            os.close(self._answers)
            self._child = None
        end_children(patience=0.2)

    def _take_last_words(self) -> None:
        """Xid errors that the reader told of after its last answer: they may be why it had to be killed."""
        os.set_blocking(self._answers, False)
        with suppress(BlockingIOError):
            while len(self._buffer) <= _ANSWER_LIMIT and (data := os.read(self._answers, 65536)):
                self._buffer += data
        for line in bytes(self._buffer).split(b"\n")[:-1]:
            with suppress(ValueError):  # a line may be cut off where the reader was ended
                self._take_xid(json.loads(line))
        self._buffer.clear()

    def _take_xid(self, message: dict[str, Any]) -> bool:
        if "xid" in message:
            self._xids.append(ToldXid(*message["xid"]))
        return "xid" in message

    def _start(self) -> None:
        stuck = end_children(patience=0.2)
        if stuck:
            raise ReaderFailure(
                "reader_stuck",
                f"process {min(stuck)} of an earlier collection hangs in the driver and can not be killed; "
                "no other is started while it lives",
            )
        self._answers, writing = os.pipe()
        self._buffer.clear()
        try:
            self._child = subprocess.Popen(
                self._command(writing),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # drivers print what they like
                pass_fds=(writing,),
            )
        except OSError as error:
            os.close(self._answers)
            raise ReaderFailure(
                "reader_not_started", f"the reader can not be started: {error.strerror}"
            ) from None
        finally:
            os.close(writing)
        self.starts += 1

    def _command(self, descriptor: int) -> list[str]:
        """The command line. -P keeps modules of the current folder from shadowing the library's."""
        return [
            *(sys.executable, "-P", "-m", "tunewatch_gpu.reader", str(descriptor), str(os.getpid())),
            json.dumps(asdict(self._options)),
        ]

    def _exchange(self, request: Request, deadline: float) -> Snapshot:
        assert self._child is not None and self._child.stdin is not None
        source, index = "", None
        try:
            self._child.stdin.write(request.dump().encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._death(source, index) from None
        while True:
            line = self._next_line(deadline)
            if line is None:
                raise ReaderFailure(
                    "reader_timeout", f"no answer in time {_place(source, index)}", source, index
                )
            if not line:
                raise self._death(source, index)
            message = json.loads(line)
            if self._take_xid(message):
                continue
            if "snapshot" in message:
                return Snapshot.from_json(message["snapshot"])
            if "failure" in message:
                reason, text = message["failure"]
                raise ReaderFailure(reason, text)
            source, index = message["at"]

    def _next_line(self, deadline: float) -> bytes | None:
        """A line from the reader; b"" when it is gone, None at the deadline."""
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[: end + 1])
                del self._buffer[: end + 1]
                return line
            if len(self._buffer) > _ANSWER_LIMIT:
                return b""
            patience = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._answers, self._wake], [], [], patience)
            if self._wake in ready:
                raise Stopped
            if not ready:
                return None
            data = os.read(self._answers, 65536)
            if not data:
                return b""
            self._buffer += data

    def _death(self, source: str, index: int | None) -> ReaderFailure:
        assert self._child is not None
        try:
            code = self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        return ReaderFailure("reader_crashed", f"the reader {how} {_place(source, index)}", source, index)


def _place(source: str, index: int | None) -> str:
    if not source:
        return "before it asked a driver"
    return f"in {source}" if index is None else f"in {source} at GPU {index}"

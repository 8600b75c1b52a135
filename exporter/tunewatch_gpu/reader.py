"""The reader process: the only one that touches a driver, and the one that may hang or crash with it.

It takes one `Request` a line on standard input and answers on the descriptor named by its first argument:
any number of `{"at": [source, index]}` lines, then `{"snapshot": ...}` or `{"failure": [reason, message]}`.
It ends at end of input, at SIGTERM, and with its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import FrameType

from tunewatch_gpu.process import die_with_parent
from tunewatch_gpu.snapshot import Request, Snapshot
from tunewatch_gpu.source import Announce, Source, SourceUnavailable

_RETRY_FIRST_CHOICE = 60.0  # seconds a second choice is kept before the first one is tried again


class SourceChain:
    """The sources in order of preference, behind the interface of one."""

    name = "auto"

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources
        self._chosen = 0
        self._chosen_until = 0.0

    def read(self, request: Request) -> Snapshot:
        """One collection from the best source that works; see `Source`."""
        start = self._chosen if time.monotonic() < self._chosen_until else 0
        failures: list[SourceUnavailable] = []
        for position, source in enumerate(self._sources):
            last = position == len(self._sources) - 1
            if not last and (position < start or source.name in request.avoid):
                continue
            try:
                snapshot = source.read(request)
            except SourceUnavailable as failure:
                source.close()
                failures.append(failure)
                continue
            if position != self._chosen:
                self._chosen, self._chosen_until = position, time.monotonic() + _RETRY_FIRST_CHOICE
            return snapshot
        self._chosen_until = 0.0
        raise _together(failures)

    def close(self) -> None:
        """Release all drivers."""
        for source in self._sources:
            source.close()


def _together(failures: list[SourceUnavailable]) -> SourceUnavailable:
    """One failure for several: a driver that is there but broken says more than one that is not there."""
    absent = {"library_not_found", "nvidia_smi_not_found"}
    message = "; ".join(str(failure) for failure in failures)
    for failure in failures:
        if failure.reason not in absent:
            return SourceUnavailable(failure.reason, message)
    return SourceUnavailable("no_driver" if len(failures) > 1 else failures[0].reason, message)


def build_source(backend: str, announce: Announce, nvidia_smi: str, simulated_gpus: int) -> Source:
    """The source for a value of `--backend`; only what is needed is imported, to keep the process small."""
    if backend == "simulated":
        from tunewatch_gpu.simulated import SimulatedSource

        return SimulatedSource(announce, simulated_gpus)
    sources: list[Source] = []
    if backend in ("auto", "nvml"):
        from tunewatch_gpu.nvml import NvmlSource

        sources.append(NvmlSource(announce))
    if backend in ("auto", "nvidia-smi"):
        from tunewatch_gpu.nvidia_smi import NvidiaSmiSource

        sources.append(NvidiaSmiSource(announce, nvidia_smi))
    return SourceChain(sources)


def main() -> None:
    """Serve requests; arguments: answer descriptor, parent's pid, backend, nvidia-smi, simulated GPUs."""
    descriptor, parent, backend, nvidia_smi, simulated_gpus = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in order
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent()
    if os.getppid() != int(parent):
        return  # it died before the kernel was told

    def answer(message: dict[str, object]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(int(descriptor), data) :]

    def announce(source: str, index: int | None) -> None:
        answer({"at": [source, index]})

    source = build_source(backend, announce, nvidia_smi, int(simulated_gpus))
    try:
        for line in sys.stdin:
            try:
                snapshot = source.read(Request.load(line))
            except SourceUnavailable as failure:
                answer({"failure": [failure.reason, str(failure)]})
            else:
                answer({"snapshot": snapshot.to_json()})
    finally:
        source.close()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()

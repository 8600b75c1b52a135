"""The reader process: the only one that touches a driver, and the one that may hang or crash with it.

It takes one `Request` a line on standard input and answers on the descriptor named by its first argument:
any number of `{"at": [source, index]}` lines, then `{"snapshot": ...}` or `{"failure": [reason, message]}`.
At any time it may tell `{"xid": [source, uuid, code, time]}`. It ends at end of input, at SIGTERM, and with
its parent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Lock
from types import FrameType

from tunewatch_gpu.process import die_with_parent
from tunewatch_gpu.reader_options import ReaderOptions
from tunewatch_gpu.snapshot import Request, Snapshot
from tunewatch_gpu.source import Announce, Source, SourceUnavailable, TellXid

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


def build_source(options: ReaderOptions, announce: Announce, tell_xid: TellXid) -> Source:
    """The source for a value of `--backend`; only what is needed is imported, to keep the process small."""
    backend = options.backend
    if backend == "simulated":
        from tunewatch_gpu.simulated import SimulatedSource

        if not options.scenario:
            return SimulatedSource(announce, tell_xid, options.simulated_gpus)
        from tunewatch_gpu.scenario import ScenarioFile

        scenario = ScenarioFile(Path(options.scenario), options.simulated_gpus, options.began)
        return SimulatedSource(announce, tell_xid, options.simulated_gpus, scenario=scenario)
    sources: list[Source] = []
    if backend in ("auto", "nvml"):
        from tunewatch_gpu.nvml import NvmlSource

        sources.append(NvmlSource(announce, tell_xid))
    if backend in ("auto", "nvidia-smi"):
        from tunewatch_gpu.nvidia_smi import NvidiaSmiSource

        sources.append(NvidiaSmiSource(announce, options.nvidia_smi))
    return SourceChain(sources)


def main() -> None:
    """Serve requests; arguments: answer descriptor, parent's pid, `ReaderOptions` as JSON."""
    descriptor, parent, options = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us in order
    signal.signal(signal.SIGTERM, _leave)
    die_with_parent()
    if os.getppid() != int(parent):
        return  # it died before the kernel was told

    whole_lines = Lock()

    def answer(message: dict[str, object]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with whole_lines:
            while data:
                data = data[os.write(int(descriptor), data) :]

    def announce(source: str, index: int | None) -> None:
        answer({"at": [source, index]})

    def tell_xid(source: str, uuid: str, code: int, time: float) -> None:
        answer({"xid": [source, uuid, code, time]})

    source = build_source(ReaderOptions(**json.loads(options)), announce, tell_xid)
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

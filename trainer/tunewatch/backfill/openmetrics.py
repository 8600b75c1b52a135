"""Samples as OpenMetrics text: family by family, in it series by series, in it by time; memory does not grow.

What is written comes in order of time, what is asked for is series by series. So each series of a run has a buffer of
its own, which goes to the disk when it is large.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from tempfile import SpooledTemporaryFile, TemporaryFile
from typing import IO

from prometheus_client.utils import floatToGoString

from tunewatch.backfill.series import IMPORT_INFO, IMPORT_INFO_HELP, Labels, Sample
from tunewatch.metrics import METRICS

BUFFER = 1 << 16
"""Bytes of a series that are kept in memory."""

HEADS = {definition.full_name: definition.help for definition in METRICS} | {IMPORT_INFO: IMPORT_INFO_HELP}
"""Families in the order in which they are written. All are gauges: a past run counts nothing any more."""


class _Series:
    """One series: it is written when its value changes, and else once an interval, for a value to be seen needs a
    sample of the last five minutes."""

    def __init__(self, family: str, labels: Labels, stack: ExitStack) -> None:
        shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
        self.family = family
        self.file: IO[bytes] = stack.enter_context(SpooledTemporaryFile(BUFFER))  # noqa: SIM115
        self._head = f"{family}{{{shown}}}"
        self._value: str | None = None
        self._at: int | None = None

    def put(self, value: float, at: int, interval: int) -> int:
        """Take in the value at a time (Unix ms); how many samples that made. A time has one value: its first."""
        shown = floatToGoString(value)
        if self._at is not None and (at - self._at < interval if shown == self._value else at == self._at):
            return 0
        self.file.write(f"{self._head} {shown} {at // 1000}.{at % 1000:03}\n".encode())
        self._value, self._at = shown, at
        return 1


class RunSamples:
    """The samples of one run. `interval` is in ms. To be closed."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._stack = ExitStack()
        self._series: dict[tuple[str, Labels], _Series] = {}
        self.samples = 0

    def put(self, samples: Iterable[Sample], at: int, *, last: bool = False) -> None:
        """Take in what a scrape at that time (Unix ms, later than the one before) would have seen.

        What is there at the `last` one has a sample then, so that all series end together.
        """
        interval = 1 if last else self._interval
        for family, labels, value in samples:
            series = self._series.get((family, labels))
            if series is None:
                series = self._series[family, labels] = _Series(family, labels, self._stack)
            self.samples += series.put(value, at, interval)

    def drain(self) -> dict[str, list[IO[bytes]]]:
        """The lines of each series, by family; they are gone with `close`."""
        found: dict[str, list[IO[bytes]]] = {}
        for series in self._series.values():
            series.file.seek(0)
            found.setdefault(series.family, []).append(series.file)
        return found

    def close(self) -> None:
        self._stack.close()
        self._series.clear()
        self.samples = 0


class Families:
    """The text of many runs. To be closed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[str, IO[bytes]] = {}

    def add(self, run: RunSamples) -> None:
        """Take in the samples of a run, which are no run's already."""
        for family, series in run.drain().items():
            if family not in self._files:
                self._files[family] = self._stack.enter_context(TemporaryFile())  # noqa: SIM115
            for lines in series:
                shutil.copyfileobj(lines, self._files[family])

    def write(self, out: IO[bytes]) -> None:
        for file in self._files.values():
            file.seek(0)
        write_families(out, {family: [file] for family, file in self._files.items()})

    def close(self) -> None:
        self._stack.close()


def write_families(out: IO[bytes], families: Mapping[str, Sequence[IO[bytes]]]) -> None:
    """Write OpenMetrics text."""
    for family, text in HEADS.items():
        if family in families:
            out.write(f"# TYPE {family} gauge\n# HELP {family} {_escaped(text)}\n".encode())
            for lines in families[family]:
                shutil.copyfileobj(lines, out)
    out.write(b"# EOF\n")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

"""A run's progress for the person at the terminal: a live line, or plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tunewatch import states
from tunewatch.health import human_duration
from tunewatch.supervisor.snapshot import Snapshot

PLAIN_SECONDS = 10.0


class ProgressView:
    """Draws the latest snapshot; call `show` as often as you like."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live: Progress | None = None
        self._last: tuple[str, tuple[str, ...]] | None = None
        self._plain_due = 0.0
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.fields[state]:<10}"),
                BarColumn(),
                TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._live.add_task("", total=None, state="")
            self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        """Draw a snapshot; new verdicts are written above the line and stay."""
        key = (snapshot.state, tuple(verdict.signal for verdict in snapshot.verdicts))
        changed, previous = key != self._last, self._last
        self._last = key
        for verdict in snapshot.verdicts:
            if previous is None or verdict.signal not in previous[1]:
                self._console.print(
                    f"{verdict.level.upper()} {verdict.signal}: {verdict.message} {verdict.advice}",
                    markup=False,
                )
        if self._live is not None:
            self._live.update(
                self._task,
                description=describe(snapshot),
                state=snapshot.state,
                total=None if snapshot.max_steps is None else 100,
                completed=shown_percent(snapshot.step or 0, snapshot.max_steps or 0, snapshot.state),
            )
        elif changed or time.monotonic() >= self._plain_due:
            self._plain_due = time.monotonic() + PLAIN_SECONDS
            self._console.print(
                f"{snapshot.state:<10} {describe(snapshot)}".rstrip(), markup=False, soft_wrap=True
            )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def shown_percent(step: int, total: int, state: str | None) -> int:
    """How much of a run is done, in percent: 100 only for a completed one, for after the last step it is packaged."""
    if state == states.COMPLETED:
        return 100
    return min(99, int(100 * step / total)) if total > 0 else 0


def describe(snapshot: Snapshot) -> str:
    """One line: step, loss, learning rate, time left; or what it prepares."""
    if snapshot.ending is not None:
        return snapshot.ending.message
    parts = []
    if snapshot.step is not None and snapshot.state not in ("queued", "preparing"):
        parts.append(f"step {snapshot.step}/{snapshot.max_steps or '?'}")
    if snapshot.loss is not None:
        parts.append(f"loss {snapshot.loss:.4g}" if math.isfinite(snapshot.loss) else f"loss {snapshot.loss}")
    if snapshot.learning_rate is not None:
        parts.append(f"lr {snapshot.learning_rate:.2e}")
    for dataset, value in list(snapshot.eval_loss.items())[:1]:
        parts.append(f"{dataset} loss {value:.4g}")
    if snapshot.eta is not None and snapshot.state in ("training", "validating"):
        parts.append(f"{human_duration(snapshot.eta)} left")
    if snapshot.glance.act != "keep":
        parts.append(snapshot.glance.act_text)
    if not parts and snapshot.phase_detail:
        share = f" {snapshot.phase_ratio:.0%}" if snapshot.phase_ratio is not None else ""
        parts.append(f"{snapshot.phase_detail}{share}")
    return ", ".join(parts)

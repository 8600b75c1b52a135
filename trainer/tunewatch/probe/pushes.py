"""Uploads to the hub that run beside a training, and whether they went well.

transformers starts them as futures and waits for them in the end, but never asks what became of them: a failed one
looks like one that went well. A save while an upload still runs starts none, which is no failure.
"""

from __future__ import annotations

import functools
import weakref
from concurrent.futures import CancelledError, Future
from typing import Any

from .failure import classify
from .writer import RunWriter


class Pushes:
    """Writes a `hub_push` event for each upload of a trainer, as soon as it is over."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._seen: weakref.WeakSet[Future[Any]] = weakref.WeakSet()
        self._told: weakref.WeakSet[Future[Any]] = weakref.WeakSet()

    def look(self, trainer: Any, step: int) -> None:
        """Note the uploads that `trainer` has begun, at `step` by the time they are first seen. Does not wait."""
        jobs = getattr(getattr(trainer, "push_in_progress", None), "jobs", None) or ()
        for job in list(jobs):
            if job not in self._seen:
                self._seen.add(job)
                job.add_done_callback(functools.partial(self._done, step))
            elif job.done():  # who waits for it may hear of its end before its callbacks are called
                self._done(step, job)

    def _done(self, step: int, job: Future[Any]) -> None:
        """Called on the thread of the upload when it is over, or on the training's; the first of them tells."""
        try:
            # Held until it is written: who comes second may go on to end the training.
            with self._writer.settled():
                if job not in self._told:
                    self._told.add(job)
                    self._tell(step, job)
        except Exception:
            self._writer.error()

    def _tell(self, step: int, job: Future[Any]) -> None:
        error = None if job.cancelled() else job.exception()
        if job.cancelled() or isinstance(error, CancelledError):
            return  # taken back before it began
        reason = None if error is None else classify(error)
        self._writer.event(
            "hub_push", ok=error is None, type=None if error is None else type(error).__name__,
            reason="hub" if reason == "unknown" else reason, step=step,
        )  # fmt: skip

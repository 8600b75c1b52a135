"""One record of where a training is, and a way for others to follow it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .values import as_number

Listener = Callable[["TrainingProgress"], None]


@dataclass(frozen=True)
class TrainingProgress:
    """Where a training is. Immutable; None is "not known", never 0.

    `loss`, `learning_rate` and `grad_norm` are the last *logged* values (they may be NaN or infinite);
    `grad_norm` is the norm before clipping of the last step of the logging window. Times are seconds;
    `updated_at` is Unix time.
    """

    run_id: str | None = None
    state: str | None = None
    step: int | None = None
    max_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    eval_loss: float | None = None
    tokens_seen: int | None = None
    elapsed_seconds: float | None = None
    eta_seconds: float | None = None
    message: str | None = None
    updated_at: float | None = None


_TEXT = frozenset({"run_id", "state", "message"})
_WHOLE = frozenset({"step", "max_steps", "tokens_seen"})
_KNOWN = frozenset(field.name for field in fields(TrainingProgress)) - {"updated_at"}


class ProgressTracker:
    """Holds the current `TrainingProgress` and hands every change to the listeners.

    Each listener has a thread and a bounded queue of its own: it gets every update once and in order, and one
    that raises or blocks delays neither the training nor the others. A listener that falls more than
    `queue_size` updates behind loses the oldest of them (`dropped` counts these).
    """

    def __init__(self, *, queue_size: int = 1000) -> None:
        self.dropped = 0
        self.listener_errors = 0
        self._queue_size = queue_size
        self._lock = threading.Lock()
        self._progress = TrainingProgress()
        self._listeners: list[_ListenerThread] = []
        self.before_read: Callable[[], None] | None = None
        """Called before the record is read: who updates it late does it then."""

    @property
    def progress(self) -> TrainingProgress:
        """The current record; all of its values belong together."""
        if self.before_read is not None:
            self.before_read()
        return self._progress

    def update(self, *, changed_at: float | None = None, **values: Any) -> TrainingProgress:
        """Change several values at once. Unknown names and values of a wrong type are ignored.

        `changed_at` is the Unix time of the change; now, when it is left out.
        """
        clean = {name: _clean(name, value) for name, value in values.items() if name in _KNOWN}
        with self._lock:
            changes = {name: value for name, value in clean.items() if value is not _WRONG}
            self._progress = replace(self._progress, **changes, updated_at=changed_at or time.time())
            for listener in self._listeners:
                if not listener.offer(self._progress):
                    self.dropped += 1
            return self._progress

    def add_progress_callback(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(progress)` after each update, on a thread of its own; returns a function that ends it.

        What is under way then is finished, nothing more is delivered.
        """
        thread = _ListenerThread(listener, self._queue_size, self._count_error)
        with self._lock:
            self._listeners.append(thread)
        return lambda: self._remove(thread)

    def remove_progress_callback(self, listener: Listener) -> None:
        """Stop calling `listener`; one that was never added is no error."""
        with self._lock:
            threads = [thread for thread in self._listeners if thread.listener == listener]
        for thread in threads:
            self._remove(thread)

    def _remove(self, thread: _ListenerThread) -> None:
        with self._lock:
            if thread not in self._listeners:
                return
            self._listeners.remove(thread)
        thread.close()

    def _count_error(self) -> None:
        with self._lock:
            self.listener_errors += 1


class _ListenerThread:
    def __init__(self, listener: Listener, size: int, on_error: Callable[[], None]) -> None:
        self.listener = listener
        self._on_error = on_error
        self._closed = False
        self._queue: queue.Queue[TrainingProgress | None] = queue.Queue(size)
        self._thread = threading.Thread(target=self._run, name="tunewatch-listener", daemon=True)
        self._thread.start()

    def offer(self, progress: TrainingProgress) -> bool:
        """Queue an update; False when the oldest one had to make room."""
        return self._put(progress)

    def close(self) -> None:
        """End the thread; what is still queued is not delivered any more."""
        self._closed = True
        self._put(None)

    def _put(self, item: TrainingProgress | None) -> bool:
        # There is one producer at a time: the tracker while the listener is in its list, then `close`.
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            try:
                self._queue.get_nowait()
            except queue.Empty:  # the listener has just taken it
                self._queue.put_nowait(item)
                return True
            self._queue.put_nowait(item)
            return False
        return True

    def _run(self) -> None:
        while (progress := self._queue.get()) is not None and not self._closed:
            try:
                self.listener(progress)
            except BaseException:  # even SystemExit: it would end only this thread, and silently
                self._on_error()


_WRONG = object()


def _clean(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _TEXT:
        return value if isinstance(value, str) else _WRONG
    number = as_number(value)
    if number is None:
        return _WRONG
    if name in _WHOLE:
        return int(number) if number - number == 0 else _WRONG
    return float(number)

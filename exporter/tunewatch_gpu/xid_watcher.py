"""Xid errors as NVML's event set tells them, in a thread that waits for nothing else.

A GPU may be unreadable, and a call for it may hang, just when it has an error: so the thread tells of an
error at once, and knows the GPU by the handle it was registered with.
"""

from __future__ import annotations

import ctypes
import time
from threading import Event, Thread

import pynvml

from tunewatch_gpu.nvml_calls import Absent, GpuDown, Handle, ask
from tunewatch_gpu.source import TellXid

WATCHING = "xid_events"
"""What a request avoids where waiting for events seems to crash the reader."""

_TIMEOUT = 10  # nvml.h: NVML_ERROR_TIMEOUT
_WAIT = 0.4  # seconds of one wait; the end of the process has to wait for it, too
_LONGEST_PAUSE = 60.0


class XidWatcher:
    """Watches the GPUs of one NVML session. Costs a call per wait that returns, some two a second in all.

    `watch` all GPUs, then `start`; `stop` before the session is closed.
    """

    def __init__(self, name: str, tell: TellXid) -> None:
        self._name = name
        self._tell = tell
        self._set = ask(pynvml.nvmlEventSetCreate)
        self._uuids: dict[int, str] = {}
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="xid", daemon=True)

    def watch(self, handle: Handle, uuid: str) -> None:
        """Register a GPU; Absent where it has no such events."""
        ask(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        self._uuids[_address(handle)] = uuid

    def start(self) -> None:
        """Begin to wait for errors."""
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; False where it is held up in the driver, which must be left alone then."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(3 * _WAIT)
        if self._thread.is_alive():
            return False
        try:
            pynvml.nvmlEventSetFree(self._set)
        except pynvml.NVMLError:
            pass  # the session is gone, and the set with it
        return True

    def _run(self) -> None:
        pause = _WAIT
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, int(1000 * _WAIT))
            except pynvml.NVMLError as error:
                # A driver that does not wait but fails at once must not keep a core busy.
                pause = _WAIT if error.value == _TIMEOUT else min(2 * pause, _LONGEST_PAUSE)
                self._stopping.wait(pause - (time.monotonic() - began))
                continue
            pause = _WAIT
            if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                self._report(event)

    def _report(self, event: object) -> None:
        uuid = self._uuids.get(_address(event.device))  # type: ignore[attr-defined]
        if uuid is not None:
            self._tell(self._name, uuid, int(event.eventData), time.time())  # type: ignore[attr-defined]


def _address(handle: Handle) -> int:
    """A handle is a pointer; two Python objects may hold the same one."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def watch_all(
    name: str, tell: TellXid, cards: list[tuple[Handle, str]]
) -> tuple[XidWatcher | None, dict[str, str]]:
    """A watcher for those of `cards` (handle, uuid) that can be watched, and why the others can not, by uuid."""
    try:
        watcher = XidWatcher(name, tell)
    except Absent as absent:
        return None, {uuid: absent.reason for _, uuid in cards}
    reasons = {}
    for handle, uuid in cards:
        try:
            watcher.watch(handle, uuid)
        except (Absent, GpuDown) as failure:
            reasons[uuid] = failure.reason
    watcher.start()
    return watcher, reasons

"""Seeing NaN and infinity where they arise, without making the training wait.

`logging_nan_inf_filter` (on by default) replaces a non-finite loss in what the trainer logs, so the logs can not be
trusted: a dead run shows a loss of 0. What counts is the loss tensor of each micro-batch and the gradient norm
of each step. On an accelerator, looking at them would wait for the device; so a flag is set *on the device*,
copied to pinned memory behind the step's work, and read when the copy has arrived: one step later, at most two.
The counts of tokens ride on the same copies.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

SLOTS = 8
"""Copies that may be under way; a device that is further behind has its steps reported together."""


class StepFinding(NamedTuple):
    """What is known of one optimizer step: whether its loss or gradient norm was not finite."""

    step: int
    loss: bool
    grad_norm: bool
    skipped: bool

    @property
    def bad(self) -> bool:
        """True where the weights may have been hurt: a step that the fp16 scaler skipped is not bad."""
        return (self.loss or self.grad_norm) and not self.skipped


class NonFiniteWatch:
    """Collects the losses and gradient norms of a step, and tells later which steps were not finite."""

    def __init__(self) -> None:
        self.losses_seen = 0
        self.norms_seen = 0
        self._host = [False, False]
        self._device: _DeviceFlags | None = None

    def loss(self, value: Any) -> None:
        """Look at the loss of one micro-batch: a tensor of any device, or a number."""
        self.losses_seen += 1
        self._look(0, value)

    def grad_norm(self, value: Any) -> None:
        """Look at the gradient norm of one step, before clipping."""
        if value is None:
            return
        self.norms_seen += 1
        self._look(1, value)

    def step_end(self, step: int, *, skipped: bool) -> list[StepFinding]:
        """End a step; returns the steps about which something new is known, oldest first."""
        host, self._host = self._host, [False, False]
        if self._device is None:
            return [StepFinding(step, host[0], host[1], skipped)]
        return self._device.step_end(step, host, skipped)

    @property
    def asynchronous(self) -> bool:
        """False on a device without events (MPS): findings come only from `flush`."""
        return self._device is None or self._device.asynchronous

    def flush(self) -> list[StepFinding]:
        """Wait for what is still under way (at the end of a training, or where the trainer waits anyway)."""
        return self._device.flush() if self._device is not None else []

    def arrived(self) -> list[StepFinding]:
        """What has arrived by now of what was under way, without waiting."""
        return self._device.arrived() if self._device is not None else []

    def count(self, which: int, number: Any) -> None:
        """Add to one of the two counts what a tensor on an accelerator holds."""
        if self._device is None:
            self._device = _DeviceFlags(sys.modules["torch"], number.device)
        self._device.count(which, number)

    def take_counts(self) -> tuple[int, ...]:
        """What has arrived of the counts since the last call; nothing where there is no accelerator."""
        return self._device.take_counts() if self._device is not None else ()

    def _look(self, which: int, value: Any) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            self._host[which] = self._host[which] or not math.isfinite(value)
            return
        value = value.detach()
        if hasattr(value, "full_tensor"):  # a DTensor: its local part is enough, every rank looks at its own
            value = value.to_local()
        if value.device.type == "cpu":
            finite = math.isfinite(value) if value.numel() == 1 else bool(torch.isfinite(value).all())
            self._host[which] = self._host[which] or not finite
            return
        if self._device is None:
            self._device = _DeviceFlags(torch, value.device)
        self._device.mark(which, value)


class _DeviceFlags:
    """Two flags and two counts on a device, and the copies of them that are on their way to the host."""

    def __init__(self, torch: Any, device: Any, make_event: Callable[[], Any] | None = None) -> None:
        self.device = device
        self._torch = torch
        self._flags = torch.zeros(4, dtype=torch.int64, device=device)
        self._views = tuple(self._flags[index] for index in range(4))
        self._counts = [0, 0]
        self._make_event = make_event or _event_factory(torch, device)
        self.asynchronous = self._make_event is not None
        pinned = self.asynchronous and device.type == "cuda"
        self._buffers = [torch.zeros(4, dtype=torch.int64, pin_memory=pinned) for _ in range(SLOTS)]
        self._free = list(range(SLOTS))
        self._under_way: deque[tuple[int, list[bool], bool, int, Any]] = deque()
        self._held: list[bool] = [False, False]
        self._held_skipped = False
        self._last_step = 0

    def mark(self, which: int, value: Any) -> None:
        with self._torch.no_grad():
            bad = self._torch.isfinite(value).all().logical_not()
            if bad.device != self.device:  # a model spread over several devices
                bad = bad.to(self.device, non_blocking=True)
            self._views[which].logical_or_(bad)

    def count(self, which: int, number: Any) -> None:
        with self._torch.no_grad():
            self._views[2 + which].add_(number.to(self.device, non_blocking=True))

    def take_counts(self) -> tuple[int, ...]:
        taken, self._counts = self._counts, [0, 0]
        return tuple(taken)

    def _read(self, values: list[int]) -> tuple[bool, bool]:
        """Take over the counts of a copy that is here; returns its flags."""
        loss, norm, *counts = values
        self._counts = [sum(pair) for pair in zip(self._counts, counts, strict=True)]
        return bool(loss), bool(norm)

    def step_end(self, step: int, host: list[bool], skipped: bool) -> list[StepFinding]:
        host = [host[0] or self._held[0], host[1] or self._held[1]]
        skipped = skipped or self._held_skipped
        self._last_step = step
        if self._free and self._make_event is not None:
            slot = self._free.pop()
            self._buffers[slot].copy_(self._flags, non_blocking=True)
            event = self._make_event()
            event.record()
            self._flags.zero_()
            self._under_way.append((step, host, skipped, slot, event))
            self._held, self._held_skipped = [False, False], False
        else:  # the flags stay set on the device; the next copy tells of this step too
            self._held, self._held_skipped = host, skipped
        return self.arrived()

    def arrived(self, *, wait: bool = False) -> list[StepFinding]:
        found = []
        while self._under_way:
            step, host, skipped, slot, event = self._under_way[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._under_way.popleft()
            loss, norm = self._read(self._buffers[slot].tolist())
            self._free.append(slot)
            found.append(StepFinding(step, loss or host[0], norm or host[1], skipped))
        return found

    def flush(self) -> list[StepFinding]:
        found = self.arrived(wait=True)
        loss, norm = self._read(self._flags.tolist())
        if loss or norm or any(self._held):
            found.append(
                StepFinding(self._last_step, loss or self._held[0], norm or self._held[1], self._held_skipped)
            )
        self._flags.zero_()
        self._held, self._held_skipped = [False, False], False
        return found


def _event_factory(torch: Any, device: Any) -> Callable[[], Any] | None:
    """Return a maker of events for the device's stream; None for a device that has none we know."""
    backend = getattr(torch, device.type, None)  # torch.cuda (ROCm too), torch.xpu, torch.npu, ...
    return getattr(backend, "Event", None)

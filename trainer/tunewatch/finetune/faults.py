"""Real faults on request, so that a rehearsal shows what a real failure looks like.

`TUNEWATCH_FAULT=nan|stall|kill|oom|disk_full[@step]` makes the built-in job fail in earnest.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunewatch.finetune.errors import ConfigError, nearest

VARIABLE = "TUNEWATCH_FAULT"
DEFAULT_STEP = 10


def faults_from_environment() -> list[Any]:
    """The callbacks that `TUNEWATCH_FAULT` asks for: one, or none. Raises `ConfigError`."""
    value = os.environ.get(VARIABLE, "")
    return [fault_callback(value)] if value else []


def fault_callback(value: str) -> Any:
    """A `TrainerCallback` that makes the fault `name[@step]` happen in that step, counted from 1."""
    from transformers import TrainerCallback

    name, _, at = value.partition("@")
    allowed = f"{', '.join(FAULTS)}, each with an optional @step"
    if name not in FAULTS:
        raise ConfigError(f"found {name!r}", key=VARIABLE, allowed=allowed, nearest=nearest(name, FAULTS))
    if at and not at.isdecimal():
        raise ConfigError(f"found step {at!r}", key=VARIABLE, allowed=allowed)
    step = int(at or DEFAULT_STEP)

    class Fault(TrainerCallback):
        def __init__(self) -> None:
            self.done = False

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if name in _IN_STEP and not self.done and state.global_step + 1 >= step:
                self.done = True
                _IN_STEP[name](kwargs["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # DefaultFlowCallback has run before: `should_save` is this step's decision.
            if name == "disk_full" and not self.done and state.global_step >= step and control.should_save:
                self.done = True
                _fill_disk(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    return Fault()


def _nan(model: Any) -> None:
    """One weight that is trained becomes NaN; the next forward computes with it."""
    import torch

    weight = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")


def _stall(model: Any) -> None:
    """The step never ends."""
    while True:
        time.sleep(3600)


def _kill(model: Any) -> None:
    """What the kernel's OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _oom(model: Any) -> None:
    """An allocation of a petabyte, on the device of the model."""
    import torch

    torch.empty(10**15, dtype=torch.uint8, device=model.device)


def _fill_disk(checkpoint: Path) -> None:
    """The optimizer state of this checkpoint goes to /dev/full, where every write ends in ENOSPC.

    Not `trainer_state.json`: whoever reads that to its end would read zeros from the device for ever.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "optimizer.pt").symlink_to("/dev/full")


_IN_STEP: dict[str, Callable[[Any], None]] = {"nan": _nan, "stall": _stall, "kill": _kill, "oom": _oom}
FAULTS = (*_IN_STEP, "disk_full")

"""Whether transformers' checkpoint on SIGTERM (`enable_jit_checkpoint`) ended a training.

`train()` returns normally then, as after early stopping, and no callback is told.
"""

from __future__ import annotations

import functools
from typing import Any


def watch(trainer: Any) -> None:
    """Have the trainer's manager of such checkpoints note that it made one."""
    for manager in _managers(trainer):
        if not hasattr(manager, "_tunewatch_used"):
            manager._tunewatch_used = False
            manager.execute_jit_checkpoint = functools.partial(
                _execute, manager, manager.execute_jit_checkpoint
            )


def ended(trainer: Any) -> bool:
    return any(getattr(manager, "_tunewatch_used", False) for manager in _managers(trainer))


def _execute(manager: Any, original: Any) -> Any:
    manager._tunewatch_used = True
    return original()


def _managers(trainer: Any) -> list[Any]:
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    return [manager for one in callbacks if (manager := getattr(one, "jit_manager", None)) is not None]

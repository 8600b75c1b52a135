"""Takes the loss and the gradient norm where the trainer gets them, by wrapping them for the time of `train()`.

transformers has no callback that sees them: `on_log` comes every `logging_steps` and shows filtered values. So
`Trainer.train` is wrapped once per process, and for its duration the trainer *instance*'s `training_step` (the loss of
each micro-batch, whatever computed it) and its accelerator's `clip_grad_norm_` (the norm of each step). The
originals' results pass through untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from .writer import process_globals


class Sink(Protocol):
    """Who wants to know; every method must return at once and never raise."""

    def training_begins(self, trainer: Any, resume_from_checkpoint: Any) -> None: ...
    def micro_batch(self, loss: Any, inputs: Any) -> None: ...
    def gradient_norm(self, norm: Any) -> None: ...
    def training_returned(self) -> None: ...
    def training_raised(self, error: BaseException) -> None: ...


def install(trainer_class: Any) -> None:
    """Wrap `transformers.Trainer.train`; a second call in the same process does nothing."""
    shared = process_globals()
    if shared.get("tapped") is trainer_class:
        return
    shared["tapped"] = trainer_class
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        _, sink = shared.get("owners", {}).get(id(getattr(self, "control", None)), (None, None))
        if sink is None or shared.get("training"):
            return original(self, *args, **kwargs)
        shared["training"] = True
        undo = _tap_instance(self, sink)
        try:
            resume = kwargs.get("resume_from_checkpoint", args[0] if args else None)
            sink.training_begins(self, resume)
            result = original(self, *args, **kwargs)
        except BaseException as error:
            sink.training_raised(error)
            raise
        else:
            sink.training_returned()
            return result
        finally:
            shared["training"] = False
            undo()

    trainer_class.train = train


def _tap_instance(trainer: Any, sink: Sink) -> Callable[[], None]:
    undos: list[Callable[[], None]] = []
    training_step = trainer.training_step

    @functools.wraps(training_step)
    def tapped_step(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        sink.micro_batch(loss, args[1] if len(args) > 1 else kwargs.get("inputs"))
        return loss

    undos.append(_replace(trainer, "training_step", tapped_step))
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is not None:
        clip = accelerator.clip_grad_norm_

        @functools.wraps(clip)
        def tapped_clip(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            sink.gradient_norm(norm)
            return norm

        undos.append(_replace(accelerator, "clip_grad_norm_", tapped_clip))

    def undo() -> None:
        for step in undos:
            step()

    return undo


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an instance attribute over a method; returns what takes it away again."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if had:
            setattr(owner, name, before)
        elif vars(owner).get(name) is value:
            delattr(owner, name)

    return restore

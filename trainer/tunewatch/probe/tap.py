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

from .writer import RunWriter, process_globals


class Sink(Protocol):
    """Who wants to know; every method must return at once and never raise.

    One that is `in_company` of other ranks is told how far each micro-batch is: that shows which rank the others
    wait for in the middle of a step.
    """

    in_company: bool

    def training_begins(self, trainer: Any, resume_from_checkpoint: Any) -> None: ...
    def batches_are_here(self) -> None: ...
    def advances(self) -> None: ...
    def micro_batch(self, loss: Any, inputs: Any) -> None: ...
    def gradient_norm(self, norm: Any) -> None: ...
    def training_returned(self) -> None: ...
    def training_raised(self, error: BaseException) -> None: ...


def install(trainer_class: Any) -> None:
    """Wrap `transformers.Trainer.train`; a second call in the same process does nothing."""
    original = trainer_class.train
    if getattr(original, "_tunewatch_tap", False):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        shared = process_globals()
        resume = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        sink = None if shared.get("training") else _find_sink(self, resume)
        if sink is None:
            return original(self, *args, **kwargs)
        shared["training"] = sink  # a trainer that runs inside of this one is none of our business
        undos: list[Callable[[], None]] = []
        try:
            _tap_instance(self, sink, undos)
            sink.training_begins(self, resume)
            result = original(self, *args, **kwargs)
        except BaseException as error:
            sink.training_raised(error)
            raise
        else:
            sink.training_returned()
            return result
        finally:
            shared["training"] = None
            for undo in undos:
                undo()

    train._tunewatch_tap = True  # type: ignore[attr-defined]
    trainer_class.train = train


def _find_sink(trainer: Any, resume_from_checkpoint: Any) -> Sink | None:
    """Who reports on `trainer`.

    Its callback may not know of it yet: it was added after the trainer was built, or (below `tunewatch exec`) the
    trainer did not take transformers' list of default callbacks.
    """
    try:
        if _owner(trainer) is None:
            attached = process_globals().get("attach")
            if attached is not None and not any(map(_is_ours, trainer.callback_handler.callbacks)):
                trainer.add_callback(attached)
            for callback in filter(_is_ours, trainer.callback_handler.callbacks):
                callback.on_init_end(trainer.args, trainer.state, trainer.control)
        for callback in filter(_is_ours, trainer.callback_handler.callbacks):
            callback.train_is_called(trainer.args, trainer.state, trainer.control, resume_from_checkpoint)
        return _owner(trainer)
    except Exception:
        RunWriter.from_environment().error()
        return None


def _is_ours(callback: Any) -> bool:
    return bool(getattr(callback, "is_tunewatch", False))


def _owner(trainer: Any) -> Sink | None:
    control = getattr(trainer, "control", None)
    held, sink = process_globals().get("owners", {}).get(id(control), (None, None))
    return sink if held is control else None


def _tap_instance(trainer: Any, sink: Sink, undos: list[Callable[[], None]]) -> None:
    """Wrap the trainer's own methods, and add to `undos` what takes the wrappers away."""
    try:
        _wrap_methods(trainer, sink, undos)
    except Exception:  # a trainer that allows no such thing is trained all the same
        RunWriter.from_environment().error()


def _wrap_methods(trainer: Any, sink: Sink, undos: list[Callable[[], None]]) -> None:
    training_step = trainer.training_step
    in_company = sink.in_company

    @functools.wraps(training_step)
    def tapped_step(*args: Any, **kwargs: Any) -> Any:
        if in_company:
            sink.advances()
        loss = training_step(*args, **kwargs)
        sink.micro_batch(loss, args[1] if len(args) > 1 else kwargs.get("inputs"))
        return loss

    undos.append(_replace(trainer, "training_step", tapped_step))
    if in_company:
        _wrap_loss(trainer, sink, undos)
        _wrap_fetching(trainer, sink, undos)
    accelerator = getattr(trainer, "accelerator", None)
    clip = getattr(accelerator, "clip_grad_norm_", None)
    if clip is not None:

        @functools.wraps(clip)
        def tapped_clip(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            sink.gradient_norm(norm)
            return norm

        undos.append(_replace(accelerator, "clip_grad_norm_", tapped_clip))


def _wrap_loss(trainer: Any, sink: Sink, undos: list[Callable[[], None]]) -> None:
    """The loss comes before the backward pass, in which a rank waits for the gradients of the others."""
    compute_loss = getattr(trainer, "compute_loss", None)
    if compute_loss is None:
        return

    @functools.wraps(compute_loss)
    def tapped_loss(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        sink.advances()
        return result

    undos.append(_replace(trainer, "compute_loss", tapped_loss))


def _wrap_fetching(trainer: Any, sink: Sink, undos: list[Callable[[], None]]) -> None:
    """A rank that has its batches counts them together with the others: it waits for a slow rank, not for its data."""
    fetch, count = (getattr(trainer, name, None) for name in ("get_batch_samples", "_get_num_items_in_batch"))
    if fetch is None or count is None:
        return
    fetching = False

    @functools.wraps(fetch)
    def tapped_fetch(*args: Any, **kwargs: Any) -> Any:
        nonlocal fetching
        fetching = True
        try:
            return fetch(*args, **kwargs)
        finally:
            fetching = False

    @functools.wraps(count)
    def tapped_count(*args: Any, **kwargs: Any) -> Any:
        if fetching:  # an evaluation counts too
            sink.batches_are_here()
        return count(*args, **kwargs)

    undos.append(_replace(trainer, "get_batch_samples", tapped_fetch))
    undos.append(_replace(trainer, "_get_num_items_in_batch", tapped_count))


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an instance attribute over a method; returns what takes it away again."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)

    def restore() -> None:
        if vars(owner).get(name) is not value:
            return  # somebody else has put theirs there
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

    return restore

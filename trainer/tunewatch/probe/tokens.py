"""How many tokens a training was given: all, those that are no padding, and those that count in the loss.

Counted are the micro-batches of this process in this session. A kind that one batch does not tell is unknown from
then on: a sum without it would pass for the whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

KINDS = ("all", "non_padding", "loss")
IGNORED_LABEL = -100
"""The label that torch's cross entropy leaves out of the loss, and that transformers and TRL mask with."""


class Batch(NamedTuple):
    """What of a micro-batch tells its tokens."""

    ids: Any
    real: Any
    """The attention mask; the input ids themselves where a row of them has no padding."""
    labels: Any

    def counts(self) -> tuple[Any, Any, Any]:
        """Tokens of each kind: a number, a tensor on the batch's device, or None where it is not known."""
        shape, everything = self.ids.shape, self.ids.numel()
        real: Any = None
        if self.real is self.ids:
            real = everything if shape[0] == 1 else None
        elif (
            getattr(self.real, "shape", None) == shape
        ):  # not one of four dimensions, nor a dictionary of several
            real = self.real.count_nonzero()
        fits = getattr(self.labels, "shape", None) == shape
        return everything, real, self.labels.ne(IGNORED_LABEL).sum() if fits else None


def batch_of(inputs: Any) -> Batch | None:
    """The part of a trainer's inputs that tells tokens, as it is.

    None for inputs without `input_ids`, as some preference trainers have them (`prompt_input_ids`, ...). A batch
    without an attention mask is all real where it is padding-free: one row of several texts, which positions or
    sequence lengths keep apart. (Padding of such a row to a multiple of some length is not seen.)
    """
    try:
        get = inputs.get
    except AttributeError:
        return None
    ids, real = get("input_ids"), get("attention_mask")
    if real is None and ("position_ids" in inputs or "cu_seq_lens_q" in inputs):
        real = ids
    return None if ids is None else Batch(ids, real, get("labels"))


class TokenTotals:
    """The sums of this session; NaN is unknown."""

    def __init__(self) -> None:
        self.counted = [math.nan] * len(KINDS)
        self._unknown = [False] * len(KINDS)

    def add(self, kind: int, number: int | None) -> None:
        """Add a batch's tokens of one kind, or learn that they can not be told."""
        if number is None:
            self._unknown[kind] = True
            self.counted[kind] = math.nan
        elif not self._unknown[kind]:
            before = self.counted[kind]
            self.counted[kind] = number + (0.0 if math.isnan(before) else before)

    def known(self) -> dict[str, int]:
        """The totals by the name of their kind; absent while unknown."""
        return {
            kind: int(total) for kind, total in zip(KINDS, self.counted, strict=True) if not math.isnan(total)
        }

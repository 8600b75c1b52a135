"""What the begin of a training says about it, as far as the detectors need it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunewatch.health.reading import finite, is_preference_trainer, mapping, whole

_ENDLESS = 2**53


@dataclass(frozen=True)
class Training:
    """One `train_begin`; None is unknown. Before the first one (a replayed log) all is unknown."""

    step: int = 0
    max_steps: int | None = None
    precision: str | None = None
    sees_each_step: bool = False
    warmup_steps: int | None = None
    cyclic: bool = False
    """Whether the learning rate is meant to rise again and again."""
    accumulation: int = 1
    world_size: int = 1
    trainable: int | None = None
    total: int | None = None
    preference: bool = False
    supervised: bool = False
    """Whether it is known to learn texts: TRL's SFTTrainer, or a class made of it."""
    learning_rate: float | None = None
    restart: bool = False
    waits_in_step: bool = True
    """Whether the program waits for its GPU inside of a step: the filter of NaN losses looks at each. Without it, it
    waits where the next batch is copied to the GPU, which looks like waiting for data."""
    restored: Mapping[str, Any] | None = None
    effective: Mapping[str, Any] | None = None
    requested: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Training:
        effective = mapping(event.get("effective"))
        max_steps = _positive(event.get("max_steps"))
        precision = effective.get("precision")
        return cls(
            step=max(0, whole(event.get("step")) or 0),
            max_steps=max_steps,
            precision=precision if isinstance(precision, str) else None,
            sees_each_step=event.get("nan_visibility") == "each step",
            warmup_steps=_warmup(effective, max_steps),
            cyclic=any(word in str(effective.get("lr_scheduler_type")) for word in ("restart", "cycl")),
            accumulation=_positive(effective.get("gradient_accumulation_steps")) or 1,
            world_size=_positive(effective.get("world_size")) or 1,
            trainable=whole(event.get("trainable_parameters")),
            total=whole(event.get("total_parameters")),
            preference=is_preference_trainer(event.get("trainer")),
            supervised="SFT" in str(event.get("trainer")),
            learning_rate=finite(effective.get("learning_rate")),
            restart=bool(event.get("restart")),
            waits_in_step=not event.get("gpus") or event.get("nan_filter") is not False,
            restored=mapping(event.get("restored")),
            effective=effective,
            requested=mapping(event.get("requested")),
        )

    def at_the_end(self, step: int | None, share: float) -> bool:
        """Whether `step` lies in the last part of the schedule; False while its length is unknown."""
        return step is not None and self.max_steps is not None and step >= share * self.max_steps


def _positive(value: Any) -> int | None:
    number = whole(value)
    return number if number is not None and 0 < number < _ENDLESS else None


def _warmup(effective: Mapping[str, Any], max_steps: int | None) -> int | None:
    """Warm-up in steps; transformers takes a number below 1, and warmup_ratio, as a share of all steps."""
    steps, ratio = finite(effective.get("warmup_steps")), finite(effective.get("warmup_ratio"))
    if steps is not None and steps >= 1:
        return int(steps)
    share = steps or ratio or 0.0
    if share <= 0:
        return 0 if steps is not None or ratio is not None else None
    return math.ceil(min(1.0, share) * max_steps) if max_steps is not None else None

"""What can stop the built-in job, each with the reason that the supervisor reports.

`str(error)` is safe to show to anyone who may see the run: it never quotes a dataset row or a secret, and it
names a path by its last component only. This module imports without the `train` extra.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from typing import ClassVar

TRAIN_EXTRA = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "pydantic")
"""The packages behind `pip install 'tunewatch[train]'`, by import name."""


class JobError(Exception):
    """The job cannot go on. `tunewatch_reason` is the reason in the run's ending."""

    tunewatch_reason: ClassVar[str] = "unknown"


class ConfigError(JobError):
    """A setting is wrong: which key, what was found, what is allowed, and the nearest valid key."""

    tunewatch_reason = "config"

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        found: object = None,
        allowed: str | None = None,
        nearest: str | None = None,
    ) -> None:
        text = message if key is None else f"{key}: {message}"
        if allowed is not None:
            text += f"; allowed: {allowed}"
        if nearest is not None:
            text += f"; did you mean {nearest!r}?"
        super().__init__(text)
        self.key = key
        self.found = found
        self.allowed = allowed
        self.nearest = nearest


class MissingExtraError(ConfigError):
    """A package of the `train` extra is not installed."""


class DataError(JobError):
    """The dataset cannot be used as it is."""

    tunewatch_reason = "data"


class MissingFileError(JobError):
    """A file or folder that the configuration names does not exist."""

    tunewatch_reason = "missing_file"


class AuthError(JobError):
    """The Hub refuses access: no token, a wrong one, or a gated repository."""

    tunewatch_reason = "auth"


class HubError(JobError):
    """The Hub cannot be reached."""

    tunewatch_reason = "hub"


class DiskFullError(JobError):
    """There is no room for the result."""

    tunewatch_reason = "disk_full"


class NothingTrainableError(JobError):
    """No parameter has `requires_grad`: the run would change nothing."""

    tunewatch_reason = "nothing_trainable"


class CheckpointError(JobError):
    """The checkpoint to resume from is incomplete or damaged."""

    tunewatch_reason = "checkpoint_corrupt"


class NonFiniteWeightsError(JobError):
    """The result contains NaN or infinite weights."""

    tunewatch_reason = "nan"


class PackagingError(JobError):
    """The result could not be written as it should be."""

    tunewatch_reason = "packaging"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name closest to `name`, or None when nothing is close."""
    matches = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


def require_train_extra() -> None:
    """Raise `MissingExtraError` that names the missing packages; imports none of them."""
    missing = [name for name in TRAIN_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            "tunewatch train needs the 'train' extra: pip install 'tunewatch[train]' "
            f"(missing: {', '.join(missing)})"
        )

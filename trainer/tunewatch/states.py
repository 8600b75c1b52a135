"""The states of a run, and the only steps between them."""

from __future__ import annotations

QUEUED, PREPARING, TRAINING, VALIDATING = "queued", "preparing", "training", "validating"
PACKAGING, COMPLETED, FAILED, CANCELLED = "packaging", "completed", "failed", "cancelled"

STATES = (QUEUED, PREPARING, TRAINING, VALIDATING, PACKAGING, COMPLETED, FAILED, CANCELLED)
TERMINAL = frozenset({COMPLETED, FAILED, CANCELLED})
LIVE = frozenset(STATES) - TERMINAL - {QUEUED}

_NEXT: dict[str, frozenset[str]] = {
    QUEUED: frozenset({PREPARING, FAILED, CANCELLED}),
    # A script may only evaluate, and a command that is no training at all just completes.
    PREPARING: frozenset({TRAINING, VALIDATING, PACKAGING, COMPLETED, FAILED, CANCELLED}),
    TRAINING: frozenset({VALIDATING, PACKAGING, COMPLETED, FAILED, CANCELLED}),
    VALIDATING: frozenset({TRAINING, PACKAGING, COMPLETED, FAILED, CANCELLED}),
    # A script under `tunewatch exec` may call train() again after the first one returned.
    PACKAGING: frozenset({TRAINING, VALIDATING, COMPLETED, FAILED, CANCELLED}),
    COMPLETED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}


def may_follow(before: str, after: str) -> bool:
    """Whether a run may go from one state to another; terminal states are final."""
    return after in _NEXT[before]

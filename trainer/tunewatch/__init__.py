"""Tunewatch: watch LLM fine-tuning runs you cannot sit next to.

The public names are loaded on first use, so that `import tunewatch` stays cheap and pulls in neither
torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["ProgressTracker", "TrainingProgress", "TunewatchCallback", "__version__"]

if TYPE_CHECKING:
    from tunewatch.probe.callback import TunewatchCallback
    from tunewatch.probe.progress import ProgressTracker, TrainingProgress

_HOMES = {
    "TunewatchCallback": "tunewatch.probe.callback",
    "ProgressTracker": "tunewatch.probe.progress",
    "TrainingProgress": "tunewatch.probe.progress",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunewatch' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)

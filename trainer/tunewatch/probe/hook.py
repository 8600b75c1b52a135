"""Attaches the callback in a process whose code does not know of tunewatch.

Called from `attach/sitecustomize.py` at the start of every Python process below `tunewatch exec`. Until transformers'
trainer module is imported it costs nothing; then the callback joins `DEFAULT_CALLBACKS`, which every Trainer
reads when it is built.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .writer import RunWriter, process_globals

TARGET = "transformers.trainer"


def attach() -> None:
    """Wait for transformers' trainer module, and report an exception that ends this process."""
    install_excepthook()
    if TARGET in sys.modules:
        _join(sys.modules[TARGET])
    else:
        sys.meta_path.insert(0, _TrainerFinder())


def install_excepthook() -> None:
    """Report an uncaught exception of the main thread to the run folder, then go on as before."""
    shared = process_globals()
    if shared.get("excepthook"):
        return
    shared["excepthook"] = True
    previous = sys.excepthook

    def excepthook(kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is not None:
                RunWriter.from_environment().exception(error.with_traceback(trace), during="process")
        finally:
            previous(kind, error, trace)

    sys.excepthook = excepthook


class _TrainerFinder(importlib.abc.MetaPathFinder):
    """Finds one module the usual way, and looks at it once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TARGET:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # resource readers, get_source and the like
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            _join(module)
        except Exception:
            RunWriter.from_environment().error()


def _join(module: Any) -> None:
    from .callback import TunewatchCallback
    from .tap import install

    if not any(getattr(item, "is_tunewatch", False) for item in module.DEFAULT_CALLBACKS):
        module.DEFAULT_CALLBACKS.append(TunewatchCallback)
    install(module.Trainer)
    process_globals()["attach"] = TunewatchCallback
    if not _helper_process():
        RunWriter.from_environment().phase("prepare", "transformers imported")


def _helper_process() -> bool:
    """Whether multiprocessing started this interpreter (a dataloader worker, a tokenizing process).

    It imports what the main script imports, but it is not the training, and must not take the training's pulse. One
    that does train (`torch.multiprocessing.spawn`) reports from its trainer on, when it knows its rank.
    """
    return any(
        "--multiprocessing-fork" in item or ".forkserver import main" in item for item in sys.orig_argv
    )

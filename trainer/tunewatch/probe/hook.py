"""Attaches the callback in a process whose code does not know of tunewatch.

Called from `attach/sitecustomize.py` at the start of every Python process below `tunewatch exec`. Until transformers'
trainer module (or TRL) is imported it costs nothing, and the process is none of ours: it may be anything. From the
beginning of that import on, the process has a pulse; when it is done, the callback joins `DEFAULT_CALLBACKS`, which
every Trainer reads when it is built.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from .pulse import PHASES
from .writer import RunWriter, process_globals

TARGET = "transformers.trainer"
BARS = ("datasets.utils.tqdm", "huggingface_hub.utils.tqdm", "transformers.utils.logging")
"""The modules that make progress bars (the keys of `bars.MODULES`, which is imported only when one of them is)."""


def attach() -> None:
    """Wait for transformers' trainer module, and report an exception that ends this process."""
    install_excepthook()
    helper = _helper_process()
    if TARGET in sys.modules:
        _join(sys.modules[TARGET])
    if helper:
        _expect(_Expected(TARGET, after=_join))
    else:
        _expect(
            _Expected(TARGET, before=_announce, after=_join_and_tell, failed=_tell_failed),
            _Expected("trl", before=_announce, after=_tell, failed=_tell_failed),
            # Its parts are imported when they are asked for, which takes longer than the package.
            _Expected("trl.*", before=_announce, after=_tell, failed=_tell_failed),
        )
        watch_bars()


def watch_bars() -> None:
    """Note the progress bars of the libraries, those that are imported already and those that will be."""
    shared = process_globals()
    if shared.get("bars"):
        return
    shared["bars"] = True
    _expect(*(_Expected(name, after=_watch_bars_of) for name in BARS if name not in sys.modules))
    if any(name in sys.modules for name in BARS):
        from . import bars

        bars.watch_loaded()


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


class _Expected(NamedTuple):
    """A module (or, with `.*`, those within a package) that is looked at when it is imported."""

    name: str
    before: Callable[[str], None] | None = None
    after: Callable[[Any], None] | None = None
    failed: Callable[[str], None] | None = None


def _expect(*modules: _Expected) -> None:
    sys.meta_path.insert(0, _Finder({module.name: module for module in modules}))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds some modules the usual way, and looks at each before and after it is executed."""

    def __init__(self, modules: dict[str, _Expected]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        expected = self._modules.get(fullname) or self._modules.get(f"{fullname.partition('.')[0]}.*")
        if expected is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, expected)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, expected: _Expected) -> None:
        self._loader, self._expected = loader, expected

    def __getattr__(self, name: str) -> Any:  # resource readers, get_source and the like
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        _quietly(self._expected.before, module.__name__)
        try:
            self._loader.exec_module(module)
        except BaseException:
            _quietly(self._expected.failed, module.__name__)
            raise
        _quietly(self._expected.after, module)


def _quietly(look: Callable[[Any], None] | None, module: Any) -> None:
    try:
        if look is not None:
            look(module)
    except Exception:
        RunWriter.from_environment().error()


def _announce(name: str) -> None:
    """An import that may take minutes (a network disk), or for ever, begins: from here on there is a pulse."""
    shared = process_globals()
    if shared.get("importing") is None and _prepares():
        shared["importing"] = name
        _say(f"importing {_package(name)}", activity="import")


def _tell(module: Any) -> None:
    """The import is over; one that is part of another says nothing."""
    _end_import(module.__name__, f"{_package(module.__name__)} imported")


def _tell_failed(name: str) -> None:
    _end_import(name, f"{_package(name)} not imported")


def _end_import(name: str, detail: str) -> None:
    shared = process_globals()
    if shared.get("importing") == name:
        shared["importing"] = None
        if _prepares():
            _say(detail)


def _say(detail: str, activity: str | None = None) -> None:
    RunWriter.from_environment().phase("prepare", detail, activity=activity)


def _prepares() -> bool:
    """Whether this process has no training under way or behind it, which an import would be no news of."""
    writer: RunWriter | None = process_globals().get("writer")
    pulse = writer.pulse if writer is not None else None
    return pulse is None or PHASES[int(pulse.get("phase"))] == "prepare"


def _package(name: str) -> str:
    return name.partition(".")[0]


def _join_and_tell(module: Any) -> None:
    _join(module)
    _tell(module)


def _watch_bars_of(module: Any) -> None:
    from . import bars

    bars.watch_module(module)


def _join(module: Any) -> None:
    from .callback import TunewatchCallback
    from .tap import install

    if not any(getattr(item, "is_tunewatch", False) for item in module.DEFAULT_CALLBACKS):
        module.DEFAULT_CALLBACKS.append(TunewatchCallback)
    install(module.Trainer)
    process_globals()["attach"] = TunewatchCallback


def _helper_process() -> bool:
    """Whether multiprocessing started this interpreter (a dataloader worker, a tokenizing process).

    It imports what the main script imports, but it is not the training, and must not take the training's pulse. One
    that does train (`torch.multiprocessing.spawn`) reports from its trainer on, when it knows its rank.
    """
    return any(
        "--multiprocessing-fork" in item or ".forkserver import main" in item for item in sys.orig_argv
    )

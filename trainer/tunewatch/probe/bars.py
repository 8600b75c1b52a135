"""What progress bars tell of the time before the first step.

Downloads, the loading of weights and the preparing of a dataset (TRL does it inside of `SFTTrainer.__init__`, before
any callback exists) tell nobody how far they are but a bar. The libraries make their bars in three places; there the
calls of each bar are noted, shown or disabled, and passed on as `phase` events and signs of life. The bars themselves
do what they always did. A user's own bars (`tqdm.tqdm`) are left alone.

With several processes (`num_proc`) datasets keeps the bar in the parent, and the workers send their counts there. Bars
that live in a worker (`map_nested`) are not seen: it is not the training.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from .pulse import PHASES
from .writer import RunWriter, process_globals

MIN_INTERVAL = 1.0
"""Seconds between two reports of how far bars are. The end of a bar that was reported is told at once, so that there
are at most two phase events for each of these seconds."""

LOOK_INTERVAL = 0.1
"""Seconds between two looks at a bar that is updated: a bar may be updated for each row."""


class Step(NamedTuple):
    """What a bar counts, in words of ours: a description is free text, and may quote data."""

    detail: str
    activity: str | None


_ROWS: dict[str, str] = {
    "Map": "processing rows",
    "Applying": "formatting",
    "Formatting": "formatting",
    "Converting": "converting to chat format",
    "Extracting": "extracting prompts",
    "Unpairing": "unpairing preferences",
    "Adding": "adding end tokens",
    "Building": "building labels",
    "Truncating": "truncating",
    "Grouping": "packing",
    "Packing": "packing",
    "Dropping": "dropping empty rows",
    "Filter": "filtering",
    "Filtering": "filtering",
    "Flattening": "processing rows",
    "Casting": "processing rows",
}
_READING = frozenset({"Generating", "Loading", "Resolving", "Saving", "Creating"})
_SENDING = frozenset({"Processing", "New", "Uploading", "Hashing"})


def dataset_step(description: str) -> Step:
    """A bar of `datasets`, of which TRL's and the user's own `map` calls are the most."""
    word = _first_word(description)
    if "tokeniz" in description.lower():
        return Step("tokenizing", "tokenize")
    if word in _ROWS:
        return Step(_ROWS[word], "tokenize")
    if word == "Downloading":
        return Step("downloading", "download")
    if word in _READING:
        return Step("reading the dataset", "load")
    return Step("preparing the dataset", None)


def hub_step(description: str) -> Step:
    """A bar of `huggingface_hub`: downloads are described by the names of their files."""
    if _first_word(description) in _SENDING:
        return Step("uploading", None)
    return Step("downloading", "download")


def model_step(description: str) -> Step:
    """A bar of transformers ("Loading weights", "Loading checkpoint shards")."""
    if _first_word(description) == "Loading":
        return Step("loading the model", "load")
    return Step("preparing the model", None)


def _first_word(description: str) -> str:
    return description.split(maxsplit=1)[0] if description.strip() else ""


# -- where the bars are made ------------------------------------------------------------------------------


def watch_module(module: ModuleType) -> None:
    """Note the bars that are made in `module`, one of MODULES that has been imported; more than once does nothing."""
    try:
        MODULES[module.__name__](module)
    except Exception:
        _note_fault()


def watch_loaded() -> None:
    """The same for those of MODULES that this process has imported already."""
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            watch_module(module)


def _watch_datasets(module: Any) -> None:
    _watch_class(module.tqdm, dataset_step)


def _watch_hub(module: Any) -> None:
    _watch_class(module.tqdm, hub_step)


def _watch_transformers(module: Any) -> None:
    """transformers makes tqdm's own bars, or empty ones: each is noted by itself, not their class."""
    factory, kinds = type(module.tqdm), (module.tqdm_lib.tqdm, module.EmptyTqdm)
    if _is_marked(factory):
        return
    original = factory.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bar = original(self, *args, **kwargs)
        if isinstance(bar, kinds):
            _watch_bar(bar, args, kwargs)
        return bar

    factory.__call__ = call


MODULES: dict[str, Callable[[Any], None]] = {
    "datasets.utils.tqdm": _watch_datasets,
    "huggingface_hub.utils.tqdm": _watch_hub,
    "transformers.utils.logging": _watch_transformers,
}


def _watch_class(owner: Any, words: Callable[[str], Step]) -> None:
    if _is_marked(owner):
        return
    original = owner.__init__

    @functools.wraps(original)
    def init(bar: Any, *args: Any, **kwargs: Any) -> None:
        original(bar, *args, **kwargs)
        _begin(bar, words, args, kwargs)

    owner.__init__ = init
    _override(owner)


def _watch_bar(bar: Any, args: Any, kwargs: Any) -> None:
    try:
        bar.__class__ = _noting(type(bar))
    except TypeError:  # a class that allows no such thing
        return
    _begin(bar, model_step, args, kwargs)


def _noting(kind: type) -> type:
    """A class like `kind`, of which what its bars are told is noted."""
    if kind not in _NOTING:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        _NOTING[kind] = type(kind.__name__, (kind,), names)
        _override(_NOTING[kind])
    return _NOTING[kind]


_NOTING: dict[type, type] = {}


def _is_marked(owner: Any) -> bool:
    if "_tunewatch_bars" in vars(owner):
        return True
    owner._tunewatch_bars = True
    return False


def _override(owner: Any) -> None:
    """Note what a bar of this class is told; the methods themselves go on as they would."""

    def update(bar: Any, *args: Any, **kwargs: Any) -> Any:
        result = update_before(bar, *args, **kwargs)
        _advance(bar, args[0] if args else kwargs.get("n", 1))
        return result

    def reset(bar: Any, *args: Any, **kwargs: Any) -> Any:
        result = reset_before(bar, *args, **kwargs)
        _restart(bar)
        return result

    def close(bar: Any, *args: Any, **kwargs: Any) -> Any:
        _finish(bar)
        return close_before(bar, *args, **kwargs)

    def iterate(bar: Any) -> Iterator[Any]:
        return _iterate(bar, iterate_before(bar))

    update_before, reset_before = _before(owner, "update"), _before(owner, "reset")
    close_before, iterate_before = _before(owner, "close"), _before(owner, "__iter__")
    for name, method in (("update", update), ("reset", reset), ("close", close), ("__iter__", iterate)):
        if hasattr(owner, name):
            setattr(owner, name, functools.wraps(getattr(owner, name))(method))


def _before(owner: Any, name: str) -> Callable[..., Any]:
    """What `name` does without us: the class's own method, else what the class above has when it is called."""
    own = vars(owner).get(name)
    if callable(own):
        return own
    return lambda bar, *args, **kwargs: getattr(super(owner, bar), name)(*args, **kwargs)


# -- what a bar is told -----------------------------------------------------------------------------------

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def _quiet(hook: _Hook) -> _Hook:
    """No fault of ours may break a bar."""

    @functools.wraps(hook)
    def quiet(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except Exception:
            _note_fault()
            return None

    return quiet  # type: ignore[return-value]


def _note_fault() -> None:
    writer: RunWriter | None = process_globals().get("writer")
    if writer is not None and not writer.inert:
        writer.error()


@_quiet
def _begin(bar: Any, words: Callable[[str], Step], args: Any, kwargs: Any) -> None:
    bar.tunewatch_bar = noted = _Bar(bar, words, args, kwargs)
    _board.begin(noted)


@_quiet
def _advance(bar: Any, amount: float | None) -> None:
    noted = _noted(bar)
    if noted is not None and not noted.iterating:
        noted.count += amount or 0
        _board.advance(noted)


@_quiet
def _restart(bar: Any) -> None:
    noted = _noted(bar)
    if noted is not None:
        noted.count = 0.0


@_quiet
def _finish(bar: Any) -> None:
    noted = _noted(bar)
    if noted is not None:
        _board.finish(noted)


def _iterate(bar: Any, items: Iterable[Any]) -> Iterator[Any]:
    """Pass the items on. A disabled bar tells nobody of them, an enabled one only when it is drawn."""
    noted = _noted(bar)
    if noted is not None:
        noted.iterating = True
    try:
        for item in items:
            yield item
            _step(noted)
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
        _finish(bar)


@_quiet
def _step(noted: _Bar | None) -> None:
    if noted is not None:
        noted.count += 1
        _board.advance(noted)


def _noted(bar: Any) -> _Bar | None:
    return vars(bar).get("tunewatch_bar")


class _Bar:
    """One bar: what it counts and how far it is."""

    def __init__(self, bar: Any, words: Callable[[str], Step], args: Any, kwargs: Any) -> None:
        given = {**dict(zip(("iterable", "desc", "total"), args, strict=False)), **kwargs}
        self.step = words(str(given.get("desc") or ""))
        self.is_download = self.step.activity == "download" and given.get("unit") == "B"
        self.count = float(given.get("initial") or 0)
        self.iterating = False
        self._bar = weakref.ref(bar)
        self._total = given.get("total")
        if self._total is None and hasattr(given.get("iterable"), "__len__"):
            self._total = len(given["iterable"])

    def part(self) -> tuple[float, float] | None:
        """What is done, and of how much; None while the total is unknown."""
        bar = self._bar()
        total, done = getattr(bar, "total", None), getattr(bar, "n", None)
        if not isinstance(total, (int, float)):
            total = self._total
        if self.iterating or getattr(bar, "disable", True) or not isinstance(done, (int, float)):
            done = self.count
        return (float(done), float(total)) if total else None


class _Board:
    """The bars of this process that are under way, and what was last said of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a bar may be closed by the garbage collector, anywhere
        self._active: list[_Bar] = []
        self._downloads: list[_Bar] = []
        """The files of one download, finished ones too, until none is under way."""
        self._shown: _Bar | None = None
        self._shown_at = self._looked_at = float("-inf")
        self._timer: threading.Timer | None = None

    def begin(self, bar: _Bar) -> None:
        with self._lock:
            self._active.append(bar)
            if bar.is_download:
                self._downloads.append(bar)
            self._look(time.monotonic())

    def advance(self, bar: _Bar) -> None:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_INTERVAL:
            with self._lock:
                self._look(now)

    def finish(self, bar: _Bar) -> None:
        with self._lock:
            if bar not in self._active:
                return
            self._active.remove(bar)
            others = bar.is_download and any(other.is_download for other in self._active)
            was_shown = self._shown is bar or (bar.is_download and self._shown in self._downloads)
            if was_shown and not others:
                self._shown = None
                writer = _writer_of(bar)
                if writer is not None and _is_preparing(writer):
                    self._show(writer, bar)
            if bar.is_download and not others:
                self._downloads.clear()

    def _look(self, now: float) -> None:
        """Give a sign of life, and say how far the innermost bar is, now or as soon as it may be said."""
        self._looked_at = now
        bar = self._active[-1] if self._active else None
        writer = _writer_of(bar)
        if writer is None:
            return
        preparing = _is_preparing(writer)
        # A training that hangs is not alive because some thread uploads its last checkpoint.
        if preparing or threading.current_thread() is threading.main_thread():
            writer.alive()
        if bar is None or not preparing:
            return
        wait = self._shown_at + MIN_INTERVAL - now
        if wait <= 0:
            self._show_now(writer, bar)
        elif self._timer is None:
            # What hangs now must be shown as far as it is, and no further update will come.
            self._timer = threading.Timer(wait, self._look_again)
            self._timer.daemon = True
            self._timer.start()

    @_quiet
    def _look_again(self) -> None:
        with self._lock:
            self._timer = None
            if time.monotonic() - self._shown_at < MIN_INTERVAL / 2:
                return  # told while this thread waited for the lock
            bar = self._active[-1] if self._active else None
            writer = _writer_of(bar)
            if bar is not None and writer is not None and _is_preparing(writer):
                self._show_now(writer, bar)

    def _show_now(self, writer: RunWriter, bar: _Bar) -> None:
        self._shown_at, self._shown = time.monotonic(), bar
        self._show(writer, bar)

    def _show(self, writer: RunWriter, bar: _Bar) -> None:
        if writer.rank != 0:  # other ranks do the same: they are alive
            return
        parts = [one.part() for one in self._downloads] if bar.is_download else [bar.part()]
        known = [part for part in parts if part is not None]
        ratio = None
        if known and len(known) == len(parts):
            ratio = round(min(1.0, max(0.0, sum(p[0] for p in known) / sum(p[1] for p in known))), 4)
        detail, activity = bar.step
        writer.event("phase", phase="prepare", detail=detail, ratio=ratio, activity=activity)


def _writer_of(bar: _Bar | None) -> RunWriter | None:
    """This process's writer, if it reports; a bar of something known may open the run that is about to begin."""
    shared = process_globals()
    open_run = shared.get("open_run")
    if (
        open_run is not None
        and bar is not None
        and bar.step.activity is not None
        and not shared.get("training")
    ):
        open_run()
    writer: RunWriter | None = shared.get("writer")
    return writer if writer is not None and not writer.inert and writer.pulse is not None else None


def _is_preparing(writer: RunWriter) -> bool:
    return writer.pulse is not None and PHASES[int(writer.pulse.get("phase"))] == "prepare"


_board = _Board()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _board.__init__())  # type: ignore[misc]

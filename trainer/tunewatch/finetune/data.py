"""The rows of a run: found, read and checked before anything expensive is loaded.

A row's text never appears in an error: the line number and the names of fields must do.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tunewatch.finetune.config import DatasetSection, is_local
from tunewatch.finetune.errors import ConfigError, DataError, MissingFileError
from tunewatch.finetune.hub import explain_hub_errors
from tunewatch.provenance import dataset_hash, hub_dataset_hash, is_commit, public_name

Format = Literal["messages", "prompt_completion", "text"]

COLUMNS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
"""The columns of each format that hold its text."""

_EXTRA_COLUMNS = ("tools", "chat_template_kwargs")
"""Optional columns that TRL passes on to the chat template."""

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Source:
    """One set of rows to load, not loaded yet."""

    path: str | list[str]
    name: str | None
    split: str
    revision: str | None
    streaming: bool = False

    @property
    def shown(self) -> str:
        """Its name as others may see it."""
        if isinstance(self.path, str):
            return public_name(self.path)
        return ", ".join(map(public_name, self.path))

    @property
    def local(self) -> bool:
        return not isinstance(self.path, str) or is_local(self.path)

    def files(self) -> Path | list[Path]:
        """The local file or folder, or the files of a list and its patterns. Raises `MissingFileError`."""
        if isinstance(self.path, str) and (Path(self.path).exists() or not glob.has_magic(self.path)):
            _check_exists(Path(self.path))
            return Path(self.path)
        return [file for name in _listed(self.path) for file in _matches(name)]


@dataclass(frozen=True)
class LoadedData:
    """Rows (of `datasets`, streamed or not) for training and evaluation in a format of TRL, and where they are from.

    `name` is how others may know the training set, `hash` and `revision` identify it (None: unknown); `eval_name`
    and `eval_hash` are those of an evaluation set that has files of its own.
    """

    train: Any
    eval: Any | None
    format: Format
    name: str
    hash: str | None
    revision: str | None
    eval_name: str | None = None
    eval_hash: str | None = None


def load_data(section: DatasetSection, *, seed: int) -> LoadedData:
    """Load the rows. Raises `DataError`, `MissingFileError`, `ConfigError`, `AuthError`."""
    source = Source(section.path, section.name, section.split, section.revision, section.streaming)
    source_eval = _eval_source(section, source)
    train, kind = _load(source, section, "the training set")
    held_out = None
    if source_eval is not None:
        held_out, eval_kind = _load(source_eval, section, "the evaluation set")
    elif section.eval_fraction is not None:
        train, held_out = _split(train, section.eval_fraction, seed)
        eval_kind = kind
    if held_out is not None and eval_kind != kind:
        raise DataError(f"the training set is in {kind} format, but the evaluation set in {eval_kind} format")
    revision, digest = _identity(source, train)
    data = LoadedData(train, held_out, kind, source.shown, digest, revision)
    if source_eval is None or source_eval.path == source.path:
        return data
    return replace(data, eval_name=source_eval.shown, eval_hash=_identity(source_eval, held_out)[1])


def is_streamed(rows: Any) -> bool:
    """Whether nobody knows how many rows there are."""
    return not hasattr(rows, "__len__")


def held_out_prompts(data: LoadedData, number: int) -> Iterator[tuple[Any, str]]:
    """Up to `number` prompts of the evaluation set, each with its answer. Plain text is cut in the middle."""
    for row in itertools.islice(data.eval if data.eval is not None else (), number):
        if data.format == "messages":
            messages = row["messages"]
            last = next(
                (i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant"), None
            )
            if last:
                yield messages[:last], messages[last]["content"]
        elif data.format == "prompt_completion":
            completion = row["completion"]
            yield row["prompt"], completion if isinstance(completion, str) else completion[-1]["content"]
        else:
            words = row["text"].split(" ")
            half = max(1, len(words) // 2)
            yield " ".join(words[:half]), " ".join(words[half:])


def texts(data: LoadedData) -> Iterator[str]:
    """The text of the training rows, whatever their format."""
    for row in data.train:
        for column in COLUMNS[data.format]:
            value = row[column]
            yield from [value] if isinstance(value, str) else (str(message["content"]) for message in value)


def _eval_source(section: DatasetSection, train: Source) -> Source | None:
    """The evaluation rows that are loaded by themselves: another dataset, or another split of this one."""
    if section.eval_split is not None:
        return replace(train, split=section.eval_split)
    if section.eval_path is None:
        return None
    if section.eval_path == section.path:
        return replace(train, split="train")
    return Source(section.eval_path, None, "train", None, section.streaming)


def _load(source: Source, section: DatasetSection, role: str) -> tuple[Any, Format]:
    rows = _read(source)
    if is_streamed(rows):
        rows = _with_known_columns(rows, source)
    elif len(rows) == 0:
        raise DataError(f"{role} ({source.shown}) is empty")
    kind, wanted = _format(rows.column_names, section, source)
    for found, column in zip(wanted, COLUMNS[kind], strict=True):
        if found != column:
            rows = rows.remove_columns([column]) if column in rows.column_names else rows
            rows = rows.rename_column(found, column)
    extra = [column for column in _EXTRA_COLUMNS if column in rows.column_names]
    return rows.select_columns([*COLUMNS[kind], *extra]), kind


def _with_known_columns(rows: Any, source: Source) -> Any:
    """Streamed rows whose column names are known, for which the first rows are read."""
    import datasets

    try:
        if next(iter(rows.take(1)), None) is None:
            raise DataError(f"{source.shown} is empty")
        return rows if rows.column_names else rows._resolve_features()
    except datasets.exceptions.DatasetGenerationError as error:
        raise _unreadable(source, error) from error


def _read(source: Source) -> Any:
    import datasets

    if not source.local:
        with explain_hub_errors("dataset", str(source.path)):
            return _hub_split(source)
    data = source.files()
    if isinstance(data, list) or data.is_file():
        return _read_files(source, [data] if isinstance(data, Path) else data)
    if (data / "state.json").exists() or (data / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(str(data))
        if isinstance(loaded, datasets.DatasetDict):
            if source.split not in loaded:
                raise ConfigError(
                    f"no split {source.split!r} in {data.name}; found: {', '.join(loaded)}",
                    key="dataset.split",
                )
            loaded = loaded[source.split]
        return loaded.to_iterable_dataset() if source.streaming else loaded
    return _read_local(source, str(data), name=source.name)


def _read_files(source: Source, files: list[Path]) -> Any:
    kinds = {_BUILDERS.get(file.suffix.lower()): file for file in files}
    if None in kinds:
        raise DataError(
            f"{kinds[None].name}: unknown kind of file; allowed: {', '.join(_BUILDERS)}, or a folder"
        )
    if len(kinds) > 1:
        raise DataError(
            f"{source.shown} mixes kinds of files: {', '.join(file.name for file in kinds.values())}"
        )
    builder = str(next(iter(kinds)))
    for file in files:
        if builder == "json" and not source.streaming and not _is_whole_json(file):
            check_jsonl(file)
    return _read_local(source, builder, data_files=[str(file) for file in files])


def _listed(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else path


def _matches(name: str) -> list[Path]:
    """The file, or the files that a pattern means, by name: the order in which the disk lists them means nothing."""
    if Path(name).exists() or not glob.has_magic(name):
        _check_exists(Path(name))
        return [Path(name)]
    matches = glob.glob(name, recursive=True)  # noqa: PTH207  Path.glob would take hidden files too
    found = sorted(Path(match) for match in matches if Path(match).is_file())
    if not found:
        raise MissingFileError(f"dataset not found: no file matches {Path(name).name}")
    return found


def _read_local(source: Source, builder: str, **arguments: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(builder, split=source.split, streaming=source.streaming, **arguments)
    except (datasets.exceptions.DatasetGenerationError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise _unreadable(source, error) from error
    except StopIteration:  # datasets looks at the first row of what is streamed
        raise DataError(f"{source.shown} is empty") from None
    except ValueError as error:
        if "split" in str(error):
            raise ConfigError(f"no split {source.split!r} in {source.shown}", key="dataset.split") from error
        raise DataError(f"{source.shown} cannot be read as a dataset") from error


def _unreadable(source: Source, error: Exception) -> DataError:
    return DataError(f"{source.shown} cannot be read: {type(error).__name__}; are all rows of one shape?")


def _hub_split(source: Source) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            source.path,
            source.name,
            split=source.split,
            revision=source.revision,
            streaming=source.streaming,
        )
    except ValueError as error:
        if "split" in str(error):
            raise ConfigError(f"no split {source.split!r} in {source.path}", key="dataset.split") from error
        if "config" in str(error).lower():
            raise ConfigError(
                f"{source.path} has several configurations, or none named {source.name!r}", key="dataset.name"
            ) from error
        raise


def check_jsonl(path: Path) -> int:
    """Read a JSONL file line by line and return the number of rows. `DataError` names the line."""
    fields: set[str] | None = None
    rows = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _parse_line(line, f"{path.name}, line {number}")
            fields = set(row) if fields is None else fields
            rows += 1
            _check_row(row, fields, f"{path.name}, line {number}")
    if rows == 0:
        raise DataError(f"{path.name} is empty")
    return rows


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8") from None
    except json.JSONDecodeError as error:
        # `from None`: the error's own text ends up in logs, and its `doc` is the row.
        raise DataError(f"{where}: not valid JSON at column {error.colno}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object")
    return row


def _check_row(row: dict[str, Any], fields: set[str], where: str) -> None:
    """A row must have the fields of the first one, and messages must look like messages."""
    for column in ("messages", "prompt", "completion", "text"):
        if column in fields and row.get(column) is None:
            raise DataError(f"{where}: no {column!r}; found: {', '.join(sorted(map(str, row))) or 'nothing'}")
    messages = row.get("messages")
    if messages is None:
        return
    whole = isinstance(messages, list) and messages
    if not whole or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise DataError(f"{where}: 'messages' must be a list of objects with 'role' and 'content'")


def _format(columns: list[str], section: DatasetSection, source: Source) -> tuple[Format, tuple[str, ...]]:
    """The format of the rows, and the names its columns have in the source."""
    for chosen, kind, key in (
        (section.messages_field, "messages", "messages_field"),
        (section.text_field, "text", "text_field"),
    ):
        if chosen is not None:
            if chosen not in columns:
                close = difflib.get_close_matches(chosen, columns, n=1)
                raise DataError(
                    f"dataset.{key}: no field {chosen!r} in {source.shown}; found: {', '.join(columns)}"
                    + (f"; did you mean {close[0]!r}?" if close else "")
                )
            return kind, (chosen,)  # type: ignore[return-value]
    for kind, wanted in COLUMNS.items():
        if all(column in columns for column in wanted):
            return kind, wanted
    raise DataError(
        f"{source.shown} has none of messages, prompt + completion, text; found: {', '.join(columns)}; "
        "set dataset.messages_field or dataset.text_field"
    )


def _split(rows: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    held_out = round(len(rows) * fraction)
    if held_out == 0 or held_out == len(rows):
        raise DataError(
            f"dataset.eval_fraction: {fraction} of {len(rows)} rows leaves one of the two sets empty"
        )
    parts = rows.train_test_split(test_size=held_out, seed=seed)
    return parts["train"], parts["test"]


def _check_exists(path: Path) -> None:
    if path.exists():
        return
    parent = path.parent
    if not parent.is_dir():
        raise MissingFileError(f"dataset not found: {path.name} (there is no folder {parent.name!r})")
    close = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise MissingFileError(f"dataset not found: {path.name} in folder {parent.name!r}{hint}")


def _is_whole_json(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix.lower() == ".json" and file.read(4096).lstrip().startswith((b"[", b"{\n", b"{\r"))


def _identity(source: Source, rows: Any) -> tuple[str | None, str | None]:
    """Revision and hash of a set of rows; None for what is unknown, or has no meaning (the revision of a file)."""
    if not source.local:
        name = str(source.path)
        revision = _hub_commit(name, source.revision, rows) or source.revision
        return revision, hub_dataset_hash(name, revision=revision, config=source.name, split=source.split)
    try:
        return None, dataset_hash(source.files(), config=source.name, split=source.split)
    except OSError:
        return None, None


def _hub_commit(name: str, revision: str | None, rows: Any) -> str | None:
    """The commit that a dataset of the Hub was read from, or None when nobody can say."""
    if revision is not None and is_commit(revision):
        return revision
    for address in rows.info.download_checksums or {}:  # hf://datasets/NAME@COMMIT/FILE
        commit = str(address).partition("@")[2].partition("/")[0]
        if str(address).startswith("hf://") and is_commit(commit):
            return commit
    for file in getattr(rows, "cache_files", ()):  # .../NAME/CONFIG/0.0.0/COMMIT/FILE
        if is_commit(Path(file["filename"]).parent.name):
            return Path(file["filename"]).parent.name
    try:
        from huggingface_hub import HfApi

        return HfApi().dataset_info(name, revision=revision, timeout=10).sha
    except Exception:  # noqa: BLE001  the rows were read: a Hub that is gone by now must not cost the run
        return None

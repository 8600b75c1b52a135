"""The rows of a run: found, read and checked before anything expensive is loaded.

A row's text never appears in an error: the line number and the names of fields must do.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tunewatch.finetune.config import DatasetSection, is_local
from tunewatch.finetune.errors import ConfigError, DataError, MissingFileError
from tunewatch.finetune.hub import explain_hub_errors
from tunewatch.provenance import dataset_hash, hub_dataset_hash, public_name

Format = Literal["messages", "prompt_completion", "text"]

_COLUMNS: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_EXTRA_COLUMNS = ("tools", "chat_template_kwargs")
"""Optional columns that TRL passes on to the chat template."""

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Source:
    """One set of rows to load, not loaded yet."""

    path: str
    name: str | None
    split: str
    revision: str | None

    @property
    def shown(self) -> str:
        return public_name(self.path)


@dataclass(frozen=True)
class LoadedData:
    """Rows (`datasets.Dataset`) for training and evaluation in a format of TRL, and where they are from."""

    train: Any
    eval: Any | None
    format: Format
    hash: str
    revision: str | None


def load_data(section: DatasetSection, *, seed: int) -> LoadedData:
    """Load the rows. Raises `DataError`, `MissingFileError`, `ConfigError`, `AuthError`."""
    source = Source(section.path, section.name, section.split, section.revision)
    train, kind = _load(source, section, "the training set")
    held_out = None
    if section.eval_path is not None:
        source_eval = replace(source, path=section.eval_path, split="train")
        held_out, eval_kind = _load(source_eval, section, "the evaluation set")
    elif section.eval_split is not None:
        held_out, eval_kind = _load(replace(source, split=section.eval_split), section, "the evaluation set")
    elif section.eval_fraction is not None:
        train, held_out = _split(train, section.eval_fraction, seed)
        eval_kind = kind
    if held_out is not None and eval_kind != kind:
        raise DataError(f"the training set is in {kind} format, but the evaluation set in {eval_kind} format")
    revision = None if is_local(source.path) else _hub_revision(train) or section.revision
    return LoadedData(train, held_out, kind, _hash(source, revision), revision)


def held_out_prompts(data: LoadedData, number: int) -> Iterator[tuple[Any, str]]:
    """Up to `number` prompts of the evaluation set, each with its answer. Plain text is cut in the middle."""
    for row in data.eval.select(range(min(number, len(data.eval)))) if data.eval is not None else ():
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
        for column in _COLUMNS[data.format]:
            value = row[column]
            yield from [value] if isinstance(value, str) else (str(message["content"]) for message in value)


def _load(source: Source, section: DatasetSection, role: str) -> tuple[Any, Format]:
    if is_local(source.path):
        _check_exists(Path(source.path))
    rows = _read(source)
    if len(rows) == 0:
        raise DataError(f"{role} ({source.shown}) is empty")
    kind, wanted = _format(rows.column_names, section, source)
    for found, column in zip(wanted, _COLUMNS[kind], strict=True):
        if found != column:
            rows = rows.remove_columns([column]) if column in rows.column_names else rows
            rows = rows.rename_column(found, column)
    extra = [column for column in _EXTRA_COLUMNS if column in rows.column_names]
    return rows.select_columns([*_COLUMNS[kind], *extra]), kind


def _read(source: Source) -> Any:
    import datasets

    path = Path(source.path)
    if not is_local(source.path):
        with explain_hub_errors("dataset", source.path):
            return _hub_split(source)
    if path.is_file():
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise DataError(
                f"{path.name}: unknown kind of file; allowed: {', '.join(_BUILDERS)}, or a folder"
            )
        if builder == "json" and not _is_whole_json(path):
            check_jsonl(path)
        return _read_local(source, builder, data_files=str(path), split="train")
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if source.split not in loaded:
            raise ConfigError(
                f"no split {source.split!r} in {path.name}; found: {', '.join(loaded)}", key="dataset.split"
            )
        return loaded[source.split]
    return _read_local(source, str(path), name=source.name, split=source.split)


def _read_local(source: Source, builder: str, **arguments: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset(builder, **arguments)
    except (datasets.exceptions.DatasetGenerationError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise DataError(
            f"{source.shown} cannot be read: {type(error).__name__}; are all rows of one shape?"
        ) from error
    except ValueError as error:
        if "split" in str(error):
            raise ConfigError(f"no split {source.split!r} in {source.shown}", key="dataset.split") from error
        raise DataError(f"{source.shown} cannot be read as a dataset") from error


def _hub_split(source: Source) -> Any:
    import datasets

    try:
        return datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
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
    for kind, wanted in _COLUMNS.items():
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


def _hub_revision(rows: Any) -> str | None:
    """The commit that a dataset was read from, out of the addresses `hf://datasets/NAME@COMMIT/FILE`."""
    for address in rows.info.download_checksums or {}:
        commit = str(address).partition("@")[2].partition("/")[0]
        if str(address).startswith("hf://") and commit:
            return commit
    return None


def _hash(source: Source, revision: str | None) -> str:
    if is_local(source.path):
        return dataset_hash(Path(source.path))
    return hub_dataset_hash(source.path, revision=revision, config=source.name, split=source.split)

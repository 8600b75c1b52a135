"""The YAML file of a built-in job: its sections, their defaults, and errors that help.

Every relative path in the file is relative to the file's own folder; `RunConfig` holds absolute ones, so that
the resolved copy in the run folder means the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from tunewatch.durations import DurationError, parse_duration, parse_time
from tunewatch.finetune.errors import ConfigError, nearest
from tunewatch.health import Patience, ThresholdError, Thresholds
from tunewatch.provenance import is_secret_key, masked_text

TINY_MODEL = "tunewatch:tiny"
"""As `model`, stands for a tiny random Llama that is built on the spot: a rehearsal without a download."""

PATIENCE_KEYS = tuple(name for name in Patience.names() if name != "step_factor")

OWNED_TRAINING_KEYS = {
    "output_dir": "set output_dir at the top level",
    "resume_from_checkpoint": "set resume at the top level",
    "run_name": "set name at the top level",
    "model_init_kwargs": "set model.revision, model.dtype at the top level",
    "trust_remote_code": "set model.trust_remote_code",
    "dataset_text_field": "set dataset.text_field",
    "push_to_hub": "set hub.push_to",
    "hub_model_id": "set hub.push_to",
    "hub_private_repo": "set hub.private",
    "hub_strategy": "the result is pushed once, after it was checked: set hub.push_to",
    "hub_always_push": "the result is pushed once, after it was checked: set hub.push_to",
    "hub_revision": "the result is pushed to the main branch of hub.push_to",
    "hub_token": "a secret does not belong in this file: set HF_TOKEN in the environment",
    "do_train": "the job always trains",
    "do_eval": "set dataset.eval_path, eval_split or eval_fraction",
    "do_predict": "the job generates samples instead: set samples",
    "local_rank": "it comes from the launcher",
}
"""Keys of `training:` that the job sets itself, and what to use instead."""

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


def _duration(value: Any) -> float:
    try:
        return parse_duration(value)
    except (DurationError, TypeError):
        raise ValueError("a duration above 0, such as 300 (seconds), 90s, 5m or 1h30m") from None


Duration = Annotated[float, BeforeValidator(_duration)]


def _point_in_time(value: Any) -> Any:
    if isinstance(value, int | float):
        raise ValueError('a point in time; in quotes, for YAML takes 18:00 for a number: "18:00"')
    try:
        return parse_time(value, datetime.now(UTC))
    except DurationError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


PointInTime = Annotated[datetime, BeforeValidator(_point_in_time)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True, protected_namespaces=())


class ModelSection(_Section):
    """The base model: a Hub id, a local folder, or `tunewatch:tiny`."""

    name: str = Field(min_length=1)
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    trust_remote_code: bool = False


Paths = Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]


class DatasetSection(_Section):
    """Training and evaluation rows: a Hub id, a local folder, or local files (JSONL, JSON, Parquet, CSV).

    Files are one path, a pattern such as `shards/*.jsonl`, or a list of both. With `streaming` rows are read while
    the training runs, and never counted.
    """

    path: Paths
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    eval_path: Paths | None = None
    eval_split: str | None = None
    eval_fraction: float | None = Field(default=None, gt=0, lt=1)
    text_field: str | None = None
    messages_field: str | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> DatasetSection:
        if self.text_field and self.messages_field:
            raise ValueError("set text_field or messages_field, not both")
        chosen = [
            key for key in ("eval_path", "eval_split", "eval_fraction") if getattr(self, key) is not None
        ]
        if len(chosen) > 1:
            raise ValueError(
                f"set one of eval_path, eval_split and eval_fraction, not {' and '.join(chosen)}"
            )
        if self.streaming and self.eval_fraction is not None:
            raise ValueError(
                "eval_fraction needs the number of rows: with streaming, set eval_path or eval_split"
            )
        return self


class SamplesSection(_Section):
    """How many held-out prompts the finished model answers, for a person to read."""

    number: int = Field(default=20, ge=0)
    max_new_tokens: int = Field(default=128, ge=1)


class HubSection(_Section):
    """Where the finished model is pushed, if anywhere."""

    push_to: str | None = Field(default=None, pattern=r"^[^/\s]+/[^/\s]+$")
    private: bool = True


class HealthSection(_Section):
    """What the verdicts go by: signals that are switched off, and limits other than the defaults."""

    off: list[str] = Field(default_factory=list)
    thresholds: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _off_is_no_flag(cls, value: Any) -> Any:
        """YAML 1.1 reads the bare key `off` as false."""
        if isinstance(value, dict) and False in value:
            return {"off" if key is False else key: item for key, item in value.items()}
        return value

    @field_validator("off")
    @classmethod
    def _signals(cls, value: list[str]) -> list[str]:
        Thresholds.chosen(off=value)
        return value

    @field_validator("thresholds")
    @classmethod
    def _limits(cls, value: dict[str, Any]) -> dict[str, Any]:
        Thresholds.chosen(value)
        return value


def _named(key: str) -> BeforeValidator:
    """A validator that lets a section be given as its main value alone: `model: some/id`."""

    def widen(value: Any) -> Any:
        return {key: value} if isinstance(value, str | int) and not isinstance(value, bool) else value

    return BeforeValidator(widen)


class RunConfig(_Section):
    """A whole run as the user wrote it, checked, with defaults filled in and paths absolute."""

    name: str = Field(min_length=1, max_length=96)
    model: Annotated[ModelSection, _named("name")]
    dataset: Annotated[DatasetSection, _named("path")]
    lora: dict[str, Any] | Literal[False] = Field(default_factory=dict)
    training: dict[str, Any] = Field(default_factory=dict)
    samples: Annotated[SamplesSection, _named("number")] = Field(default_factory=SamplesSection)
    patience: dict[Literal[PATIENCE_KEYS], Duration] = Field(  # type: ignore[valid-type]
        default_factory=dict
    )
    health: HealthSection = Field(default_factory=HealthSection)
    resume: bool | str = False
    output_dir: Path
    hub: Annotated[HubSection, _named("push_to")] = Field(default_factory=HubSection)
    walltime: Duration | None = None
    deadline: PointInTime | None = None

    @field_validator("lora", mode="before")
    @classmethod
    def _lora_by_default(cls, value: Any) -> Any:
        return {} if value is True or value is None else value

    @field_validator("samples", mode="before")
    @classmethod
    def _no_samples(cls, value: Any) -> Any:
        return {"number": 0} if value is False else value

    @field_validator("resume")
    @classmethod
    def _resume(cls, value: bool | str) -> bool | str:
        return True if value == "auto" else value

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config` of it gives an equal `RunConfig`."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(path: str | os.PathLike[str]) -> RunConfig:
    """Read and check a configuration. Raises `ConfigError` for the first thing that is wrong in it."""
    file = Path(path)
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{file.name}{where}: not valid YAML ({getattr(error, 'problem', error)})"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{file.name}: found {_kind(raw)}, expected a mapping with model, dataset and output_dir"
        )
    return parse_config(raw, base=file.resolve().parent, default_name=file.stem)


def parse_config(raw: Mapping[str, Any], *, base: Path, default_name: str = "run") -> RunConfig:
    """Check a configuration that was read already; relative paths are relative to `base`.

    No secret gets in: the checked configuration is copied into the run folder, and parts of it are shown.
    """
    for key in _secrets(raw):
        if key.removeprefix("training.") not in OWNED_TRAINING_KEYS:
            raise ConfigError(
                "a secret does not belong in this file: set HF_TOKEN, or what the secret is for, in the environment",
                key=key,
            )
    try:
        config = RunConfig.model_validate({"name": default_name, **raw})
    except ValidationError as error:
        raise _config_error(error) from None
    for key in config.training:
        if key in OWNED_TRAINING_KEYS:
            raise ConfigError(f"not allowed here: {OWNED_TRAINING_KEYS[key]}", key=f"training.{key}")
    return _with_absolute_paths(config, base)


def is_local(name: str) -> bool:
    """Whether a resolved model or dataset name is a path of this machine and not a Hub id."""
    return Path(name).is_absolute()


def _secrets(value: Any, key: str = "") -> Iterator[str]:
    """The keys whose names or values are those of a secret, as far as something is set there."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            path = f"{key}.{name}" if key else str(name)
            if (
                is_secret_key(str(name))
                and isinstance(item, str | int)
                and not isinstance(item, bool)
                and item != ""
            ):
                yield path
            else:
                yield from _secrets(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from _secrets(item, key)
    elif isinstance(value, str) and masked_text(value) != value:
        yield key


def _with_absolute_paths(config: RunConfig, base: Path) -> RunConfig:
    dataset = config.dataset
    resume = config.resume
    if isinstance(resume, str) and resume != "if_available":
        resume = str(base / Path(resume).expanduser())
    return config.model_copy(
        update={
            "output_dir": base / config.output_dir.expanduser(),
            "resume": resume,
            "model": config.model.model_copy(update={"name": _resolve(config.model.name, base)}),
            "dataset": dataset.model_copy(
                update={
                    "path": _resolve_all(dataset.path, base),
                    "eval_path": dataset.eval_path and _resolve_all(dataset.eval_path, base),
                }
            ),
        }
    )


def _resolve_all(names: str | list[str], base: Path) -> str | list[str]:
    """Absolute paths; what stands in a list is always a file of this machine."""
    if isinstance(names, str):
        return _resolve(names, base)
    return [os.path.normpath(base / Path(name).expanduser()) for name in names]


def _resolve(name: str, base: Path) -> str:
    """An absolute path when `name` looks like one or exists below `base`; a Hub id as it is."""
    path = base / Path(name).expanduser()
    looks_local = name.startswith(("/", "./", "../", "~")) or name.lower().endswith(_DATA_SUFFIXES)
    looks_local = looks_local or any(sign in name for sign in "*?[")
    return os.path.normpath(path) if looks_local or path.exists() else name


_SECTIONS: dict[str, type[_Section]] = {
    "model": ModelSection,
    "dataset": DatasetSection,
    "samples": SamplesSection,
    "hub": HubSection,
    "health": HealthSection,
}


_ALLOWED = {
    "lora": "false (full fine-tuning), or a mapping",
    "resume": "false, true, auto, if_available, or the path of a checkpoint",
    "hub.push_to": "user/repository",
    "health.off": "a list of signals",
    "samples": "a number, false, or a mapping",
    "dataset.path": "a Hub id, a path, or a list of files",
    "dataset.eval_path": "a Hub id, a path, or a list of files",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "text that is not empty",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
}
"""What is allowed in plain words, by key or by pydantic's error type."""


def _config_error(error: ValidationError) -> ConfigError:
    """Pydantic's first complaint in the file's words. An unknown key goes first."""
    complaints = error.errors(include_url=False)
    first = next((c for c in complaints if c["type"] == "extra_forbidden"), complaints[0])
    path = [
        str(part) for part in first["loc"] if not str(part).startswith(("function-", "literal[", "dict["))
    ]
    if path and path[-1] in ("bool", "str", "constrained-str", "[key]", "list[str]"):
        path.pop()
    key, found = ".".join(path), first["input"]
    if first["type"] == "extra_forbidden":
        valid = list((_SECTIONS[path[0]] if len(path) > 1 else RunConfig).model_fields)
        return ConfigError("unknown key", key=key, allowed=", ".join(valid), nearest=nearest(path[-1], valid))
    if path[0] == "patience" and first["type"] == "literal_error":
        return ConfigError(
            "unknown key", key=key, allowed=", ".join(PATIENCE_KEYS), nearest=nearest(path[-1], PATIENCE_KEYS)
        )
    if isinstance(first.get("ctx", {}).get("error"), ThresholdError):
        return ConfigError(first["msg"].removeprefix("Value error, "), key=key)
    if first["type"] == "missing":
        return ConfigError(f"missing; {key} is required", key=key)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(found, dict):
        return ConfigError(message, key=key)
    message = (message[0].lower() + message[1:]).removeprefix("input should be ")
    allowed = _ALLOWED.get(key) or _ALLOWED.get(first["type"]) or message
    return ConfigError(f"found {shown(key, found)}", key=key, found=found, allowed=allowed)


def shown(key: str, value: object) -> str:
    """A value for an error message: short, and never that of a key which sounds like a secret."""
    if is_secret_key(key):
        return f"a {_kind(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({_kind(value)})"


def _kind(value: object) -> str:
    names = {
        "str": "text",
        "int": "number",
        "float": "number",
        "bool": "true/false",
        "dict": "mapping",
        "NoneType": "nothing",
    }
    return names.get(type(value).__name__, type(value).__name__)

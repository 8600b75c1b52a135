"""From which checkpoint a run goes on."""

from __future__ import annotations

from pathlib import Path

from tunewatch.finetune.config import RunConfig
from tunewatch.finetune.errors import CheckpointError, ConfigError, MissingFileError
from tunewatch.supervisor.checkpoints import Checkpoint, newest_resumable, scan


def choose_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint that `resume` asks for, or None to start from the beginning.

    transformers takes the folder with the highest number, whole or not, and goes on with a fresh optimizer
    where its file is missing. Here only a checkpoint counts from which everything can be restored.

    Raises `ConfigError` when there is nothing to resume from, or something that nobody asked to resume,
    `CheckpointError` when there are only damaged ones, `MissingFileError` for a path that does not exist.
    """
    if isinstance(config.resume, str) and config.resume != "if_available":
        return _named(Path(config.resume))
    found = scan(config.output_dir)
    newest = newest_resumable(found)
    where = config.output_dir.name
    if newest is not None:
        if not config.resume:
            raise ConfigError(
                f"{where} holds {newest.name} of an earlier run: set resume: true to go on from it, or "
                "another output_dir to keep it",
                key="resume",
            )
        return newest.path
    if config.resume is not True:
        return None
    if found:
        raise CheckpointError(f"{where} holds no checkpoint to resume from: {_why(found[-1])}")
    raise ConfigError(
        f"there is no checkpoint in {where}; resume: if_available starts from the beginning then",
        key="resume",
    )


def _named(path: Path) -> Path:
    if not path.is_dir():
        raise MissingFileError(f"no checkpoint folder {path.name}")
    checkpoint = next((found for found in scan(path.parent) if found.name == path.name), None)
    if checkpoint is None:
        raise ConfigError(
            f"{path.name} is not a checkpoint; allowed: a folder named checkpoint-STEP", key="resume"
        )
    if not checkpoint.resumable:
        raise CheckpointError(f"cannot resume from {_why(checkpoint)}")
    return path


def _why(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.name} ({checkpoint.problem})"

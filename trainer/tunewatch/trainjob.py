"""`tunewatch train`: the built-in job as a supervised child."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tunewatch import states
from tunewatch.durations import DurationError, parse_deadline
from tunewatch.finetune.errors import ConfigError, require_train_extra
from tunewatch.health import Patience, Thresholds
from tunewatch.progressview import ProgressView
from tunewatch.provenance import overlap_warning
from tunewatch.review import review_state
from tunewatch.run import child_environment, report_end, report_start, run_id_not_watched, say, supervise
from tunewatch.runfolder import RunFolder, create_run
from tunewatch.supervisor.watch import Options, Supervisor

if TYPE_CHECKING:
    from tunewatch.finetune.config import RunConfig

EXIT_CODES = {states.COMPLETED: 0, states.FAILED: 1, states.CANCELLED: 130}


@dataclass(frozen=True)
class Job:
    """A checked configuration and the run folder it goes into."""

    folder: RunFolder
    options: Options


def prepare(
    config_path: Path,
    *,
    name: str | None,
    run_id: str | None,
    options: Options,
    patience: Mapping[str, float],
    thresholds: Mapping[str, float],
) -> Job:
    """Check the configuration and make the run's folder, before anything is started.

    `patience` and `thresholds` are those of the command line, which go before those of the file.

    Raises ConfigError (which names key, found and allowed), MissingExtraError and RunFolderError.
    """
    require_train_extra()
    from tunewatch.finetune.config import load_config

    config = load_config(config_path)
    deadline = _deadline(config) if options.deadline is None else options.deadline
    if name is not None:
        config = config.model_copy(update={"name": name})
    earlier = _earlier_run(config)
    run_id = run_id_not_watched(run_id or os.environ.get("TUNEWATCH_RUN_ID") or earlier)
    folder = create_run(
        run_id=run_id,
        name=config.name,
        way="train",
        resumed_from=earlier if earlier != run_id else None,
        output_dir=str(config.output_dir),
    )
    path = folder.path / "config.yaml"
    path.touch(mode=0o600)
    path.write_text(config.to_yaml(), encoding="utf-8")
    options = replace(
        options,
        patience=Patience(**{**config.patience, **patience}),
        thresholds=Thresholds.chosen(
            {**config.health.thresholds, **thresholds}, options.thresholds.off.union(config.health.off)
        ),
        walltime=options.walltime or config.walltime,
        deadline=deadline,
    )
    return Job(folder, options)


def run_job(job: Job, *, quiet: bool) -> int:
    """Run and watch it; returns 0 for completed, 1 for failed, 130 for cancelled."""
    view = None if quiet else ProgressView(sys.stderr)
    supervisor = Supervisor(job.folder, job.options, on_change=view.show if view else None)
    report_start(supervisor)
    command = [sys.executable, "-m", "tunewatch.finetune", str(job.folder.path / "config.yaml")]

    def begin() -> None:
        environment = child_environment(job.folder, "train", attach=False)
        supervisor.start(command, environment, log=job.folder.child_log)

    try:
        supervise(supervisor, begin)
    finally:
        if view:
            view.close()
    report_end(supervisor)
    assert supervisor.ending is not None
    if supervisor.ending.state == states.FAILED:
        say(f"its output is in {job.folder.child_log}")
    elif supervisor.ending.state == states.COMPLETED:
        _say_what_is_not_known_yet(job.folder)
    return EXIT_CODES[supervisor.ending.state]


def _say_what_is_not_known_yet(folder: RunFolder) -> None:
    """A lower loss alone is no success: was there an evaluation worth the name, and has anybody read the samples?"""
    info = (folder.read("run.json") or {}).get("info", {})
    if not info.get("eval_rows", 1):
        say("no evaluation was run: there is no evaluation set")
    if overlap := info.get("eval_overlap_rows"):
        say(f"warning: {overlap_warning(overlap, info.get('eval_rows', '?'))}")
    samples = review_state(folder)
    if samples is not None and samples.generated:
        say(f"{samples}: tunewatch samples show {folder.run_id}")


def _deadline(config: RunConfig) -> float | None:
    if config.deadline is None:
        return None
    try:
        return parse_deadline(config.deadline, datetime.now(UTC))
    except DurationError as error:
        raise ConfigError(str(error), key="deadline") from error


def _earlier_run(config: RunConfig) -> str | None:
    """The run whose output a resume goes on with: its run.json lies in output_dir."""
    if not config.resume:
        return None
    try:
        run_id = json.loads((config.output_dir / "run.json").read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run_id if isinstance(run_id, str) else None

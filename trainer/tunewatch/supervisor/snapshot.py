"""What is known of a run at one moment: the input of metrics, verdict.json and, later, API and page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tunewatch.health import Glance, Verdict
from tunewatch.supervisor.ending import Ending


@dataclass(frozen=True)
class RankSnapshot:
    """One rank of the training on this node."""

    last_step_time: float | None = None
    step: int | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """Device memory by kind (allocated, reserved, peak) and host memory (rss)."""
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """One run at one moment. None and a missing key are "unknown"; times are Unix seconds, durations seconds.

    Positions (`step`, `tokens_seen`, ...) are of the whole run; what ends in `_total` counts this session only.
    """

    run_id: str
    state: str
    info: Mapping[str, str]
    environment: Mapping[str, str]
    state_since: float
    run_start: float
    session_start: float
    now: float
    attached: bool = False
    ending: Ending | None = None
    run_end: float | None = None
    step: int | None = None
    max_steps: int | None = None
    epoch: float | None = None
    tokens_seen: Mapping[str, float] = field(default_factory=dict)
    samples_seen: float | None = None
    steps_total: float = 0
    steps_redone_total: float = 0
    tokens_total: Mapping[str, float] = field(default_factory=dict)
    samples_total: float | None = None
    steps_skipped_total: float = 0
    batch_size_restarts_total: float = 0
    resumes_total: float = 0
    batch_size: float | None = None
    intervals: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Steps between logs, evaluations and saves, by (log, eval, save) and (requested, effective)."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Of the model, by kind (trainable, total)."""
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    train_loss_mean: float | None = None
    eval_loss: Mapping[str, float] = field(default_factory=dict)
    best_eval_loss: float | None = None
    best_step: int | None = None
    evals_since_best: int | None = None
    other_metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_dropped_total: float = 0
    elapsed: float | None = None
    session_elapsed: float | None = None
    eta: float | None = None
    step_seconds_sum: float = 0
    step_buckets: tuple[float, ...] = ()
    phase: str | None = None
    phase_detail: str = ""
    activity: str | None = None
    phase_ratio: float | None = None
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    wasted_seconds: float = 0
    last_activity: float | None = None
    deadline: float | None = None
    walltime_deadline: float | None = None
    nonfinite_steps: Mapping[str, float] = field(default_factory=dict)
    nonfinite_streak: float | None = None
    first_nonfinite_step: float | None = None
    nan_filter: bool | None = None
    nonfinite_times: Mapping[str, float] = field(default_factory=dict)
    """When such a step was last seen, by what was not finite."""
    glance: Glance = field(default_factory=Glance)
    judged: tuple[str, ...] = ()
    """The signals that are looked for: none while nothing was heard of the run, and none that is switched off."""
    verdicts: tuple[Verdict, ...] = ()
    checkpoints_saved_total: float = 0
    checkpoints_present: int | None = None
    checkpoints_broken: int | None = None
    checkpoint_last_step: int | None = None
    checkpoint_last_time: float | None = None
    checkpoint_size: float | None = None
    checkpoint_duration: float | None = None
    checkpoint_interval_steps: int | None = None
    checkpoint_best_step: int | None = None
    checkpoint_resumable_step: int | None = None
    checkpoints_that_fit: int | None = None
    work_at_risk_steps: int | None = None
    work_at_risk_seconds: float | None = None
    output_free_bytes: float | None = None
    resume_lost: Mapping[str, bool] = field(default_factory=dict)
    hub_push_failures_total: float = 0
    hub_push_last_success: float | None = None
    hub_push_last_failure: float | None = None
    samples_generated: int | None = None
    samples_reviewed: int | None = None
    eval_overlap_rows: float | None = None
    probe_errors: Mapping[str, float] = field(default_factory=dict)
    probe_error_times: Mapping[str, float] = field(default_factory=dict)
    """When such an error was last seen, by its kind."""
    evidence: tuple[str, ...] = ()
    """Names of the evidence files beside the run, oldest first."""
    probe_seconds_total: float | None = None
    clock_jumps_total: float = 0
    ranks: Mapping[int, RankSnapshot] = field(default_factory=dict)

    @property
    def health(self) -> str:
        """One word for the run: ok, attention, bad, or unknown."""
        return self.glance.health

    @property
    def progress_ratio(self) -> float | None:
        """Share of the steps that are done, 0-1; None while the total is unknown."""
        if self.step is None or not self.max_steps:
            return None
        return min(1.0, self.step / self.max_steps)

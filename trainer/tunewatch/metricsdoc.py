"""docs/metrics.md, made from the tables that the two exporters expose their metrics from.

python -m tunewatch.metricsdoc > docs/metrics.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunewatch.health import ACTS, SIGNALS
from tunewatch.metrics import BUILD_INFO, METRICS, STEP_DURATION, STEP_DURATION_HELP, SUFFIXES, TIME
from tunewatch.probe.pulse import PHASES
from tunewatch.states import STATES
from tunewatch.supervisor.ending import ADVICE
from tunewatch_gpu.fields import FIELDS, THROTTLE_BITS
from tunewatch_gpu.metrics import METRICS as GPU_METRICS


@dataclass(frozen=True)
class Row:
    """One metric: `name` as Prometheus stores it (a histogram by its base name), type, labels and meaning."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


# Where the themes begin: each runs on to the next one, in the order of the exporters' tables.
RUN_THEMES = {
    "tunewatch_run_info": "Which run, and how it stands",
    "tunewatch_step": "Progress",
    "tunewatch_steps_total": "Work of this session",
    "tunewatch_loss": "Loss and learning",
    "tunewatch_elapsed_seconds": "Time",
    "tunewatch_nonfinite_steps_total": "Health",
    "tunewatch_checkpoints_saved_total": "Checkpoints and results",
    "tunewatch_run_gpu_info": "GPUs and memory of the training",
    "tunewatch_probe_seconds_total": "The monitoring itself",
}
GPU_THEMES = {
    "tunewatch_gpu_info": "Which GPUs, and whether they answer",
    "tunewatch_gpu_utilization_ratio": "Load and memory",
    "tunewatch_gpu_power_watts": "Power, heat and clocks",
    "tunewatch_gpu_recovery_action": "Faults and wear",
    "tunewatch_gpu_collector_success": "The sidecar itself",
}

RECORDED = (
    Row("run_kind:tunewatch_tokens:rate5m", "gauge", ("run_id", "kind"), "Tokens per second."),
    Row("run:tunewatch_steps:rate5m", "gauge", ("run_id",), "Optimizer steps per second."),
    Row(
        "run:tunewatch_step_duration_seconds:mean5m",
        "gauge",
        ("run_id",),
        "Mean step time, evaluation and saving taken out.",
    ),
    Row("run:tunewatch_step_per_max_steps:ratio", "gauge", ("run_id",), "Steps done of all steps, 0-1."),
    Row(
        "run:tunewatch_gpu_power_watts:sum",
        "gauge",
        ("run_id",),
        "Power of all GPUs that the run uses; a GPU that two runs share counts in full for both.",
    ),
    Row(
        "run:tunewatch_gpu_energy_joules_per_token:rate5m",
        "gauge",
        ("run_id",),
        "Energy of all GPUs that the run uses for each token that is not padding.",
    ),
    Row(
        "run_state:tunewatch_run_state:last_seen",
        "gauge",
        ("run_id", "state"),
        "When Prometheus last saw the run in the state, Unix time by Prometheus' clock. For the alerts.",
    ),
    Row(
        "run_state_reason:tunewatch_run_end_info:last_seen",
        "gauge",
        ("run_id", "state", "reason"),
        "When Prometheus last saw the run ended for the reason. For the alerts.",
    ),
    Row(
        "run:tunewatch_goodput:ratio",
        "gauge",
        ("run_id",),
        "Share of the time since the first start that went into steps that were kept, 0-1; an estimate where the "
        "sessions of the run differ in pace.",
    ),
    Row(
        "run:tunewatch_goodput:ratio1h",
        "gauge",
        ("run_id",),
        "The same of the last hour, as measured; the time between sessions counts.",
    ),
    Row("run:tunewatch_goodput:ratio24h", "gauge", ("run_id",), "The same of the last day."),
    Row(
        "run_reason:tunewatch_badput_seconds:increase24h",
        "gauge",
        ("run_id", "reason"),
        "Seconds of the last day that were no goodput, by reason: training_prep, program_startup, data_loading, "
        "checkpoint_save, evaluation, packaging, stalled, wasted_progress_from_disruption, "
        "infrastructure_recovery_from_disruption.",
    ),
    Row(
        "run_phase:tunewatch_phase_seconds:max",
        "gauge",
        ("run_id", "phase"),
        "tunewatch_phase_seconds_total as one series per run over all its sessions and ports; a counter with resets.",
    ),
    Row(
        "run:tunewatch_wasted_seconds:max", "gauge", ("run_id",), "tunewatch_wasted_seconds_total, likewise."
    ),
    Row("run:tunewatch_elapsed_seconds:max", "gauge", ("run_id",), "tunewatch_elapsed_seconds, likewise."),
    Row(
        "run:tunewatch_session_elapsed_seconds:max",
        "gauge",
        ("run_id",),
        "tunewatch_session_elapsed_seconds, likewise.",
    ),
)
"""What prometheus/rules records, for dashboards and queries of one's own."""

INTRODUCTION = """\
# Metrics

<!-- Made by `python -m tunewatch.metricsdoc > docs/metrics.md`: change the tables in the code, not this page. -->

All names begin with `tunewatch_`; they and their labels are a contract. Units are base units (seconds, bytes, watts,
ratios from 0 to 1), and counters end in `_total`.

| endpoint | who serves it | what it shows |
| --- | --- | --- |
| `127.0.0.1:9470/metrics`, or the next free port | the supervisor of each run | the run: the first part of this page |
| `127.0.0.1:9460/metrics` | the sidecar `tunewatch-gpu` | the GPUs of the machine: the second part |

**What is unknown is absent.** There is no series for a value that nobody knows: never 0, never -1, never the last
value passed off as new. A query over an absent series gives nothing, and no alert fires on it. Before the first log
there is no `tunewatch_loss`; on a MIG slice there is no `tunewatch_gpu_utilization_ratio`; a GPU that is lost has no
readings at all, only its identity and `tunewatch_gpu_up` 0.

**NaN is a value.** A loss that was logged as NaN is exposed as NaN. It compares false with everything, so no threshold
sees it: use `tunewatch_health{signal="nonfinite"}` or `tunewatch_nonfinite_steps_total`.

**Counters count a session, gauges place the whole run.** A run that is resumed begins its counters at 0 again;
`rate` and `increase` handle that. Positions (`tunewatch_step`, `tunewatch_tokens_seen`, `tunewatch_samples_seen`) go
on from where the run was.

**One run may be seen at two endpoints** for a while, the old port and the new one. Aggregate with
`max by (run_id, ...)` before you compare or join.

**GPUs and runs are joined on `uuid`.** The run says which GPUs it uses in `tunewatch_run_gpu_info`, and the sidecar
knows everything else about them. The run is the many side, since two runs may share a GPU. Watts of each GPU of each
run:

```promql
max by (run_id, uuid) (tunewatch_run_gpu_info)
  * on (uuid) group_left () max by (uuid) (tunewatch_gpu_power_watts)
```

The name of a run is a label of `tunewatch_run_info` only. To have it beside a number:

```promql
max by (run_id) (tunewatch_loss)
  * on (run_id) group_left (name) max by (run_id, name) (tunewatch_run_info)
```

An `info` metric is a gauge that is always 1: its labels are what it says.
"""


def run_rows() -> list[Row]:
    """The metrics of a run, in the order of the page."""
    rows = [
        Row(
            definition.full_name + SUFFIXES[definition.kind],
            definition.kind,
            ("run_id", *definition.labels),
            definition.help,
        )
        for definition in METRICS
    ]
    histogram = Row(STEP_DURATION, "histogram", ("run_id",), STEP_DURATION_HELP)
    rows.insert([row.name for row in rows].index("tunewatch_phase_seconds_total"), histogram)
    return [
        *rows,
        Row(BUILD_INFO, "info", ("version",), "Version of tunewatch."),
        Row(TIME, "gauge", (), "The exporter's clock, Unix time."),
    ]


def gpu_rows() -> list[Row]:
    """The metrics of the sidecar, in the order of the page."""
    return [
        Row(
            metric.name,
            "info" if metric.name.endswith("_info") else metric.type,
            metric.labels,
            metric.help,
        )
        for metric in GPU_METRICS
    ]


def label_values() -> dict[str, Sequence[str]]:
    """Labels that take their values from a closed list."""

    def of_fields(metric: str) -> list[str]:
        return [value for field in FIELDS.values() if field.metric == metric for _, value in field.labels]

    return {
        "`state` of `tunewatch_run_state`": STATES,
        "`reason` of `tunewatch_run_end_info`": [*ADVICE, "killed_signal_N"],
        "`signal` of `tunewatch_health`": list(SIGNALS),
        "`act` of `tunewatch_suggested_act`": ACTS,
        "`phase` of `tunewatch_phase_seconds_total`": [*PHASES, "stalled"],
        "`sensor` of `tunewatch_gpu_temperature_celsius`": of_fields("tunewatch_gpu_temperature_celsius"),
        "`domain` of `tunewatch_gpu_clock_hertz`": of_fields("tunewatch_gpu_clock_hertz"),
        "`limit` of `tunewatch_gpu_temperature_limit_celsius`": of_fields(
            "tunewatch_gpu_temperature_limit_celsius"
        ),
        "`reason` of `tunewatch_gpu_throttle_active`": list(THROTTLE_BITS),
        "`reason` of `tunewatch_gpu_throttle_seconds_total`": of_fields(
            "tunewatch_gpu_throttle_seconds_total"
        ),
        "`action` of `tunewatch_gpu_recovery_action`": of_fields("tunewatch_gpu_recovery_action"),
        "`kind` of `tunewatch_gpu_ecc_errors_total`": of_fields("tunewatch_gpu_ecc_errors_total"),
        "`kind` of `tunewatch_gpu_remapped_rows`": of_fields("tunewatch_gpu_remapped_rows"),
    }


def document() -> str:
    """The page."""
    return "\n".join(
        [
            INTRODUCTION,
            "## A run (supervisor)\n",
            *_themes(run_rows(), RUN_THEMES),
            "## GPUs (sidecar)\n",
            *_themes(gpu_rows(), GPU_THEMES),
            "## Recorded by the shipped rules\n",
            _table(RECORDED),
            "## Label values\n",
            *(
                f"- {label}: {', '.join(f'`{value}`' for value in values)}"
                for label, values in label_values().items()
            ),
        ]
    )


def _themes(rows: Sequence[Row], themes: Mapping[str, str]) -> Iterator[str]:
    names = [row.name for row in rows]
    starts = [names.index(name) for name in themes]
    for title, start, end in zip(themes.values(), starts, [*starts[1:], len(rows)], strict=True):
        yield f"### {title}\n"
        yield _table(rows[start:end])


def _table(rows: Sequence[Row]) -> str:
    lines = ["| name | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.type} | {labels} | {row.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document() + "\n")

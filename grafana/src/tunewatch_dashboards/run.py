"""The dashboard of one run: is it healthy, where does it stand, what does it cost."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.common import BigValueTextMode

from tunewatch.health import SIGNALS
from tunewatch.metrics import ENVIRONMENT_LABELS, INFO_LABELS
from tunewatch.states import STATES, TERMINAL
from tunewatch_dashboards import palette
from tunewatch_dashboards.parts import (
    DATASOURCE,
    PROMETHEUS_UID,
    Grid,
    Panel,
    bars,
    buckets,
    columns_table,
    histogram_over_time,
    instant,
    label_table,
    lines,
    number,
    plain_legend,
    series,
    stacked,
    timeline,
    words,
)

UID = "tunewatch-run"
VARIABLE = "run_id"
"""The alerts' dashboard_url sets it: `?var-run_id=...`."""

RUN = f'run_id="${VARIABLE}"'
STEPS = "suffix: steps"
ENDED = "|".join(state for state in STATES if state in TERMINAL)
NOT_ENDED = "|".join(state for state in STATES if state not in TERMINAL)
STATE_CODES = {state: 11 + index for index, state in enumerate(STATES)}
NO_GPU = "no data: no GPU in use, or no sidecar on its machine"


def run_dashboard() -> model.Dashboard:
    """Build the dashboard `tunewatch-run`."""
    board = (
        dashboard.Dashboard("tunewatch / Run")
        .uid(UID)
        .description("One fine-tuning run: is it healthy, where does it stand, what does it cost.")
        .tags(["tunewatch"])
        .readonly()
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(_datasource_variable())
        .with_variable(_run_variable())
    )
    for annotation in _annotations():
        board = board.annotation(annotation)
    grid = Grid(board)
    grid.line(4, (1, 6, _state()), (2, 6, _health()), (3, 6, _alerts()), (4, 6, _last_sign_of_life()))
    grid.line(
        3, (5, 6, _progress()), (6, 6, _time_left()), (7, 6, _work_at_risk()), (8, 6, _room_for_checkpoints())
    )
    grid.line(9, (10, 12, _loss()), (11, 12, _gradient_norm()))
    grid.line(8, (12, 12, _timeline()), (13, 6, _bad_steps()), (14, 6, _learning_rate()))
    grid.heading(20, "Speed")
    grid.line(8, (21, 8, _tokens_per_second()), (22, 8, _step_time()), (23, 8, _phases()))
    grid.heading(30, "GPUs of this run")
    grid.line(7, (31, 8, _gpu_utilization()), (32, 8, _gpu_memory()), (33, 8, _gpu_power()))
    grid.line(7, (34, 6, _gpu_temperature()), (35, 6, _energy_per_token()), (36, 12, _gpus()))
    grid.heading(40, "Checkpoints and host")
    grid.line(7, (41, 8, _steps_not_saved()), (42, 8, _disk()), (43, 8, _process_memory()))
    grid.heading(50, "What runs, and how it ended")
    grid.line(4, (51, 24, _ending()))
    grid.line(16, (52, 14, _configuration()), (53, 10, _environment()))
    return board.build()


def _datasource_variable() -> dashboard.DatasourceVariable:
    preselected = model.VariableOption(text="tunewatch Prometheus", value=PROMETHEUS_UID)
    variable = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return variable.current(preselected)


def _run_variable() -> dashboard.QueryVariable:
    """Ids begin with the date, so sorting by the text "id · name" backwards puts the newest run first."""
    infos = "max by (run_id, name) (last_over_time(tunewatch_run_info[$__range]))"
    text = f'label_join({infos}, "text", " · ", "run_id", "name")'
    return (
        dashboard.QueryVariable(VARIABLE)
        .label("Run")
        .datasource(DATASOURCE)
        .query(f"query_result({text})")
        .regex('/run_id="(?<value>[^"]+)", ?text="(?<text>[^"]+)"/')
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_DESC)
    )


def _annotations() -> list[dashboard.AnnotationQuery]:
    def marks(name: str, color: str, expr: str) -> dashboard.AnnotationQuery:
        query = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True)
        return query.icon_color(color).expr(expr)

    def firing(severity: str) -> str:
        return f'ALERTS{{alertstate="firing", severity="{severity}", {RUN}}}'

    def alerts(severity: str) -> dashboard.AnnotationQuery:
        mark = marks(f"Alerts: {severity}", palette.SEVERITIES[severity], firing(severity))
        # Points no further apart than the step become one region.
        return mark.title_format("{{alertname}}").tag_keys("severity").step("15s")

    def moments(name: str, color: str, times: str) -> dashboard.AnnotationQuery:
        mark = marks(name, color, f"1000 * (max by (run_id) ({times}{{{RUN}}}) > 0)")
        return mark.title_format(name).use_value_for_time(True).step("15s")

    return [
        alerts("critical"),
        alerts("warning"),
        moments("Checkpoint", palette.FIRST, "tunewatch_checkpoint_last_timestamp_seconds"),
        moments("Session started", palette.SECOND, "tunewatch_session_start_timestamp_seconds"),
    ]


# Is it healthy?


def _state() -> Panel:
    live = f'max by (state) (tunewatch_run_state{{{RUN}, state!~"{ENDED}"}} == 1)'
    ended = f"max by (state, reason) (tunewatch_run_end_info{{{RUN}}} == 1)"
    # When nothing reports the run any more: the newest of what was last seen of it (the rules record when).
    seen_live = f'run_state:tunewatch_run_state:last_seen{{{RUN}, state!~"{ENDED}"}}'
    seen_ended = f"run_state_reason:tunewatch_run_end_info:last_seen{{{RUN}}}"
    newest = (
        f"topk(1, max by (state) (last_over_time({seen_live}[$__range]))"
        f" or max by (state, reason) (last_over_time({seen_ended}[$__range])))"
    )
    silent = f'label_replace({newest}, "state", "silent, was $1", "state", "({NOT_ENDED})")'
    colors = {f"^{state}": color for state, color in palette.STATES.items()}
    return words(
        "State",
        "What the run is doing, or how it ended and why. “Silent” means that nothing reports it any more although "
        "it was not seen to end: its supervisor or its machine is gone.",
        instant(f"{live} or on () {ended} or on () {silent}", "{{state}} {{reason}}"),
        {**colors, "^silent": palette.ATTENTION},
    )


def _health() -> Panel:
    def holding(level: str) -> str:
        names = "|".join(name for name, its_level in SIGNALS.items() if its_level == level)
        active = f'max by (signal) (tunewatch_health{{{RUN}, signal=~"{names}"}} == 1)'
        return f'label_replace({active}, "signal", "{level}: $1", "signal", "(.*)")'

    levels = sorted(set(SIGNALS.values()), key=list(palette.LEVELS).index)

    def level_is(code: int, text: str) -> str:
        return f'label_replace(max by (run_id) (tunewatch_health_level{{{RUN}}}) == {code}, "signal", "{text}", "", "")'

    fine = level_is(0, "ok")
    # A run that failed is bad, one that was preempted asks for attention, without any signal.
    ends = [
        f"({level_is(code, f'{level}: the way it ended')} unless on () {holding(level)})"
        for level, code in (("bad", 2), ("attention", 1))
    ]
    return words(
        "Health",
        "The supervisor's verdict with the signals that hold now. Normal is “ok”; without data nobody judges the run.",
        instant(" or ".join([*map(holding, levels), *ends, fine]), "{{signal}}"),
        {"^bad": palette.FAILURE, "^attention": palette.ATTENTION, "^ok$": palette.GOOD},
        no_value="no data: not watched now",
    )


def _alerts() -> Panel:
    firing = f'max by (alertname, severity) (ALERTS{{alertstate="firing", {RUN}}})'
    watchdog = 'max(ALERTS{alertname="TunewatchWatchdog", alertstate="firing"})'
    none = f'label_replace({watchdog}, "alertname", "none", "", "")'
    colors = {f" {severity}$": color for severity, color in palette.SEVERITIES.items()}
    return words(
        "Alerts",
        "Alerts that fire for this run. “None” is shown only while the rules are known to be evaluated (the watchdog "
        "fires).",
        instant(f"{firing} or on () {none}", "{{alertname}} {{severity}}"),
        {**colors, "^none": palette.GOOD},
        no_value="no data: rules not loaded",
    )


def _last_sign_of_life() -> Panel:
    activity = f"tunewatch_last_activity_timestamp_seconds{{{RUN}}}"
    own_clock = f"min by (run_id) (tunewatch_time_seconds - on (job, instance) group_right () {activity})"
    since_gone = f"time() - max by (run_id) (last_over_time({activity}[$__range]))"
    return number(
        "Last sign of life",
        "Time since the last step, micro-batch, evaluation batch or phase, by the clock of the machine that trains. "
        "Normal is less than a step; a run counts as stalled only past its own learned deadline (see Health).",
        instant(f"{own_clock} or {since_gone}"),
        unit=units.Seconds,
        decimals=1,
    )


def _last_known(metric: str) -> str:
    """The value now; of a run that nothing reports any more, the last one."""
    selector = f"{metric}{{{RUN}}}"
    return f"max by (run_id) ({selector}) or max by (run_id) (last_over_time({selector}[$__range]))"


def _progress() -> Panel:
    panel = number(
        "Progress",
        "Share of all steps of the run that is done, and the step it is at, earlier sessions included. The share is "
        "left out while the total is unknown.",
        instant(_last_known("tunewatch_progress_ratio"), "done"),
        instant(_last_known("tunewatch_step"), "step", "B"),
        unit=units.PercentUnit,
        decimals=1,
    )
    whole_steps = [
        model.DynamicConfigValue(id_val="unit", value=STEPS),
        model.DynamicConfigValue(id_val="decimals", value=0),
    ]
    return panel.text_mode(BigValueTextMode.VALUE).override_by_query("B", whole_steps)


def _time_left() -> Panel:
    return number(
        "Time left",
        "Estimate from the recent pace of this session, evaluation and saving included. No data before there is a "
        "pace, and after the end.",
        instant(f"max by (run_id) (tunewatch_eta_seconds{{{RUN}}})"),
        unit=units.Seconds,
        decimals=1,
    )


def _not_saved() -> str:
    step = f"max by (run_id) (tunewatch_step{{{RUN}}})"
    saved = f"max by (run_id) (tunewatch_checkpoint_last_step{{{RUN}}})"
    none_saved = f"max by (run_id) (tunewatch_checkpoints_present{{{RUN}}}) == 0"
    return f"{step} - ({saved} or {none_saved})"


def _work_at_risk() -> Panel:
    step, saved, present = map(
        _last_known,
        ("tunewatch_step", "tunewatch_checkpoint_last_step", "tunewatch_checkpoints_present"),
    )
    return number(
        "Work at risk",
        "Steps since the newest complete checkpoint: what a crash now would cost, and after the end what it did cost. "
        "Normal is at most the save interval.",
        instant(f"({step}) - ({saved} or ({present}) == 0)"),
        unit=STEPS,
        decimals=0,
    )


def _room_for_checkpoints() -> Panel:
    free = f"max by (run_id) (tunewatch_output_free_bytes{{{RUN}}})"
    size = f"max by (run_id) (tunewatch_checkpoint_size_bytes{{{RUN}}})"
    return number(
        "Room on disk",
        "How many more checkpoints of the size of the newest one fit. Below 2, free space or keep fewer.",
        instant(f"floor({free} / ({size} > 0))"),
        unit="suffix: checkpoints",
        decimals=0,
    )


# Does it learn?


def _loss() -> Panel:
    return lines(
        "Loss",
        "Training and evaluation loss as last logged. Normal is a fall that flattens; evaluation rising while training "
        "falls is overfitting. NaN leaves a gap, also where the trainer logs 0 in its place: see the timeline below.",
        series(f"max by (run_id) (tunewatch_loss{{{RUN}}}) unless on (run_id) {_made_up()}", "training"),
        series(f"max by (run_id, dataset) (tunewatch_eval_loss{{{RUN}}})", "evaluation ({{dataset}})", "B"),
        unit=units.Short,
        colors={"^training": palette.FIRST, "^evaluation": palette.SECOND},
    )


def _made_up() -> str:
    """Holds while the trainer replaces the losses of steps that were not finite, mostly by 0, in what it logs."""
    streak = f"max by (run_id) (tunewatch_nonfinite_streak{{{RUN}}}) > 0"
    filtered = f"max by (run_id) (tunewatch_nan_filter_active{{{RUN}}}) == 1"
    return f"({streak} and on (run_id) {filtered})"


def _gradient_norm() -> Panel:
    return lines(
        "Gradient norm",
        "Norm before clipping, of the last step of each logging window; logarithmic. Normal is a steady band; a rise "
        "over orders of magnitude comes before divergence.",
        series(f"max by (run_id) (tunewatch_grad_norm{{{RUN}}})", "gradient norm"),
        unit=units.Short,
        log=True,
        colors={"gradient": palette.FIRST},
    )


def _learning_rate() -> Panel:
    return lines(
        "Learning rate",
        "As last logged, first parameter group. Normal is the warm-up and decay that the settings ask for.",
        series(f"max by (run_id) (tunewatch_learning_rate{{{RUN}}})", "learning rate"),
        unit=units.ScientificNotation,
        colors={"learning": palette.FIRST},
    ).decimals(2)


def _timeline() -> Panel:
    codes = " or ".join(
        f'{code} * (tunewatch_run_state{{{RUN}, state="{state}"}} == 1)'
        for state, code in STATE_CODES.items()
    )
    queries = [
        # Two endpoints may disagree for a moment after a restart: the state that has not ended is the newer one.
        series(f"min by (run_id) ({codes})", "state"),
        series(f"3 * (max by (run_id) (tunewatch_nonfinite_streak{{{RUN}}}) > bool 0)", "steps", "B"),
        series(f"4 + 0 * {_made_up()} or {_is_nonfinite('tunewatch_loss')}", "logged loss", "C"),
        series(_is_nonfinite("tunewatch_grad_norm"), "gradient norm", "D"),
    ]
    for ref, level, code in (("E", "bad", 2), ("F", "attention", 1)):
        names = "|".join(name for name, its_level in SIGNALS.items() if its_level == level)
        health = f'tunewatch_health{{{RUN}, signal=~"{names}"}}'
        held = f"max by (signal) (max_over_time({health}[$__range])) == 1"
        queries.append(
            series(f"{code} * max by (signal) ({health}) and on (signal) ({held})", "{{signal}}", ref)
        )
    # The many that never held are one row: the level, which is 0 while none holds.
    queries.append(series(f"max by (run_id) (tunewatch_health_level{{{RUN}}})", "health", "G"))
    return timeline(
        "State, NaN and health signals",
        "The state; whether steps and logged values are numbers; the supervisor's verdict, and each signal that held "
        "in the time shown. Normal is “ok” in all rows; a gap is a time without data, not a good one.",
        *queries,
        values={
            0: ("ok", "dark-green"),
            1: ("attention", palette.ATTENTION),
            2: ("bad", palette.FAILURE),
            3: ("NaN or infinite", palette.FAILURE),
            4: ("replaced", palette.ATTENTION),
            **{code: (state, palette.STATES[state]) for state, code in STATE_CODES.items()},
        },
    )


def _is_nonfinite(metric: str) -> str:
    """3 where the value is NaN or infinite, 0 where it is a number. No comparison with a NaN is ever true."""
    value = f"max by (run_id) ({metric}{{{RUN}}})"
    return f"3 * (({value} - {value}) != bool 0)"


def _bad_steps() -> Panel:
    nonfinite = f"max by (what) (increase(tunewatch_nonfinite_steps_total{{{RUN}}}[$__rate_interval]))"
    skipped = (
        f"max by (run_id) (increase(tunewatch_optimizer_steps_skipped_total{{{RUN}}}[$__rate_interval]))"
    )
    panel = lines(
        "Bad steps",
        "Steps whose loss or gradient norm was NaN or infinite, and steps that the fp16 loss scaler skipped, about how "
        "many in each interval. Normal is none; a skipped step now and then is harmless.",
        series(nonfinite, "{{what}}"),
        series(skipped, "skipped (fp16)", "B"),
        unit=units.Short,
        colors={
            "^loss": palette.FAILURE,
            "^grad_norm": palette.FAILURE_DARK,
            "^eval_loss": palette.FAILURE_LIGHT,
            "^skipped": palette.THIRD,
        },
    )
    return bars(panel.min(0).axis_soft_max(1).legend(plain_legend()))


# How fast is it?


def _tokens_per_second() -> Panel:
    panel = lines(
        "Tokens per second",
        "Mean of 5 minutes. The distance between the two lines is padding, paid for and not learned from. Normal is a "
        "steady line with dips for evaluation and saving.",
        series(f"max by (kind) (run_kind:tunewatch_tokens:rate5m{{{RUN}}})", "{{kind}}"),
        unit=units.Short,
        colors={"^all": palette.SECOND, "^non_padding": palette.FIRST},
    )
    return panel.min(0)


def _step_time() -> Panel:
    return histogram_over_time(
        "Step time",
        "How many steps took how long; evaluation and saving are taken out. Normal is one narrow band.",
        buckets(f"max by (le) (increase(tunewatch_step_duration_seconds_bucket{{{RUN}}}[$__rate_interval]))"),
        unit=units.Seconds,
    )


def _phases() -> Panel:
    rate = f"max by (phase) (rate(tunewatch_phase_seconds_total{{{RUN}}}[$__rate_interval]))"
    panel = lines(
        "Where the time went",
        "Share of the time by what the training was busy with. Normal is mostly compute; much data means that the GPU "
        "waits for the input pipeline.",
        series(rate, "{{phase}}"),
        unit=units.PercentUnit,
        colors={f"^{phase}$": color for phase, color in palette.PHASES.items()},
    )
    return stacked(panel.min(0).max(1)).legend(plain_legend())


# What does it do to its GPUs?


def _joined(per_gpu: str) -> str:
    """A value of each GPU (one series a uuid) for the GPUs of the run only; label `gpu` ends the uuid."""
    mine = f"max by (run_id, uuid) (tunewatch_run_gpu_info{{{RUN}}})"
    return f'label_replace({mine} * on (uuid) group_left () {per_gpu}, "gpu", "…$1", "uuid", ".*-([^-]+)")'


def _of_gpu(metric: str) -> str:
    return _joined(f"max by (uuid) ({metric})")


def _gpu_utilization() -> Panel:
    panel = lines(
        "GPU utilisation",
        "Share of time in which any kernel ran. Normal is close to 100 %; it says nothing about how well they ran.",
        series(_of_gpu("tunewatch_gpu_utilization_ratio"), "{{gpu}}"),
        unit=units.PercentUnit,
        no_value=NO_GPU,
    )
    return panel.min(0).max(1)


def _gpu_memory() -> Panel:
    panel = lines(
        "GPU memory",
        "In use by all processes on the GPU, against what it has. Near the limit is normal for a caching allocator.",
        series(_of_gpu("tunewatch_gpu_memory_used_bytes"), "used {{gpu}}"),
        series(_of_gpu("tunewatch_gpu_memory_total_bytes"), "total {{gpu}}", "B"),
        unit=units.BytesIEC,
        colors={"^total": palette.LIMIT},
        no_value=NO_GPU,
    )
    return panel.min(0)


def _gpu_power() -> Panel:
    panel = lines(
        "GPU power",
        "Draw of the board, against its limit. Normal for training is well above idle; low power at high utilisation "
        "means kernels that wait.",
        series(_of_gpu("tunewatch_gpu_power_watts"), "draw {{gpu}}"),
        series(_of_gpu("tunewatch_gpu_power_limit_watts"), "limit {{gpu}}", "B"),
        unit=units.Watt,
        colors={"^limit": palette.LIMIT},
        no_value=NO_GPU,
    )
    return panel.min(0)


def _gpu_temperature() -> Panel:
    hottest = 'max by (uuid) (tunewatch_gpu_temperature_celsius{sensor="%s"})'
    return lines(
        "GPU temperature",
        "Of the chip and, where it is measured, of its memory. Normal is a plateau below the GPU's slowdown limit.",
        series(_joined(hottest % "gpu"), "chip {{gpu}}"),
        series(_joined(hottest % "memory"), "memory {{gpu}}", "B"),
        unit=units.Celsius,
        colors={"^chip": palette.FIRST, "^memory": palette.SECOND},
        no_value=NO_GPU,
    )


def _energy_per_token() -> Panel:
    panel = lines(
        "Energy per token",
        "Energy of the run's GPUs for each token that is not padding, mean of 5 minutes. Normal is a steady line; it "
        "rises when the GPUs wait. No data while one of the GPUs tells nothing.",
        series(
            f"max by (run_id) (run:tunewatch_gpu_energy_joules_per_token:rate5m{{{RUN}}})", "energy per token"
        ),
        unit=units.Joule,
        colors={"energy": palette.FIRST},
        no_value=NO_GPU,
    )
    return panel.min(0)


def _gpus() -> Panel:
    names = {"index": "#", "name": "Name", "uuid": "UUID"}
    panel = columns_table(
        "GPUs",
        "Which GPUs the run uses, while it lives. None are listed when the training uses the CPU.",
        f"max by ({', '.join(names)}) (tunewatch_gpu_info and on (uuid) tunewatch_run_gpu_info{{{RUN}}})",
        names,
        NO_GPU,
    )
    for column, width in (("#", 40), ("Name", 160)):
        panel = panel.override_by_name(column, [model.DynamicConfigValue(id_val="custom.width", value=width)])
    return panel


# Is it safe?


def _steps_not_saved() -> Panel:
    panel = lines(
        "Steps since the last checkpoint",
        "What a crash would have cost at each moment, against the save interval. Normal is a saw with teeth as high as "
        "the interval.",
        series(_not_saved(), "not saved"),
        series(f"max by (run_id) (tunewatch_checkpoint_interval_steps{{{RUN}}})", "save interval", "B"),
        unit=STEPS,
        colors={"^not": palette.FIRST, "^save": palette.LIMIT},
    )
    return panel.min(0)


def _disk() -> Panel:
    return lines(
        "Disk",
        "Free space where the run writes, and the size of its newest checkpoint; logarithmic. Free must stay above "
        "the size.",
        series(f"max by (run_id) (tunewatch_output_free_bytes{{{RUN}}})", "free"),
        series(f"max by (run_id) (tunewatch_checkpoint_size_bytes{{{RUN}}})", "newest checkpoint", "B"),
        unit=units.BytesSI,
        log=True,
        colors={"^free": palette.FIRST, "^newest": palette.SECOND},
    )


def _process_memory() -> Panel:
    panel = lines(
        "Memory of the training process",
        "On its GPU (allocated, reserved, peak) and on the host (rss), by rank. Normal is flat after the first steps; "
        "a steady rise is a leak.",
        series(f"max by (rank, kind) (tunewatch_process_memory_bytes{{{RUN}}})", "{{kind}}, rank {{rank}}"),
        unit=units.BytesIEC,
    )
    return panel.min(0)


# What is it?


def _newest_info(metric: str, labels: tuple[str, ...]) -> str:
    kept = ", ".join(("run_id", *labels))
    now = f"max by ({kept}) ({metric}{{{RUN}}})"
    return f"topk(1, {now} or on () max by ({kept}) (last_over_time({metric}{{{RUN}}}[$__range])))"


def _ending() -> Panel:
    info = f"last_over_time(tunewatch_run_end_info{{{RUN}}}[$__range])"
    moment = f"last_over_time(tunewatch_run_end_timestamp_seconds{{{RUN}}}[$__range])"
    ends = f"{info} * on (run_id, job, instance) group_left () {moment}"
    columns = {
        "state": "State",
        "reason": "Reason",
        "when": "When",
        "Value": "Ended",
    }
    panel = columns_table(
        "How it ended",
        "The supervisor's word about the end. “Early” is within the first steps of a session: suspect the settings.",
        f"1000 * max by (run_id, state, reason, when) ({ends})",
        columns,
        "no end seen in this time range",
    )
    return panel.override_by_name("Ended", [model.DynamicConfigValue(id_val="unit", value=units.DatetimeISO)])


def _configuration() -> Panel:
    return label_table(
        "Configuration",
        "The settings that matter, as they took effect. Unknown settings are left out.",
        _newest_info("tunewatch_run_info", INFO_LABELS),
        {label: label.replace("_", " ") for label in ("run_id", *INFO_LABELS)},
        "no data",
    )


def _environment() -> Panel:
    return label_table(
        "Environment",
        "Versions of the libraries of the training process.",
        _newest_info("tunewatch_run_environment_info", ENVIRONMENT_LABELS),
        {"run_id": "run id"},
        "no data",
    )

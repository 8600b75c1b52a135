"""The provisioned Grafana: what its files say, and that every query of the dashboard finds data of a real run."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grafana_lint
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from harness import Machine, wait_for

from tunewatch.health import SIGNALS
from tunewatch.metrics import METRIC_NAMES, STEP_DURATION
from tunewatch.stack import Stack, add_static_target, fetch
from tunewatch_gpu.metrics import METRICS as GPU_METRICS
from tunewatch_gpu.simulated import simulated_uuid

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "grafana"
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))

sys.path.insert(0, str(GRAFANA / "src"))

from tunewatch_dashboards.document import to_json  # noqa: E402
from tunewatch_dashboards.run import UID, VARIABLE, run_dashboard  # noqa: E402

JSON_FILE = GRAFANA / "dashboards" / f"{UID}.json"
BOARD: dict[str, Any] = json.loads(JSON_FILE.read_text(encoding="utf-8"))


def panel(title: str) -> grafana_lint.Json:
    return next(panel for panel in grafana_lint.panels(BOARD) if panel["title"] == title)


def expression(title: str, ref: str = "A") -> str:
    return next(target["expr"] for target in panel(title)["targets"] if target["refId"] == ref)


# The files


def test_the_committed_dashboard_is_what_the_builder_writes() -> None:
    assert JSON_FILE.read_text(encoding="utf-8") == to_json(run_dashboard()), (
        "write it anew: PYTHONPATH=grafana/src python -m tunewatch_dashboards"
    )
    assert [path.name for path in (GRAFANA / "dashboards").iterdir()] == [JSON_FILE.name]


def test_the_dashboard_is_what_links_and_people_rely_on() -> None:
    assert {
        key: BOARD[key] for key in ("uid", "title", "tags", "schemaVersion", "refresh", "graphTooltip")
    } == {
        "uid": "tunewatch-run",
        "title": "tunewatch / Run",
        "tags": ["tunewatch"],
        "schemaVersion": 42,
        "refresh": "30s",
        "graphTooltip": 1,
    }
    links = [
        rule["annotations"]["dashboard_url"]
        for file in RULES
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "run_id" in rule.get("annotations", {}).get("dashboard_url", "")
    ]
    assert links
    for link in links:
        assert f"/d/{UID}?var-{VARIABLE}={{{{ $labels.run_id }}}}" in link


def test_the_curve_and_the_card_stand_on_one_page() -> None:
    """Loss, temperature and memory of the GPU over one time axis: a loss that falls off a hot card is seen at once."""
    drawn = {
        name
        for panel in grafana_lint.panels(BOARD)
        if panel["type"] == "timeseries"
        for name in re.findall(r"tunewatch_[a-z_]+", json.dumps(panel["targets"]))
    }
    assert {
        "tunewatch_loss", "tunewatch_eval_loss", "tunewatch_grad_norm", "tunewatch_learning_rate",
        "tunewatch_gpu_temperature_celsius", "tunewatch_gpu_memory_used_bytes", "tunewatch_gpu_utilization_ratio",
    } <= drawn  # fmt: skip


def test_a_round_trip_through_grafanas_schema_loses_nothing() -> None:
    register_default_plugins()
    after = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(BOARD))))
    assert after == BOARD


def test_the_lint_finds_nothing() -> None:
    assert grafana_lint.lint(BOARD) == []


def _set(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(board: Any) -> None:
        for key in path[:-1]:
            board = board[key]
        board[path[-1]] = value

    return change


def _expr(expr: str) -> Callable[[dict[str, Any]], None]:
    return _set("panels", 0, "targets", 0, "expr", value=expr)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_set("id", value=3), "id must be absent"),
        (_set("editable", value=True), "editable"),
        (_set("__inputs", value=[]), "__inputs"),
        (_set("templating", "list", 1, "refresh", value=1), "must refresh"),
        (_set("panels", 0, "id", value=2), "has the id of"),
        (_set("panels", 0, "gridPos", value={"x": 20, "y": -4, "w": 6, "h": 4}), "wider than the grid"),
        (_set("panels", 0, "gridPos", value={"x": 5, "y": 2, "w": 6, "h": 1}), "'Health' overlaps 'State'"),
        (_set("panels", 0, "type", value="graph"), "type graph"),
        (_set("panels", 0, "description", value=""), "describes it"),
        (_set("panels", 0, "fieldConfig", "defaults", "noValue", value="0"), "noValue"),
        (_set("panels", 0, "fieldConfig", "defaults", "unit", value="Tokens"), "no unit 'Tokens'"),
        (_set("panels", 0, "datasource", "uid", value="${DS_PROMETHEUS}"), "datasource is not the variable"),
        (_expr("max(tunewatch_step{run_id='$run'})"), "unknown variables ['run']"),
        (_expr("max(tunewatch_step"), "panel 'State' A:"),
        (_expr("max(tunewatch_step)"), ""),
        (_expr("tunewatch_step"), "tunewatch_step is not aggregated"),
        (_expr("max(rate(tunewatch_steps_total[5m]))"), "fixed range ['5m']"),
        (_expr("max(tunewatch_steps_total)"), "counter tunewatch_steps_total"),
    ],
)
def test_the_lint_notices(change: Callable[[dict[str, Any]], None], complaint: str) -> None:
    board = copy.deepcopy(BOARD)
    change(board)
    found = grafana_lint.lint(board)
    assert len(found) == bool(complaint), found
    assert complaint in "".join(found)


def test_every_metric_of_the_dashboard_is_one_that_somebody_exposes_or_records() -> None:
    recorded = {
        rule["record"]
        for file in RULES
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
        if "record" in rule
    }
    known = METRIC_NAMES | {metric.name for metric in GPU_METRICS} | recorded
    known |= {STEP_DURATION + suffix for suffix in ("_bucket", "_sum", "_count")} | {"ALERTS"}
    values = dict.fromkeys(("run_id", "__rate_interval", "__range"), "1m")
    used = {
        selector.metric
        for query in grafana_lint.queries(BOARD)
        for selector in grafana_lint.selectors(grafana_lint.expand(query.expr, values))
    }
    assert used - known == set()


def test_red_is_for_failure_only() -> None:
    red = re.compile(r"(dark-|light-|semi-dark-|super-light-)?red")
    for each in grafana_lint.panels(BOARD):
        for override in each.get("fieldConfig", {}).get("overrides", ()):
            if red.fullmatch(
                json.dumps(override["properties"]).partition('"fixedColor": "')[2].partition('"')[0]
            ):
                assert re.search("bad|failed|critical|stalled|loss|grad_norm", override["matcher"]["options"])


def test_provisioning_names_what_the_dashboard_and_the_stack_use() -> None:
    (sources,) = (GRAFANA / "provisioning" / "datasources").iterdir()
    prometheus, alertmanager = yaml.safe_load(sources.read_text(encoding="utf-8"))["datasources"]
    preselected = BOARD["templating"]["list"][0]["current"]["value"]
    scrape_interval = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))

    assert (prometheus["uid"], prometheus["url"]) == (preselected, "$TUNEWATCH_PROMETHEUS_URL")
    assert prometheus["jsonData"]["timeInterval"] == scrape_interval["global"]["scrape_interval"]
    assert (alertmanager["uid"], alertmanager["url"]) == (
        "tunewatch-alertmanager",
        "$TUNEWATCH_ALERTMANAGER_URL",
    )
    assert alertmanager["jsonData"] == {"implementation": "prometheus", "handleGrafanaManagedAlerts": False}
    assert prometheus["editable"] is alertmanager["editable"] is False

    (providers,) = (GRAFANA / "provisioning" / "dashboards").iterdir()
    (provider,) = yaml.safe_load(providers.read_text(encoding="utf-8"))["providers"]
    assert (provider["folder"], provider["allowUiUpdates"]) == ("tunewatch", False)
    assert provider["options"]["path"] == "$TUNEWATCH_DASHBOARDS"


# What the panels say: their own expressions on series whose answer is known


@dataclass(frozen=True)
class Case:
    """`series` are metrics (run_id="a" is added) with promtool values, a minute apart; asked at minute 20."""

    name: str
    panel: str
    series: dict[str, str]
    expected: dict[str, float]
    ref: str = "A"


_SIGNALS = tuple(SIGNALS)
_LAST_SEEN = "run_state:tunewatch_run_state:last_seen"
_LAST_END = "run_state_reason:tunewatch_run_end_info:last_seen"
_GONE = "0x5 stale"

CASES = [
    Case(
        "a live run",
        "State",
        {
            'tunewatch_run_state{state="training"}': "1x30",
            'tunewatch_run_state{state="failed"}': "0x30",
            _LAST_SEEN + '{state="preparing"}': "60 120 stale",
            _LAST_END + '{state="failed", reason="oom_gpu"}': "0 stale",
        },
        {'{state="training"}': 1},
    ),
    Case(
        "an ended run, while its endpoint lingers",
        "State",
        {
            'tunewatch_run_state{state="failed"}': "1x30",
            'tunewatch_run_end_info{state="failed", reason="oom_gpu", when="early"}': "1x30",
        },
        {'{state="failed", reason="oom_gpu"}': 1},
    ),
    Case(
        "resumed while the endpoint of the failed session lingers",
        "State",
        {
            'tunewatch_run_state{state="training", instance="new"}': "1x30",
            'tunewatch_run_state{state="failed", instance="old"}': "1x30",
            'tunewatch_run_end_info{state="failed", reason="oom_gpu", instance="old"}': "1x30",
        },
        {'{state="training"}': 1},
    ),
    Case(
        "killed with its supervisor: not called training any more",
        "State",
        {
            'tunewatch_run_state{state="training"}': "1x5 stale",
            _LAST_SEEN + '{state="preparing"}': "60 stale",
            _LAST_SEEN + '{state="training"}': "60 120 180 240 300 stale",
        },
        {'{state="silent, was training"}': 300},
    ),
    Case(
        "ended, and its endpoint is gone",
        "State",
        {
            _LAST_SEEN + '{state="training"}': "60 120 180 stale",
            _LAST_SEEN + '{state="failed"}': "_ _ _ 240 300 stale",
            _LAST_END + '{state="failed", reason="nan"}': "_ _ _ 240 300 stale",
        },
        {'{state="failed", reason="nan"}': 300},
    ),
    Case("never seen", "State", {}, {}),
    Case(
        "all is well",
        "Health",
        {
            "tunewatch_health_level": "0x30",
            **{f'tunewatch_health{{signal="{name}"}}': "0x30" for name in _SIGNALS},
        },
        {'{signal="ok", run_id="a"}': 0},
    ),
    Case(
        "two signals",
        "Health",
        {
            "tunewatch_health_level": "2x30",
            'tunewatch_health{signal="nonfinite"}': "1x30",
            'tunewatch_health{signal="eval_nonfinite"}': "1x30",
            'tunewatch_health{signal="stalled"}': "0x30",
        },
        {'{signal="bad: nonfinite"}': 1, '{signal="attention: eval_nonfinite"}': 1},
    ),
    Case("nobody judges", "Health", {'tunewatch_run_state{state="training"}': "1x30"}, {}),
    Case("rules not loaded", "Alerts", {}, {}),
    Case(
        "rules loaded, nothing fires",
        "Alerts",
        {'ALERTS{alertname="TunewatchWatchdog", alertstate="firing", severity="none", run_id=""}': "1x30"},
        {'{alertname="none"}': 1},
    ),
    Case(
        "by the exporter's own clock, which is an hour ahead here",
        "Last sign of life",
        {
            'tunewatch_time_seconds{instance="i", run_id=""}': "3600+60x30",
            'tunewatch_last_activity_timestamp_seconds{instance="i"}': "4780x30",
        },
        {'{run_id="a"}': 20},
    ),
    Case(
        "the endpoint is gone",
        "Last sign of life",
        {'tunewatch_last_activity_timestamp_seconds{instance="i"}': "290x5 stale"},
        {'{run_id="a"}': 910},
    ),
    Case(
        "steps since the checkpoint, seen at two endpoints",
        "Work at risk",
        {
            'tunewatch_step{instance="i"}': "120x30",
            'tunewatch_step{instance="j"}': "120x30",
            "tunewatch_checkpoint_last_step": "100x30",
        },
        {'{run_id="a"}': 20},
    ),
    Case(
        "no checkpoint at all",
        "Work at risk",
        {"tunewatch_step": "120x30", "tunewatch_checkpoints_present": "0x30"},
        {'{run_id="a"}': 120},
    ),
    Case(
        "after the end: what was lost",
        "Work at risk",
        {"tunewatch_step": "100 120 stale", "tunewatch_checkpoint_last_step": "100 100 stale"},
        {'{run_id="a"}': 20},
    ),
    Case("checkpoints unknown", "Work at risk", {"tunewatch_step": "120x30"}, {}),
    Case(
        "a loss that the trainer made up is no loss",
        "Loss",
        {
            "tunewatch_loss": "0x30",
            "tunewatch_nonfinite_streak": "3x30",
            "tunewatch_nan_filter_active": "1x30",
        },
        {},
    ),
    Case(
        "a loss of 0 may be real",
        "Loss",
        {
            "tunewatch_loss": "0x30",
            "tunewatch_nonfinite_streak": "0x30",
            "tunewatch_nan_filter_active": "1x30",
        },
        {'{run_id="a"}': 0},
    ),
    *(
        Case(
            f"a loss of {loss}",
            "State, NaN and health signals",
            {"tunewatch_loss": " ".join([loss] * 30)},
            {'{run_id="a"}': code},
            "C",
        )
        for loss, code in (("NaN", 3), ("+Inf", 3), ("-Inf", 3), ("2.5", 0), ("0", 0))
    ),
    Case(
        "a loss that the trainer made up",
        "State, NaN and health signals",
        {
            "tunewatch_loss": "0x30",
            "tunewatch_nonfinite_streak": "3x30",
            "tunewatch_nan_filter_active": "1x30",
        },
        {'{run_id="a"}': 4},
        "C",
    ),
    Case(
        "joined on the uuid; other GPUs and other runs stay out",
        "GPU power",
        {
            'tunewatch_run_gpu_info{rank="0", uuid="GPU-1-aa", instance="i"}': "1x30",
            'tunewatch_run_gpu_info{rank="0", uuid="GPU-1-aa", instance="j"}': "1x30",
            'tunewatch_run_gpu_info{rank="0", uuid="GPU-1-bb", run_id="b"}': "1x30",
            'tunewatch_gpu_power_watts{uuid="GPU-1-aa", run_id=""}': "300x30",
            'tunewatch_gpu_power_watts{uuid="GPU-1-bb", run_id=""}': "200x30",
        },
        {'{run_id="a", uuid="GPU-1-aa", gpu="…aa"}': 300},
    ),
    Case(
        "what is no checkpoint yet has no room",
        "Room on disk",
        {"tunewatch_output_free_bytes": "1050x30", "tunewatch_checkpoint_size_bytes": "0x30"},
        {},
    ),
    Case(
        "ten and a half fit",
        "Room on disk",
        {"tunewatch_output_free_bytes": "1050x30", "tunewatch_checkpoint_size_bytes": "100x30"},
        {'{run_id="a"}': 10},
    ),
]


def _of_run_a(series: str) -> str:
    if "run_id=" in series:
        return re.sub(r',? ?run_id=""', "", series)
    name, brace, labels = series.partition("{")
    return f'{name}{{run_id="a"{", " + labels if brace else "}"}'


def test_panels_say_the_right_thing(tmp_path: Path) -> None:
    values = {"run_id": "a", "__range": "1h", "__rate_interval": "5m"}
    tests = [
        {
            "interval": "1m",
            "name": case.name,
            "input_series": [{"series": _of_run_a(s), "values": v} for s, v in case.series.items()],
            "promql_expr_test": [
                {
                    "expr": grafana_lint.expand(expression(case.panel, case.ref), values),
                    "eval_time": "20m",
                    "exp_samples": [{"labels": k, "value": v} for k, v in case.expected.items()],
                }
            ],
        }
        for case in CASES
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}), encoding="utf-8")
    outcome = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


# On a real Prometheus that scrapes a real run


class Prometheus:
    """Asks a Prometheus as Grafana would, for one run and the time since `start`."""

    def __init__(self, url: str, run_id: str, start: float) -> None:
        self._url = url
        self._start = start
        self._values = {"run_id": run_id, "__rate_interval": "20s", "__range": "10m"}

    def ask(self, query: grafana_lint.Query) -> list[dict[str, Any]]:
        """The series a query finds now (instant) or since the start."""
        parameters: dict[str, Any] = {"query": grafana_lint.expand(query.expr, self._values)}
        if not query.instant:
            parameters |= {"start": self._start, "end": time.time(), "step": 1}
        path = "query" if query.instant else "query_range"
        answer = json.loads(fetch(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))
        return answer["data"]["result"]

    def wait_for_data(self, queries: list[grafana_lint.Query]) -> None:
        """Until every query finds a series; fails with those that do not."""

        def missing() -> list[grafana_lint.Query]:
            return [query for query in queries if not self.ask(query)]

        with contextlib.suppress(AssertionError):
            wait_for(lambda: not missing(), seconds=60)
        assert missing() == []


@pytest.fixture
def gpu_of_the_run() -> Iterator[str]:
    """An endpoint that says the run uses the simulated GPU, as a training on a GPU would; its address."""
    text = f'tunewatch_run_gpu_info{{run_id="watched",rank="0",uuid="{simulated_uuid(0)}"}} 1\n'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[str]:
    """A GPU sidecar with one simulated GPU; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", "from tunewatch_gpu.cli import main; raise SystemExit(main())"]
    flags = ["--backend", "simulated", "--interval", "1", "--web.listen-address", address]
    with (tmp_path / "sidecar.log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], env={"TUNEWATCH_GPU_SIMULATE": "1"}, stderr=log)
    yield address
    process.terminate()
    process.wait(10)


def test_every_query_finds_data_of_a_real_run(machine: Machine, sidecar: str, gpu_of_the_run: str) -> None:
    """A training whose weights turn into NaN: it has losses, checkpoints, signals, an alert and, at last, an end."""
    start = time.time()
    with Stack(machine.home, time_scale=15.0) as stack:  # a scrape a second
        for address in (sidecar, gpu_of_the_run):
            add_static_target(machine.home, "gpu", address)
        command = machine.exec_tiny(
            *("--steps", "2000", "--step-seconds", "0.2", "--logging-steps", "1", "--poison-at", "20"),
            options=("--run-id", "watched", "--name", "a run to watch", "--grace", "1s"),
        )
        prometheus = Prometheus(stack.prometheus_url, "watched", start)
        at_the_end = {panel("How it ended")["id"]}
        alive = [q for q in grafana_lint.panel_queries(BOARD) if q.panel_id not in at_the_end]
        # No warning fires for this run: that its alert would be marked is the critical one's to show.
        marks = [q for q in grafana_lint.annotation_queries(BOARD) if 'severity="warning"' not in q.expr]
        choices = list(grafana_lint.variable_queries(BOARD))

        wait_for(lambda: prometheus.ask(marks[0]), seconds=180, what="a critical alert for the run")
        prometheus.wait_for_data([*alive, *marks, *choices])
        _assert_the_run_can_be_chosen(prometheus.ask(choices[0]))

        command.send(2)  # SIGINT: cancelled
        ended = [q for q in grafana_lint.panel_queries(BOARD) if q.panel_id in at_the_end]
        prometheus.wait_for_data(ended)
        (state,) = [q for q in alive if q.where == "panel 'State' A"]
        assert [series["metric"] for series in prometheus.ask(state)] == [
            {"state": "cancelled", "reason": "cancelled"}
        ]
        command.wait()


def _assert_the_run_can_be_chosen(found: list[dict[str, Any]]) -> None:
    """The variable's regular expression finds value and text in what Grafana makes of a query_result()."""
    pattern = BOARD["templating"]["list"][1]["regex"].strip("/").replace("(?<", "(?P<")
    (labels,) = [series["metric"] for series in found]
    option = "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "} 1 1700000000000"
    match = re.search(pattern, option)
    assert match
    assert match.groupdict() == {"value": "watched", "text": "watched · a run to watch"}

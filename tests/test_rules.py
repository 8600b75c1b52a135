"""The shipped Prometheus files: valid, complete, documented, and the same elsewhere and at another speed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunewatch.health import SIGNALS
from tunewatch.rules import (
    GRAFANA_URL,
    RUNBOOK_URL,
    alertmanager_config,
    prometheus_config,
    render_rules,
    scale_durations,
)
from tunewatch.share import share_path
from tunewatch.states import LIVE, TRAINING, VALIDATING
from tunewatch_gpu.metrics import METRICS as GPU_METRICS

ROOT = Path(__file__).resolve().parents[1]
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
RULE_TESTS = sorted((ROOT / "prometheus" / "tests").glob("*.yml"))
RUNBOOKS = ROOT / "docs" / "runbooks"

# What a woken person needs to read, whatever becomes of the wording around it.
CORRECTIVE_WORDS = {
    "TunewatchRunNonFinite": ("stop", "resume from the last checkpoint before", "lower learning rate"),
    "TunewatchRunStalled": ("what its process waits for", "before you kill it"),
    "TunewatchRunFailed": ("reason", "verdict.json", "resume"),
    "TunewatchRunPreempted": ("resume it from its last complete checkpoint",),
    "TunewatchRunVanished": ("supervisor was killed", "tunewatch adopt"),
    "TunewatchTargetDown": ("restart it", "remove its file"),
    "TunewatchClockSkew": ("synchronise",),
    "TunewatchNonFiniteIsolated": ("batch", "learning rate"),
    "TunewatchResumeLost": ("resume from a complete checkpoint", "accept"),
    "TunewatchRunNotLearning": ("not give a good model", "what to change"),
    "TunewatchRunNeedsAttention": ("before you trust the result", "what to do"),
    "TunewatchRunFinished": ("review its samples",),
    "TunewatchWatchdog": ("dead man's switch",),
    "TunewatchGpuLost": ("stop what hangs", "xid in the kernel log", "reset", "reboot"),
    "TunewatchGpuSidecarBlind": ("nvidia-smi", "driver", "restart the sidecar"),
    "TunewatchGpuIdleWhileTraining": ("data loading", "disk", "cpu", "rank"),
    "TunewatchGpuResetRequired": ("stop what uses it", "nvidia-smi --gpu-reset", "reboot"),
    "TunewatchGpuResetDue": ("may go on", "reset the card before the next run"),
    "TunewatchGpuRemapFailed": ("reset does not help", "another card", "replaced"),
    "TunewatchGpuEccUncorrected": ("from a checkpoint of before", "reset the card", "replaced"),
    "TunewatchGpuXidCritical": ("stop what hangs", "kernel log", "reset the card or reboot"),
    "TunewatchGpuXidWarning": ("kernel log", "resume"),
    "TunewatchGpuThrottled": ("fans", "air flow", "power supply"),
    "TunewatchGpuHot": ("fans", "air flow", "power limit"),
    "TunewatchGpuHang": ("before you stop it", "resume it from its last complete checkpoint"),
    "TunewatchGpuBusyWithStrangers": ("nvidia-smi", "end or move them"),
    "TunewatchGpuMemoryNearEnd": ("lower the batch size or max_length",),
    "TunewatchProbeErrors": ("free space", "update tunewatch", "writes to its run folder"),
    "TunewatchGpuReadingsStale": ("nvidia-smi", "lengthen --interval"),
    "TunewatchNotificationsFailing": (
        "mend the address, the secret or the network",
        "look at the page of alerts",
    ),
    "TunewatchRuleFailures": ("page of rules", "mend the rule"),
    "TunewatchConfigReloadFailed": ("promtool check config", "amtool check-config"),
}

USES_THE_GPU = {"TunewatchGpuIdleWhileTraining"}


def _binary(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.fail(f"none of {', '.join(names)} is on PATH: install the prometheus package to run this test")


def _promtool(*arguments: str | Path) -> None:
    result = subprocess.run(
        [_binary("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _rules() -> list[dict[str, Any]]:
    return [rule for path in RULES for group in _load(path)["groups"] for rule in group["rules"]]


ALERTS = {rule["alert"]: rule for rule in _rules() if "alert" in rule}


def _write(folder: Path, files: dict[str, str]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_rules_do_what_their_promtool_cases_say(path: Path) -> None:
    _promtool("test", "rules", path)


def test_shipped_files_are_valid() -> None:
    _promtool("check", "rules", *RULES)
    _promtool("check", "config", ROOT / "prometheus" / "prometheus.yml")


def test_shipped_rules_are_those_of_the_repository() -> None:
    assert share_path("prometheus", "rules") == ROOT / "prometheus" / "rules"
    assert render_rules() == {path.name: path.read_text(encoding="utf-8") for path in RULES}


@pytest.mark.parametrize("time_scale", [1, 7, 30, 1000])
def test_rendered_files_are_valid_at_any_speed(tmp_path: Path, time_scale: float) -> None:
    rules = _write(tmp_path / "rules", render_rules(time_scale=time_scale))
    config = prometheus_config(
        rules_dir=tmp_path / "rules",
        targets_dir=tmp_path / "targets",
        alertmanager="127.0.0.1:19093",
        time_scale=time_scale,
    )
    (path,) = _write(tmp_path, {"prometheus.yml": config})

    _promtool("check", "rules", *rules)
    _promtool("check", "config", path)


def test_prometheus_config_names_the_other_places() -> None:
    config = yaml.safe_load(
        prometheus_config(
            rules_dir=Path("/srv/rules"),
            targets_dir=Path("/srv/home/targets"),
            alertmanager="127.0.0.1:19093",
            prometheus="127.0.0.1:19090",
            time_scale=30,
        )
    )

    assert config["rule_files"] == ["/srv/rules/*.yml"]
    assert config["alerting"]["alertmanagers"][0]["static_configs"] == [{"targets": ["127.0.0.1:19093"]}]
    files = {
        job["job_name"]: job["file_sd_configs"][0]["files"]
        for job in config["scrape_configs"]
        if "file_sd_configs" in job
    }
    assert files == {
        "tunewatch": ["/srv/home/targets/*.json"],
        "tunewatch-gpu": ["/srv/home/targets/gpu/*.json"],
        "tunewatch-serve": ["/srv/home/targets/serve/*.json"],
    }
    own = {
        job["job_name"]: job["static_configs"]
        for job in config["scrape_configs"]
        if job["job_name"] not in files
    }
    assert own == {
        "prometheus": [{"targets": ["127.0.0.1:19090"]}],
        "alertmanager": [{"targets": ["127.0.0.1:19093"]}],
    }
    assert config["global"] == {"scrape_interval": "500ms", "evaluation_interval": "500ms"}


def test_rules_for_another_site_carry_its_addresses(tmp_path: Path) -> None:
    rendered = render_rules("https://watch.example.org/grafana/", "https://wiki.example.org/runbooks")
    alerts = [
        rule
        for text in rendered.values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]

    assert len(alerts) == len(ALERTS)
    for alert in alerts:
        links = alert["annotations"]
        assert links["dashboard_url"].startswith("https://watch.example.org/grafana/d/tunewatch-run")
        assert links["runbook_url"] == f"https://wiki.example.org/runbooks/{alert['alert']}.md"
    assert not any(shipped in text for shipped in (GRAFANA_URL, RUNBOOK_URL) for text in rendered.values())
    _promtool("check", "rules", *_write(tmp_path, rendered))


@pytest.mark.parametrize(
    "url", ["watch.example.org", "ftp://x.org", "http://", "http://x/{{ $value }}", "http://x y"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="grafana_url"):
        render_rules(grafana_url=url)
    with pytest.raises(ValueError, match="runbook_url"):
        render_rules(runbook_url=url)
    with pytest.raises(ValueError, match="webhook_url"):
        alertmanager_config(webhook_url=url)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    assert sorted(path.stem for path in RUNBOOKS.glob("*.md")) == sorted(ALERTS)
    for path in RUNBOOKS.glob("*.md"):
        headings = re.findall(r"^#+ .*$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == [f"# {path.stem}", "## Meaning", "## Impact", "## Diagnosis", "## Mitigation"]


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_alert_is_labelled_and_described(name: str) -> None:
    alert = ALERTS[name]
    annotations = alert["annotations"]

    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning", "info", "none"}
    assert annotations.keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    assert annotations["summary"].endswith(".") and "{{" not in annotations["summary"]
    assert annotations["runbook_url"] == f"{RUNBOOK_URL}/{name}.md"
    about_a_run = "run_id" in alert["expr"]
    query = "?var-run_id={{ $labels.run_id }}" if about_a_run else ""
    assert annotations["dashboard_url"] == f"{GRAFANA_URL}/d/tunewatch-run{query}"
    if about_a_run:
        assert "last_over_time(tunewatch_run_info{run_id=%q}[6h])" in annotations["description"]
    missing = [word for word in CORRECTIVE_WORDS[name] if word not in annotations["description"].lower()]
    assert missing == []


def test_no_expression_depends_on_an_identity() -> None:
    """A run or GPU without its info series would lose its alert."""
    names = ("tunewatch_run_info", "tunewatch_gpu_info")
    assert [rule for rule in _rules() if any(name in rule["expr"] for name in names)] == []


def test_an_alert_about_a_gpu_is_about_a_run_or_keeps_its_machine() -> None:
    """Notifications are grouped by one or the other."""
    for name, alert in ALERTS.items():
        if name.startswith("TunewatchGpu"):
            assert re.search(r"by \((run_id, uuid|job, instance(, uuid(, \w+)?)?)\)", alert["expr"]), name


def test_every_alert_has_a_firing_case_and_its_text_checked() -> None:
    cases = [case for path in RULE_TESTS for case in _load(path)["tests"]]
    described = {
        check["alertname"]
        for case in cases
        for check in case.get("alert_rule_test", ())
        if check["exp_alerts"]
    }
    firing = {
        name
        for case in cases
        for check in case.get("promql_expr_test", ())
        for sample in check["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }

    assert described == set(ALERTS)
    assert firing == set(ALERTS) - {"TunewatchWatchdog"}


def test_a_healthy_machine_has_every_series_that_an_alert_looks_at() -> None:
    """Else its silence in the case "nothing fires" would say nothing about the alert."""
    (case,) = _load(ROOT / "prometheus" / "tests" / "healthy_test.yml")["tests"]
    there = {series["series"].partition("{")[0] for series in case["input_series"]}
    recorded = {rule["record"] for rule in _rules() if "record" in rule}

    names = {
        name
        for alert in ALERTS.values()
        for name in re.findall(
            r"\b(?:\w+:)*(?:tunewatch|prometheus|alertmanager)_\w+(?::\w+)*", alert["expr"]
        )
    }
    # What tells of the end of a run is not there while it lives.
    ended = {"run_state_reason:tunewatch_run_end_info:last_seen"}
    jobs = {"tunewatch_gpu", "tunewatch_serve"}
    assert names - there - (recorded - ended) - ended - jobs == set()


def test_every_verdict_that_changes_the_health_reaches_somebody() -> None:
    """Once each, at the severity of its level; a note reaches nobody."""
    severity = {"bad": "critical", "attention": "warning"}
    heard: dict[str, str] = {}
    for rule in ALERTS.values():
        # The last branch of an alert names what it is silent for.
        expression = rule["expr"].partition("unless")[0]
        for names in re.findall(r'tunewatch_health\{signal=~?"([a-z0-9_|]+)"', expression):
            for signal in names.split("|"):
                assert signal not in heard, signal
                heard[signal] = rule["labels"]["severity"]
    assert heard == {signal: severity[level] for signal, level in SIGNALS.items() if level != "info"}


def test_live_means_the_same_as_in_the_supervisor() -> None:
    def states(named: bool) -> set[frozenset[str]]:
        return {
            frozenset(matcher.split("|"))
            for rule in _rules()
            if (rule.get("alert") in USES_THE_GPU) == named
            for matcher in re.findall(r'\bstate(?:=~|!~)"([^"]*)"', rule["expr"])
        }

    assert states(named=False) == {LIVE}
    # Loading a model and writing one to the disk leave a GPU idle for good reasons.
    assert states(named=True) == {frozenset({TRAINING, VALIDATING})}


def _metrics_used() -> set[str]:
    used: set[str] = set()
    for rule in _rules():
        for text in (rule["expr"], *rule.get("annotations", {}).values()):
            raw = re.sub(r"\w+:\w+:\w+", "", text)  # results of recording rules
            used |= set(re.findall(r"\btunewatch_[a-z_]+\b", raw))
    return used


def test_rules_use_only_metrics_that_exist() -> None:
    if importlib.util.find_spec("tunewatch.metrics") is None:
        pytest.skip("tunewatch.metrics is not there yet")
    names = set(importlib.import_module("tunewatch.metrics").METRIC_NAMES)
    names |= {metric.name for metric in GPU_METRICS}
    series = names | {f"{name}{suffix}" for name in names for suffix in ("_sum", "_count", "_bucket")}

    used = _metrics_used()
    assert len(used) > 10
    assert used - series == set()


@pytest.mark.parametrize(
    ("before", "factor", "after"),
    [
        ("15s", 30, "500ms"),
        ("1h", 30, "2m"),
        ("2m", 1, "2m"),
        ("1h30m", 60, "1m30s"),
        ("1d", 24, "1h"),
        ("1w", 7, "1d"),
        ("1y", 365, "1d"),
        ("1s", 3, "333ms"),  # 333.3
        ("5s", 3, "1s667ms"),  # 1666.7
        ("2ms", 1000, "1ms"),  # never zero, which would mean "at once" or be refused
        ("0s", 30, "0s"),
        ("15s", 0.5, "30s"),
    ],
)
def test_one_duration(before: str, factor: float, after: str) -> None:
    assert scale_durations({"for": before}, factor) == {"for": after}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rate(x[5m])", "rate(x[30s])"),
        ("max_over_time(rate(x[5m])[1h:1m])", "max_over_time(rate(x[30s])[6m:6s])"),
        ("max_over_time(x[1h:])", "max_over_time(x[6m:])"),
        ("max_over_time(x[ 1h : 10s ])", "max_over_time(x[ 6m : 1s ])"),
        ("x offset 1h > x offset -10s", "x offset 6m > x offset -1s"),
        ("x offset 1h30m", "x offset 9m"),
        ("x{a=\"[5m]\", b='offset 1h', c=`[1h]`}[10m]", "x{a=\"[5m]\", b='offset 1h', c=`[1h]`}[1m]"),
        ('x{a="quoted \\" [5m]"}[10m]', 'x{a="quoted \\" [5m]"}[1m]'),
        ("x[10m] # the [5m] of old", "x[1m] # the [5m] of old"),
        ("time() - x > 600 and y5m == 30", "time() - x > 600 and y5m == 30"),
    ],
)
def test_durations_in_promql(before: str, after: str) -> None:
    assert scale_durations({"expr": before}, 10) == {"expr": after}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("for 5m [5m] offset 1h", "for 5m [5m] offset 1h"),
        (
            'a [5m] {{ printf "x{r=%q}[5m]" $labels.r | query }} [5m]',
            'a [5m] {{ printf "x{r=%q}[30s]" $labels.r | query }} [5m]',
        ),
        ('{{ query `x{r="a}}[1h]"}[10m]` }}', '{{ query `x{r="a}}[1h]"}[1m]` }}'),
        ('{{ query "x{r=\\"[1h]\\"}[10m]" }}', '{{ query "x{r=\\"[1h]\\"}[1m]" }}'),
        ('{{ printf "%.0f\\t" 5 }}', '{{ printf "%.0f\\t" 5 }}'),
    ],
)
def test_durations_in_templates(before: str, after: str) -> None:
    assert scale_durations({"annotations": {"for": before}}, 10) == {"annotations": {"for": after}}


def test_other_texts_and_numbers_stay() -> None:
    document = {"route": {"receiver": "15s", "group_by": ["1h"]}, "url": "http://x/5m", "limit": 15}

    assert scale_durations(document, 10) == document


def test_the_document_itself_is_not_changed() -> None:
    document = {"groups": [{"interval": "15s", "rules": [{"expr": "x[5m]", "for": "2m"}]}]}

    scaled = scale_durations(document, 5)

    assert scaled == {"groups": [{"interval": "3s", "rules": [{"expr": "x[1m]", "for": "24s"}]}]}
    assert document == {"groups": [{"interval": "15s", "rules": [{"expr": "x[5m]", "for": "2m"}]}]}


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_time_scale_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="time scale"):
        scale_durations({"for": "1m"}, factor)


def test_a_duration_that_prometheus_would_refuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"for: '1\.5h' is not a duration"):
        scale_durations({"for": "1.5h"}, 2)


def _seconds(duration: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vanished_test.yml",
        "ended_test.yml",
        "nonfinite_test.yml",
        "gpu_test.yml",
        "gpu_idle_test.yml",
        "gpu_reset_test.yml",
        "gpu_hot_test.yml",
        "gpu_strangers_test.yml",
        "readings_stale_test.yml",
        "delivery_test.yml",
    ],
)
def test_rules_in_fast_time_do_the_same_in_less_time(tmp_path: Path, name: str) -> None:
    """The same samples 3 s instead of 15 s apart, each assertion at a fifth of its time.

    Texts name ages, which differ.
    """
    document = _load(ROOT / "prometheus" / "tests" / name)
    document["evaluation_interval"] = "3s"
    tested = {Path(file).name for file in document["rule_files"]}
    faster = _write(tmp_path, render_rules(time_scale=5))
    document["rule_files"] = [str(path) for path in faster if path.name in tested]
    for case in document["tests"]:
        assert case["interval"] == "15s"
        case["interval"] = "3s"
        case.pop("alert_rule_test", None)
        for check in case["promql_expr_test"]:
            check["eval_time"] = f"{_seconds(check['eval_time']) // 5}s"

    _promtool("test", "rules", *_write(tmp_path, {"fast_test.yml": yaml.safe_dump(document)}))

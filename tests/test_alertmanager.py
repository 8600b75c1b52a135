"""Who is told what, and in which words: the shipped Alertmanager files and templates, on amtool and live servers."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunewatch.health.verdict import SIGNALS
from tunewatch.rules import alertmanager_config, notification_templates, prometheus_config
from tunewatch.stack import Stack

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "prometheus" / "alertmanager.yml"
DOCS = ROOT / "docs" / "alerting.md"
SLACK_CONFIG = ROOT / "prometheus" / "alertmanager.slack.yml"
TEMPLATES = ROOT / "prometheus" / "templates"
DEADLINE = 30.0  # seconds a condition may take on a busy machine

Labels = dict[str, str]

RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for file in sorted((ROOT / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
RECEIVER = {"critical": "critical", "warning": "warning", "info": "info", "none": "watchdog"}


def _labels_used(rule: Mapping[str, Any]) -> list[str]:
    """The labels that the texts of a rule speak of, so its alerts carry them."""
    texts = "".join(rule["annotations"].values())
    return sorted(set(re.findall(r"\$labels\.(\w+)", texts)))


def _binary(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.fail(f"none of {', '.join(names)} is on PATH: install prometheus-alertmanager to run this test")


def _amtool(*arguments: str) -> str:
    result = subprocess.run(
        [_binary("amtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def _load(text: str) -> Any:
    return yaml.safe_load(text)


@pytest.mark.parametrize("config", [CONFIG, SLACK_CONFIG], ids=lambda path: path.name)
def test_shipped_config_is_valid_and_finds_its_templates(config: Path) -> None:
    _amtool("check-config", str(config))
    (pattern,) = _load(config.read_text())["templates"]
    assert TEMPLATES / "tunewatch.tmpl" in config.parent.glob(pattern)


def test_the_variant_with_slack_differs_in_the_receivers_only() -> None:
    plain, slack = _load(CONFIG.read_text()), _load(SLACK_CONFIG.read_text())

    assert slack["global"].pop("slack_api_url_file").startswith("/etc/alertmanager/secrets/")
    assert [receiver["name"] for receiver in slack.pop("receivers")] == [
        receiver["name"] for receiver in plain.pop("receivers")
    ]
    assert slack == plain


@pytest.mark.parametrize("time_scale", [1, 30, 1000])
def test_rendered_config_is_valid_and_posts_elsewhere(tmp_path: Path, time_scale: float) -> None:
    # An address that itself begins with the shipped one: nothing is replaced twice.
    text = alertmanager_config(webhook_url="http://127.0.0.1:9095/hook/", time_scale=time_scale)
    (tmp_path / "alertmanager.yml").write_text(text, encoding="utf-8")

    _amtool("check-config", str(tmp_path / "alertmanager.yml"))
    urls = {
        receiver["name"]: [webhook["url"] for webhook in receiver["webhook_configs"]]
        for receiver in _load(text)["receivers"]
    }
    assert urls == {
        "critical": ["http://127.0.0.1:9095/hook/alerts"],
        "warning": ["http://127.0.0.1:9095/hook/alerts"],
        "info": ["http://127.0.0.1:9095/hook/alerts"],
        "watchdog": ["http://127.0.0.1:9095/hook/watchdog"],
    }


@pytest.mark.parametrize("text", ["receivers", "- a\n", "route: {}\n", "a: [", ""])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "own.yml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.yml is not a configuration of Alertmanager"):
        alertmanager_config(webhook_url="http://127.0.0.1:1", file=file)
    with pytest.raises(
        ValueError, match=r"missing\.yml is not a configuration of Alertmanager: .*No such file"
    ):
        alertmanager_config(webhook_url="http://127.0.0.1:1", file=tmp_path / "missing.yml")


def _assert_route(config: Path, receiver: str, labels: Mapping[str, str]) -> None:
    pairs = [f"{name}={value}" for name, value in labels.items()]
    _amtool("config", "routes", "test", f"--config.file={config}", f"--verify.receivers={receiver}", *pairs)


@pytest.mark.parametrize(
    ("receiver", "labels"),
    [
        ("critical", {"run_id": "a", "severity": "critical", "reason": "nan"}),
        ("warning", {"run_id": "a", "severity": "warning"}),
        ("warning", {"run_id": "a", "severity": "warning", "uuid": "GPU-1", "instance": "gpu1:9460"}),
        ("info", {"run_id": "a", "severity": "info"}),
        ("critical", {"instance": "gpu1:9460", "severity": "critical", "uuid": "GPU-1"}),
        ("warning", {"instance": "gpu1:9460", "severity": "warning"}),
        ("info", {"instance": "gpu1:9460", "severity": "info"}),
        ("critical", {"severity": "critical"}),
        ("critical", {"run_id": "", "instance": "", "severity": "critical"}),
        ("warning", {"severity": "warning"}),
        ("info", {"severity": "info"}),
        # Somebody else's alert with a severity of its own, or none, is not lost.
        ("warning", {"severity": "page"}),
        ("warning", {"run_id": "a"}),
        ("warning", {}),
    ],
)
def test_each_severity_reaches_its_receiver(receiver: str, labels: Labels) -> None:
    _assert_route(CONFIG, receiver, {"alertname": "Any", **labels})


@pytest.mark.parametrize("name", RULES)
def test_each_shipped_alert_reaches_the_receiver_of_its_severity(name: str) -> None:
    severity = RULES[name]["labels"]["severity"]
    labels = dict.fromkeys(_labels_used(RULES[name]), "x")
    _assert_route(CONFIG, RECEIVER[severity], {**labels, "alertname": name, "severity": severity})
    assert (severity == "none") == (name == "TunewatchWatchdog"), "only the heartbeat goes to nobody"


def _seconds(duration: str) -> int:
    match = re.fullmatch(r"(\d+)([smh])", duration)
    assert match is not None
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`route` and all below it, each with what it inherits."""
    yield route
    for child in route.get("routes", ()):
        yield from _routes({**{k: v for k, v in route.items() if k not in ("routes", "matchers")}, **child})


def test_waiting_times_and_groups() -> None:
    prometheus = _load((ROOT / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    evaluation = _seconds(prometheus["global"]["evaluation_interval"])
    routes = list(_routes(_load(CONFIG.read_text(encoding="utf-8"))["route"]))
    (watchdog,) = [route for route in routes if route["receiver"] == "watchdog"]
    others = [route for route in routes if route is not watchdog]

    # An alert that inhibits another one may come one evaluation later than it.
    assert min(_seconds(route["group_wait"]) for route in others) > evaluation
    waits = {route["receiver"]: _seconds(route["group_wait"]) for route in others}
    assert waits["critical"] < waits["info"] < waits["warning"]
    repeats = {route["receiver"]: _seconds(route["repeat_interval"]) for route in routes}
    assert repeats["watchdog"] < repeats["critical"] < repeats["warning"] < repeats["info"]
    for route in routes:
        assert _seconds(route["repeat_interval"]) % _seconds(route["group_interval"]) == 0
    groups = {tuple(route.get("matchers", ())): route["group_by"] for route in routes}
    assert groups[('run_id=~".+"',)] == ["run_id"] and groups[('instance=~".+"',)] == ["instance"]


@pytest.mark.parametrize("config", [CONFIG, SLACK_CONFIG], ids=lambda path: path.name)
def test_only_a_heartbeat_and_news_are_not_taken_back(config: Path) -> None:
    told = {
        receiver["name"]: one["send_resolved"]
        for receiver in _load(config.read_text())["receivers"]
        for key in receiver.keys() - {"name"}
        for one in receiver[key]
    }
    assert told == {"critical": True, "warning": True, "info": False, "watchdog": False}


@dataclass(frozen=True)
class _Matcher:
    label: str
    operator: str
    value: str

    @classmethod
    def parse(cls, text: str) -> _Matcher:
        match = re.fullmatch(r'(\w+)(=~|!~|!=|=)"(.*)"', text)
        assert match is not None, text
        return cls(*match.groups())

    def accepts(self, labels: Mapping[str, str]) -> bool:
        own = labels.get(self.label, "")
        found = (re.fullmatch(self.value, own) if "~" in self.operator else own == self.value) not in (
            None,
            False,
        )
        return found != self.operator.startswith("!")


INHIBITIONS = [
    (
        [_Matcher.parse(text) for text in rule["source_matchers"]],
        [_Matcher.parse(text) for text in rule["target_matchers"]],
        rule["equal"],
    )
    for rule in _load(CONFIG.read_text(encoding="utf-8"))["inhibit_rules"]
]


def test_inhibitions_name_alerts_and_signals_that_exist() -> None:
    """A renamed alert or signal would drop out of an inhibition without a word."""
    signals = {
        signal
        for rule in RULES.values()
        for alternatives in re.findall(r'tunewatch_health\{signal=~?"([^"]+)"', rule["expr"])
        for signal in alternatives.split("|")
    }
    assert signals <= SIGNALS.keys()
    for sources, targets, _ in INHIBITIONS:
        for matcher in [*sources, *targets]:
            known = {"alertname": RULES.keys(), "signal": signals}.get(matcher.label)
            for pattern in matcher.value.split("|") if known else ():
                assert any(re.fullmatch(pattern, name) for name in known or ()), matcher


def test_no_inhibition_can_leak_to_alerts_without_the_label() -> None:
    for sources, targets, equal in INHIBITIONS:
        assert len(equal) == 1
        present = _Matcher(equal[0], "=~", ".+")
        assert present in sources and present in targets
        # Without the label on either side, neither side is concerned.
        names = {"alertname": "TunewatchRunFailed", "severity": "warning"}
        assert not all(matcher.accepts(names) for matcher in sources)
        assert not all(matcher.accepts(names) for matcher in targets)


def _silenced_by(source: str) -> set[str]:
    """The shipped alerts that can be held back by `source`, whatever their signal."""
    return {
        name
        for sources, targets, _ in INHIBITIONS
        if all(m.accepts({"alertname": source}) for m in sources if m.label == "alertname")
        for name, rule in RULES.items()
        if all(
            m.accepts({"alertname": name, "severity": rule["labels"]["severity"]})
            for m in targets
            if m.label in ("alertname", "severity")
        )
    }


def test_what_each_alert_can_hold_back() -> None:
    gpu = {name for name in RULES if name.startswith("TunewatchGpu")}
    warnings = {name for name, rule in RULES.items() if rule["labels"]["severity"] == "warning"}
    over = warnings | {"TunewatchRunStalled"}
    expected = {
        "TunewatchRunFailed": over,
        "TunewatchRunVanished": over,
        "TunewatchRunStalled": {"TunewatchGpuIdleWhileTraining", "TunewatchRunNeedsAttention"},
        "TunewatchRunNonFinite": {
            "TunewatchNonFiniteIsolated",
            "TunewatchRunNotLearning",
            "TunewatchRunNeedsAttention",
        },
        "TunewatchTargetDown": gpu | {"TunewatchClockSkew"},
        "TunewatchGpuLost": gpu - {"TunewatchGpuLost"},
        "TunewatchGpuResetRequired": {"TunewatchGpuResetDue"},
    }
    assert {name: _silenced_by(name) for name in RULES if _silenced_by(name)} == expected


@dataclass
class _Receiver:
    """An HTTP receiver on loopback: keeps what is posted, with the path it was posted to."""

    posts: queue.Queue[tuple[str, dict[str, Any]]] = field(default_factory=queue.Queue)

    def __enter__(self) -> _Receiver:
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posts.put((self.path, json.loads(body)))
                answer = b'{"status": "success"}'
                self.send_response(202 if self.path == "/pagerduty" else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@dataclass
class _Alertmanager:
    url: str
    receiver: _Receiver

    def post(self, *alerts: Labels, ends: datetime | None = None, **annotations: str) -> None:
        # Without an end, alerts would be over after resolve_timeout, which is short in fast time.
        ends = ends or datetime.now(UTC) + timedelta(hours=1)
        body = [
            {"labels": labels, "annotations": annotations, "endsAt": ends.isoformat()} for labels in alerts
        ]
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def alerts(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=10) as answer:
            return json.load(answer)

    def inhibited(self) -> list[Labels]:
        """The labels of the alerts that are held back.

        Alertmanager takes alerts up one after the other, in the background: a last pair of a run of its own
        shows that all before it are taken up.
        """
        last = f"last-{uuid.uuid4()}"
        self.post(_alert("TunewatchRunFailed", "critical", last))
        self.post(_alert("TunewatchRunStalled", "critical", last))
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            labels = [alert["labels"] for alert in self.alerts() if alert["status"]["inhibitedBy"]]
            others = [own for own in labels if own.get("run_id") != last]
            if len(others) < len(labels):
                return others
            time.sleep(0.05)
        pytest.fail("the last pair of alerts was never taken up")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def _server(folder: Path, *names: str, flags: list[str]) -> Iterator[str]:
    """A server on a free port of loopback; gives its address."""
    url = f"http://127.0.0.1:{_free_port()}"
    log_file = folder / f"{names[0]}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [_binary(*names), *flags, f"--web.listen-address={url.removeprefix('http://')}"],
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + DEADLINE
        while not _is_ready(url):
            assert process.poll() is None, log_file.read_text()
            assert time.monotonic() < deadline, f"{names[0]} did not become ready"
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=DEADLINE)


@contextmanager
def _running(folder: Path, config: str, receiver: _Receiver) -> Iterator[_Alertmanager]:
    (folder / "templates").mkdir(parents=True)
    for name, text in notification_templates().items():
        (folder / "templates" / name).write_text(text, encoding="utf-8")
    file = folder / "alertmanager.yml"
    file.write_text(config, encoding="utf-8")
    flags = [f"--config.file={file}", f"--storage.path={folder / 'data'}", "--cluster.listen-address="]
    with _server(folder, "alertmanager", "prometheus-alertmanager", flags=flags) as url:
        yield _Alertmanager(url, receiver)


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Alertmanager]:
    """A live Alertmanager with the shipped routes in fast time (group_wait 0.5 s to 1.5 s).

    One for all tests: each uses runs and machines of its own.
    """
    folder = tmp_path_factory.mktemp("alertmanager")
    with _Receiver() as receiver:
        config = alertmanager_config(webhook_url=receiver.url, time_scale=40)
        with _running(folder, config, receiver) as running:
            yield running


def _alert(name: str, severity: str, run: str | None = None, **labels: str) -> Labels:
    return {
        "alertname": name,
        "severity": severity,
        **({"run_id": run} if run is not None else {}),
        **labels,
    }


def _attention(signal: str, run: str) -> Labels:
    return _alert("TunewatchRunNeedsAttention", "warning", run, signal=signal)


def _not_learning(signal: str, run: str) -> Labels:
    return _alert("TunewatchRunNotLearning", "critical", run, signal=signal)


def _idle(run: str, uuid: str) -> Labels:
    return _alert("TunewatchGpuIdleWhileTraining", "warning", run, uuid=uuid)


def _lost(instance: str, uuid: str) -> Labels:
    return _alert("TunewatchGpuLost", "critical", instance=instance, uuid=uuid, job="tunewatch-gpu")


def _blind(instance: str) -> Labels:
    return _alert("TunewatchGpuSidecarBlind", "warning", instance=instance, job="tunewatch-gpu")


def _reset(when: str, uuid: str) -> Labels:
    severity = "critical" if when == "Required" else "warning"
    return _alert(f"TunewatchGpuReset{when}", severity, instance="reset:9460", uuid=uuid)


@dataclass(frozen=True)
class _Case:
    """Alerts that fire together: those that are held back, and those that are told."""

    held: list[Labels]
    told: list[Labels]


CASES = {
    **{
        source: _Case(
            held=[
                _idle(f"{source}-a", f"{source}-1"),
                _attention("overfitting", f"{source}-a"),
                _alert("TunewatchRunStalled", "critical", f"{source}-a"),
            ],
            told=[
                _alert(source, "critical", f"{source}-a"),
                _alert("TunewatchRunNonFinite", "critical", f"{source}-a"),
                _alert("TunewatchRunStalled", "critical", f"{source}-b"),
                _attention("overfitting", f"{source}-b"),
                _idle(f"{source}-c", f"{source}-1"),
                _blind(f"{source}-machine:9460"),
                # Without run_id on either side `equal` would hold.
                _alert(source, "critical"),
                _alert("TunewatchRunStalled", "critical", about=source),
                _alert("DiskSlow", "warning", about=source),
            ],
        )
        for source in ("TunewatchRunFailed", "TunewatchRunVanished")
    },
    "stalled": _Case(
        held=[
            _attention("slow", "stalled-a"),
            _attention("data_starved", "stalled-a"),
            _attention("checkpoint_overdue", "stalled-a"),
            _idle("stalled-a", "stalled-1"),
        ],
        told=[
            _alert("TunewatchRunStalled", "critical", "stalled-a"),
            _attention("work_at_risk", "stalled-a"),
            _attention("overfitting", "stalled-a"),
            _attention("slow", "stalled-b"),
            _idle("stalled-b", "stalled-1"),
            _alert("TunewatchRunStalled", "critical", about="stalled"),
            _alert("TunewatchGpuIdleWhileTraining", "warning", uuid="stalled-1"),
            _alert("TunewatchRunNeedsAttention", "warning", signal="slow"),
        ],
    ),
    "nonfinite": _Case(
        held=[
            _alert("TunewatchNonFiniteIsolated", "warning", "nonfinite-a"),
            _not_learning("diverging", "nonfinite-a"),
            _not_learning("zero_loss", "nonfinite-a"),
            _attention("eval_nonfinite", "nonfinite-a"),
        ],
        told=[
            _alert("TunewatchRunNonFinite", "critical", "nonfinite-a"),
            _not_learning("labels_masked", "nonfinite-a"),
            _attention("will_not_fit", "nonfinite-a"),
            _not_learning("diverging", "nonfinite-b"),
            _alert("TunewatchNonFiniteIsolated", "warning", "nonfinite-b"),
            _alert("TunewatchRunNonFinite", "critical"),
            _alert("TunewatchNonFiniteIsolated", "warning"),
        ],
    ),
    "target down": _Case(
        held=[
            _lost("down-1:9460", "down-1"),
            _blind("down-1:9460"),
            _alert("TunewatchClockSkew", "warning", job="tunewatch-gpu", instance="down-1:9460"),
        ],
        told=[
            _alert("TunewatchTargetDown", "critical", job="tunewatch-gpu", instance="down-1:9460"),
            _alert("TunewatchTargetDown", "critical", job="tunewatch-serve", instance="down-1:8080"),
            _lost("down-2:9460", "down-2"),
            _blind("down-2:9460"),
            _idle("down-a", "down-3"),
            _alert("TunewatchTargetDown", "critical", about="down"),
            _alert("TunewatchGpuSidecarBlind", "warning", about="down"),
            _alert("TunewatchClockSkew", "warning", about="down"),
        ],
    ),
    "GPU lost": _Case(
        held=[_idle("lost-a", "lost-1")],
        told=[
            _lost("lost:9460", "lost-1"),
            _lost("lost:9460", "lost-2"),
            _idle("lost-a", "lost-3"),
            _blind("lost:9460"),
            # The machine misses a card that nobody knows by name.
            _alert("TunewatchGpuLost", "critical", instance="lost:9460", job="tunewatch-gpu"),
            _alert("TunewatchGpuIdleWhileTraining", "warning", "lost-b"),
        ],
    ),
    "GPU to be reset": _Case(
        held=[_reset("Due", "reset-1")],
        told=[
            _reset("Required", "reset-1"),
            _reset("Due", "reset-2"),
            _alert("TunewatchGpuResetRequired", "critical", instance="reset:9460"),
            _alert("TunewatchGpuResetDue", "warning", instance="reset:9460"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_back_and_what_is_told(alertmanager: _Alertmanager, name: str) -> None:
    case = CASES[name]
    alertmanager.post(*case.held, *case.told)

    def sorted_(alerts: list[Labels]) -> list[Labels]:
        return sorted(alerts, key=lambda own: sorted(own.items()))

    held = [own for own in alertmanager.inhibited() if own in case.held or own in case.told]
    assert sorted_(held) == sorted_(case.held)


def test_a_critical_alert_reaches_the_webhook_in_one_message_per_run(alertmanager: _Alertmanager) -> None:
    alertmanager.post(
        _alert("TunewatchRunStalled", "critical", "one-a"),
        _alert("TunewatchRunFailed", "critical", "one-a", reason="oom_gpu"),
        _alert("TunewatchRunStalled", "critical", "one-b"),
        _alert("TunewatchWatchdog", "none"),
        _alert("TunewatchRunFinished", "info", "one-c"),
        _attention("overfitting", "one-d"),
        _attention("spikes", "one-d"),
    )

    messages: dict[str, tuple[str, dict[str, Any]]] = {}
    deadline = time.monotonic() + DEADLINE
    while not {"one-a", "one-b", "one-c", "one-d", "none"} <= messages.keys():
        # The heartbeat repeats for ever, so the queue alone never runs dry.
        assert time.monotonic() < deadline, f"only these runs were told of: {sorted(messages)}"
        path, message = alertmanager.receiver.posts.get(timeout=DEADLINE)
        run = message["groupLabels"].get("run_id", "none" if path == "/watchdog" else "other")
        messages.setdefault(run, (path, message))

    def sent(run: str) -> tuple[str, str, list[str]]:
        path, message = messages[run]
        return path, message["receiver"], [alert["labels"]["alertname"] for alert in message["alerts"]]

    # The stall of run a is in the same group as its failure: it was held back, not late.
    assert sent("one-a") == ("/alerts", "critical", ["TunewatchRunFailed"])
    assert sent("one-b") == ("/alerts", "critical", ["TunewatchRunStalled"])
    assert sent("one-c") == ("/alerts", "info", ["TunewatchRunFinished"])
    assert sent("one-d") == ("/alerts", "warning", ["TunewatchRunNeedsAttention"] * 2)
    assert sent("none") == ("/watchdog", "watchdog", ["TunewatchWatchdog"])


def test_what_befalls_one_machine_comes_in_one_message(alertmanager: _Alertmanager) -> None:
    alertmanager.post(
        _lost("one-1:9460", "GPU-1"),
        _lost("one-1:9460", "GPU-2"),
        _blind("one-2:9460"),
        _idle("one-e", "GPU-3"),
    )

    messages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    deadline = time.monotonic() + DEADLINE
    while not {"one-1:9460", "one-2:9460", "one-e"} <= messages.keys():
        assert time.monotonic() < deadline, f"only these were told of: {sorted(messages)}"
        _, message = alertmanager.receiver.posts.get(timeout=DEADLINE)
        ((_, key),) = message["groupLabels"].items()
        labels = [alert["labels"] for alert in message["alerts"]]
        names = sorted((own["alertname"], own.get("uuid", "")) for own in labels)
        messages.setdefault(key, (message["receiver"], names))

    assert messages["one-1:9460"] == (
        "critical",
        [("TunewatchGpuLost", "GPU-1"), ("TunewatchGpuLost", "GPU-2")],
    )
    assert messages["one-2:9460"] == ("warning", [("TunewatchGpuSidecarBlind", "")])
    assert messages["one-e"] == ("warning", [("TunewatchGpuIdleWhileTraining", "GPU-3")])


def _data(*alerts: Labels | tuple[Labels, Labels], status: str = "firing") -> dict[str, Any]:
    """What a template is given for a group of alerts: labels alone, or labels and annotations."""
    pairs = [alert if isinstance(alert, tuple) else (alert, {}) for alert in alerts]
    common = set.intersection(*(set(labels.items()) for labels, _ in pairs))
    return {
        "receiver": "critical",
        "status": status,
        "externalURL": "http://127.0.0.1:9093",
        "groupLabels": {},
        "commonLabels": dict(common),
        "commonAnnotations": {},
        "alerts": [
            {
                "status": labels.get("status", status),
                "labels": {key: value for key, value in labels.items() if key != "status"},
                "annotations": annotations,
                "startsAt": "2026-01-02T03:04:05Z",
                "endsAt": "2026-01-02T04:16:05Z",
                "fingerprint": str(number),
            }
            for number, (labels, annotations) in enumerate(pairs)
        ],
    }


def _rendered(folder: Path, template: str, data: Mapping[str, Any]) -> str:
    file = folder / "data.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return _amtool(
        *("template", "render", f"--template.glob={TEMPLATES}/*.tmpl", f"--template.data={file}"),
        f'--template.text={{{{ template "{template}" . }}}}',
    )


STALL = {
    "summary": "Training makes no progress.",
    "description": "Run tiny (2026-ab) has shown no activity for 5m. Look at what it waits for.",
    "runbook_url": "https://example.org/TunewatchRunStalled.md",
    "dashboard_url": "http://127.0.0.1:3000/d/tunewatch-run?var-run_id=2026-ab",
}


@pytest.mark.parametrize(
    ("title", "alerts"),
    [
        ("🔴 tiny: Training makes no progress", [(_alert("S", "critical", "2026-ab"), STALL)]),
        ("🟡 tiny: Training makes no progress", [(_alert("S", "warning", "2026-ab"), STALL)]),
        ("🔵 tiny: Training makes no progress", [(_alert("S", "info", "2026-ab"), STALL)]),
        # The description does not tell a name for this run.
        ("🔴 2026xab: Training makes no progress", [(_alert("S", "critical", "2026xab"), STALL)]),
        ("🔴 2026.ab: Training makes no progress", [(_alert("S", "critical", "2026.ab"), STALL)]),
        ("🔴 gpu1: TunewatchGpuLost", [_lost("gpu1:9460", "GPU-1")]),
        ("🔴 [::1]: TunewatchGpuLost", [_lost("[::1]:9460", "GPU-1")]),
        ("🟡 Diskful", [{"alertname": "Diskful"}]),
        ("🟡 An alert without a name", [{}]),
        # A critical one goes before, and one that fires before one that is over.
        ("🔴 b: S (+1)", [_alert("W", "warning", "a"), _alert("S", "critical", "b")]),
        ("🟡 b: W (+2)", [_alert(n, "warning", r, **s) for n, r, s in (
            ("V", "a", {"status": "resolved"}), ("W", "b", {}), ("X", "c", {}))]),
        # Whatever a name holds.
        ("🟡 ‹!channel›: W", [_alert("W", "warning", "<!channel>")]),
        (r"🟡 [a-(\1$: W", [_alert("W", "warning", r"[a-(\1$")]),
        (f"🟡 {'ä' * 40}…: {'W' * 100}…", [_alert("W" * 200, "warning", "ä" * 41)]),
        ("🟡 a: It learns nothing: lr_zero", [
            ({"run_id": "a", "signal": "lr_zero"}, {"summary": "It learns nothing."})]),
        ("🔴 a: Over: oom_gpu", [
            (_alert("F", "critical", "a", reason="oom_gpu"), {"summary": "Over."})]),
        ("🔴 gpu1: X: Xid 79", [_alert("X", "critical", instance="gpu1:9460", xid="79")]),
        ("🟡 a b: W", [_alert("W", "warning", "a\nb")]),
        (
            "🔴 my (best) run: Training makes no progress",
            [(_alert("S", "critical", "r+1"), STALL | {"description": "Run my (best) run (r+1) stalls (r+1)."})],
        ),
    ],
)  # fmt: skip
def test_the_title_tells_how_bad_where_and_what(tmp_path: Path, title: str, alerts: list[Any]) -> None:
    assert _rendered(tmp_path, "tunewatch.title", _data(*alerts)) == title


def test_the_title_of_what_is_over(tmp_path: Path) -> None:
    over = _data((_alert("S", "critical", "2026-ab"), STALL), status="resolved")
    assert _rendered(tmp_path, "tunewatch.title", over) == "✅ Resolved: tiny: Training makes no progress"


TEXT = {
    "one": (
        [(_alert("S", "critical", "2026-ab"), STALL)],
        "firing",
        """\
Run tiny (2026-ab) has shown no activity for 5m. Look at what it waits for.
Since Fri 2 Jan 03:04 UTC
Runbook: https://example.org/TunewatchRunStalled.md
Dashboard: http://127.0.0.1:3000/d/tunewatch-run?var-run_id=2026-ab""",
    ),
    "over": (
        [(_alert("S", "critical", "2026-ab"), STALL)],
        "resolved",
        """\
It lasted 1h12m0s.
Since Fri 2 Jan 03:04 UTC
Runbook: https://example.org/TunewatchRunStalled.md
Dashboard: http://127.0.0.1:3000/d/tunewatch-run?var-run_id=2026-ab""",
    ),
    "folded": (
        [
            (_alert("N", "critical", "2026-ab", signal="lr_zero"), {"summary": "It does not learn."}),
            (_alert("S", "critical", "2026-ab"), STALL | {"description": "Run tiny (2026-ab)\nhangs."}),
            (_alert("R", "critical", "2026-ab", status="resolved"), {"summary": "Its state is lost."}),
        ],
        "firing",
        """\
It does not learn.
Also: Training makes no progress
Resolved: Its state is lost
Since Fri 2 Jan 03:04 UTC""",
    ),
    "many": (
        [_lost("gpu1:9460", f"GPU-0000000{n}-1111-2222-3333-444444444444") for n in range(8)],
        "firing",
        """\
TunewatchGpuLost
Also: TunewatchGpuLost (GPU-00000001…)
Also: TunewatchGpuLost (GPU-00000002…)
Also: TunewatchGpuLost (GPU-00000003…)
And 4 more.
Since Fri 2 Jan 03:04 UTC""",
    ),
    "nothing": ([{}], "firing", "It has no text.\nSince Fri 2 Jan 03:04 UTC"),
}


@pytest.mark.parametrize("name", TEXT)
def test_the_text_tells_what_to_do_and_folds_the_others(tmp_path: Path, name: str) -> None:
    alerts, status, text = TEXT[name]
    assert _rendered(tmp_path, "tunewatch.text", _data(*alerts, status=status)) == text


def test_slack_shows_links_and_the_readers_own_time(tmp_path: Path) -> None:
    # 2026-01-02T03:04:05Z is 1767323045 seconds after 1970.
    since = "Since <!date^1767323045^{date_short_pretty} {time}|Fri 2 Jan 03:04 UTC>"
    evil = STALL | {"description": "<!channel> look", "dashboard_url": "http://x/?a=<!here>&b=1|2"}

    assert _rendered(tmp_path, "tunewatch.slack.text", _data((_alert("S", "critical", "a"), STALL))) == (
        "Run tiny (2026-ab) has shown no activity for 5m. Look at what it waits for.\n"
        f"{since} · <https://example.org/TunewatchRunStalled.md|Runbook>"
        " · <http://127.0.0.1:3000/d/tunewatch-run?var-run_id=2026-ab|Dashboard>"
    )
    assert _rendered(tmp_path, "tunewatch.slack.text", _data((_alert("S", "critical", "a"), evil))) == (
        f"‹!channel› look\n{since} · <https://example.org/TunewatchRunStalled.md|Runbook>"
        " · <http://x/?a=!here&b=12|Dashboard>"
    )
    long = _rendered(
        tmp_path, "tunewatch.slack.text", _data(({"alertname": "S"}, {"description": "ö" * 5000}))
    )
    assert long == f"{'ö' * 500}…\n{since}"


@pytest.mark.parametrize(
    ("color", "severities", "status"),
    [
        ("danger", ["critical"], "firing"),
        ("warning", ["warning", "warning"], "firing"),
        ("#439fe0", ["info"], "firing"),
        ("danger", ["warning", "critical"], "firing"),
        ("good", ["critical"], "resolved"),
    ],
)
def test_the_color_is_that_of_the_severity(
    tmp_path: Path, color: str, severities: list[str], status: str
) -> None:
    data = _data(*(_alert("A", severity) for severity in severities), status=status)
    assert _rendered(tmp_path, "tunewatch.slack.color", data) == color


def _documented(heading: str) -> dict[str, Any]:
    """The YAML under a heading of docs/alerting.md, all its blocks as one document."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOCS.read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None
    blocks = [_load(block) for block in re.findall(r"```yaml\n(.*?)```", section[1], re.S)]
    return {key: value for block in blocks for key, value in block.items()}


def _with(config: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with a part of the documentation: routes below the watchdog, receivers in place of their namesakes."""
    routes = config["route"]["routes"]
    receivers = {one["name"]: one for one in [*config["receivers"], *part["receivers"]]}
    routes = [*routes[:1], *part.get("route", {}).get("routes", ()), *routes[1:]]
    return {**config, "route": {**config["route"], "routes": routes}, "receivers": list(receivers.values())}


@pytest.mark.parametrize("config", [CONFIG, SLACK_CONFIG], ids=lambda path: path.name)
@pytest.mark.parametrize("heading", ["PagerDuty", "E-mail", "A webhook of yours", "Teams"])
def test_what_the_documentation_shows_is_valid(tmp_path: Path, config: Path, heading: str) -> None:
    file = tmp_path / "alertmanager.yml"
    shutil.copytree(TEMPLATES, tmp_path / "templates")
    file.write_text(yaml.safe_dump(_with(_load(config.read_text()), _documented(heading))), encoding="utf-8")
    _amtool("check-config", str(file))


def test_a_team_has_its_alerts_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "alertmanager.yml"
    config = _with(_load(CONFIG.read_text()), _documented("Teams"))
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    for severity, receiver in RECEIVER.items():
        labels = {"alertname": "Any", "severity": severity, "run_id": "a"}
        _assert_route(file, "team-vision", {**labels, "team": "vision"})
        if severity != "none":
            _assert_route(file, receiver, labels)
            _assert_route(file, receiver, {**labels, "team": "speech"})
    # The heartbeat is the stack's, whoever owns its runs.
    _assert_route(file, "watchdog", {"alertname": "TunewatchWatchdog", "severity": "none", "team": "vision"})


def test_no_secret_stands_in_a_shipped_file() -> None:
    files = [CONFIG, SLACK_CONFIG, DOCS, *TEMPLATES.iterdir()]
    secret = (
        r"(?<!_)\b(api_url|routing_key|service_key|auth_password|password|credentials|bot_token|api_key):"
    )
    for file in files:
        assert not re.search(secret, file.read_text(encoding="utf-8")), file


def _vector(labels: Mapping[str, str]) -> str:
    """PromQL for one series with these labels."""
    expression = "vector(1)"
    for name, value in labels.items():
        expression = f'label_replace({expression}, "{name}", "{value}", "", "")'
    return expression


VISION = "vision-7"


def _shipped_labels(name: str) -> Labels:
    """Labels as an alert of that name has, with a run, machine and card of its own."""
    machine = f"gpu{list(RULES).index(name)}:9460"
    own = {"run_id": f"run-{name}", "instance": machine, "uuid": f"GPU-{name}", "job": "tunewatch-gpu"}
    return {label: own.get(label, f"some-{label}") for label in _labels_used(RULES[name])}


@dataclass(frozen=True)
class _Told:
    """What came to the fake Slack and PagerDuty: one message for each group of alerts."""

    slack: dict[str, dict[str, Any]]
    pager: dict[str, dict[str, Any]]
    team: list[dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Told]:
    """Every shipped alert, from a real Prometheus through a real Alertmanager to Slack and PagerDuty on loopback.

    The alerts fire at once: their conditions are replaced by a series with their labels. Texts, routes, groups and
    templates are the shipped ones; team and pager are those of docs/alerting.md.
    """
    folder = tmp_path_factory.mktemp("told")
    runs = [labels["run_id"] for name in RULES if "run_id" in (labels := _shipped_labels(name))]
    rules = [
        *(
            {"record": "tunewatch_run_info", "expr": _vector({"run_id": run, "name": "tiny_train"})}
            for run in [*runs, VISION]
        ),
        *(
            {key: rule[key] for key in ("alert", "labels", "annotations")}
            | {"expr": _vector(_shipped_labels(name))}
            for name, rule in RULES.items()
        ),
        RULES["TunewatchRunStalled"] | {"expr": _vector({"run_id": VISION})},
    ]
    (folder / "rules").mkdir()
    groups = {"groups": [{"name": "all", "rules": rules}]}
    (folder / "rules" / "all.yml").write_text(yaml.safe_dump(groups), encoding="utf-8")

    with _Receiver() as receiver:
        pager = _documented("PagerDuty")["receivers"][0]["pagerduty_configs"][0]
        team = _documented("Teams")
        secrets = {
            "slack_url": f"{receiver.url}/slack",
            "pagerduty_key": "0123456789abcdef0123456789abcdef",
            "slack_url_vision": f"{receiver.url}/vision",
        }
        for name, secret in secrets.items():
            (folder / name).write_text(f"{secret}\n", encoding="utf-8")  # as an editor saves it
        config = _with(_load(SLACK_CONFIG.read_text(encoding="utf-8")), team)
        critical = next(one for one in config["receivers"] if one["name"] == "critical")
        critical["pagerduty_configs"] = [{**pager, "url": f"{receiver.url}/pagerduty"}]
        own = folder / "own.yml"
        own.write_text(yaml.safe_dump(config).replace("/etc/alertmanager/secrets", str(folder)))
        rendered = alertmanager_config(webhook_url=receiver.url, time_scale=40, file=own)
        with _running(folder / "alertmanager", rendered, receiver) as running:
            prometheus = _load(
                prometheus_config(
                    rules_dir=folder / "rules",
                    targets_dir=folder / "targets",
                    alertmanager=running.url.removeprefix("http://"),
                    time_scale=15,
                )
            )
            prometheus["alerting"] |= team["alerting"]
            file = folder / "prometheus.yml"
            file.write_text(yaml.safe_dump(prometheus), encoding="utf-8")
            flags = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
            # The first alerts come before Prometheus has discovered Alertmanager, and are lost.
            flags.append("--rules.alert.resend-delay=2s")
            with _server(folder, "prometheus", flags=flags):
                yield _collect(receiver)


def _collect(receiver: _Receiver) -> _Told:
    told = _Told({}, {}, [])
    deadline = time.monotonic() + DEADLINE
    critical = sum(rule["labels"]["severity"] == "critical" for rule in RULES.values())
    # All but the heartbeat, each in a message of its own; and the critical ones on the pager, too.
    while len(told.slack) < len(RULES) - 1 or len(told.pager) < critical or not told.team:
        missing = RULES.keys() - told.slack.keys()
        assert time.monotonic() < deadline, f"not told: {sorted(missing)}, or not all on the pager"
        path, message = receiver.posts.get(timeout=DEADLINE)
        if path == "/pagerduty":
            told.pager.setdefault(message["dedup_key"], message)
        elif path == "/vision":
            told.team.append(message)
        elif path == "/slack":
            (attachment,) = message["attachments"]
            name = re.search(r"/([A-Za-z]+)\.md\|Runbook>", attachment["text"])
            assert name is not None, attachment
            # On a busy machine Prometheus may be late, and an alert be over in the meantime.
            told.slack.setdefault(name[1], attachment)
    return told


SIGN = {"critical": "🔴", "warning": "🟡", "info": "🔵"}
COLOR = {"critical": "danger", "warning": "warning", "info": "#439fe0"}


@pytest.mark.parametrize("name", [name for name in RULES if name != "TunewatchWatchdog"])
def test_each_shipped_alert_reads_well_in_slack(told: _Told, name: str) -> None:
    rule, labels, attachment = RULES[name], _shipped_labels(name), told.slack[name]
    severity = rule["labels"]["severity"]
    # The name of the run, or the machine without its port.
    subject = "tiny_train" if "run_id" in labels else labels["instance"].removesuffix(":9460")
    detail = "".join(
        f": {word}{labels[label]}"
        for label, word in (("signal", ""), ("reason", ""), ("xid", "Xid "))
        if label in labels
    )
    title = f"{SIGN[severity]} {subject}: {rule['annotations']['summary'].removesuffix('.')}{detail}"

    assert attachment["title"] == attachment["fallback"] == title
    assert len(title) <= 80
    assert attachment["color"] == COLOR[severity]
    advice, since = attachment["text"].splitlines()
    assert 40 < len(advice) <= 500 and "…" not in advice
    # An error in a template shows as "<error ...>" in Prometheus, and as "%!s(...)" in Go; nothing is left out.
    assert not re.search(r"[<>‹›]|%!|\{\{|\}\}| [.,;)]|\( |  ", advice), advice
    assert labels.get("run_id", labels.get("instance")) in advice
    assert re.match(
        r"Since <!date\^\d{10}\^\{date_short_pretty\} \{time\}\|\w{3} \d+ \w{3} \d\d:\d\d UTC> · ", since
    )
    query = f"?var-run_id={labels['run_id']}" if "run_id" in labels else ""
    assert since.endswith(f" · <http://127.0.0.1:3000/d/tunewatch-run{query}|Dashboard>")


def test_the_pager_is_called_for_critical_alerts_with_the_same_words(told: _Told) -> None:
    summaries = {message["payload"]["summary"] for message in told.pager.values()}
    titles = {
        attachment["title"]
        for name, attachment in told.slack.items()
        if RULES[name]["labels"]["severity"] == "critical"
    }
    assert summaries == titles
    for message in told.pager.values():
        assert message["routing_key"] == "0123456789abcdef0123456789abcdef"
        assert message["event_action"] == "trigger"
        assert message["payload"]["severity"] == "critical"
        assert "\nRunbook: https://" in message["payload"]["custom_details"]["text"]


def test_a_run_whose_id_tells_its_team_is_told_to_that_team(told: _Told) -> None:
    """The relabelling of docs/alerting.md, on a real Prometheus."""
    titles = {message["attachments"][0]["title"] for message in told.team}
    assert titles == {"🔴 tiny_train: Training makes no progress"}
    assert VISION in told.team[0]["attachments"][0]["text"]
    assert not any(VISION in attachment["text"] for attachment in told.slack.values())


@pytest.mark.parametrize("with_templates", [False, True], ids=["shipped_texts", "own_texts"])
def test_the_stack_runs_with_a_file_of_yours(tmp_path: Path, with_templates: bool) -> None:
    own = tmp_path / "own"
    own.mkdir()
    if with_templates:
        (own / "templates").mkdir()
        (own / "templates" / "own.tmpl").write_text(
            '{{ define "tunewatch.title" }}own title{{ end }}{{ define "tunewatch.slack.text" }}{{ end }}'
            '{{ define "tunewatch.slack.color" }}{{ end }}'
        )
    with _Receiver() as receiver:
        (own / "slack_url").write_text(f"{receiver.url}/slack\n")
        text = SLACK_CONFIG.read_text().replace("/etc/alertmanager/secrets", str(own))
        (own / "slack.yml").write_text(text)
        with Stack(tmp_path / "home", time_scale=40, alertmanager_file=own / "slack.yml") as stack:
            assert stack.info.notifications_file is None, "what a person gets is not in the inbox"
            alertmanager = _Alertmanager(stack.alertmanager_url, receiver)
            stalled = _alert("TunewatchRunStalled", "critical", "r1")
            alertmanager.post(stalled, _alert("TunewatchWatchdog", "none"), summary="It stands.")
            assert stack.inbox is not None
            assert stack.inbox.wait_for(lambda n: n.path == "/watchdog", timeout=DEADLINE)
            posts = [receiver.posts.get(timeout=DEADLINE)]
            alertmanager.post(stalled, ends=datetime.now(UTC), summary="It stands.")
            posts.append(receiver.posts.get(timeout=DEADLINE))
    assert [path for path, _ in posts] == ["/slack", "/slack"]
    fires, over = (message["attachments"][0] for _, message in posts)
    if with_templates:
        assert (fires["title"], over["title"]) == ("own title", "own title")
    else:
        assert (fires["title"], fires["color"]) == ("🔴 r1: It stands", "danger")
        assert (over["title"], over["color"]) == ("✅ Resolved: r1: It stands", "good")
        assert re.match(r"It lasted [\dhms]+\.\nSince <!date", over["text"])


def test_the_command_names_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tunewatch", "stack", "--alertmanager-config", str(tmp_path / "missing.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "TUNEWATCH_HOME": str(tmp_path / "home")},
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "missing.yml is not a configuration of Alertmanager: " in line
    assert not (tmp_path / "home").exists()

"""Who is told what: routes and inhibition of the shipped alertmanager.yml, on a live Alertmanager."""

from __future__ import annotations

import json
import queue
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunewatch.rules import alertmanager_config

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "prometheus" / "alertmanager.yml"
DEADLINE = 30.0  # seconds a condition may take on a busy machine


def _binary(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    pytest.fail(f"none of {', '.join(names)} is on PATH: install prometheus-alertmanager to run this test")


def _amtool(*arguments: str) -> None:
    result = subprocess.run(
        [_binary("amtool"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_shipped_config_is_valid() -> None:
    _amtool("check-config", str(CONFIG))


@pytest.mark.parametrize("time_scale", [1, 30, 1000])
def test_rendered_config_is_valid_and_posts_elsewhere(tmp_path: Path, time_scale: float) -> None:
    text = alertmanager_config(webhook_url="http://127.0.0.1:1234/hook/", time_scale=time_scale)
    (tmp_path / "alertmanager.yml").write_text(text, encoding="utf-8")

    _amtool("check-config", str(tmp_path / "alertmanager.yml"))
    urls = {
        receiver["name"]: [webhook["url"] for webhook in receiver["webhook_configs"]]
        for receiver in yaml.safe_load(text)["receivers"]
    }
    assert urls.pop("watchdog") == ["http://127.0.0.1:1234/hook/watchdog"]
    assert len(urls) == 5
    assert all(url == ["http://127.0.0.1:1234/hook/alerts"] for url in urls.values())


@pytest.mark.parametrize(
    ("receiver", "labels"),
    [
        ("run-critical", ["alertname=TunewatchRunFailed", "run_id=a", "reason=nan", "severity=critical"]),
        ("run-critical", ["alertname=TunewatchRunVanished", "run_id=a", "severity=critical"]),
        ("run", ["alertname=TunewatchRunPreempted", "run_id=a", "severity=warning"]),
        ("run", ["alertname=TunewatchGpuIdleWhileTraining", "run_id=a", "uuid=GPU-1", "severity=warning"]),
        ("run-info", ["alertname=TunewatchRunFinished", "run_id=a", "severity=info"]),
        ("watchdog", ["alertname=TunewatchWatchdog", "severity=none"]),
        ("machine", ["alertname=TunewatchTargetDown", "instance=gpu1:9460", "severity=critical"]),
        ("machine", ["alertname=TunewatchGpuLost", "instance=gpu1:9460", "uuid=GPU-1", "severity=critical"]),
        ("machine", ["alertname=TunewatchGpuSidecarBlind", "instance=gpu1:9460", "severity=warning"]),
        ("machine", ["alertname=TunewatchClockSkew", "instance=gpu1:9470", "severity=warning"]),
        ("default", ["alertname=DiskSlow", "severity=warning"]),
        ("default", ["alertname=DiskSlow", "run_id=", "instance=", "severity=critical"]),
    ],
)
def test_each_kind_reaches_its_receiver(receiver: str, labels: list[str]) -> None:
    _amtool("config", "routes", "test", f"--config.file={CONFIG}", f"--verify.receivers={receiver}", *labels)


def _seconds(duration: str) -> int:
    match = re.fullmatch(r"(\d+)([smh])", duration)
    assert match is not None
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def test_waiting_times() -> None:
    prometheus = yaml.safe_load((ROOT / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    evaluation = _seconds(prometheus["global"]["evaluation_interval"])
    root = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["route"]
    routes = {route["receiver"]: route for route in root["routes"]}
    run = routes["run"]
    waits = {route["receiver"]: _seconds(route["group_wait"]) for route in (root, run, *run["routes"])}

    # An alert that inhibits another one may come one evaluation later than it.
    assert min(waits.values()) > evaluation
    assert waits["run-critical"] < waits["run"]
    assert run["group_by"] == ["run_id"] and routes["machine"]["group_by"] == ["instance"]
    watchdog = routes["watchdog"]
    assert _seconds(watchdog["repeat_interval"]) % _seconds(watchdog["group_interval"]) == 0


def test_only_a_heartbeat_and_news_are_not_taken_back() -> None:
    receivers = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["receivers"]
    silent = {r["name"] for r in receivers if not r["webhook_configs"][0]["send_resolved"]}

    assert silent == {"watchdog", "run-info"}


@dataclass
class _Webhook:
    """Keeps what Alertmanager posts, with the path it was posted to."""

    posts: queue.Queue[tuple[str, dict[str, Any]]] = field(default_factory=queue.Queue)

    def __enter__(self) -> _Webhook:
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                posts.put((self.path, json.loads(body)))
                self.send_response(200)
                self.end_headers()

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
    webhook: _Webhook

    def post(self, *alerts: dict[str, str]) -> None:
        # Without an end, alerts would be over after resolve_timeout, which is short in fast time.
        ends = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        body = [{"labels": labels, "endsAt": ends} for labels in alerts]
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def alerts(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=10) as answer:
            return json.load(answer)

    def inhibited(self) -> list[dict[str, str]]:
        """The labels of the alerts that are held back, by run, then name.

        Alertmanager takes alerts up one after the other, in the background: a last pair of a run of its own
        shows that all before it are taken up.
        """
        self.post(_alert("TunewatchRunFailed", "critical", "last"))
        self.post(_alert("TunewatchRunStalled", "critical", "last"))
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            labels = [alert["labels"] for alert in self.alerts() if alert["status"]["inhibitedBy"]]
            others = [own for own in labels if own.get("run_id") != "last"]
            if len(others) < len(labels):
                return sorted(others, key=lambda own: (own.get("run_id", ""), own["alertname"]))
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


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[_Alertmanager]:
    """A live Alertmanager with the shipped routes in fast time (group_wait 0.5 s to 1.5 s)."""
    program = _binary("alertmanager", "prometheus-alertmanager")
    with _Webhook() as webhook:
        config = tmp_path / "alertmanager.yml"
        config.write_text(alertmanager_config(webhook_url=webhook.url, time_scale=40), encoding="utf-8")
        url = f"http://127.0.0.1:{_free_port()}"
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.path={tmp_path / 'data'}",
                    f"--web.listen-address={url.removeprefix('http://')}",
                    "--cluster.listen-address=",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            deadline = time.monotonic() + DEADLINE
            while not _is_ready(url):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, "Alertmanager did not become ready"
                time.sleep(0.05)
            yield _Alertmanager(url, webhook)
        finally:
            process.terminate()
            process.wait(timeout=DEADLINE)


def _alert(name: str, severity: str, run: str | None = None, **labels: str) -> dict[str, str]:
    return {
        "alertname": name,
        "severity": severity,
        **({"run_id": run} if run is not None else {}),
        **labels,
    }


@pytest.mark.parametrize("source", ["TunewatchRunFailed", "TunewatchRunVanished"])
def test_an_end_silences_the_lesser_alerts_of_its_run_and_no_other(
    alertmanager: _Alertmanager, source: str
) -> None:
    silenced = [
        _alert("TunewatchGpuIdleWhileTraining", "warning", "a", uuid="GPU-1"),
        _alert("TunewatchResumeLost", "warning", "a"),
        _alert("TunewatchRunStalled", "critical", "a"),
    ]
    alertmanager.post(
        _alert(source, "critical", "a"),
        *silenced,
        _alert("TunewatchRunNonFinite", "critical", "a"),
        _alert("TunewatchRunStalled", "critical", "b"),
        _alert("TunewatchResumeLost", "warning", "b"),
        _alert("TunewatchGpuIdleWhileTraining", "warning", "b", uuid="GPU-1"),
        _alert("TunewatchGpuLost", "critical", instance="gpu1:9460", uuid="GPU-1"),
        _alert("TunewatchGpuSidecarBlind", "warning", instance="gpu1:9460"),
        _alert("DiskSlow", "warning"),
        # Without run_id on either side `equal` would hold.
        _alert(source, "critical"),
        _alert("TunewatchRunStalled", "critical"),
        _alert("NodeDown", "critical"),
    )

    assert alertmanager.inhibited() == silenced
    assert len(alertmanager.alerts()) == 16


def test_a_critical_alert_reaches_the_webhook_in_one_message_per_run(alertmanager: _Alertmanager) -> None:
    alertmanager.post(
        _alert("TunewatchRunStalled", "critical", "a"),
        _alert("TunewatchRunFailed", "critical", "a", reason="oom_gpu"),
        _alert("TunewatchRunStalled", "critical", "b"),
        _alert("TunewatchWatchdog", "none"),
        _alert("TunewatchRunFinished", "info", "c"),
    )

    messages: dict[str, tuple[str, dict[str, Any]]] = {}
    deadline = time.monotonic() + DEADLINE
    while len(messages) < 4:
        # The heartbeat repeats for ever, so the queue alone never runs dry.
        assert time.monotonic() < deadline, f"only these runs were told of: {sorted(messages)}"
        path, message = alertmanager.webhook.posts.get(timeout=DEADLINE)
        messages.setdefault(message["groupLabels"].get("run_id", "none"), (path, message))

    def sent(run: str) -> tuple[str, str, list[str]]:
        path, message = messages[run]
        return path, message["receiver"], [alert["labels"]["alertname"] for alert in message["alerts"]]

    # The stall of run a is in the same group as its failure: it was held back, not late.
    assert sent("a") == ("/alerts", "run-critical", ["TunewatchRunFailed"])
    assert sent("b") == ("/alerts", "run-critical", ["TunewatchRunStalled"])
    assert sent("c") == ("/alerts", "run-info", ["TunewatchRunFinished"])
    assert sent("none") == ("/watchdog", "watchdog", ["TunewatchWatchdog"])


def test_what_befalls_one_machine_comes_in_one_message(alertmanager: _Alertmanager) -> None:
    alertmanager.post(
        _alert("TunewatchGpuLost", "critical", job="tunewatch-gpu", instance="gpu1:9460", uuid="GPU-1"),
        _alert("TunewatchGpuLost", "critical", job="tunewatch-gpu", instance="gpu1:9460", uuid="GPU-2"),
        _alert("TunewatchGpuSidecarBlind", "warning", job="tunewatch-gpu", instance="gpu2:9460"),
        _alert("TunewatchGpuIdleWhileTraining", "warning", "a", uuid="GPU-1"),
    )

    messages: dict[tuple[str, str], list[tuple[str, str]]] = {}
    while len(messages) < 3:
        _, message = alertmanager.webhook.posts.get(timeout=DEADLINE)
        ((_, key),) = message["groupLabels"].items()
        labels = [alert["labels"] for alert in message["alerts"]]
        messages[message["receiver"], key] = sorted((own["alertname"], own.get("uuid", "")) for own in labels)

    assert messages == {
        ("machine", "gpu1:9460"): [("TunewatchGpuLost", "GPU-1"), ("TunewatchGpuLost", "GPU-2")],
        ("machine", "gpu2:9460"): [("TunewatchGpuSidecarBlind", "")],
        ("run", "a"): [("TunewatchGpuIdleWhileTraining", "GPU-1")],
    }

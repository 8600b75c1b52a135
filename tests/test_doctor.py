"""The doctor, on real servers: green where all is well, red with the reason where it is not."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from rich.console import Console

from tunewatch import stack as stack_module
from tunewatch.doctor import VERDICT, Check, diagnose, exit_code, print_report
from tunewatch.inbox import read_notifications
from tunewatch.rules import render_rules
from tunewatch.share import share_path
from tunewatch.stack import Stack, fetch

SCALE = 20.0
TIMEOUT = 60.0


@contextmanager
def endpoint(clock_offset: float = 0.0) -> Iterator[str]:
    """A supervisor's /metrics, as far as the doctor looks at it; yields its address."""
    registry = CollectorRegistry()
    clock = Gauge("tunewatch_time_seconds", "The exporter's clock.", registry=registry)
    clock.set_function(lambda: time.time() + clock_offset)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def receiver(status: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Somebody else's webhook, which answers `status`; yields its address and the bodies it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def announce(home: Path, run_id: str, address: str) -> None:
    (home / "targets").mkdir(parents=True, exist_ok=True)
    (home / "targets" / f"{run_id}.json").write_text(json.dumps([{"targets": [address], "labels": {}}]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    assert checks[-1].name == VERDICT
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with its own inbox, for the tests that leave it as it was."""
    with Stack(tmp_path_factory.mktemp("home"), time_scale=SCALE) as stack:
        yield stack


def test_all_is_green_on_a_running_stack(running: Stack) -> None:
    with endpoint() as run, endpoint() as sidecar:
        announce(running.home, "run-1", run)
        file = running.add_static_target("gpu", sidecar)
        checks = diagnose(running.home, timeout=TIMEOUT)
        (running.home / "targets" / "run-1.json").unlink()
        file.unlink()

    assert [(check.name, check.ok) for check in checks] == [
        ("Prometheus", True),
        ("Scrape targets", True),
        ("Alert rules", True),
        ("Clocks", True),
        ("Prometheus' Alertmanager", True),
        ("Alertmanager", True),
        ("Alerts arrive", True),
        ("Test alert", True),
        (VERDICT, True),
    ], checks
    assert exit_code(checks) == 0
    found = by_name(checks)
    assert "all 2 announced" in found["Scrape targets"].message
    shipped = sum(
        "alert" in rule
        for text in render_rules().values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
    )
    assert f"all {shipped} shipped alerts" in found["Alert rules"].message
    assert "notifications.jsonl" in found["Test alert"].message, "it says what the proof is"
    assert "inbox" in found[VERDICT].message, "an inbox wakes nobody"


@pytest.mark.slow
def test_the_test_alert_takes_the_route_of_a_critical_alert_and_is_ended(running: Stack) -> None:
    assert running.inbox is not None
    assert by_name(diagnose(running.home, timeout=TIMEOUT))["Test alert"].ok
    sent = [n for n in read_notifications(running.inbox.file) if n.alerts[0].name == "TunewatchTest"]
    assert sent[-1].receiver == "critical"
    run_id = sent[-1].alerts[0].labels["run_id"]

    resolved = running.inbox.wait_for(
        lambda n: n.status == "resolved" and n.alerts[0].labels.get("run_id") == run_id, timeout=TIMEOUT
    )
    assert resolved is not None


def test_no_live_run_is_no_fault(running: Stack) -> None:
    checks = diagnose(running.home, send_test_alert=False, timeout=TIMEOUT)
    found = by_name(checks)
    assert found["Scrape targets"].ok is None
    assert found[VERDICT].ok is None and "no test alert was sent" in found[VERDICT].message
    assert "Test alert" not in found
    assert exit_code(checks) == 0


def test_a_dead_target_is_named_with_its_error(running: Stack) -> None:
    dead = f"127.0.0.1:{free_port()}"
    announce(running.home, "dead", dead)
    wait_for_series(running, f'up{{instance="{dead}"}} == 0')
    checks = diagnose(running.home, send_test_alert=False, timeout=2.0)
    (running.home / "targets" / "dead.json").unlink()

    targets = by_name(checks)["Scrape targets"]
    assert targets.ok is False
    assert f"{dead} is down" in targets.message and "connection refused" in targets.message
    assert by_name(checks)[VERDICT].message == "No. Not in order: Scrape targets."
    assert exit_code(checks) == 1


def test_a_target_that_prometheus_does_not_know_is_named(running: Stack, tmp_path: Path) -> None:
    announce(tmp_path, "elsewhere", "127.0.0.1:9")  # a home whose folder this Prometheus does not read
    checks = diagnose(tmp_path, running.prometheus_url, send_test_alert=False, timeout=1.0)
    targets = by_name(checks)["Scrape targets"]
    assert targets.ok is False
    assert "127.0.0.1:9 (elsewhere.json) is not known to Prometheus" in targets.message


def test_a_clock_that_is_off_is_measured(running: Stack) -> None:
    with endpoint(clock_offset=-300.0) as address:
        announce(running.home, "late", address)
        wait_for_series(running, f'tunewatch_time_seconds{{instance="{address}"}}')
        checks = diagnose(running.home, send_test_alert=False, timeout=TIMEOUT)
        (running.home / "targets" / "late.json").unlink()
    clocks = by_name(checks)["Clocks"]
    assert clocks.ok is False
    assert address in clocks.message
    assert abs(float(clocks.message.split()[-2]) - 300.0) < 20.0


def wait_for_series(stack: Stack, query: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    url = f"{stack.prometheus_url}/api/v1/query?query={quote(query)}"
    while not json.loads(fetch(url))["data"]["result"]:
        assert time.monotonic() < deadline, f"{query} does not appear"
        time.sleep(0.1)


def test_a_silence_that_swallows_it_is_named(running: Stack) -> None:
    now = datetime.now(UTC)
    silence = {
        "matchers": [{"name": "severity", "value": "critical", "isRegex": False, "isEqual": True}],
        "startsAt": now.isoformat(),
        "endsAt": (now + timedelta(minutes=5)).isoformat(),
        "createdBy": "test",
        "comment": "holiday",
    }
    body = json.dumps(silence).encode()
    answer = json.loads(fetch(f"{running.alertmanager_url}/api/v2/silences", body=body))
    try:
        checks = diagnose(running.home, timeout=5.0)
    finally:
        end = Request(f"{running.alertmanager_url}/api/v2/silence/{answer['silenceID']}", method="DELETE")
        urlopen(end, timeout=10).close()
    assert by_name(checks)["Test alert"].ok is False
    assert f"a silence swallows it ({answer['silenceID']})" in by_name(checks)["Test alert"].message


def test_without_servers_it_says_so(tmp_path: Path) -> None:
    prometheus, alertmanager = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    checks = diagnose(tmp_path, prometheus, alertmanager, timeout=5.0)
    assert [(check.name, check.ok) for check in checks] == [
        ("Prometheus", False),
        ("Alertmanager", False),
        (VERDICT, False),
    ]
    assert "Connection refused" in checks[0].message and prometheus in checks[0].message
    assert "tunewatch stack" in checks[0].advice
    assert exit_code(checks) == 1


def test_another_program_on_the_port_is_no_prometheus(tmp_path: Path) -> None:
    with endpoint() as address:
        checks = diagnose(tmp_path, f"http://{address}", f"http://{address}", timeout=5.0)
    assert checks[0].ok is False
    assert "another program listens there" in checks[0].message


def test_missing_rules_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_stalled(*args: Any, **options: Any) -> dict[str, str]:
        files = {name: yaml.safe_load(text) for name, text in render_rules(*args, **options).items()}
        for content in files.values():
            for group in content["groups"]:
                group["rules"] = [r for r in group["rules"] if r.get("alert") != "TunewatchRunStalled"]
        return {name: yaml.safe_dump(content) for name, content in files.items()}

    monkeypatch.setattr(stack_module, "render_rules", without_stalled)
    with Stack(tmp_path, time_scale=SCALE):
        rules = by_name(diagnose(tmp_path, send_test_alert=False, timeout=TIMEOUT))["Alert rules"]
    assert rules.ok is False
    assert rules.message.startswith("1 of ") and rules.message.endswith("not loaded: TunewatchRunStalled")


def test_a_prometheus_without_alertmanager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unconnected(**options: Any) -> str:
        config = yaml.safe_load(stack_module_config(**options))
        del config["alerting"]
        return yaml.safe_dump(config)

    stack_module_config = stack_module.prometheus_config
    monkeypatch.setattr(stack_module, "prometheus_config", unconnected)
    with Stack(tmp_path, time_scale=SCALE):
        found = by_name(diagnose(tmp_path, timeout=4.0))
    assert found["Prometheus' Alertmanager"].ok is False
    assert found["Alerts arrive"].ok is False
    assert found["Test alert"].ok, "that part of the chain is in order"
    assert found[VERDICT].message == "No. Not in order: Prometheus' Alertmanager, Alerts arrive."


def test_a_receiver_that_refuses_is_told_with_the_reason(tmp_path: Path) -> None:
    with receiver(500) as (url, got), Stack(tmp_path, time_scale=SCALE, receiver_url=url):
        checks = diagnose(tmp_path, timeout=TIMEOUT)
    test_alert = by_name(checks)["Test alert"]
    assert test_alert.ok is False
    assert "unexpected status code 500" in test_alert.message
    assert got
    assert by_name(checks)[VERDICT].message == "No. Not in order: Test alert."
    assert exit_code(checks) == 1


def test_somebody_elses_receiver_is_proved_by_the_counters(tmp_path: Path) -> None:
    with receiver(200) as (url, _), Stack(tmp_path, time_scale=SCALE, receiver_url=url):
        found = by_name(diagnose(tmp_path, timeout=TIMEOUT))
    assert found["Test alert"].ok
    assert "receiver critical" in found["Test alert"].message
    assert "counter" in found["Test alert"].message, "it says what the proof is"
    assert found[VERDICT].message == "Yes: an alert about a run gets through to your receiver."


@pytest.mark.slow
def test_a_heartbeat_that_is_delivered_elsewhere_is_no_proof(tmp_path: Path) -> None:
    """Slack refuses, while the watchdog's webhook takes everything."""
    with receiver(500) as (slack, refused), receiver(200) as (url, taken):
        own = tmp_path / "own.yml"
        (tmp_path / "slack_url").write_text(slack)
        shipped = share_path("prometheus", "alertmanager.slack.yml").read_text()
        own.write_text(shipped.replace("/etc/alertmanager/secrets", str(tmp_path)))
        with Stack(tmp_path, time_scale=SCALE, alertmanager_file=own, receiver_url=url) as stack:
            beat = [{"labels": {"alertname": "TunewatchWatchdog", "severity": "none"}}]
            fetch(f"{stack.alertmanager_url}/api/v2/alerts", body=json.dumps(beat).encode())
            checks = diagnose(tmp_path, timeout=TIMEOUT)
    test_alert = by_name(checks)["Test alert"]
    assert test_alert.ok is False and "500" in test_alert.message
    assert refused and taken


def test_the_report_ends_with_the_verdict() -> None:
    checks = [
        Check("Prometheus", True, "answers"),
        Check("Scrape targets", None, "no run [live]", "Start one."),
        Check("Test alert", False, "refused", "Look there."),
        Check(VERDICT, False, "No."),
    ]
    output = io.StringIO()
    print_report(checks, Console(file=output, width=60))
    assert output.getvalue().splitlines() == [
        "ok   Prometheus: answers",
        "-    Scrape targets: no run [live]",
        "     Start one.",
        "FAIL Test alert: refused",
        "     Look there.",
        "FAIL Will it wake me? No.",
    ]

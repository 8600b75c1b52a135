"""The one-machine stack: real Prometheus and Alertmanager on loopback, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
import yaml

from tunewatch import stack as stack_module
from tunewatch.inbox import Inbox, Notification
from tunewatch.stack import Stack, StackError, add_static_target, fetch, running_stack

SCALE = 20.0
DEADLINE = 60.0


def wait_until(condition: Callable[[], Any], what: str, deadline: float = DEADLINE) -> Any:
    end = time.monotonic() + deadline
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline:.0f} s"
        time.sleep(0.05)
    return found


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children_of(home: Path) -> list[psutil.Process]:
    """The servers started for `home`, whoever their parent is: their command line names it."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if any(str(home / "stack") in part for part in process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Runs Python code, with `home` set, in a process of its own that writes to `tmp_path / "output"`."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> subprocess.Popen[str]:
        head = f"import sys, time\nfrom tunewatch.stack import *\nhome = Path({str(tmp_path / 'home')!r})\n"
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", head + code],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_it_starts_serves_notifies_and_leaves_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    shown: list[Notification] = []
    with Stack(home, time_scale=SCALE, on_notification=shown.append) as stack:
        assert stack.inbox is not None
        info = running_stack(home)
        assert info == stack.info
        assert info.notifications_file == home / "stack" / "notifications.jsonl"
        assert home.stat().st_mode & 0o077 == 0

        build = json.loads(fetch(f"{stack.prometheus_url}/api/v1/status/buildinfo"))
        assert build["status"] == "success"
        flags = json.loads(fetch(f"{stack.prometheus_url}/api/v1/status/flags"))["data"]
        assert flags["storage.tsdb.retention.time"] == "30d"
        for pid, _ in list(info.processes.values())[1:]:
            listening = [c for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
            assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
            assert os.getpgid(pid) != os.getpgid(0), "out of reach of the terminal's Ctrl-C"

        # The shipped watchdog travels the whole way: rule, Prometheus, Alertmanager, inbox.
        heartbeat = stack.inbox.wait_for(lambda n: n.path == "/watchdog", timeout=DEADLINE)
        assert heartbeat is not None
        assert [alert.name for alert in heartbeat.alerts] == ["TunewatchWatchdog"]
        assert heartbeat in shown
        stack.check()

    assert running_stack(home) is None
    assert children_of(home) == []
    assert not (home / "stack" / "stack.json").exists()
    assert "See you next time!" in (home / "stack" / "prometheus.log").read_text(), "it was ended in order"

    with Stack(home, time_scale=SCALE):  # and again, on the same data
        assert (home / "stack" / "prometheus.log.1").exists()


def test_what_is_announced_in_the_folder_is_scraped(tmp_path: Path) -> None:
    with Stack(tmp_path, time_scale=SCALE, receiver_url="http://127.0.0.1:9") as stack:
        address = stack.alertmanager_url.removeprefix("http://")  # any /metrics will do
        file = stack.add_static_target("gpu", address)
        assert json.loads(file.read_text()) == [{"targets": [address], "labels": {}}]
        assert file.parent == tmp_path / "targets" / "gpu"

        def jobs() -> set[str]:
            active = json.loads(fetch(f"{stack.prometheus_url}/api/v1/targets"))["data"]["activeTargets"]
            up = [t for t in active if t["labels"]["instance"] == address and t["health"] == "up"]
            return {t["labels"]["job"] for t in up}

        wait_until(lambda: "tunewatch-gpu" in jobs(), "the target is scraped")

        # What the alerts on the monitoring itself look at, in the servers' own spelling.
        own = (
            "prometheus_notifications_(errors|dropped)_total|prometheus_rule_evaluation_failures_total|"
            "alertmanager_notifications_failed_total|(prometheus|alertmanager)_config_last_reload_successful"
        )
        query = f'count by (job) (count by (job, __name__) ({{__name__=~"{own}", job=~"prometheus|alertmanager"}}))'

        def seen() -> dict[str, str]:
            url = f"{stack.prometheus_url}/api/v1/query?{urlencode({'query': query})}"
            return {one["metric"]["job"]: one["value"][1] for one in json.loads(fetch(url))["data"]["result"]}

        wait_until(lambda: seen() == {"prometheus": "4", "alertmanager": "2"}, "both servers are scraped")
        assert stack.inbox is None
        assert stack.info.notifications_file is None
        assert list((tmp_path / "targets" / "gpu").iterdir()) == [file], "no temporary file is left"


def test_a_static_target_is_validated(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpu or serve, not 'cpu'"):
        add_static_target(tmp_path, "cpu", "127.0.0.1:9460")  # type: ignore[arg-type]
    for address in ("127.0.0.1", "http://127.0.0.1:9460", "a:b", "../x:1", "host:9460/metrics"):
        with pytest.raises(ValueError, match="host:port"):
            add_static_target(tmp_path, "gpu", address)
    assert add_static_target(tmp_path, "serve", "[::1]:8080").name == "1-8080.json"
    assert add_static_target(tmp_path, "serve", "node-1.example:8080").name == "node-1.example-8080.json"


def test_wrong_arguments_are_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="time scale"):
        Stack(tmp_path, time_scale=0)
    with pytest.raises(ValueError, match="webhook_url: 'pager'"):
        Stack(tmp_path, receiver_url="pager")
    with Inbox(tmp_path / "n.jsonl") as inbox, pytest.raises(ValueError, match="not to both"):
        Stack(tmp_path, inbox=inbox, receiver_url="http://127.0.0.1:9")


@pytest.mark.parametrize("name", ["prometheus", "alertmanager"])
def test_a_named_port_that_is_taken_is_named(tmp_path: Path, taken_port: int, name: str) -> None:
    ports: dict[str, Any] = {f"{name}_port": taken_port}
    with pytest.raises(StackError, match=f"port {taken_port}, named for {name}, is taken"):
        Stack(tmp_path, **ports).start()
    assert children_of(tmp_path) == []


@pytest.mark.parametrize("seen_as_free", [False, True], ids=["seen", "lost-the-race"])
def test_a_default_port_that_is_taken_gives_way_to_the_next(
    tmp_path: Path, taken_port: int, seen_as_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_module, "PROMETHEUS_PORT", taken_port)
    if seen_as_free:  # free when we looked, taken when Prometheus did
        is_free = stack_module._is_free
        monkeypatch.setattr(stack_module, "_is_free", lambda port: port == taken_port or is_free(port))
    with Stack(tmp_path, time_scale=SCALE) as stack:
        port = int(stack.prometheus_url.rsplit(":", 1)[1])
        assert taken_port < port < taken_port + 200
        config = yaml.safe_load((tmp_path / "stack" / "prometheus.yml").read_text())
        own = [job for job in config["scrape_configs"] if job["job_name"] == "prometheus"]
        assert own[0]["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
        alertmanager = stack.alertmanager_url.removeprefix("http://")
        assert config["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": [alertmanager]}]}]


def test_a_second_stack_is_told_where_the_first_one_is(tmp_path: Path) -> None:
    with Stack(tmp_path, time_scale=SCALE) as first:
        with pytest.raises(StackError) as failure:
            Stack(tmp_path).start()
        assert f"pid {os.getpid()}" in str(failure.value)
        assert first.prometheus_url in str(failure.value)
        assert running_stack(tmp_path) == first.info, "the first one is untouched"
        first.check()


def test_a_prometheus_that_dies_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "prometheus_config", lambda **_: "scrape_configs: 12\n")
    with pytest.raises(StackError) as failure:
        Stack(tmp_path).start()
    for part in ("prometheus ended with exit code", "prometheus.log", "cannot unmarshal"):
        assert part in str(failure.value)
    assert children_of(tmp_path) == [], "the Alertmanager that had started is ended, too"
    assert not (tmp_path / "stack" / "stack.json").exists()

    monkeypatch.undo()
    with Stack(tmp_path, time_scale=SCALE) as stack:
        stack.check()


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text("#!/bin/sh\necho thinking about it\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(stack_module, "find_binary", lambda *_: sleeper)
    with pytest.raises(StackError, match=r"alertmanager was not ready within 1 s(.|\n)*thinking about it"):
        Stack(tmp_path, start_timeout=1.0).start()


def test_a_lost_process_is_noticed(tmp_path: Path) -> None:
    with Stack(tmp_path, time_scale=SCALE) as stack:
        pid, _ = stack.info.processes["alertmanager"]
        os.kill(pid, signal.SIGKILL)

        def noticed() -> str | None:
            try:
                stack.check()
            except StackError as error:
                return str(error)
            return None

        # Its first thread is gone before the process is: ask until the kernel tells.
        wait_until(lambda: "alertmanager was killed by SIGKILL" in (noticed() or ""), "the death is noticed")
        assert running_stack(tmp_path) is None


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "_STOP_TIMEOUT", 0.5)
    stack = Stack(tmp_path, time_scale=SCALE).start()
    pid, _ = stack.info.processes["prometheus"]
    os.kill(pid, signal.SIGSTOP)
    stack.stop()
    assert children_of(tmp_path) == []
    stack.stop()  # once more does nothing


def test_a_stale_state_file_is_no_running_stack(tmp_path: Path) -> None:
    with Stack(tmp_path, time_scale=SCALE) as stack:
        state = json.loads((tmp_path / "stack" / "stack.json").read_text())
        info = stack.info
    # The pids live on, as other programs: a reused pid differs in its start time.
    state["processes"] = {name: [os.getpid(), 1000.0] for name in info.processes}
    (tmp_path / "stack" / "stack.json").write_text(json.dumps(state))
    assert running_stack(tmp_path) is None
    state["processes"] = {"stack": [os.getpid(), psutil.Process().create_time()]}
    (tmp_path / "stack" / "stack.json").write_text(json.dumps(state))
    assert running_stack(tmp_path) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_kill_9_leaves_no_process(tmp_path: Path, program: Callable[[str], subprocess.Popen[str]]) -> None:
    home = tmp_path / "home"
    process = program("stack = Stack(home, time_scale=20).start(); time.sleep(300)")
    info = wait_until(lambda: running_stack(home), "the stack runs")
    servers = [pid for name, (pid, _) in info.processes.items() if name != "stack"]
    assert len(servers) == 2
    assert not any(map(is_gone, servers))

    process.kill()
    process.wait()

    for pid in servers:
        wait_until(partial(is_gone, pid), f"{pid} is gone", deadline=10)
    assert running_stack(home) is None
    with Stack(home, time_scale=SCALE) as stack:  # neither the lock nor the data stands in the way
        stack.check()


RUN = "sys.exit(run_stack(home, console=Console(), time_scale=20))"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_in_order_at_a_signal(
    tmp_path: Path, program: Callable[[str], subprocess.Popen[str]], number: signal.Signals
) -> None:
    home = tmp_path / "home"
    process = program(RUN)
    info = wait_until(lambda: running_stack(home), "the stack runs")
    os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group

    assert process.wait(DEADLINE) == 0
    assert children_of(home) == []
    assert not (home / "stack" / "stack.json").exists()
    assert "See you next time!" in (home / "stack" / "prometheus.log").read_text()
    output = (tmp_path / "output").read_text()
    assert info.prometheus_url in output
    assert str(home / "stack" / "notifications.jsonl") in output


def test_the_command_prints_what_it_notifies(
    tmp_path: Path, program: Callable[[str], subprocess.Popen[str]]
) -> None:
    home = tmp_path / "home"
    program(RUN)
    info = wait_until(lambda: running_stack(home), "the stack runs")
    alert = {
        "labels": {"alertname": "TunewatchRunStalled", "severity": "critical", "run_id": "r1"},
        "annotations": {"summary": "Training makes no progress."},
    }
    fetch(f"{info.alertmanager_url}/api/v2/alerts", body=json.dumps([alert]).encode())
    expected = "[FIRING] critical  TunewatchRunStalled\n  Training makes no progress.\n"
    wait_until(lambda: expected in (tmp_path / "output").read_text(), "the alert is printed")
    wait_until(lambda: "TunewatchWatchdog" in info_file(info).read_text(), "the heartbeat is saved")
    assert "TunewatchWatchdog" not in (tmp_path / "output").read_text(), "the heartbeat is not printed"


def info_file(info: stack_module.StackInfo) -> Path:
    assert info.notifications_file is not None
    return info.notifications_file


def test_the_command_fails_when_it_loses_a_server(
    tmp_path: Path, program: Callable[[str], subprocess.Popen[str]]
) -> None:
    home = tmp_path / "home"
    process = program(RUN)
    info = wait_until(lambda: running_stack(home), "the stack runs")
    os.kill(info.processes["prometheus"][0], signal.SIGKILL)
    assert process.wait(DEADLINE) == 1
    assert "prometheus was killed by SIGKILL" in (tmp_path / "output").read_text()
    assert children_of(home) == []


GRAFANA = """#!{python}
import http.server, json, os, pathlib, sys
settings = {{k: v for k, v in os.environ.items() if k.startswith(("GF_", "TUNEWATCH_"))}}
settings["argv"] = sys.argv[1:]
pathlib.Path(os.environ["GF_PATHS_DATA"] + ".json").write_text(json.dumps(settings))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()
if {fails}:
    sys.exit("no licence to serve")
address = os.environ["GF_SERVER_HTTP_ADDR"], int(os.environ["GF_SERVER_HTTP_PORT"])
http.server.HTTPServer(address, Handler).serve_forever()
"""


def fake_grafana(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """A program that answers like Grafana and writes down how it was started."""
    program = tmp_path / "grafana"
    program.write_text(GRAFANA.format(python=sys.executable, fails=fails))
    program.chmod(0o755)
    (tmp_path / "shipped" / "grafana" / "provisioning").mkdir(parents=True)
    monkeypatch.setattr(stack_module, "installed_binary", lambda name: program)
    monkeypatch.setattr(stack_module, "share_path", lambda *parts: (tmp_path / "shipped").joinpath(*parts))


def test_grafana_is_provisioned_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_grafana(tmp_path, monkeypatch, fails=False)
    home = tmp_path / "home"
    with Stack(home, time_scale=SCALE) as stack:
        assert stack.notes == []
        url = stack.info.grafana_url
        assert url is not None
        settings = json.loads((home / "stack" / "grafana.json").read_text())
        assert settings["argv"][0] == "server"
        assert settings["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
        assert settings["GF_PATHS_PROVISIONING"] == str(tmp_path / "shipped" / "grafana" / "provisioning")
        assert settings["TUNEWATCH_PROMETHEUS_URL"] == stack.prometheus_url
        assert settings["TUNEWATCH_ALERTMANAGER_URL"] == stack.alertmanager_url
        rules = "".join(path.read_text() for path in (home / "stack" / "rules").iterdir())
        assert f"dashboard_url: {url}/d/" in rules
    assert children_of(home) == []


def test_a_grafana_that_fails_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_grafana(tmp_path, monkeypatch, fails=True)
    with Stack(tmp_path / "home", time_scale=SCALE) as stack:
        assert stack.info.grafana_url is None
        assert len(stack.notes) == 1
        assert "no licence to serve" in stack.notes[0]
        stack.check()


def test_no_grafana_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "installed_binary", lambda name: None)
    with Stack(tmp_path, time_scale=SCALE) as stack:
        assert "no Grafana here" in stack.notes[0]

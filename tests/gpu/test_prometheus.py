"""A real Prometheus scrapes the sidecar."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_harness import FakeDriver, RunningSidecar, card, uuid_of

_QUERY = f'tunewatch_gpu_power_watts{{uuid="{uuid_of(0)}"}} * on (uuid) group_left (name) tunewatch_gpu_info'


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _ask(port: int) -> list[dict[str, object]]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': _QUERY})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            result: list[dict[str, object]] = json.load(response)["data"]["result"]
            return result
    except (urllib.error.URLError, ConnectionError):
        return []


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_readings_and_joins_them(
    driver: FakeDriver, start_sidecar: Callable[..., RunningSidecar], tmp_path: Path
) -> None:
    driver.play(card(0), card(1))
    sidecar = start_sidecar(driver.environment, "--backend", "nvml", "--interval", "0.5")
    sidecar.wait_success()
    target = sidecar.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "gpu", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = _free_port()
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stderr=(tmp_path / "prometheus.log").open("wb"),
    )
    try:
        deadline = time.monotonic() + 40
        while not (found := _ask(port)):
            assert time.monotonic() < deadline, (tmp_path / "prometheus.log").read_text()
            time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(20)
    assert len(found) == 1
    assert found[0]["metric"]["name"] == "NVIDIA Test 40GB"  # type: ignore[index]
    assert found[0]["value"][1] == "123.456"  # type: ignore[index]

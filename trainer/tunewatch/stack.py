"""Prometheus, Alertmanager and a notification inbox on one machine, run as children of one process.

The configuration is the shipped one (`tunewatch.rules`), written to `<home>/stack/`. Everything listens on
127.0.0.1, and nothing outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import psutil
from rich.console import Console

from tunewatch.binaries import BinaryMissing, find_binary, installed_binary
from tunewatch.inbox import Inbox, Notification, format_notification
from tunewatch.lifeline import die_with_parent
from tunewatch.rules import (
    GRAFANA_URL,
    WEBHOOK_URL,
    alertmanager_config,
    notification_templates,
    prometheus_config,
    render_rules,
)
from tunewatch.runfolder import write_json
from tunewatch.share import share_path

PROMETHEUS_PORT = 9090
ALERTMANAGER_PORT = 9093
GRAFANA_PORT = 3000
SIDECAR_PORT = 9460
SIDECAR_SECONDS = 5.0

TargetKind = Literal["gpu", "serve"]
_TARGET_KINDS: tuple[TargetKind, ...] = ("gpu", "serve")
_PORTS_TRIED = 200
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
_POLL = 0.1
_RESEND_DELAY = 60.0  # Prometheus' own default
_SHORTEST_RESEND_DELAY = 3.0
_LOG_TAIL_LINES = 8


class StackError(RuntimeError):
    """The stack can not start or has lost a process; the message names which one and shows its last words."""


@dataclass(frozen=True)
class StackInfo:
    """Where a running stack can be found: `<home>/stack/stack.json`.

    `processes` maps a program's name to its pid and start time (Unix seconds), together a process' identity.
    `notifications_file` is the inbox' file, None when notifications go to somebody else's receivers.
    """

    pid: int
    prometheus_url: str
    alertmanager_url: str
    grafana_url: str | None
    receiver_url: str
    notifications_file: Path | None
    time_scale: float
    processes: Mapping[str, tuple[int, float]]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StackInfo:
        file = document["notifications_file"]
        return cls(
            **{
                **document,
                "notifications_file": None if file is None else Path(file),
                "processes": {name: (pid, start) for name, (pid, start) in document["processes"].items()},
            }
        )

    def to_json(self) -> dict[str, Any]:
        file = self.notifications_file
        return {**asdict(self), "notifications_file": None if file is None else str(file)}


def running_stack(home: Path) -> StackInfo | None:
    """The stack that runs for `home`; None when none does, or one of its processes is gone."""
    try:
        info = StackInfo.from_json(json.loads((home / "stack" / "stack.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    return info if all(_is_alive(pid, start) for pid, start in info.processes.values()) else None


def add_static_target(home: Path, kind: TargetKind, address: str) -> Path:
    """Has Prometheus scrape `address` (`host:port`) until the returned file is removed.

    For endpoints that stay: the GPU sidecar (`gpu`) and `tunewatch serve` (`serve`). Training runs announce
    themselves. Prometheus watches the folder, so it needs no restart.
    """
    if kind not in _TARGET_KINDS:
        raise ValueError(f"a static target is of kind {' or '.join(_TARGET_KINDS)}, not {kind!r}")
    if not re.fullmatch(r"[\w.-]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}", address, re.ASCII):
        raise ValueError(f"a target is host:port, not {address!r}")
    folder = home / "targets" / kind
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (re.sub(r"[^\w.]+", "-", address).strip("-") + ".json")
    # Readable by others: a Prometheus of the system is another user.
    write_json(file, [{"targets": [address], "labels": {}}], mode=0o644)
    return file


def fetch(url: str, *, body: bytes | None = None, timeout: float = 5.0) -> bytes:
    """GETs `url`, or POSTs `body` as JSON; raises OSError (also for an HTTP error status)."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    # Loopback is never reached through a proxy, whatever http_proxy says.
    loopback = urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] if loopback else [])
    with opener.open(request, timeout=timeout) as response:
        answer: bytes = response.read()
    return answer


@dataclass
class _Service:
    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(lines) or "(its log is empty)"


class _PortTaken(StackError):
    """Another program took the port between our look and our start."""


class Stack:
    """The one-machine stack of the runs under `home`; a context manager, or `start` and `stop`.

    `time_scale` N divides every interval and waiting time of the shipped rules by N. Ports default to 9090
    and 9093 or the next free ones; one that is named must be free. Notifications go to `inbox`, else to
    `receiver_url` (Alertmanager's webhooks are posted to /alerts and /watchdog below it), else to an inbox of
    the stack's own, which passes each on to `on_notification`. `alertmanager_file` replaces the shipped routes and
    receivers (a copy of alertmanager.slack.yml, for example, with the templates/ beside it, else the shipped ones);
    only what it posts to the address of the shipped webhooks still goes to the inbox or to `receiver_url`.
    `sidecar` starts the GPU sidecar with that backend. `retention` is how long Prometheus keeps
    samples, in its own spelling ("30d"). `report` is told what takes long. `notes` says what was left out.
    Raises ValueError for a wrong address, time scale or `alertmanager_file`.

    The thread that calls `start` must live as long as the stack: Linux ends the children with it.
    """

    def __init__(
        self,
        home: Path,
        *,
        time_scale: float = 1.0,
        prometheus_port: int | None = None,
        alertmanager_port: int | None = None,
        inbox: Inbox | None = None,
        receiver_url: str | None = None,
        alertmanager_file: Path | None = None,
        grafana_url: str | None = None,
        runbook_url: str | None = None,
        retention: str = "30d",
        sidecar: Literal["auto", "simulated"] | None = None,
        start_timeout: float = _START_TIMEOUT,
        on_notification: Callable[[Notification], None] = lambda _notification: None,
        report: Callable[[str], None] = lambda _line: None,
    ) -> None:
        if inbox is not None and receiver_url is not None:
            raise ValueError("notifications go to an inbox or to a receiver_url, not to both")
        # A wrong address or factor is told here, before anything is started.
        render_rules(grafana_url, runbook_url, time_scale)
        alertmanager_config(
            webhook_url=receiver_url or WEBHOOK_URL, time_scale=time_scale, file=alertmanager_file
        )
        self.home = home.absolute()
        self.folder = self.home / "stack"
        self.targets = self.home / "targets"
        self.inbox = inbox
        self.alertmanager_file = alertmanager_file
        self.notes: list[str] = []
        self._time_scale = time_scale
        self._named_ports = {"prometheus": prometheus_port, "alertmanager": alertmanager_port}
        self._own_inbox = inbox is None and receiver_url is None
        self._receiver_url = receiver_url
        self._grafana_url = grafana_url
        self._runbook_url = runbook_url
        self._retention = retention
        self._sidecar_backend = sidecar
        self._sidecar_target: Path | None = None
        self._start_timeout = start_timeout
        self._on_notification = on_notification
        self._report = report
        self._services: dict[str, _Service] = {}
        self._lock_file: IO[str] | None = None
        self._info: StackInfo | None = None

    @property
    def info(self) -> StackInfo:
        """Addresses and processes; StackError when the stack does not run."""
        if self._info is None:
            raise StackError("the stack is not running")
        return self._info

    @property
    def prometheus_url(self) -> str:
        return self.info.prometheus_url

    @property
    def alertmanager_url(self) -> str:
        return self.info.alertmanager_url

    def start(self) -> Stack:
        """Starts everything and returns when all of it is ready.

        Raises `StackError` (a second stack, a named port that is taken, a process that died, with the end of
        its log) and `tunewatch.binaries.BinaryMissing`; nothing is left running then.
        """
        self._lock()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends every process of the stack and waits for it: SIGTERM, then SIGKILL after 10 s. Idempotent."""
        _end([service.process for service in self._services.values()])
        self._services.clear()
        if self._sidecar_target is not None:
            self._sidecar_target.unlink(missing_ok=True)
            self._sidecar_target = None
        if self._own_inbox and self.inbox is not None:
            self.inbox.close()
            self.inbox = None
        if self._lock_file is not None:
            self._state_file.unlink(missing_ok=True)
            self._lock_file.close()
            self._lock_file = None
        self._info = None

    def check(self) -> None:
        """Raises `StackError`, with the end of its log, when a process of the stack has ended by itself."""
        for service in self._services.values():
            self._check(service)

    def add_static_target(self, kind: TargetKind, address: str) -> Path:
        """`add_static_target` for this stack's home."""
        return add_static_target(self.home, kind, address)

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _state_file(self) -> Path:
        return self.folder / "stack.json"

    def _lock(self) -> None:
        if self._lock_file is not None:
            raise StackError("this stack is already running")
        if not self.home.exists():
            self.home.mkdir(mode=0o700, parents=True)
        for folder in (self.folder, *(self.targets / kind for kind in _TARGET_KINDS)):
            folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            other = running_stack(self.home)
            where = f"pid {other.pid}, Prometheus at {other.prometheus_url}" if other else "still starting"
            raise StackError(f"a stack for {self.home} is already running ({where})") from None
        self._lock_file = file

    def _start(self) -> None:
        for name, port in self._named_ports.items():
            if port is not None and not _is_free(port):
                raise StackError(f"port {port}, named for {name}, is taken by another program")
        programs = {name: find_binary(name, self._report) for name in self._named_ports}
        self.notes.clear()
        if self._own_inbox:
            self.inbox = Inbox(self.folder / "notifications.jsonl", on_notification=self._on_notification)
        receiver = self._receiver_url if self.inbox is None else self.inbox.url
        assert receiver is not None, (
            "__init__ allows an inbox or a receiver_url, and makes an inbox for neither"
        )

        alertmanager = self._alertmanager(programs["alertmanager"], receiver)
        grafana = None if self._grafana_url else self._grafana_program()
        grafana_port = _first_free(GRAFANA_PORT)
        links_to = self._grafana_url or (f"http://127.0.0.1:{grafana_port}" if grafana else GRAFANA_URL)
        prometheus = self._prometheus(programs["prometheus"], alertmanager.url, links_to)
        if grafana:
            self._grafana(grafana, grafana_port, prometheus.url, alertmanager.url)
        if self._sidecar_backend:
            self._sidecar(self._sidecar_backend)

        own, inbox = self._services.get("grafana"), self.inbox
        self._info = StackInfo(
            pid=os.getpid(),
            prometheus_url=prometheus.url,
            alertmanager_url=alertmanager.url,
            grafana_url=own.url if own else self._grafana_url,
            receiver_url=receiver,
            notifications_file=inbox.file.absolute() if inbox and not self.alertmanager_file else None,
            time_scale=self._time_scale,
            processes={
                name: (pid, psutil.Process(pid).create_time())
                for name, pid in [
                    ("stack", os.getpid()),
                    *((service.name, service.process.pid) for service in self._services.values()),
                ]
            },
        )
        _write(self._state_file, json.dumps(self._info.to_json(), indent=1) + "\n")

    def _alertmanager(self, program: Path, receiver: str) -> _Service:
        config = self.folder / "alertmanager.yml"
        file = self.alertmanager_file
        _write(config, alertmanager_config(webhook_url=receiver, time_scale=self._time_scale, file=file))
        beside = file.parent if file is not None and (file.parent / "templates").is_dir() else None
        self._write_folder("templates", notification_templates(beside))
        return self._launch(
            "alertmanager",
            ALERTMANAGER_PORT,
            lambda port: [
                str(program),
                f"--config.file={config}",
                f"--storage.path={self.folder / 'alertmanager'}",
                f"--web.listen-address=127.0.0.1:{port}",
                f"--web.external-url=http://127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
        )

    def _prometheus(self, program: Path, alertmanager_url: str, grafana_url: str) -> _Service:
        rules = self._write_folder(
            "rules", render_rules(grafana_url, self._runbook_url, time_scale=self._time_scale)
        )
        # Prometheus repeats a firing alert only so often, and Alertmanager holds it for ended after four
        # times that: a shorter delay than the minimum would end alerts whenever the machine is busy.
        resend_delay = max(_RESEND_DELAY / self._time_scale, _SHORTEST_RESEND_DELAY)
        config = self.folder / "prometheus.yml"

        def command(port: int) -> list[str]:
            text = prometheus_config(
                rules_dir=rules,
                targets_dir=self.targets,
                alertmanager=urllib.parse.urlsplit(alertmanager_url).netloc,
                prometheus=f"127.0.0.1:{port}",
                time_scale=self._time_scale,
            )
            _write(config, text)
            return [
                str(program),
                f"--config.file={config}",
                f"--storage.tsdb.path={self.folder / 'prometheus'}",
                f"--storage.tsdb.retention.time={self._retention}",
                f"--web.listen-address=127.0.0.1:{port}",
                f"--web.external-url=http://127.0.0.1:{port}",
                f"--rules.alert.resend-delay={resend_delay:g}s",
                *_page_flags(program),
            ]

        return self._launch("prometheus", PROMETHEUS_PORT, command)

    def _write_folder(self, name: str, texts: Mapping[str, str]) -> Path:
        folder = self.folder / name
        # A rule file that is no longer shipped must not stay loaded.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file_name, text in texts.items():
            _write(folder / file_name, text)
        return folder

    def _grafana_program(self) -> Path | None:
        """Grafana, when there is one and something to show in it; else a note says what is missing."""
        program = installed_binary("grafana")
        if program is None:
            self.notes.append("no Grafana here: install it for the dashboards (grafana is not on PATH)")
        elif not share_path("grafana").joinpath("provisioning").is_dir():
            self.notes.append(f"Grafana is not started: {share_path('grafana')} has no provisioning/")
            return None
        return program

    def _grafana(self, program: Path, port: int, prometheus_url: str, alertmanager_url: str) -> None:
        """Starts Grafana with the shipped dashboards. The alerts do not need it: if it fails, a note says so.

        The provisioning files refer to the TUNEWATCH_ variables: Grafana expands them in its YAML.
        """
        data = self.folder / "grafana"
        settings = {
            "GF_SERVER_HTTP_ADDR": "127.0.0.1",
            "GF_SERVER_HTTP_PORT": str(port),
            "GF_PATHS_DATA": str(data),
            "GF_PATHS_LOGS": str(data / "log"),
            "GF_PATHS_PLUGINS": str(data / "plugins"),
            "GF_PATHS_PROVISIONING": str(share_path("grafana", "provisioning")),
            "GF_ANALYTICS_REPORTING_ENABLED": "false",
            "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
            "TUNEWATCH_PROMETHEUS_URL": prometheus_url,
            "TUNEWATCH_ALERTMANAGER_URL": alertmanager_url,
            "TUNEWATCH_DASHBOARDS": str(share_path("grafana").joinpath("dashboards")),
        }
        command = [str(program), *(["server"] if program.name == "grafana" else [])]
        homepath = Path("/usr/share/grafana")  # where Grafana's own packages put its pages
        if homepath.is_dir():
            command.append(f"--homepath={homepath}")
        url = f"http://127.0.0.1:{port}"
        try:
            self._run("grafana", url, command, "/api/health", environment=settings)
        except StackError as error:
            _end([self._services.pop("grafana").process])
            self.notes.append(f"Grafana is not running: {error}")

    def _sidecar(self, backend: str) -> None:
        interval = max(1.0, SIDECAR_SECONDS / self._time_scale)

        def command(port: int) -> list[str]:
            return [
                sys.executable, "-m", "tunewatch_gpu", f"--web.listen-address=127.0.0.1:{port}",
                f"--backend={backend}", f"--interval={interval}",
            ]  # fmt: skip

        service = self._launch("tunewatch-gpu", SIDECAR_PORT, command, "/healthz")
        self._sidecar_target = self.add_static_target("gpu", urllib.parse.urlsplit(service.url).netloc)

    def _launch(
        self,
        name: str,
        default_port: int,
        command: Callable[[int], Sequence[str]],
        ready_path: str = "/-/ready",
    ) -> _Service:
        named = self._named_ports.get(name)
        port = _first_free(default_port) if named is None else named
        while True:
            try:
                return self._run(name, f"http://127.0.0.1:{port}", command(port), ready_path)
            except _PortTaken:
                if named is not None:
                    raise
                port = _first_free(port + 1)

    def _run(
        self,
        name: str,
        url: str,
        command: Sequence[str],
        ready_path: str,
        environment: Mapping[str, str] | None = None,
    ) -> _Service:
        log = self.folder / f"{name}.log"
        if log.exists():
            log.replace(log.with_name(log.name + ".1"))
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C on the terminal is ours: the children end in order, by `stop`
                preexec_fn=die_with_parent(),
            )
        service = _Service(name, url, log, process)
        self._services[name] = service
        self._wait_until_ready(service, ready_path)
        return service

    def _wait_until_ready(self, service: _Service, path: str) -> None:
        deadline = time.monotonic() + self._start_timeout
        while True:
            self._check(service)
            # An answer alone may come from another program that has just taken the port.
            if _listens(service.process.pid, urllib.parse.urlsplit(service.url).port):
                with contextlib.suppress(OSError):
                    fetch(service.url + path)
                    return
            if time.monotonic() > deadline:
                raise StackError(
                    f"{service.name} was not ready within {self._start_timeout:.0f} s; the end of "
                    f"{service.log}:\n{service.last_words()}"
                )
            time.sleep(_POLL)

    def _check(self, service: _Service) -> None:
        code = service.process.poll()
        if code is None:
            return
        words = service.last_words()
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        kind = _PortTaken if "address already in use" in words.lower() else StackError
        raise kind(f"{service.name} {ended}; the end of {service.log}:\n{words}")


def gpu_driver_is_here() -> bool:
    """Whether NVIDIA's management library answers on this machine."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def run_stack(
    home: Path,
    *,
    console: Console,
    time_scale: float = 1.0,
    prometheus_port: int | None = None,
    alertmanager_port: int | None = None,
    receiver_url: str | None = None,
    alertmanager_file: Path | None = None,
    grafana_url: str | None = None,
    retention: str = "30d",
    sidecar: Literal["auto", "simulated"] | None = None,
) -> int:
    """`tunewatch stack`: runs the stack until SIGINT, SIGTERM or SIGHUP and prints what it notifies.

    Returns the exit code: 0 after a signal, 1 when the stack could not start or lost a process. Raises
    ValueError as `Stack` does.
    """
    asked_to_stop = threading.Event()
    starting = True

    def on_signal(_number: int, _frame: object) -> None:
        asked_to_stop.set()
        if starting:
            raise KeyboardInterrupt

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(notification: Notification) -> None:
        if notification.path == "/alerts":  # the watchdog's heartbeat comes every minute and means: all well
            say(format_notification(notification))

    stack = Stack(
        home,
        time_scale=time_scale,
        prometheus_port=prometheus_port,
        alertmanager_port=alertmanager_port,
        receiver_url=receiver_url,
        alertmanager_file=alertmanager_file,
        grafana_url=grafana_url,
        retention=retention,
        sidecar=sidecar,
        on_notification=show,
        report=say,
    )
    try:
        with _stop_signals_call(on_signal), stack:
            starting = False
            say(_welcome(stack))
            known_error = None
            while not asked_to_stop.wait(1.0):
                stack.check()
                if stack.inbox and (file_error := stack.inbox.file_error) is not known_error:
                    known_error = file_error
                    say(f"notifications are shown but not saved: {file_error}")
            say("stopping")
    except KeyboardInterrupt:
        say("stopped while it was starting")
    except (StackError, BinaryMissing) as error:
        say(str(error))
        return 1
    return 0


def _welcome(stack: Stack) -> str:
    info = stack.info
    if info.notifications_file:
        saved = f"shown here and saved in {info.notifications_file}"
    else:
        saved = f"as {stack.alertmanager_file} says" if stack.alertmanager_file else info.receiver_url
    lines = [
        f"Prometheus     {info.prometheus_url}",
        f"Alertmanager   {info.alertmanager_url}",
        *([f"Grafana        {info.grafana_url}"] if info.grafana_url else []),
        f"Notifications  {saved}",
        *(f"note: {note}" for note in stack.notes),
        "Ctrl-C stops it. `tunewatch doctor`, in another terminal, tells whether an alert gets through.",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _stop_signals_call(handler: Callable[[int, object], None]) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # What was ignored before us stays so: nohup, and the Ctrl-C of a shell that put us into the background.
    before = {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _page_flags(prometheus: Path) -> list[str]:
    """Debian's build reads its pages from an absolute path, which must be named when it is only unpacked."""
    pages = prometheus.resolve().parents[1] / "share" / "prometheus" / "web"
    return [f"--web.local-assets={pages}"] if pages.is_dir() else []


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_alive(pid: int, start: float) -> bool:
    try:
        process = psutil.Process(pid)
        # psutil adds the boot time to a count of ticks: a stepped clock moves it, a reused pid by far more.
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - start) < 5
    except psutil.NoSuchProcess:
        return False


def _listens(pid: int, port: int | None) -> bool:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A connection that has just ended holds its port for a minute: no obstacle to a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_free(port: int) -> int:
    for candidate in range(port, port + _PORTS_TRIED):
        if _is_free(candidate):
            return candidate
    raise StackError(f"no free port between {port} and {port + _PORTS_TRIED - 1}")


def _write(path: Path, text: str) -> None:
    """Replaces `path` in one step: Prometheus may be reading it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)

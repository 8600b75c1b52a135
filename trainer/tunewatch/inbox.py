"""A notification inbox: receives Alertmanager's webhooks on loopback, keeps them, and can be asked for them.

It stands in for the pager on a machine that has none: `tunewatch stack` prints what arrives, and
`tunewatch doctor` proves with it that an alert gets through. Alone it is `python -m tunewatch.inbox FILE`.
The format is Alertmanager's webhook, version 4
(https://prometheus.io/docs/alerting/latest/configuration/#webhook_config).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_FILE_BYTES = 10 * 1024 * 1024
_KEPT_IN_MEMORY = 1000
_SOCKET_TIMEOUT = 10.0
_PATHS = ("/alerts", "/watchdog")


@dataclass(frozen=True)
class Alert:
    """One alert of a notification. Times are RFC 3339 texts, as Alertmanager sent them."""

    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str
    ends_at: str

    @property
    def name(self) -> str:
        return self.labels.get("alertname", "(no name)")


@dataclass(frozen=True)
class Notification:
    """One message as a person would have got it: one group of alerts, `firing` or `resolved`.

    `received_at` is in Unix seconds; `path` is where it was posted: /alerts, or /watchdog for the heartbeat.
    """

    status: str
    alerts: tuple[Alert, ...]
    receiver: str
    received_at: float
    path: str = "/alerts"

    @classmethod
    def from_json(cls, document: Any) -> Notification:
        """Reads back one line of the notification file. Raises ValueError."""
        if not isinstance(document, dict):
            raise ValueError(f"a notification is a JSON object, not {type(document).__name__}")
        alerts = _typed(document, "alerts", list)
        return cls(
            status=_typed(document, "status", str),
            alerts=tuple(_alert(alert, "starts_at", "ends_at") for alert in alerts),
            receiver=_typed(document, "receiver", str),
            received_at=float(_typed(document, "received_at", (int, float))),
            path=_typed(document, "path", str),
        )


def parse_webhook(body: bytes, *, path: str, received_at: float) -> Notification:
    """The notification in Alertmanager's webhook `body`; raises ValueError, which names the fault."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"the body is a JSON object, not {type(document).__name__}")
    alerts = _typed(document, "alerts", list)
    return Notification(
        status=_typed(document, "status", str),
        alerts=tuple(_alert(alert, "startsAt", "endsAt") for alert in alerts),
        receiver=_typed(document, "receiver", str),
        received_at=received_at,
        path=path,
    )


def _alert(document: Any, starts_at: str, ends_at: str) -> Alert:
    if not isinstance(document, dict):
        raise ValueError(f"an alert is a JSON object, not {type(document).__name__}")
    return Alert(
        status=_typed(document, "status", str),
        labels=_texts(document, "labels"),
        annotations=_texts(document, "annotations"),
        starts_at=_typed(document, starts_at, str),
        ends_at=_typed(document, ends_at, str),
    )


def _texts(document: Mapping[str, Any], key: str) -> dict[str, str]:
    texts = _typed(document, key, dict)
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{key!r} maps names to texts")
    return texts


def _typed(document: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    if key not in document:
        raise ValueError(f"{key!r} is missing")
    if not isinstance(document[key], kind):
        raise ValueError(f"{key!r} is {type(document[key]).__name__}")
    return document[key]


def format_notification(notification: Notification) -> str:
    """The notification as a person would receive it, several lines of plain text."""
    return "\n".join(_format_alert(alert) for alert in notification.alerts)


def _format_alert(alert: Alert) -> str:
    lines = [f"[{alert.status.upper()}] {alert.labels.get('severity', 'none'):<9} {alert.name}"]
    # What was the matter, and what to do about it, would mislead once it is over.
    told = ("summary",) if alert.status == "resolved" else ("summary", "description")
    lines += [alert.annotations[key] for key in told if alert.annotations.get(key)]
    if when := _when(alert):
        lines.append(when)
    links = [
        f"{word} {alert.annotations[key]}"
        for word, key in (("runbook", "runbook_url"), ("dashboard", "dashboard_url"))
        if alert.annotations.get(key)
    ]
    if links:
        lines.append("  ".join(links))
    # What arrives is printed on a terminal, and an annotation may carry anything: no control characters.
    texts = [line for text in lines for line in text.splitlines()]
    printable = ["".join(sign if sign.isprintable() else "?" for sign in text.strip()) for text in texts]
    return "\n  ".join(text for text in printable if text)


def _when(alert: Alert) -> str | None:
    """Since when it fires, in this machine's time zone, or how long it lasted; None where its times are none."""
    try:
        start, end = (datetime.fromisoformat(text) for text in (alert.starts_at, alert.ends_at))
        if alert.status == "resolved":
            return f"it lasted {timedelta(seconds=round((end - start).total_seconds()))}"
        return f"since {start.astimezone():%a %d %b %H:%M:%S %Z}"
    except (ValueError, TypeError, OverflowError):
        return None


def read_notifications(path: Path) -> Iterator[Notification]:
    """The notifications in the file at `path`, oldest first, the rotated-out part before.

    A line that is not whole (still being written, or cut short by a kill) is left out; no file holds none.
    """
    for part in (_rotated(path), path):
        try:
            lines = part.read_bytes().split(b"\n")
        except FileNotFoundError:
            continue
        for line in lines:
            try:
                yield Notification.from_json(json.loads(line))
            except ValueError:
                continue


class Inbox:
    """The receiver: listens on `host` from construction until `close`.

    Every notification is appended to `file` as one JSON line (the file is moved to `<file>.1` when it would
    pass 10 MB) and the last 1000 are kept in memory. `on_notification` is called with each, one at a time,
    from a thread of the server. `port` 0 takes a free port; OSError when a named one is taken. Anybody who
    reaches `host` may post.

    A file that can not be written (a full disk) loses no notification: it is still kept and passed on, and
    `file_error` says what went wrong.
    """

    def __init__(
        self,
        file: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        on_notification: Callable[[Notification], None] = lambda _notification: None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self.file = file
        self.host = host
        self._on_notification = on_notification
        self._max_file_bytes = max_file_bytes
        self._arrived = threading.Condition()
        self._kept: deque[Notification] = deque(maxlen=_KEPT_IN_MEMORY)
        self._count = 0
        self.file_error: OSError | None = None
        file.parent.mkdir(parents=True, exist_ok=True)
        self._server = _Server((host, port), _Handler)
        self._server.inbox = self
        serve = partial(self._server.serve_forever, poll_interval=0.05)  # how long `close` may wait
        self._thread = threading.Thread(target=serve, name="inbox", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The base address; notifications are posted to `<url>/alerts` and `<url>/watchdog`."""
        return f"http://{self.host}:{self.port}"

    @property
    def notifications(self) -> tuple[Notification, ...]:
        """What arrived, oldest first (the last 1000)."""
        with self._arrived:
            return tuple(self._kept)

    def wait_for(self, predicate: Callable[[Notification], bool], timeout: float) -> Notification | None:
        """The first notification, here or to come, that `predicate` accepts; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        seen = 0
        while True:
            with self._arrived:
                while self._count == seen and (left := deadline - time.monotonic()) > 0:
                    self._arrived.wait(left)
                news = self._count - seen
                seen = self._count
                fresh = list(self._kept)[-news:] if news else []
            for notification in fresh:
                if predicate(notification):
                    return notification
            if not fresh:
                return None

    def receive(self, notification: Notification) -> None:
        """Keeps one notification, in the file first: what `wait_for` returns has been written."""
        line = json.dumps(asdict(notification), separators=(",", ":")).encode() + b"\n"
        with self._arrived:
            try:
                self._append(line)
            except OSError as error:
                self.file_error = error
            self._kept.append(notification)
            self._count += 1
            self._arrived.notify_all()
            self._on_notification(notification)

    def _append(self, line: bytes) -> None:
        if self.file.exists() and self.file.stat().st_size + len(line) > self._max_file_bytes:
            self.file.replace(_rotated(self.file))
        with self.file.open("ab") as file:
            file.write(line)

    def close(self) -> None:
        """Stops listening; what was received stays readable."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _rotated(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class _Server(ThreadingHTTPServer):
    inbox: Inbox
    # A sender that hangs must not hold up `close`; its socket times out by itself.
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a sender that hung up is no fault of ours
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SOCKET_TIMEOUT
    server_version = "tunewatch-inbox"

    def do_POST(self) -> None:
        if self.path not in _PATHS:
            self._answer(HTTPStatus.NOT_FOUND, f"post to {' or '.join(_PATHS)}")
            return
        length = self.headers.get("Content-Length", "")
        # RFC 9110 allows digits only; int() would also take "+5", "-5" and "5_0".
        if not (length.isascii() and length.isdigit()):
            self._answer(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is required")
            return
        if len(length) > len(str(MAX_BODY_BYTES)) or int(length) > MAX_BODY_BYTES:
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY_BYTES} bytes")
            return
        body = self.rfile.read(int(length))
        try:
            notification = parse_webhook(body, path=self.path, received_at=time.time())
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, str(error))
            return
        self.server.inbox.receive(notification)
        self._answer(HTTPStatus.OK, "kept")

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode(errors="replace") + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: what arrives is reported by the inbox, not by access lines on stderr."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `python -m tunewatch.inbox`: prints what arrives until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m tunewatch.inbox",
        description="Receive Alertmanager's webhooks, print each as a person would get it, and keep them.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the file that each notification is appended to, as JSON")
    parser.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 9095),
        metavar="HOST:PORT",
        help="where Alertmanager posts to (default 127.0.0.1:9095; anybody who reaches it may post)",
    )
    options = parser.parse_args(arguments)
    host, port = options.listen
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        inbox = Inbox(options.file, host=host, port=port, on_notification=_print)
    except OSError as error:
        parser.error(f"can not listen on {host}, port {port}: {error.strerror}")
    with inbox:
        print(f"notifications to {inbox.url}/alerts are shown here and kept in {inbox.file}", flush=True)
        while not stop.wait(1.0):
            if fault := inbox.file_error:
                inbox.file_error = None
                print(f"notifications are shown but not kept: {fault}", flush=True)


def _print(notification: Notification) -> None:
    if notification.path == "/alerts":  # the heartbeat comes every minute and means: all is well
        print(format_notification(notification), flush=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT, such as 127.0.0.1:9095")
    return host, int(port)


if __name__ == "__main__":
    main()

"""The supervisor's HTTP endpoint: /metrics for Prometheus, a landing page for people."""

from __future__ import annotations

import errno
import html
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9470
PORTS_TRIED = 1000


REMEMBERED = 300.0
"""Seconds after which a scraper that did not come back is forgotten."""


class ListenError(Exception):
    """The address can not be listened on; the text says why and what to do."""


class PortTaken(ListenError):
    """The port that the user named is in use."""


class Scrapes:
    """Who scraped us and when: how long to stay after the end depends on it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._intervals: dict[str, float] = {}
        self._since_end: dict[str, int] | None = None

    def seen(self, scraper: str) -> None:
        """Note one successful scrape. `scraper` tells scrapers apart (address and User-Agent)."""
        now = self._clock()
        with self._lock:
            if scraper in self._last:
                self._intervals[scraper] = now - self._last[scraper]
            self._last[scraper] = now
            if self._since_end is not None:
                self._since_end[scraper] = self._since_end.get(scraper, 0) + 1

    def run_ended(self) -> None:
        """From now on the metrics show the terminal state. A curl of an hour ago is nobody to wait for."""
        with self._lock:
            gone = [scraper for scraper, last in self._last.items() if self._clock() - last > REMEMBERED]
            for scraper in gone:
                del self._last[scraper]
                self._intervals.pop(scraper, None)
            self._since_end = {}

    @property
    def any(self) -> bool:
        return bool(self._last)

    @property
    def interval(self) -> float | None:
        """The longest interval of a scraper, seconds; None while none came twice."""
        with self._lock:
            return max(self._intervals.values(), default=None)

    def all_saw_the_end(self, times: int = 2) -> bool:
        """Whether every scraper that we know fetched the terminal state `times` times."""
        with self._lock:
            seen = self._since_end or {}
            return bool(self._last) and all(seen.get(scraper, 0) >= times for scraper in self._last)


class Endpoint:
    """Serves a registry on HTTP, from threads of its own. Read-only."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = DEFAULT_HOST,
        port: int | None = None,
        title: str = "tunewatch",
    ) -> None:
        """Listen on `port`, or on the first free one from 9470 on.

        Raises PortTaken when the named port is in use, ListenError when the address can not be bound at all.
        """
        self.scrapes = Scrapes()
        handler = _make_handler(registry, self.scrapes, title)
        self._server = _bind(host, port, handler)
        self.host, self.port = host, self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="tunewatch-http", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for a scrape configuration."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        # HTTPServer would look its own name up in the DNS, which may take half a minute.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news; anything else is ours, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _bind(host: str, port: int | None, handler: type[BaseHTTPRequestHandler]) -> _Server:
    candidates = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)
    server_class = (
        type("_Server6", (_Server,), {"address_family": socket.AF_INET6}) if ":" in host else _Server
    )
    for candidate in candidates:
        try:
            return server_class((host, candidate), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ListenError(
                    f"can not listen on {host}, port {candidate}: {error.strerror or error}"
                ) from error
    if port is not None:
        raise PortTaken(
            f"port {port} on {host} is taken. Leave --listen out to get the next free port from {DEFAULT_PORT} on, "
            "or name another one."
        )
    raise PortTaken(f"no free port on {host} between {DEFAULT_PORT} and {DEFAULT_PORT + PORTS_TRIED - 1}")


def _make_handler(registry: CollectorRegistry, scrapes: Scrapes, title: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "tunewatch"
        sys_version = ""
        timeout = 30  # a client that sends nothing does not keep its thread

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                if self._answer(200, content_type, encode(registry)) and self.command == "GET":
                    scrapes.seen(f"{self.client_address[0]} {self.headers.get('User-Agent', '')}")
            elif path == "/":
                page = f"<!doctype html><title>{html.escape(title)}</title><h1>{html.escape(title)}</h1>"
                self._answer(
                    200, "text/html; charset=utf-8", f'{page}<p><a href="/metrics">Metrics</a>'.encode()
                )
            elif path == "/healthz":
                self._answer(200, "text/plain; charset=utf-8", b"ok\n")
            else:
                self._answer(404, "text/plain; charset=utf-8", b"not found: try /metrics\n")

        do_HEAD = do_GET

        def _answer(self, status: int, content_type: str, body: bytes) -> bool:
            try:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
            except OSError:  # the client is gone, or does not read
                return False
            return True

        def log_message(self, format: str, *args: object) -> None:
            pass  # a line per scrape in the user's training output helps nobody

    return Handler

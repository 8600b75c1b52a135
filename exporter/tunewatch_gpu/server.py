"""The HTTP side: it serves what was rendered and never waits for a driver."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Thread

from tunewatch_gpu.exposition import CONTENT_TYPE

_PLAIN = "text/plain; charset=utf-8"

_LANDING = b"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>tunewatch-gpu</title></head>
<body><h1>tunewatch-gpu</h1><p>GPU metrics for Prometheus.</p>
<ul><li><a href="/metrics">/metrics</a></li><li><a href="/healthz">/healthz</a></li></ul></body></html>
"""


class MetricsServer(ThreadingHTTPServer):
    """Serves `/metrics`, `/healthz` and `/` from memory, a thread per connection.

    `metrics` gives the exposition; `healthy` says whether the collecting loop still turns.
    """

    request_queue_size = 128
    daemon_threads = True

    def __init__(
        self, host: str, port: int, metrics: Callable[[], bytes], healthy: Callable[[], bool]
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.metrics = metrics
        self.healthy = healthy
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's reverse look-up of the host name, which may wait for a resolver."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def start(self) -> None:
        """Serve from a background thread."""
        Thread(target=self.serve_forever, name="http", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds an idle or slow client may keep its thread
    server: MetricsServer
    server_version = "tunewatch-gpu"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._send(HTTPStatus.OK, CONTENT_TYPE, self.server.metrics())
        elif path == "/healthz":
            healthy = self.server.healthy()
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
            self._send(status, _PLAIN, b"ok\n" if healthy else b"the collector is stuck\n")
        elif path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", _LANDING)
        else:
            self._send(HTTPStatus.NOT_FOUND, _PLAIN, b"not found\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not news."""

"""Health and metrics over HTTP, from a thread of their own: they answer while the loop is busy."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from common.errors import FailedPrecondition

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to a health check: whether the process can take work, and one line why."""

    healthy: bool
    reason: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        metrics: CollectorRegistry,
        health: Callable[[], Verdict],
    ) -> None:
        self.metrics = metrics
        self.health = health
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        """Answer `/healthz` and `/metrics`."""
        match self.path.partition("?")[0]:
            case "/healthz":
                verdict = self.server.health()
                status = HTTPStatus.OK if verdict.healthy else HTTPStatus.SERVICE_UNAVAILABLE
                self._reply(status, _TEXT, f"{verdict.reason}\n".encode())
            case "/metrics":
                body = generate_latest(self.server.metrics)
                self._reply(HTTPStatus.OK, CONTENT_TYPE_LATEST, body)
            case _:
                self._reply(HTTPStatus.NOT_FOUND, _TEXT, b"there is /healthz and /metrics\n")

    def _reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: health checks come every second."""


class HttpServer:
    """`/healthz` and `/metrics`. Attribute `address`: `host:port` with the real port."""

    def __init__(
        self, address: str, metrics: CollectorRegistry, health: Callable[[], Verdict]
    ) -> None:
        """Begin to serve.

        Args:
            address: `host:port`; port 0: the system picks.
            metrics: what `/metrics` shows.
            health: asked at each check, from another thread.

        Raises:
            FailedPrecondition: the address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server((host, int(port)), metrics, health)
        except OSError as error:
            raise FailedPrecondition(
                f"cannot listen for HTTP on {address}: {error}. Free the port, or choose another "
                f"http_port"
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

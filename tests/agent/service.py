"""A minimal service with the agent routes, for one node."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tests.agent.simulated import ServiceState

from slicewise.agent.desired_state import DesiredInstance, Eviction

TOKEN = "t-secret"


class TinyService:
    """The state of the service and the requests it received."""

    def __init__(self) -> None:
        self.state = ServiceState()
        self.changed = threading.Condition()
        self.seq = 1
        self.session = ""
        self.hellos: list[dict[str, object]] = []
        self.reports: list[dict[str, object]] = []
        self.requests: list[str] = []
        self.refusals: list[tuple[int, dict[str, object]]] = []
        """Answers that replace the next ones."""
        self.url = ""

    @contextmanager
    def changing(self) -> Iterator[ServiceState]:
        """Change the desired state; open polls are answered."""
        with self.changed:
            yield self.state
            self.seq += 1
            self.changed.notify_all()

    def answer(
        self, method: str, path: str, token: str, body: dict[str, object]
    ) -> tuple[int, dict[str, object]]:
        parts = urlsplit(path)
        with self.changed:
            self.requests.append(f"{method} {parts.path}")
            self.changed.notify_all()
            if token != f"Bearer {TOKEN}":
                return 401, {"detail": "unknown token", "status": 401}
            if self.refusals:
                return self.refusals.pop(0)
            if parts.path == "/v1/agent/hello":
                return self._hello(body)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            session = body.get("session", query.get("session"))
            if session != self.session:
                return 409, {"reason": "superseded", "detail": "a newer session has begun"}
            if parts.path == "/v1/agent/report":
                return self._report(body)
            assert parts.path == "/v1/agent/desired"
            after = int(query["after"])
            self.changed.wait_for(
                lambda: self.seq != after or self.session != session, float(query["wait"])
            )
            if self.session != session:
                return 409, {"reason": "superseded", "detail": "a newer session has begun"}
            return 200, self._desired()

    def _hello(self, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        assert set(body) >= {
            "boot", "agent", "driver", "model", "geometry", "disagreements", "gpus",
        }  # fmt: skip
        if self.hellos and self.hellos[-1]["boot"] != body["boot"]:
            self.state.forget_uuids()
        self.hellos.append(body)
        self.session = f"s{len(self.hellos)}"
        self.changed.notify_all()
        return 200, {"session": self.session, "node": "gpu-07"}

    def _report(self, body: dict[str, object]) -> tuple[int, dict[str, object]]:
        reported = {name: value for name, value in body.items() if name != "session"}
        assert set(reported) == {"gpus", "instances", "foreign"}
        self.reports.append(reported)
        if self.state.receive_report(reported):
            self.seq += 1
        self.changed.notify_all()
        return 200, {"seq": self.seq}

    def _desired(self) -> dict[str, object]:
        return {
            "seq": self.seq,
            "instances": [_instance(item) for item in self.state.instances.values()],
            "evict": [_eviction(item) for item in self.state.evict],
        }


def _instance(item: DesiredInstance) -> dict[str, object]:
    reported = {k: v for k, v in vars(item).items() if k != "present"}
    return {**reported, "wanted": "present" if item.present else "absent"}


def _eviction(item: Eviction) -> dict[str, object]:
    return dict(vars(item))


@contextmanager
def serving(service: TinyService, context: ssl.SSLContext | None = None) -> Iterator[TinyService]:
    """Serve HTTP on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._do()

        def do_POST(self) -> None:
            self._do()

        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            token = self.headers.get("Authorization", "")
            status, answer = service.answer(self.command, self.path, token, body)
            data = json.dumps(answer).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True  # The agent was killed.

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None: ...  # A killed agent drops its connections.

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    scheme = "http" if context is None else "https"
    service.url = f"{scheme}://127.0.0.1:{server.server_address[1]}"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A real `slicewise serve` process that tests start, call, pause, kill and restart."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slicewise.client import Client
from slicewise.store import save_backup

PATIENCE_SECONDS = 180.0
"""Timeout of all waits for a server."""
_LOOK_SECONDS = 0.02
_LAST_LINES = 40
_PORTS = range(20_000, 32_000)
_TAKEN = "cannot listen on"
_LAUNCHES = 5

Address = tuple[str, int]
T = TypeVar("T")


class ServerError(Exception):
    """Raised when a server does not reach the expected state; contains the end of its log."""


class Server:
    """A service process on its own port."""

    def __init__(
        self, folder: Path, *, database: str | None = None, settings: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.database = database
        self.settings = settings
        self.port = 0
        """The port to listen on; 0 for any free port."""
        self.options: list[str] = []
        """Additional command-line options."""
        self.log = folder / "log"
        self.address: Address = ("127.0.0.1", 0)
        self.prefix: list[str] = []
        """Words before the command; with ``there``, for a process in another mount namespace."""
        self.there: Path | None = None
        """The data folder as the process sees it, if different."""
        self.tls: ssl.SSLContext | None = None
        """How to reach a server with TLS."""
        self.lent_token = ""
        """The admin token of another process, for one that never led and has none."""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # Process

    def launch(self) -> None:
        """Start the process without waiting for it."""
        assert not self.runs, "it runs already"
        self.address = ("127.0.0.1", self.port or free_port())
        host, port = self.address
        command = [*self.prefix, sys.executable, "-m", "slicewise.cli", "serve"]
        command += ["--data", str(self.there or self.data), "--listen", f"{host}:{port}"]
        if self.database is not None:
            command += ["--database", self.database]
        for setting in self.settings:
            command += ["--set", setting]
        command += self.options
        # The developer's settings must not reach the server.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.starts += 1

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.launch()
        self.wait_until_ready()

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP pauses the process, SIGCONT resumes it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Terminate the process and return its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._error("did not end when it was asked to") from None

    def wait_until_exit(self) -> int:
        """Wait until the process exits on its own."""
        assert self._process is not None
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._error("did not end") from None

    @property
    def resident_bytes(self) -> int:
        """The resident memory of the process."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise self._error("tells no resident memory")

    # Requests

    @property
    def url(self) -> str:
        """The base URL."""
        scheme = "http" if self.tls is None else "https"
        return "{}://{}:{}".format(scheme, *self.address)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        if self.tls is None:
            return http.client.HTTPConnection(*self.address, timeout=timeout)
        return http.client.HTTPSConnection(*self.address, timeout=timeout, context=self.tls)

    @property
    def admin_token(self) -> str:
        """The admin token, as written to the data folder."""
        return self.lent_token or (self.data / "admin-token").read_text().strip()

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = PATIENCE_SECONDS,
    ) -> tuple[int, Any]:
        """Send a request, as the admin by default; return the status and the decoded body."""
        sent = {"authorization": f"Bearer {token or self.admin_token}", **(headers or {})}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        return self._exchange(method, path, data, sent, timeout)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[int, Any]:
        connection = self._connection(timeout)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(content) if content else None

    def issue_token(self, **options: Any) -> dict[str, Any]:
        """Issue a token; its ``id`` and its secret ``token`` are in the answer."""
        status, made = self.ask("POST", "/v1/tokens", options)
        assert status == 201, made
        assert isinstance(made, dict)
        return made

    def accepts(self, token: str) -> bool:
        """Return whether a token is valid."""
        return self.ask("GET", "/v1/whoami", token=token)[0] == 200

    def metric(self, name: str) -> float:
        """Return the value of a metric, named with its labels; 0 if it is missing."""
        connection = self._connection(PATIENCE_SECONDS)
        try:
            token = {"authorization": f"Bearer {self.admin_token}"}
            connection.request("GET", "/metrics", headers=token)
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def backup(self, file: Path) -> None:
        """Take a backup of the running service."""
        with Client(self.url, self.admin_token) as client:
            save_backup(client.backup(), file)

    def readiness(self) -> dict[str, Any] | None:
        """Return the readiness report; None if the server does not answer."""
        try:
            _, content = self._exchange("GET", "/readyz", None, {}, 10.0)
        except (OSError, http.client.HTTPException):
            return None
        assert isinstance(content, dict)
        return content

    def wait_until_ready(self, role: str | None = None) -> dict[str, Any]:
        """Wait until the server is ready and, if given, has this role."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        content, launches = None, 0
        while time.monotonic() < give_up:
            if not self.runs:
                last = self.last_lines().splitlines()[-1:]
                if launches < _LAUNCHES and _TAKEN in "".join(last):
                    launches += 1  # another process took the port
                    self.launch()
                    continue
                raise self._error(f"ended with status {self._status()} instead of getting ready")
            content = self.readiness()
            if content is not None and content["ready"] and role in (None, content["role"]):
                return content
            time.sleep(_LOOK_SECONDS)
        raise self._error(f"did not get ready{f' and {role}' if role else ''}: {content}")

    def _status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def _error(self, what: str) -> ServerError:
        return ServerError(f"the server at {self.url} {what}; its log ends:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """Return the end of the log."""
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def wait_until(condition: Callable[[], T]) -> T:
    """Wait until a condition holds, and return its true value."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < give_up, f"still {value!r} after {PATIENCE_SECONDS:g} s"
        time.sleep(0.05)
    return value


def run_command(*arguments: object) -> str:
    """Run a `slicewise` command that must succeed, and return its output."""
    command = [sys.executable, "-m", "slicewise.cli", *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def free_port() -> int:
    """Return a free port outside the ephemeral range.

    Clients try to connect before the server listens. With an ephemeral port, such a connection
    could get that port as its own and connect to itself, and the port would be taken.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("no port is free")

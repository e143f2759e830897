"""A real `slicewise serve`: started, asked, paused, killed and started again by its process id."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 180.0
"""How long a server may take to become what is waited for, before a test gives up on it."""
_LOOK_SECONDS = 0.02
_LAST_LINES = 40
_PORTS = range(20_000, 32_000)
_TAKEN = "cannot listen on"
_LAUNCHES = 5

Address = tuple[str, int]


class ServerError(Exception):
    """A server did not become what it should have; tells the end of its log."""


class Server:
    """One process of the service, on a port of its own."""

    def __init__(
        self, folder: Path, *, database: str | None = None, settings: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.database = database
        self.settings = settings
        self.port = 0
        """Where to listen; any free port if it is 0."""
        self.options: list[str] = []
        """What else stands behind the command."""
        self.log = folder / "log"
        self.address: Address = ("127.0.0.1", 0)
        self.prefix: list[str] = []
        """What stands in front of the command; with ``there``, for a process with another view."""
        self.there: Path | None = None
        """Where the process itself finds the data, if that is elsewhere."""
        self.lent_token = ""
        """An admin token of another process, for one that never led and so has none."""
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    # The process

    def launch(self) -> None:
        """Start the process, and do not wait for it."""
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
        # Settings of whoever runs the tests are not those of the server.
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
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP pauses the process, SIGCONT lets it go on."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process with kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Ask the process to end, and return with which status it did."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._error("did not end when it was asked to") from None

    def wait_until_exit(self) -> int:
        """Wait until the process ends by itself."""
        assert self._process is not None
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise self._error("did not end") from None

    @property
    def resident_bytes(self) -> int:
        """How much memory the process holds."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise self._error("tells no resident memory")

    # Asking

    @property
    def url(self) -> str:
        """Where it is."""
        return "http://{}:{}".format(*self.address)

    @property
    def admin_token(self) -> str:
        """The token it left for whoever owns the folder."""
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
        """Ask as the admin, or as whoever has the token: the status and what was said."""
        sent = {"authorization": f"Bearer {token or self.admin_token}", **(headers or {})}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        return self._exchange(method, path, data, sent, timeout)

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        return answer.status, json.loads(content) if content else None

    def readiness(self) -> dict[str, Any] | None:
        """What it says of itself; None while it does not answer."""
        try:
            _, said = self._exchange("GET", "/readyz", None, {}, 10.0)
        except (OSError, http.client.HTTPException):
            return None
        assert isinstance(said, dict)
        return said

    def wait_until_ready(self, role: str | None = None) -> dict[str, Any]:
        """Ask until it is ready, and leads or follows if that is what is waited for."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        said, launches = None, 0
        while time.monotonic() < give_up:
            if not self.runs:
                last = self.last_lines().splitlines()[-1:]
                if launches < _LAUNCHES and _TAKEN in "".join(last):
                    launches += 1  # somebody else was faster
                    self.launch()
                    continue
                raise self._error(f"ended with status {self._status()} instead of getting ready")
            said = self.readiness()
            if said is not None and said["ready"] and role in (None, said["role"]):
                return said
            time.sleep(_LOOK_SECONDS)
        raise self._error(f"did not get ready{f' and {role}' if role else ''}: {said}")

    def _status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def _error(self, what: str) -> ServerError:
        return ServerError(f"the server at {self.url} {what}; its log ends:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of its log, for whoever wonders what happened."""
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def free_port() -> int:
    """A port nobody listens on, below those that are given to outgoing connections.

    Clients try to connect before the server listens. From among those ports one of them might get
    the very port as its own, which then is taken, by a connection to itself.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError("no port is free")

"""A private PostgreSQL server: in a temporary folder, on loopback, removed after the tests."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psycopg
import pytest
from scripts.test_services import MissingServiceError, require_postgres

USER = "slicewise"
_TRIES = 5
_START_SECONDS = 60
_STOP_SECONDS = 60


class PostgresServer:
    """A server that creates databases on request."""

    def __init__(self, programs: Path, durable: bool = False) -> None:
        self.programs = programs
        self._durable = durable
        # PostgreSQL refuses to run as root.
        self._user = _another_user() if os.geteuid() == 0 else None
        self._folder = Path(tempfile.mkdtemp(prefix="slicewise-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self.port = 0
        self._group: int | None = None
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            self._group = owner.pw_gid
            os.chown(self._folder, owner.pw_uid, owner.pw_gid)
        self._run("initdb", "-U", USER, "--auth=trust", "-E", "UTF8", "--no-locale", "--no-sync")

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self.programs / program, "-D", self._data, *arguments],
            cwd=self._folder,
            user=self._user,
            group=self._group,
            extra_groups=[] if self._user else None,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr}{done.stdout}")

    def start(self) -> None:
        """Start the server on the port it had, or on a free one."""
        for _ in range(_TRIES):
            port = self.port or _free_port()
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    [
                        self.programs / "postgres",
                        *("-D", self._data, "-p", str(port)),
                        *("-c", "listen_addresses=127.0.0.1"),
                        *("-c", "unix_socket_directories="),
                        # Killed processes lose nothing that was written, and there are no power
                        # failures: without it the tests take a fraction of the time.
                        *("-c", f"fsync={'on' if self._durable else 'off'}"),
                        *("-c", "max_connections=200"),
                    ],
                    cwd=self._folder,
                    user=self._user,
                    group=self._group,
                    extra_groups=[] if self._user else None,
                    stdout=log,
                    stderr=log,
                )
            if self._answers(port):
                self.port = port
                return
            self._process.wait()
        raise RuntimeError(f"PostgreSQL does not start: {(self._folder / 'log').read_text()}")

    def _answers(self, port: int) -> bool:
        assert self._process is not None
        give_up = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < give_up:
            try:
                psycopg.connect(self._dsn("postgres", port), connect_timeout=5).close()
            except psycopg.OperationalError:
                time.sleep(0.05)
            else:
                return True
        if self._process.poll() is None:
            self._process.kill()
        return False

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT ends connections and is clean, SIGQUIT is a crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(_STOP_SECONDS)
            self._process = None

    def destroy(self) -> None:
        """Stop the server and remove its files."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        """The URL of a fresh database."""
        self._databases += 1
        name = f"d{self._databases}"
        with psycopg.connect(self._dsn("postgres", self.port), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql://{USER}@127.0.0.1:{self.port}/{name}"

    def _dsn(self, database: str, port: int) -> str:
        return f"postgresql://{USER}@127.0.0.1:{port}/{database}"

    def processes(self) -> list[int]:
        """The server's process and those it started."""
        assert self._process is not None
        parent = self._process.pid
        found = [parent]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[1]) == parent:
                found.append(int(stat.parent.name))
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The server neither answers nor refuses, as when it is cut off."""
        processes = self.processes()
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in reversed(processes):
                os.kill(process, signal.SIGCONT)


@cache
def the_server() -> PostgresServer:
    """The server that all tests share, with a separate database for each."""
    try:
        programs = require_postgres()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    server = PostgresServer(programs)
    atexit.register(server.destroy)
    server.start()
    return server


def _another_user() -> str:
    """The user that PostgreSQL's package created, or else ``nobody``."""
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Commands import only what they need: service commands start fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slicewise.cli.commands import LazyCommand, commands
from slicewise.cli.main import exit_status

NEVER = {
    "alembic", "asyncio", "click", "kubernetes", "matplotlib", "numba", "numpy", "pyarrow",
    "pydantic", "pygments", "sqlalchemy", "starlette", "structlog", "uvicorn",
    "slicewise.agent", "slicewise.catalog", "slicewise.core.cluster", "slicewise.engine",
    "slicewise.policies", "slicewise.server", "slicewise.lab", "slicewise.store",
}  # fmt: skip
"""Packages that no service command needs, with their submodules."""

PROBE = """\
import json, sys
from slicewise.cli.main import exit_status
status = exit_status(sys.argv[1:])
sys.stdout = sys.__stdout__
print(json.dumps([status, *sys.modules]))
"""


class NotHere(BaseHTTPRequestHandler):
    """A service that answers every request with 404."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        problem = {"type": "about:blank", "title": "Not found", "status": 404, "detail": "not here"}
        body = json.dumps(problem).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a service that refuses every request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NotHere) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join(10)


def loaded(arguments: str, server: str = "") -> tuple[int, str, set[str]]:
    """Run a command in a new process; return exit status, standard error and loaded modules."""
    environment = {
        name: value for name, value in os.environ.items() if "proxy" not in name.lower()
    } | {"SLICEWISE_SERVER": server, "SLICEWISE_TOKEN": "sw_x"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    status, *modules = json.loads(done.stdout.splitlines()[-1])
    return status, done.stderr, set(modules)


def without(names: set[str], modules: set[str]) -> None:
    """Check that none of these packages is loaded."""
    found = {name for name in modules for heavy in names if f"{name}.".startswith(f"{heavy}.")}
    assert sorted(found) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "submit 1g.10gb", "release a-1", "ls", "ls --json", "show a-1", "explain 1g.10gb", "queue",
        "events", "nodes", "nodes show n1", "nodes drain n1", "tenants", "tenants add t", "tokens",
        "tokens revoke x", "clock", "clock accept",
    ],
)  # fmt: skip
def test_a_service_command_loads_no_heavy_package(arguments: str, server: str) -> None:
    status, told, modules = loaded(arguments, server)
    assert (status, told) == (2, "slicewise: error: not here\n")
    assert "slicewise.client.blocking_client" in modules
    without(NEVER | {"rich", "slicewise.client.async_client"}, modules)


def test_top_once_needs_no_asyncio(server: str) -> None:
    status, told, modules = loaded("top --once", server)
    assert (status, told) == (2, "slicewise: error: not here\n")
    without(NEVER - {"pygments"} | {"slicewise.client.async_client"}, modules)


@pytest.mark.parametrize("arguments", ["", "--help", "--version"])
def test_the_list_of_commands_loads_no_command(arguments: str) -> None:
    status, told, modules = loaded(arguments)
    assert (status, told) == (0, "")
    assert not {f"slicewise.cli.{name}" for name in ("allocations", "simulate")} & modules
    without(NEVER | {"httpx", "msgspec", "rich"}, modules)


@pytest.mark.parametrize("arguments", ["ls --help", "nodes --help", "submit --no-such-option"])
def test_help_needs_no_client(arguments: str) -> None:
    _, _, modules = loaded(arguments)
    without(NEVER | {"httpx", "rich"}, modules)


@pytest.mark.parametrize("command", [*commands()], ids=lambda command: str(command.name))
def test_the_summary_in_the_list_is_that_of_the_command(command: LazyCommand) -> None:
    assert command.get_short_help_str(1000) == command.loaded.get_short_help_str(1000)


def test_a_similar_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["simulat"]) == 2
    assert "No such command 'simulat'. Did you mean 'simulate'?" in capsys.readouterr().err

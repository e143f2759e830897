"""Fixtures of the dashboard tests: a browser, servers, visitors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser
from tests.dashboard.browser import Visitor, chromium
from tests.e2e.server import Server

Visit = Callable[..., Visitor]
Tell = Callable[[str], None]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of a file."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service for the tests of a file, with two nodes and two tenants."""
    made = Server(tmp_path_factory.mktemp("served"))
    made.start()
    try:
        for name, model, gpus in (("n1", "A100-80GB", 4), ("n2", "A30-24GB", 2)):
            asked(made, "POST", "/v1/nodes", {"name": name, "model": model, "gpus": gpus})
        for name in ("acme", "zen"):
            asked(made, "POST", "/v1/tenants", {"name": name})
        yield made
    finally:
        made.kill()


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    """Opens windows, and closes them after the test."""
    opened: list[Visitor] = []

    def make(to: Server = server, **options: Any) -> Visitor:
        visitor = Visitor(browser, to, **options)
        opened.append(visitor)
        return visitor

    yield make
    for visitor in opened:
        visitor.close()


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Prints a line to the terminal, even if the test passes."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return say


def asked(server: Server, method: str, path: str, body: object = None, **options: Any) -> Any:
    """The answer to a request that must succeed."""
    status, answer = server.ask(method, path, body, **options)
    assert status < 300, answer
    return answer

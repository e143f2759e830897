"""A service for the tests of each file, with a node and a tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with a node and a tenant, practically without rate limits."""
    limits = ("requests_per_second", "strangers_per_second")
    made = Server(
        tmp_path_factory.mktemp("attacked"),
        settings=[f"limits.{name}=1000000" for name in limits],
    )
    made.start()
    try:
        node = {"name": "n1", "model": "A100-80GB", "gpus": 200}
        for path, body in (("/v1/nodes", node), ("/v1/tenants", {"name": "acme"})):
            status, answer = made.ask("POST", path, body)
            assert status == 201, answer
        yield made
    finally:
        made.kill()

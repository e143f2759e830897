"""A service under attack: one for the tests of a file, with a node to place on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with a node."""
    limits = ("requests_per_second", "strangers_per_second")
    made = Server(
        tmp_path_factory.mktemp("attacked"),
        settings=[f"limits.{name}=1000000" for name in limits],
    )
    made.start()
    try:
        status, said = made.ask(
            "POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 200}
        )
        assert status == 201, said
        yield made
    finally:
        made.kill()

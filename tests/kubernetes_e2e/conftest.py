"""A real control plane for the tests of this folder, with a separate namespace for each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.kubernetes_e2e.cluster import make_classes, namespace, node, publish, withdraw
from tests.kubernetes_e2e.plane import Plane, the_plane

Nodes = Callable[..., list[str]]
"""Publishes nodes with GPUs: how many, of which model, how many GPUs, and what ``node`` takes."""


@pytest.fixture(scope="session")
def plane() -> Plane:
    """The control plane that all tests of a worker share; skipped without Go, except in CI."""
    plane = the_plane()
    make_classes(plane.api)
    return plane


@pytest.fixture
def nodes(plane: Plane) -> Iterator[Nodes]:
    """Nodes that exist for one test: nodes(2, "H200-141GB", gpus=8, cpu="4")."""
    made: list[str] = []

    def publish_nodes(
        count: int = 1, model: str = "H200-141GB", gpus: int = 1, **what: str
    ) -> list[str]:
        prefix = f"n-{uuid.uuid4().hex[:8]}"
        names = [f"{prefix}-{number}" for number in range(count)]
        made.extend(names)
        return publish(plane.api, [node(name, **what) for name in names], model, gpus)

    yield publish_nodes
    withdraw(plane.api, made)


@pytest.fixture
def space(nodes: Nodes, plane: Plane) -> Iterator[str]:
    """A separate namespace; it is emptied before the nodes are deleted."""
    with namespace(plane.api) as name:
        yield name

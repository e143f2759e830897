"""A real control plane for the tests of this folder, with a separate namespace for each."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.cluster import make_classes, namespace, node, publish, withdraw
from tests.kubernetes_e2e.nvidia_driver import why_not
from tests.kubernetes_e2e.plane import Plane, the_plane
from tests.kubernetes_e2e.programs import require_dra_driver

from slicewise.core.errors import SlicewiseError
from slicewise.fakedriver import build

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


@pytest.fixture(scope="module")
def real_folder() -> Iterator[Path]:
    """A folder with a short name, as paths of sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def real_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVML on which NVIDIA's driver runs; skipped where it cannot, except in CI."""
    problem = why_not()
    try:
        if problem is None:
            require_dra_driver()
            return build(tmp_path_factory.getbasetemp().parent / "fakedriver")
    except (MissingServiceError, SlicewiseError) as error:
        problem = str(error)
    if os.environ.get("CI"):
        raise MissingServiceError(problem)
    pytest.skip(problem)

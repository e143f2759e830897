"""What several test folders share: the GPU models, loaded once."""

from __future__ import annotations

import pytest

from slicewise.catalog import Catalog
from slicewise.core.geometry import Geometry

SCHEDULABLE = [e.geometry for e in Catalog.builtin().entries() if e.geometry is not None]


@pytest.fixture(scope="session")
def a100() -> Geometry:
    """The paper's GPU."""
    return Catalog.builtin().find("A100-80GB").require()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``geometry`` runs once for every schedulable model."""
    if "geometry" in metafunc.fixturenames:
        metafunc.parametrize("geometry", SCHEDULABLE, ids=lambda g: g.model)

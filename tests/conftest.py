"""What several test folders share: the GPU models, loaded once."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

from slicewise.catalog import Catalog
from slicewise.core.geometry import Geometry

# No test may depend on how fast the machine is. In CI the same cases are tried every time, so that
# a run can be repeated; elsewhere they are drawn anew and may find what was not thought of.
settings.register_profile("slicewise", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("slicewise")

# Where tests run in the background of a shell, SIGINT is ignored, and what they start would inherit
# that: no Ctrl-C could be tried.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SCHEDULABLE = [e.geometry for e in Catalog.builtin().entries() if e.geometry is not None]


@pytest.fixture(scope="session")
def a100() -> Geometry:
    """The paper's GPU."""
    return Catalog.builtin().find("A100-80GB").require()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``geometry`` runs once for every schedulable model."""
    if "geometry" in metafunc.fixturenames:
        metafunc.parametrize("geometry", SCHEDULABLE, ids=lambda g: g.model)

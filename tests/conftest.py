"""What several test folders share: the GPU models, loaded once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A command that is run in this process sets up its logs; the next test must not have them."""
    root = logging.getLogger()
    level, before = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def a100() -> Geometry:
    """The paper's GPU."""
    return Catalog.builtin().find("A100-80GB").require()


LONG = ("e2e", "k8s", "dashboard", "sim", "agent", "fakedriver")
"""Folders with files that take minutes: begun first, so that no core is left with one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; within them, and among the rest, the order stays."""
    tests = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=turn)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``geometry`` runs once for every schedulable model."""
    if "geometry" in metafunc.fixturenames:
        metafunc.parametrize("geometry", SCHEDULABLE, ids=lambda g: g.model)

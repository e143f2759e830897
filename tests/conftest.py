"""Shared fixtures and the order of the tests."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from coverage import Coverage
from hypothesis import settings

from slicewise.catalog import Catalog
from slicewise.core.geometry import Geometry

# No test may depend on how fast the machine is. In CI the same cases are tried every time, so that
# a run can be repeated; elsewhere they are random and may find new cases.
settings.register_profile("slicewise", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("slicewise")

# In the background of a shell SIGINT is ignored, and child processes would inherit that, so no
# test could send Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SCHEDULABLE = [e.geometry for e in Catalog.builtin().entries() if e.geometry is not None]


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """Restore the logging that a command run in this process has configured."""
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


LONG = (
    ("e2e", "kubernetes_e2e", "lab"),
    ("dashboard", "cli", "kubernetes", "control"),
    ("docs", "agent", "fakedriver"),
)
"""Folders with files that take minutes, started first, so that no core ends with one of them.

The files of a group alternate: while those of one folder wait, those of another use the processor.
"""
MEASURED = ("core", "catalog", "policies", "engine", "lab/test_agreement.py")
"""Tests during which coverage is measured: they must cover the packages in the coverage gate."""


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """Two workers more than there are cores, by default: many tests wait for other processes."""
    cores = yield
    return cores if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else cores + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start long files first, alternating between folders; keep the order within a file."""
    tests = Path(__file__).parent
    for name in (*itertools.chain(*LONG), *MEASURED):
        assert (tests / name).exists(), f"tests/{name} is gone: mend LONG or MEASURED"
    files: dict[str, list[Path]] = {}
    """By folder."""

    def turn(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(tests).parts[0]
        there = files.setdefault(folder, [])
        if item.path not in there:
            there.append(item.path)
        group = next((n for n, group in enumerate(LONG) if folder in group), len(LONG))
        return group, there.index(item.path)

    items.sort(key=turn)
    measured = [tests / name for name in MEASURED]
    for item in items:
        if not any(item.path.is_relative_to(path) for path in measured):
            item.add_marker("unmeasured")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure no coverage during a test that is marked so, nor during the setup of its fixtures.

    In a worker pytest-cov has two measurements, one on top of the other. Its own ``no_cover`` would
    stop the upper one only.
    """
    stopped: list[Coverage] = []
    if item.get_closest_marker("unmeasured"):
        while (running := Coverage.current()) is not None:
            running.stop()
            stopped.append(running)
    try:
        return (yield)
    finally:
        while stopped:
            stopped.pop().start()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``geometry`` runs once for every schedulable model."""
    if "geometry" in metafunc.fixturenames:
        metafunc.parametrize("geometry", SCHEDULABLE, ids=lambda g: g.model)

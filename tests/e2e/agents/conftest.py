"""Fixtures: the fake driver library, and sites that end with the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.e2e.agents.site import Site

from slicewise.fakedriver import build

OpenSite = Callable[..., Site]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver library."""
    return build(tmp_path_factory.getbasetemp().parent / "fakedriver")


@pytest.fixture(scope="session")
def rounds() -> int:
    """A factor for the length of the tests, from SLICEWISE_AGENT_ROUNDS."""
    return int(os.environ.get("SLICEWISE_AGENT_ROUNDS", "1"))


@pytest.fixture
def open_site(tmp_path: Path, library: Path) -> Iterator[OpenSite]:
    """A function that opens sites with given settings; they end after the test."""
    with ExitStack() as stack:
        made: list[Site] = []

        def make(*settings: str, host: str = "", database: str | None = None) -> Site:
            folder = tmp_path / f"site-{len(made)}"
            site = Site(folder, library, *settings, host=host, database=database)
            made.append(stack.enter_context(site))
            return made[-1]

        yield make


@pytest.fixture
def site(open_site: OpenSite) -> Site:
    """A site with default settings."""
    return open_site()

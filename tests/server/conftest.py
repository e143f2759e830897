"""Fixtures: a service in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.harness import Harness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A service with nothing in it but the default tenant."""
    made = Harness(tmp_path)
    yield made
    made.close()


@pytest.fixture
def busy(harness: Harness) -> Harness:
    """A service with a node of two GPUs."""
    harness.node()
    return harness

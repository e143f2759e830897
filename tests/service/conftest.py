"""A house for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A service with nothing in it but the default tenant."""
    made = House(tmp_path)
    yield made
    made.close()


@pytest.fixture
def busy(house: House) -> House:
    """A service with a node of two GPUs."""
    house.node()
    return house

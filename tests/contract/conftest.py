"""An empty journal of every kind, with an epoch to write in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.postgres import the_server

from slicewise.control.ports import Journal, Store
from slicewise.store import open_store
from slicewise.store.memory import MemoryJournal

STORES = ["sqlite", "postgresql"]


class Led(NamedTuple):
    """A journal and the epoch in which it may be written."""

    journal: Journal
    epoch: int


def _opened(kind: str, folder: Path) -> Store:
    if kind == "postgresql":
        return open_store(None, the_server().database())
    return open_store(folder)


@pytest.fixture(params=["memory", *STORES])
def led(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Led]:
    """A journal of every kind."""
    if request.param == "memory":
        yield Led(MemoryJournal(), 1)
        return
    store = _opened(request.param, tmp_path)
    epoch = store.lead("me", "http://127.0.0.1:1", 3600)
    assert epoch is not None
    yield Led(store, epoch)
    store.close()


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store on every database."""
    store = _opened(request.param, tmp_path)
    yield store
    store.close()

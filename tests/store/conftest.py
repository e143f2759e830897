"""Stores for tests: every test that uses ``home`` runs on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.postgres import PostgresServer, the_server

from slicewise.store import open_store
from slicewise.store.sql import SqlStore


class Destination:
    """The location of a store, which can be opened several times."""

    def __init__(self, data: Path | None, database: str | None) -> None:
        self.data = data
        self.database = database
        self._opened = ExitStack()

    @property
    def options(self) -> list[str]:
        """The options of a command that name the store."""
        if self.database is not None:
            return ["--database", self.database]
        return ["--data", str(self.data)]

    def open(self) -> SqlStore:
        """Open the store; it is closed after the test."""
        store = open_store(self.data, self.database)
        self._opened.callback(store.close)
        return store

    def close(self) -> None:
        """Close every store that was opened."""
        self._opened.close()


@pytest.fixture
def server() -> PostgresServer:
    """A PostgreSQL server."""
    return the_server()


def a_home(kind: str, folder: Path) -> Destination:
    """A new location of that kind."""
    if kind == "postgresql":
        return Destination(None, the_server().database())
    folder.mkdir()
    return Destination(folder, None)


@pytest.fixture(params=["sqlite", "postgresql"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Destination]:
    """The location of a store."""
    home = a_home(request.param, tmp_path / "home")
    yield home
    home.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def other_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Destination]:
    """A second location, of either kind."""
    home = a_home(request.param, tmp_path / "other")
    yield home
    home.close()


@pytest.fixture
def store(home: Destination) -> SqlStore:
    """An open, empty store."""
    return home.open()

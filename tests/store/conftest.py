"""Stores to try things on: every test that asks for ``home`` runs on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.postgres import PostgresServer, the_server

from slicewise.store import open_store
from slicewise.store.sql import SqlStore


class Home:
    """A place for one store, which can be opened again and again."""

    def __init__(self, data: Path | None, database: str | None) -> None:
        self.data = data
        self.database = database
        self._opened = ExitStack()

    @property
    def options(self) -> list[str]:
        """How a command is told where it is."""
        if self.database is not None:
            return ["--database", self.database]
        return ["--data", str(self.data)]

    def open(self) -> SqlStore:
        """Open it, and see that it is closed after the test."""
        store = open_store(self.data, self.database)
        self._opened.callback(store.close)
        return store

    def close(self) -> None:
        """Close whatever was opened."""
        self._opened.close()


@pytest.fixture
def server() -> PostgresServer:
    """A PostgreSQL server."""
    return the_server()


def a_home(kind: str, folder: Path) -> Home:
    """A new place of that kind."""
    if kind == "postgresql":
        return Home(None, the_server().database())
    folder.mkdir()
    return Home(folder, None)


@pytest.fixture(params=["sqlite", "postgresql"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A place for a store."""
    home = a_home(request.param, tmp_path / "home")
    yield home
    home.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def other_home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Another place, of either kind whatever the first is."""
    home = a_home(request.param, tmp_path / "other")
    yield home
    home.close()


@pytest.fixture
def store(home: Home) -> SqlStore:
    """A store, empty and open."""
    return home.open()

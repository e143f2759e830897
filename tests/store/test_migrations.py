"""Migrations: run once, by one process at a time, and never backwards."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect
from tests.postgres import PostgresServer
from tests.store.conftest import Destination

from slicewise.core.errors import SlicewiseError
from slicewise.store import open_contents, open_store
from slicewise.store import schema_version as migrating
from slicewise.store.schema import metadata
from slicewise.store.sql import SqlStore


def test_the_migrations_produce_the_schema(store: SqlStore) -> None:
    with store.session() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        indexes = {
            index["name"]
            for table in metadata.tables
            for index in inspect(connection).get_indexes(table)
        }
    assert indexes >= {index.name for table in metadata.tables.values() for index in table.indexes}


def test_the_head_revision_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrating.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [migrating.HEAD]


def test_a_current_database_is_not_changed(home: Destination) -> None:
    store = home.open()
    epoch = store.lead("me", "", 3600)
    store.close()
    again = home.open()
    with again.session() as connection:
        assert migrating.revision(connection) == migrating.HEAD
        assert connection.exec_driver_sql("SELECT epoch FROM leader").scalar() == epoch


def test_a_newer_database_is_refused(home: Destination) -> None:
    store = home.open()
    with store.transaction() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    with pytest.raises(SlicewiseError, match="migrated by a newer slicewise"):
        home.open()
    with (
        pytest.raises(SlicewiseError, match="revision 9999"),
        open_contents(home.data, home.database),
    ):
        pass


def test_reading_does_not_migrate_an_older_database(
    home: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.open().close()
    monkeypatch.setattr(migrating, "HEAD", "0002")
    with (
        pytest.raises(SlicewiseError, match="start the service once"),
        open_contents(home.data, home.database),
    ):
        pass


def test_reading_creates_no_database(home: Destination) -> None:
    with pytest.raises(SlicewiseError, match="holds no"), open_contents(home.data, home.database):
        pass
    assert home.data is None or list(home.data.iterdir()) == []


def test_concurrent_starts_create_the_tables_once(server: PostgresServer) -> None:
    url = server.database()
    outcomes: list[object] = []

    def start() -> None:
        try:
            store = open_store(None, url)
            outcomes.append(store.last_seq())
            store.close()
        except Exception as error:
            outcomes.append(error)

    starts = [threading.Thread(target=start) for _ in range(6)]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert outcomes == [0] * 6


def test_a_failed_migration_changes_nothing(
    home: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise SlicewiseError("halfway")

    with monkeypatch.context() as context:
        context.setattr("alembic.op.bulk_insert", fail)
        with pytest.raises(SlicewiseError, match="halfway"):
            home.open()
    store = home.open()
    with store.session() as connection:
        assert migrating.revision(connection) == migrating.HEAD
    assert store.lead("me", "", 1) == 1

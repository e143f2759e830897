"""Migrates a database to the schema of this version, and refuses a newer one."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from slicewise.core.errors import SlicewiseError

HEAD = "0001"
"""The last migration of this version."""
_MIGRATIONS = Path(__file__).parent / "migrations"


def revision(connection: Connection) -> str | None:
    """The revision of the database; None if it has no tables of slicewise."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


class EmptyError(SlicewiseError):
    """A database that should hold a journal is empty."""


def upgrade(connection: Connection, begin: bool = True) -> None:
    """Run the missing migrations; the caller holds a transaction and a lock.

    Without ``begin``, an empty database is refused.
    """
    found = revision(connection)
    if found == HEAD:
        return
    if found is None and not begin:
        raise EmptyError("this database holds no journal")
    # Alembic is slow to import, and nearly every start has nothing to migrate.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if found is not None and found not in {
        step.revision for step in ScriptDirectory.from_config(config).walk_revisions()
    }:
        raise too_new(found)
    command.upgrade(config, "head")


def require_current(connection: Connection) -> None:
    """Refuse a database of another version; nothing is changed."""
    found = revision(connection)
    if found is None:
        raise SlicewiseError("this database holds no journal: no service has used it yet")
    if found != HEAD:
        raise SlicewiseError(
            f"the tables of this database are of revision {found} and this slicewise has {HEAD}: "
            "use the version of the service, or start the service once with this one"
        )


def too_new(found: str) -> SlicewiseError:
    """The error for a database that a newer version has migrated."""
    return SlicewiseError(
        f"this database was migrated by a newer slicewise (revision {found}; this one supports "
        f"up to {HEAD}): upgrade slicewise, or restore an older backup"
    )

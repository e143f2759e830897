"""Bringing a database to the tables of this version, and refusing one that is ahead."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from slicewise.core.errors import SlicewiseError

HEAD = "0001"
"""The last step of this version."""
_STEPS = Path(__file__).parent / "migrations"


def revision(connection: Connection) -> str | None:
    """The last step the database has seen; None if it holds nothing of ours."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return found


class EmptyError(SlicewiseError):
    """There is nothing in a database that should hold something."""


def upgrade(connection: Connection, begin: bool = True) -> None:
    """Take the steps that are missing; the caller holds a transaction and a lock around it.

    Unless it may ``begin``, a database without tables of ours is refused.
    """
    found = revision(connection)
    if found == HEAD:
        return
    if found is None and not begin:
        raise EmptyError("this database holds no journal")
    # Alembic takes a moment to import, and nearly every start finds nothing to do.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_STEPS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if found is not None and found not in {
        step.revision for step in ScriptDirectory.from_config(config).walk_revisions()
    }:
        raise too_new(found)
    command.upgrade(config, "head")


def require_current(connection: Connection) -> None:
    """Refuse a database that is not of this version, without changing it."""
    found = revision(connection)
    if found is None:
        raise SlicewiseError("this database holds no journal: nothing was ever served from it")
    if found != HEAD:
        raise SlicewiseError(
            f"the tables of this database are of revision {found} and this slicewise has {HEAD}: "
            "use the version that serves from it, or serve from it once with this one"
        )


def too_new(found: str) -> SlicewiseError:
    """What is said about a database that a newer version has changed."""
    return SlicewiseError(
        f"this database was changed by a newer slicewise (revision {found}, and this one knows "
        f"up to {HEAD}): upgrade slicewise, or restore a backup that was made before"
    )

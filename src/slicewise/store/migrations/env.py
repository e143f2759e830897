"""Alembic's environment script: runs the migrations on the connection that was passed to it."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()

"""Alembic migrations, which bring a database of an older version to the current schema.

`store.schema_version.upgrade` runs them. They may import `store.checksums`.
"""

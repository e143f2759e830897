"""The store: keeps the journal in SQLite or PostgreSQL, and backs up, restores and verifies it."""

from slicewise.store.backups import backup, open_backup
from slicewise.store.migrating import EmptyError
from slicewise.store.opening import open_contents, open_store
from slicewise.store.restoring import restore
from slicewise.store.verifying import Report, verify

__all__ = [
    "EmptyError",
    "Report",
    "backup",
    "open_backup",
    "open_contents",
    "open_store",
    "restore",
    "verify",
]

"""The store: the journal in SQLite or PostgreSQL, with backup, restore and verification.

`open_store` opens it for a service; `SqlStore` implements the port `control.ports.Store`.
May import `config`, `control`, `journal` and what is below them.
"""

from slicewise.store.backup_file import backup, open_backup, save_backup
from slicewise.store.opening import open_contents, open_store
from slicewise.store.restore import restore
from slicewise.store.schema_version import EmptyError
from slicewise.store.verification import VerificationReport, verify

__all__ = [
    "EmptyError",
    "VerificationReport",
    "backup",
    "open_backup",
    "open_contents",
    "open_store",
    "restore",
    "save_backup",
    "verify",
]

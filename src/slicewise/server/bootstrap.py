"""The first start: checks of the data folder, the default tenant and the admin token.

A database may be empty because the volume with the real one is not mounted, or because the wrong
one was configured. The service therefore writes the id of its history to the data folder, and
refuses to start on an empty database if the folder has that marker or an admin token.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from slicewise.config.logs import logger
from slicewise.control.actors import expired, internal
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command, IssueToken, SetTenant
from slicewise.control.ports import IdempotencyKey, Span
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import QuotaRecord, Role
from slicewise.runtime.runtime import Runtime
from slicewise.server.auth import DEFAULT_TENANT, digest_of, new_secret

TOKEN_FILE = "admin-token"
MARKER = "slicewise.history"
ACTOR = internal("service")
_RETRY_SECONDS = 1.0

log = logger()


def traces(folder: Path) -> tuple[str, ...]:
    """The files that an earlier service left in this folder."""
    return tuple(name for name in (MARKER, TOKEN_FILE) if (folder / name).exists())


def check_history(folder: Path, span: Span | None, *, init: bool, required: bool) -> None:
    """Refuse to start if the history of this folder is missing from the database, or another one.

    ``span`` describes the journal in the database, None if there is no journal.
    """
    begun = span is not None and span.last > 0
    if init:
        if begun:
            raise SlicewiseError(
                "--init begins a new history, but this database already holds one: serve without "
                "--init, or name a new folder or database"
            )
    elif not begun:
        left = " and ".join(traces(folder))
        if left:
            raise SlicewiseError(
                f"a service ran from {folder} before ({left} exists), but its database is empty: "
                "mount the volume or name the database it had, or restore a backup; to begin a "
                "new history here, add --init"
            )
        if required:
            raise SlicewiseError(
                f"require_history is set, but the database of {folder} holds no history: "
                "mount the volume or name the right database; for the first start, add --init"
            )
    else:
        assert span is not None
        marked = _marked(folder)
        if marked not in (None, span.history, *span.former):
            raise SlicewiseError(
                f"the database holds history {span.history}, but {folder} belongs to {marked}: "
                "name the right database or folder; if this is intended, remove "
                f"{folder / MARKER}"
            )


def write_marker(folder: Path, history: str) -> None:
    """Record the id of the history that is served from this folder."""
    try:
        if _marked(folder) != history:
            write_private(folder / MARKER, history)
    except SlicewiseError as error:
        log.warning("history marker not written", problem=str(error))


def _marked(folder: Path) -> str | None:
    try:
        return (folder / MARKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SlicewiseError(f"{folder / MARKER}: cannot be read: {error}") from None


def token_file(folder: Path) -> Path:
    """The path of the admin token."""
    return folder / TOKEN_FILE


async def prepare(runtime: Runtime, folder: Path | None) -> None:
    """Create the default tenant and the admin token, if they do not exist.

    The file is written before its token is issued. A crash in between leaves an invalid token in
    the file, and the next start replaces it.
    """
    if runtime.state.seq == 0:
        await _submit(runtime, SetTenant(DEFAULT_TENANT, QuotaRecord(), new=True))
    if folder is None:
        return
    path = token_file(folder)
    if not await runtime.in_thread(_is_valid, path, runtime):
        secret = new_secret()
        await runtime.in_thread(write_private, path, secret)
        note = f"issued at start, in the file {TOKEN_FILE}"
        await _submit(runtime, IssueToken(digest_of(secret), Role.ADMIN, note=note))
        log.info("admin token issued", file=str(path))


async def _submit(runtime: Runtime, command: Command) -> None:
    """Submit a command, and retry while the database is unavailable."""
    # The key makes retries idempotent: a commit that seemed to fail may have succeeded.
    key = IdempotencyKey(ACTOR.name, secrets.token_hex())
    while True:
        try:
            if (await runtime.submit(command, ACTOR, key)).answer.status != 503:
                return
        except RefusedError:
            if not runtime.leads:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


def _is_valid(path: Path, runtime: Runtime) -> bool:
    try:
        digest = digest_of(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    token = runtime.state.tokens_by_digest.get(digest)
    if token is None or token.role is not Role.ADMIN:
        return False
    return not expired(token, runtime.latest())


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    draft = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be written: {error.strerror or error}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

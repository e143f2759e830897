"""The first start: a tenant to act for, and an admin token in a file only its owner can read."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from slicewise.control.actors import expired, internal
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command, IssueToken, SetTenant
from slicewise.control.entries import QuotaRecord, Role
from slicewise.control.ports import Key
from slicewise.core.errors import SlicewiseError
from slicewise.service.auth import DEFAULT_TENANT, digest_of, new_secret
from slicewise.service.logs import logger
from slicewise.service.plant import Plant

TOKEN_FILE = "admin-token"
ACTOR = internal("service")
_RETRY_SECONDS = 1.0

log = logger()


def token_file(folder: Path) -> Path:
    """Where the admin token is."""
    return folder / TOKEN_FILE


async def furnish(plant: Plant, folder: Path | None) -> None:
    """Make sure that whoever owns the folder can work with the service this process leads.

    The file is written before its token is known. So a crash in between leaves a file that nobody
    knows, and the next start issues another one.
    """
    if plant.state.seq == 0:
        await _insist(plant, SetTenant(DEFAULT_TENANT, QuotaRecord(), new=True))
    if folder is None:
        return
    path = token_file(folder)
    if not await plant.in_thread(_is_valid, path, plant):
        secret = new_secret()
        await plant.in_thread(write_secret, path, secret)
        note = f"issued at start, in the file {TOKEN_FILE}"
        await _insist(plant, IssueToken(digest_of(secret), Role.ADMIN, note=note))
        log.info("admin token issued", file=str(path))


async def _insist(plant: Plant, command: Command) -> None:
    """Have a command carried out, however long the database takes to come back."""
    key = Key(
        ACTOR.name, secrets.token_hex()
    )  # so that a commit that only seemed to fail counts once
    while True:
        try:
            if (await plant.ask(command, ACTOR, key)).answer.status != 503:
                return
        except RefusedError:
            if not plant.leads:
                raise
        await asyncio.sleep(_RETRY_SECONDS)


def _is_valid(path: Path, plant: Plant) -> bool:
    try:
        digest = digest_of(path.read_text(encoding="utf-8").strip())
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    token = plant.state.tokens_by_digest.get(digest)
    if token is None or token.role is not Role.ADMIN:
        return False
    return not expired(token, plant.latest())


def write_secret(path: Path, secret: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{secret}\n")
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be written: {error.strerror or error}") from None


def _sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

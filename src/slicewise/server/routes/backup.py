"""Backups of a running service, streamed to an administrator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator

from slicewise.config.logs import logger
from slicewise.control.answers import RefusedError
from slicewise.control.ports import StoreError
from slicewise.server.auth import Caller
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, Stream

MAX_BACKUPS = 2
"""Concurrent backups of a process: each holds a connection and a page of the journal."""

log = logger("slicewise.backup")


async def backup(context: AppContext, request: HttpRequest) -> Reply:
    """The whole database as one file for `slicewise restore` and `slicewise verify`.

    The file ends with a digest. A file without it is incomplete and cannot be restored.
    """
    if context.backups >= MAX_BACKUPS:
        raise RefusedError(429, f"{MAX_BACKUPS} backups are already in progress", retry_after=10)
    context.backups += 1
    gone = asyncio.Event()
    try:
        pieces = context.runtime.store.backup()
        # Read the first piece before the status is sent: if the database fails, the status is 503.
        first = await _next(context, request.caller, pieces)
    except BaseException:
        context.backups -= 1
        raise

    def ended() -> None:
        context.backups -= 1

    return Stream(
        200,
        b"",
        [(b"content-disposition", b'attachment; filename="slicewise.backup"')],
        content=b"application/gzip",
        chunks=_pieces(context, request.caller, first, pieces, gone),
        receive=request.receive,
        gone=gone,
        ended=ended,
    )


async def _pieces(
    context: AppContext,
    caller: Caller,
    piece: bytes,
    pieces: Iterator[bytes],
    gone: asyncio.Event,
) -> AsyncGenerator[bytes, None]:
    """The pieces, each read from the database after the client has received the previous one."""
    while piece:
        yield piece
        if gone.is_set() or context.runtime.stopping:
            return
        try:
            context.check(caller)
            piece = await _next(context, caller, pieces)
        except (RefusedError, StoreError) as error:
            log.warning("backup aborted", problem=str(error))
            return


async def _next(context: AppContext, caller: Caller, pieces: Iterator[bytes]) -> bytes:
    """The next piece, empty at the end. Commits and other readers run between pieces."""
    async with context.journal_lock.hold(caller.share):
        return await context.runtime.in_thread(next, pieces, b"")

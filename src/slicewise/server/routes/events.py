"""Events: the journal as a stream, and as pages (the audit log)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, get_args

from msgspec import Meta

from slicewise.api.base import encode
from slicewise.api.events import EventPage
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.identities import role_of
from slicewise.control.ports import StoreError
from slicewise.control.views import SERVICE_ACTORS, event_view
from slicewise.core.errors import UnknownNameError
from slicewise.journal.entries import AnyEntry, Row, TokenIssued, concerns
from slicewise.runtime.runtime import Runtime
from slicewise.server.auth import Caller
from slicewise.server.context import AppContext
from slicewise.server.pagination import PageQuery, TenantFilter, Word, cursor_of
from slicewise.server.requests import HttpRequest, Query, Reply, Stream, reply
from slicewise.server.routes.listing import before_of

HEARTBEAT_SECONDS = 15.0
_SENT_ROWS = 20
"""Rows sent in one turn."""
_READ_ROWS = 200
"""Rows read at a time."""
_KINDS = tuple(str(entry.__struct_config__.tag) for entry in get_args(AnyEntry))
PLACE = "^([0-9a-f]{16}-)?[0-9]{1,17}$"
"""The id of an event: the history, which may be omitted, and the number of the entry."""
Place = Annotated[str, Meta(pattern=PLACE)]
_PLACE = re.compile(PLACE.encode())


class EventQuery(Query, frozen=True):
    """Where the stream starts."""

    after: Place | None = None


class AuditQuery(PageQuery, frozen=True):
    """Filters of the audit log."""

    tenant: TenantFilter | None = None
    subject: Word | None = None
    kind: Annotated[tuple[Word, ...], Meta(max_length=len(_KINDS))] = ()


async def events(context: AppContext, request: HttpRequest) -> Reply:
    """Stream the journal as server-sent events. A tenant gets its own entries."""
    query = request.query(EventQuery)
    given = _last_seen(request) or query.after
    tenant = request.caller.tenant
    after = context.runtime.replica.seq
    if given is not None:
        after = await _resume(context.runtime, given)
    context.streams.add(tenant)
    gone, news = asyncio.Event(), asyncio.Event()
    return Stream(
        200,
        b"",
        [(b"x-accel-buffering", b"no")],  # nginx would buffer events
        content=b"text/event-stream; charset=utf-8",
        chunks=_follow(context, request.caller, after, gone, news),
        receive=request.receive,
        gone=gone,
        wake=news.set,
        ended=lambda: context.streams.remove(tenant),
    )


def _last_seen(request: HttpRequest) -> str | None:
    """The id after which an interrupted stream resumes."""
    header = request.headers.get(b"last-event-id")
    if header is None:
        return None
    if not _PLACE.fullmatch(header):
        raise RefusedError(400, "Last-Event-ID must be the id of an event", field="header")
    return header.decode()


async def _resume(runtime: Runtime, place: str) -> int:
    """The entry after which to resume; refused if the following entries are missing."""
    history, _, number = place.rpartition("-")
    after = int(number)
    why = ""
    if history not in ("", runtime.history):
        why = "is of another history, which ended when a backup was restored or the service moved"
    elif after > runtime.replica.seq:  # this process may be behind
        last = (await runtime.in_thread(runtime.store.span)).last
        if after > last:
            why = f"is beyond the end of the journal, entry {last}"
    elif runtime.replica.since(after, 1) is None:
        base = (await runtime.in_thread(runtime.store.span)).base
        if after < base:
            why = f"is too old: the entries up to {base} are no longer kept"
    if why:
        raise RefusedError(
            410,
            f"event {place} {why}; read the state again, such as by GET /v1/cluster, and resume "
            "from its history and seq",
        )
    return after


async def _follow(
    context: AppContext, caller: Caller, after: int, gone: asyncio.Event, news: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """Stream rows as they are committed.

    Only the position of a reader is kept. A slow reader falls behind and continues from the store.
    The protocol closes the connection of one that does not read; it may resume after its last id.
    """
    runtime, time = context.runtime, asyncio.get_running_loop().time
    history = runtime.history.encode()
    # The position, even if no entry is visible to the reader.
    yield b"retry: 2000\nid: %b-%d\n\n" % (history, after)
    silent_until = time() + HEARTBEAT_SECONDS
    with runtime.replica.listen(caller.tenant, news):
        while not (gone.is_set() or runtime.stopping):
            news.clear()
            now = runtime.latest()
            try:
                token = caller.check(context.state, now)
                rows = await _rows(context, caller, after)
            except (RefusedError, StoreError):
                return
            for begin in range(0, len(rows), _SENT_ROWS):
                some = rows[begin : begin + _SENT_ROWS]
                await context.turns.take(caller.share)
                chunk = b"".join(_event(context, caller, row) for row in some if _sees(caller, row))
                after = some[-1].seq
                if chunk:
                    yield chunk
                    silent_until = time() + HEARTBEAT_SECONDS
            if rows:
                continue
            left = silent_until - time()
            if left <= 0:
                # Keeps the connection open and updates the position.
                yield b": nothing new\nid: %b-%d\n\n" % (history, after)
                silent_until = time() + HEARTBEAT_SECONDS
                continue
            await _wait(news, left if token.expires is None else min(left, token.expires - now))


async def _rows(context: AppContext, caller: Caller, after: int) -> list[Row]:
    """The next rows, from the replica or from the store."""
    rows = context.runtime.replica.since(after, _READ_ROWS)
    if rows is None:
        async with context.journal_lock.hold(caller.share):
            rows = await context.runtime.in_thread(context.runtime.store.rows, after, _READ_ROWS)
    return rows


async def _wait(news: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


def _sees(caller: Caller, row: Row) -> bool:
    return caller.sees_all or concerns(row.entry)[0] == caller.tenant


def _event(context: AppContext, caller: Caller, row: Row) -> bytes:
    view = event_view(context.state.tokens, row, caller.tenant)
    return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (
        context.runtime.history.encode(),
        row.seq,
        view.kind.encode(),
        encode(view),
    )


def _issued(context: AppContext, ids: set[str]) -> dict[str, TokenIssued]:
    """The entries that issued these tokens, which have since been revoked."""
    found = {}
    for identity in ids:
        rows = context.runtime.store.history(
            before=None, limit=1, subject=identity, kinds=("token-issued",)
        )
        for row in rows:
            if isinstance(row.entry, TokenIssued):
                found[identity] = row.entry
    return found


async def audit(context: AppContext, request: HttpRequest) -> Reply:
    """List journal entries, newest first."""
    query = request.query(AuditQuery)
    for name in query.kind:
        if name not in _KINDS:
            raise RefusedError(400, str(UnknownNameError("kind", name, _KINDS)), field="kind")
    limit, before = context.page(query.limit), before_of(query.cursor)
    tenant = None if query.tenant is None else context.tenant_id(query.tenant)

    def read() -> list[Row]:
        return context.runtime.store.history(
            before=before,
            limit=limit + 1,
            tenant=tenant,
            subject=query.subject,
            kinds=query.kind,
        )

    async with context.journal_lock.hold(request.share):
        rows = await context.runtime.in_thread(read)
    page = rows[:limit]
    following = cursor_of(str(page[-1].seq)) if len(rows) > limit else None
    known = context.state.tokens
    revoked = {row.actor for row in page if role_of(row.actor) is None}
    revoked -= known.keys() | SERVICE_ACTORS
    tokens = known
    if revoked:
        tokens = {**known, **await context.runtime.in_thread(_issued, context, revoked)}
    views = tuple(event_view(tokens, row) for row in page)
    return reply(json_answer(200, EventPage(events=views, next=following)))

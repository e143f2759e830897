"""Events: the journal as a stream to follow, and as pages to look back through."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Annotated, get_args

from msgspec import Meta

from slicewise.control.answers import RefusedError, said
from slicewise.control.entries import AnyEntry, Row, TokenIssued, concerns
from slicewise.control.lives import of_one_life, since
from slicewise.control.ports import StoreError
from slicewise.control.reports import EventPage
from slicewise.control.views import SERVICE_ACTORS, event_view
from slicewise.control.wire import encode
from slicewise.core.errors import UnknownNameError
from slicewise.service.auth import Caller
from slicewise.service.http import Query, Reply, Request, Stream, reply
from slicewise.service.listing import before_of
from slicewise.service.pages import PageQuery, Word, cursor_of
from slicewise.service.plant import Plant
from slicewise.service.site import Site

HEARTBEAT_SECONDS = 15.0
_AT_A_TIME = 20
"""Rows sent in one piece."""
_LOOKED_AT = 200
"""Rows read at a time."""
_KINDS = tuple(str(entry.__struct_config__.tag) for entry in get_args(AnyEntry))
PLACE = "^([0-9a-f]{16}-)?[0-9]{1,17}$"
"""An event's id: the history and the number of its entry. The number alone will do."""
Place = Annotated[str, Meta(pattern=PLACE)]
_PLACE = re.compile(PLACE.encode())


class EventQuery(Query, frozen=True):
    """From where on to follow."""

    after: Place | None = None


class AuditQuery(PageQuery, frozen=True):
    """Which entries of the journal."""

    tenant: Word | None = None
    subject: Word | None = None
    kind: Annotated[tuple[Word, ...], Meta(max_length=len(_KINDS))] = ()


async def events(site: Site, request: Request) -> Reply:
    """The journal from an entry on, as server-sent events; a tenant gets what concerns it."""
    query = request.query(EventQuery)
    given = _last_seen(request) or query.after
    tenant = request.caller.tenant
    first = since(site.state, tenant) - 1
    if given is None:
        after = max(site.plant.replica.seq, first)
    else:
        after = await _resume(site.plant, given, first)
    site.streams.enter(tenant)
    gone, news = asyncio.Event(), asyncio.Event()
    return Stream(
        200,
        b"",
        [(b"x-accel-buffering", b"no")],  # nginx would hold events back
        content=b"text/event-stream; charset=utf-8",
        chunks=_follow(site, request.caller, after, gone, news),
        receive=request.receive,
        gone=gone,
        wake=news.set,
        ended=lambda: site.streams.leave(tenant),
    )


def _last_seen(request: Request) -> str | None:
    """Where a stream that broke off goes on."""
    header = request.headers.get(b"last-event-id")
    if header is None:
        return None
    if not _PLACE.fullmatch(header):
        raise RefusedError(400, "Last-Event-ID must be the id of an event", field="header")
    return header.decode()


async def _resume(plant: Plant, place: str, first: int) -> int:
    """The entry behind which to go on; refused where what follows it is not told here."""
    history, _, number = place.rpartition("-")
    after = max(int(number), first)
    why = ""
    if history not in ("", plant.history):
        why = "is of another history, which ended when a backup was restored or the service moved"
    elif after > plant.replica.seq:  # this process may only be behind
        last = (await plant.in_thread(plant.store.span)).last
        if after > last:
            why = f"is beyond the end of the journal, entry {last}"
    elif plant.replica.since(after, 1) is None:
        base = (await plant.in_thread(plant.store.span)).base
        if after < base:
            why = f"is too long ago: the entries up to {base} are not kept any more"
    if why:
        raise RefusedError(
            410,
            f"event {place} {why}; read the state again, such as by GET /v1/cluster, and follow "
            "from the history and seq it names",
        )
    return after


async def _follow(
    site: Site, caller: Caller, after: int, gone: asyncio.Event, news: asyncio.Event
) -> AsyncGenerator[bytes, None]:
    """Rows as they are committed.

    Nothing is kept for a reader but its place in the journal: one that is slow falls behind, and
    reads on from the store. One that does not read at all is cut off by the server, and may come
    back with the id it saw last.
    """
    plant, time = site.plant, asyncio.get_running_loop().time
    history = plant.history.encode()
    # From here on, even if nothing concerns the reader.
    yield b"retry: 2000\nid: %b-%d\n\n" % (history, after)
    silent_until = time() + HEARTBEAT_SECONDS
    with plant.replica.listen(caller.tenant, news):
        while not (gone.is_set() or plant.stopping):
            news.clear()
            now = plant.latest()
            try:
                token = caller.check(site.state, now)
                rows = await _rows(site, caller, after)
            except (RefusedError, StoreError):
                return
            for begin in range(0, len(rows), _AT_A_TIME):
                some = rows[begin : begin + _AT_A_TIME]
                await site.turns.take(caller.share)
                chunk = b"".join(_event(site, caller, row) for row in some if _sees(caller, row))
                after = some[-1].seq
                if chunk:
                    yield chunk
                    silent_until = time() + HEARTBEAT_SECONDS
            if rows:
                continue
            left = silent_until - time()
            if left <= 0:
                # Keeps the connection open, and the place of those whom nothing concerned.
                yield b": nothing new\nid: %b-%d\n\n" % (history, after)
                silent_until = time() + HEARTBEAT_SECONDS
                continue
            await _wait(news, left if token.expires is None else min(left, token.expires - now))


async def _rows(site: Site, caller: Caller, after: int) -> list[Row]:
    """Some rows behind one: those at hand, or from the store."""
    rows = site.plant.replica.since(after, _LOOKED_AT)
    if rows is None:
        async with site.looking.hold(caller.share):
            rows = await site.plant.in_thread(site.plant.store.rows, after, _LOOKED_AT)
    return rows


async def _wait(news: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


def _sees(caller: Caller, row: Row) -> bool:
    return caller.sees_all or concerns(row.entry)[0] == caller.tenant


def _event(site: Site, caller: Caller, row: Row) -> bytes:
    view = event_view(site.state.tokens, row, caller.tenant)
    return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (
        site.plant.history.encode(),
        row.seq,
        view.kind.encode(),
        encode(view),
    )


def _issued(site: Site, ids: set[str]) -> dict[str, TokenIssued]:
    """Tokens that were revoked since, as they were issued."""
    found = {}
    for identity in ids:
        rows = site.plant.store.history(
            before=None, limit=1, subject=identity, kinds=("token-issued",)
        )
        for row in rows:
            if isinstance(row.entry, TokenIssued):
                found[identity] = row.entry
    return found


async def audit(site: Site, request: Request) -> Reply:
    """The journal, the newest entries first."""
    query = request.query(AuditQuery)
    for name in query.kind:
        if name not in _KINDS:
            raise RefusedError(400, str(UnknownNameError("kind", name, _KINDS)), field="kind")
    limit, before = site.page(query.limit), before_of(query.cursor)
    first = since(site.state, query.tenant)

    def look() -> list[Row]:
        rows = site.plant.store.history(
            before=before,
            limit=limit + 1,
            tenant=query.tenant,
            subject=query.subject,
            kinds=query.kind,
        )
        return list(of_one_life(rows, first))

    async with site.looking.hold(request.share):
        rows = await site.plant.in_thread(look)
    page = rows[:limit]
    following = cursor_of(str(page[-1].seq)) if len(rows) > limit else None
    known = site.state.tokens
    gone = {row.actor for row in page} - known.keys() - SERVICE_ACTORS
    tokens = {**known, **await site.plant.in_thread(_issued, site, gone)} if gone else known
    views = tuple(event_view(tokens, row) for row in page)
    return reply(said(200, EventPage(events=views, next=following)))

"""Lists of allocations: current ones from the replica, ended ones from the journal; the queue."""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated

from msgspec import Meta

from slicewise.api.allocations import AllocationPage, QueuePage
from slicewise.api.base import encode
from slicewise.control.agent_state import as_gone
from slicewise.control.allocation_index import EVERY, Key, Place, place_of
from slicewise.control.answers import RefusedError, json_answer
from slicewise.journal.entries import AllocationRecord, AllocationState, Ended
from slicewise.server.cluster_views import waiting_for
from slicewise.server.context import AppContext
from slicewise.server.pagination import (
    PageLimit,
    PageQuery,
    TenantFilter,
    Word,
    cursor_of,
    mark_of,
    wrong_cursor,
)
from slicewise.server.requests import HttpRequest, Reply, reply

_FILTERED_PER_TURN = 500
"""Allocations filtered before other requests get a turn."""
_FILTERED_PER_PAGE = 5000
"""Allocations filtered for one page; the page may be short, and the next one continues."""
_ENCODED_PER_TURN = 50
"""Allocations encoded before other requests get a turn."""
_TICKET = re.compile("-?[0-9]{1,18}")
_NONE = b'"allocations":[]'
"""The allocations in an encoded page without any. Quotes in a string are escaped."""


class ListQuery(PageQuery, frozen=True):
    """Filters of the list of allocations."""

    tenant: TenantFilter | None = None
    state: AllocationState | None = None
    profile: Word | None = None
    node: Word | None = None
    model: Word | None = None
    label: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=320)], ...],
        Meta(max_length=16, description="KEY:VALUE; all given labels must match."),
    ] = ()
    newest: Annotated[bool, Meta(description="Newest first; ended allocations always are.")] = False
    limit: PageLimit | None = None


class _Filter:
    """Whether an allocation matches a query."""

    def __init__(self, query: ListQuery, tenant: str | None) -> None:
        self._query = query
        self._tenant = tenant
        self._labels = [_label(text) for text in query.label]
        self.by_keys = query.profile is query.node is query.model is None and (
            query.state != "releasing" or (tenant is None and not query.label)
        )
        """Whether the keys of the index cover all filters."""

    def __call__(self, record: AllocationRecord) -> bool:
        query, parts = self._query, record.parts
        return (
            self._tenant in (None, record.tenant.id)
            and (query.state is None or record.state == query.state)
            and (
                query.profile is None
                or record.want.profile == query.profile
                or any(part.profile == query.profile for part in parts)
            )
            and (query.node is None or any(part.node == query.node for part in parts))
            and (query.model is None or any(part.model == query.model for part in parts))
            and all(record.labels.get(key) == value for key, value in self._labels)
        )


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon:
        raise RefusedError(400, f"label {text!r} must be KEY:VALUE", field="label")
    return key, value


async def allocations(context: AppContext, request: HttpRequest) -> Reply:
    """A page of allocations: current ones oldest first by default, ended ones newest first."""
    query = request.query(ListQuery)
    limit = context.page(query.limit)
    own = request.caller.tenant
    tenant = None if query.tenant is None else context.tenant_id(query.tenant)
    if own is not None:
        if tenant not in (None, own.id):
            return reply(json_answer(200, AllocationPage(allocations=(), next=None, total=None)))
        tenant = own.id
    matches = _Filter(query, tenant)
    total = None
    if query.state in ("released", "failed", "cancelled"):
        page, following = await _ended(context, request, query, tenant, matches, limit)
    else:
        page, following, total = await _current(context, request, query, tenant, matches, limit)
    empty = AllocationPage(allocations=(), next=following, total=total)
    return await _filled(context, request, empty, page)


async def _filled(
    context: AppContext,
    request: HttpRequest,
    empty: AllocationPage | QueuePage,
    records: list[AllocationRecord],
) -> Reply:
    """The answer with a page and its allocations; other requests get turns in between."""
    texts: list[bytes] = []
    for begin in range(0, len(records), _ENCODED_PER_TURN):
        if begin:
            await context.turns.take(request.share)
        some = records[begin : begin + _ENCODED_PER_TURN]
        views = [context.view(record) for record in some]
        texts.append(encode(views)[1:-1])
    head, none, rest = encode(empty).partition(_NONE)
    assert none
    return Reply(200, head + none[:-1] + b",".join(texts) + b"]" + rest)


_Page = tuple[list[AllocationRecord], str | None]


async def _current(
    context: AppContext,
    request: HttpRequest,
    query: ListQuery,
    tenant: str | None,
    matches: _Filter,
    limit: int,
) -> tuple[list[AllocationRecord], str | None, int | None]:
    """A page of allocations that have not ended, the next cursor, and the total if it is known."""
    mark = _current_mark(query.cursor)
    page: list[AllocationRecord] = []
    filtered = 0
    while True:
        state = context.state
        index = state.index
        assert index is not None  # the replica's state has one
        keys = _keys(query, tenant)
        shortest = min(keys, key=index.count)
        total = index.count(shortest) if len(keys) == 1 and matches.by_keys else None
        among = state.leaving if query.state == "releasing" else state.allocations
        some = list(islice(index.walk(shortest, mark, query.newest), _FILTERED_PER_TURN))
        for _, identity in some:
            record = among.get(identity)
            if record is not None and matches(record):
                if len(page) == limit:
                    return page, _cursor(place_of(page[-1])), total
                page.append(record)
        if len(some) < _FILTERED_PER_TURN:
            return page, None, total
        mark = some[-1]
        filtered += len(some)
        if filtered >= _FILTERED_PER_PAGE:
            return page, _cursor(mark), total
        await context.turns.take(request.share)


def _keys(query: ListQuery, tenant: str | None) -> list[Key]:
    """The keys of the index that all matching allocations have."""
    if query.state == "releasing":
        return [("state", "releasing")]
    keys: list[Key] = [] if tenant is None else [("tenant", tenant)]
    if query.state is not None:
        keys.append(("state", query.state))
    keys += [("label", *_label(text)) for text in query.label]
    return list(dict.fromkeys(keys)) or [EVERY]


def _cursor(place: Place) -> str:
    requested, identity = place
    return cursor_of(f"{requested!r} {identity}")


def _current_mark(cursor: str | None) -> Place | None:
    mark = mark_of(cursor)
    if mark is None:
        return None
    requested, _, identity = mark.partition(" ")
    try:
        return float(requested), identity
    except ValueError:
        raise wrong_cursor() from None


async def _ended(
    context: AppContext,
    request: HttpRequest,
    query: ListQuery,
    tenant: str | None,
    matches: _Filter,
    limit: int,
) -> _Page:
    before = before_of(query.cursor)
    leaving = dict(context.state.leaving)  # a copy, since the state changes while the thread reads

    def read() -> tuple[list[AllocationRecord], int | None]:
        found: list[AllocationRecord] = []
        seen, at, size = 0, before, max(limit, 500)
        while len(found) < limit and seen < _FILTERED_PER_PAGE:
            rows = context.runtime.store.history(
                before=at, limit=size, tenant=tenant, kinds=("ended",)
            )
            for row in rows:
                at = row.seq
                assert isinstance(row.entry, Ended)  # by the filter of kinds
                record = leaving.get(row.entry.allocation.id) or as_gone(row.entry.allocation)
                if matches(record):
                    found.append(record)
                    if len(found) == limit:
                        return found, at
            if len(rows) < size:
                return found, None
            seen += len(rows)
        return found, at

    async with context.journal_lock.hold(request.share):
        found, at = await context.runtime.in_thread(read)
    return found, None if at is None else cursor_of(str(at))


def before_of(cursor: str | None) -> int | None:
    """The journal entry of a cursor."""
    mark = mark_of(cursor)
    if mark is None:
        return None
    if not mark.isdecimal() or len(mark) > 18:
        raise wrong_cursor()
    return int(mark)


async def queue(context: AppContext, request: HttpRequest) -> Reply:
    """The lines of the queue and a page of queued requests. A tenant sees its own."""
    query = request.query(PageQuery)
    limit, state, own = context.page(query.limit), context.state, request.caller.tenant
    tenant = None if own is None else own.id
    numbers = state.waiting.numbers(tenant, _queue_mark(query.cursor))
    found = list(islice(numbers, limit + 1))
    records = [state.allocations[state.by_ticket[number]] for number in found[:limit]]
    empty = QueuePage(
        waiting=waiting_for(state, own),
        lines=context.waiting.lines(tenant, context.runtime.clock()),
        allocations=(),
        next=cursor_of(str(found[limit - 1])) if len(found) > limit else None,
    )
    return await _filled(context, request, empty, records)


def _queue_mark(cursor: str | None) -> int | None:
    """The ticket of a cursor; that of a reclaimed allocation's successor is negative."""
    mark = mark_of(cursor)
    if mark is None:
        return None
    if not _TICKET.fullmatch(mark):
        raise wrong_cursor()
    return int(mark)

"""Allocations in pages: the living from the replica, the ended from the journal; and the queue."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from typing import Annotated

from msgspec import Meta

from slicewise.control.answers import RefusedError, said
from slicewise.control.entries import AllocationRecord, AllocationState, Ended
from slicewise.control.lives import of_one_life, since
from slicewise.control.managed import as_gone
from slicewise.control.reports import AllocationPage, QueuePage
from slicewise.control.views import allocation_view
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pages import PageLimit, PageQuery, Word, cursor_of, mark_of, wrong_cursor
from slicewise.service.site import Site

_AT_A_TIME = 2000
"""Allocations looked at before others get their turn."""
_ROWS_A_PAGE = 5000
"""Ended allocations looked at for one page; a page may be short, and the next one go on."""


class ListQuery(PageQuery, frozen=True):
    """Which allocations to list."""

    tenant: Word | None = None
    state: AllocationState | None = None
    profile: Word | None = None
    node: Word | None = None
    model: Word | None = None
    label: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=320)], ...],
        Meta(max_length=16, description="KEY:VALUE; all that are given must hold."),
    ] = ()
    newest: Annotated[
        bool, Meta(description="The latest first, as those that ended are in any case.")
    ] = False
    limit: PageLimit | None = None


class _Filter:
    """Whether an allocation is one of those asked for."""

    def __init__(self, query: ListQuery, own: str | None) -> None:
        self._query = query
        self._own = own
        self._labels = dict(_label(text) for text in query.label)

    def __call__(self, record: AllocationRecord) -> bool:
        query, parts = self._query, record.parts
        return (
            (self._own is None or record.tenant == self._own)
            and (query.tenant is None or record.tenant == query.tenant)
            and (query.state is None or record.state == query.state)
            and (
                query.profile is None
                or record.want.profile == query.profile
                or any(part.profile == query.profile for part in parts)
            )
            and (query.node is None or any(part.node == query.node for part in parts))
            and (query.model is None or any(part.model == query.model for part in parts))
            and all(record.labels.get(key) == value for key, value in self._labels.items())
        )


def _label(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon:
        raise RefusedError(400, f"label {text!r} must be KEY:VALUE", field="label")
    return key, value


async def allocations(site: Site, request: Request) -> Reply:
    """Some of the allocations, the oldest first unless told otherwise; the ended, latest first."""
    query = request.query(ListQuery)
    limit = site.page(query.limit)
    chosen = _Filter(query, request.caller.tenant)
    total = None
    if query.state in ("released", "failed", "cancelled"):
        page, following = await _ended(site, query, request.caller.tenant, chosen, limit)
    else:
        every = await _living(site, query, request.caller.tenant, chosen)
        total = len(every)
        page, following = _page(query, every, limit)
    views = tuple(allocation_view(site.state, record) for record in page)
    return reply(said(200, AllocationPage(allocations=views, next=following, total=total)))


_Page = tuple[list[AllocationRecord], str | None]


async def _living(
    site: Site, query: ListQuery, own: str | None, chosen: _Filter
) -> list[AllocationRecord]:
    """All that fit, in order."""
    # The records do not change, so this list is what there is at one moment, however long it
    # takes to go through it. They are in order already, but for clocks that were set back.
    state = site.state
    tenant = own or query.tenant
    if query.state == "releasing":
        every = list(state.leaving.values())
    elif tenant is None:
        every = list(state.allocations.values())
    else:
        standing = state.tenants.get(tenant)
        every = [state.allocations[i] for i in standing.allocations] if standing else []
    found: list[AllocationRecord] = []
    for begin in range(0, len(every), _AT_A_TIME):
        found += filter(chosen, every[begin : begin + _AT_A_TIME])
        await asyncio.sleep(0)
    found.sort(key=_place)
    return found


def _page(query: ListQuery, every: list[AllocationRecord], limit: int) -> _Page:
    """Those behind the cursor, in the direction asked for."""
    mark = _living_mark(query.cursor)
    if query.newest:
        end = len(every) if mark is None else bisect_left(every, mark, key=_place)
        page, more = every[max(0, end - limit) : end][::-1], end > limit
    else:
        begin = 0 if mark is None else bisect_right(every, mark, key=_place)
        page, more = every[begin : begin + limit], begin + limit < len(every)
    return page, cursor_of(f"{page[-1].requested!r} {page[-1].id}") if more else None


def _place(record: AllocationRecord) -> tuple[float, str]:
    return record.requested, record.id


def _living_mark(cursor: str | None) -> tuple[float, str] | None:
    mark = mark_of(cursor)
    if mark is None:
        return None
    requested, _, identity = mark.partition(" ")
    try:
        return float(requested), identity
    except ValueError:
        raise wrong_cursor() from None


async def _ended(
    site: Site, query: ListQuery, own: str | None, chosen: _Filter, limit: int
) -> _Page:
    before = before_of(query.cursor)
    tenant = own or query.tenant
    first = since(site.state, tenant)
    leaving = dict(site.state.leaving)  # the state goes on while somebody looks

    def look() -> tuple[list[AllocationRecord], int | None]:
        found: list[AllocationRecord] = []
        seen, at, size = 0, before, max(limit, 500)
        while len(found) < limit and seen < _ROWS_A_PAGE:
            found_rows = site.plant.store.history(
                before=at, limit=size, tenant=tenant, kinds=("ended",)
            )
            rows = list(of_one_life(found_rows, first))
            for row in rows:
                at = row.seq
                assert isinstance(row.entry, Ended)  # of no other kind were any asked for
                record = leaving.get(row.entry.allocation.id) or as_gone(row.entry.allocation)
                if chosen(record):
                    found.append(record)
                    if len(found) == limit:
                        return found, at
            if len(rows) < size:
                return found, None
            seen += len(rows)
        return found, at

    if own is not None and query.tenant not in (None, own):
        return [], None
    found, at = await site.plant.in_thread(look)
    return found, None if at is None else cursor_of(str(at))


def before_of(cursor: str | None) -> int | None:
    """The row that a cursor into the journal stands for."""
    mark = mark_of(cursor)
    if mark is None:
        return None
    if not mark.isdecimal() or len(mark) > 18:
        raise wrong_cursor()
    return int(mark)


async def queue(site: Site, request: Request) -> Reply:
    """Those who wait, in order; a tenant sees its own."""
    query = request.query(PageQuery)
    limit, state = site.page(query.limit), site.state
    after = _queue_mark(query.cursor)
    own = [t for t in state.waiting if request.caller.sees(t.tenant)]
    rest = [t for t in own if after is None or (-t.priority, t.number) > after]
    page = rest[:limit]
    views = tuple(
        allocation_view(state, state.allocations[state.waits_for[ticket.number]]) for ticket in page
    )
    following = f"{-page[-1].priority} {page[-1].number}" if len(rest) > limit else None
    return reply(
        said(
            200,
            QueuePage(
                waiting=len(own),
                allocations=views,
                next=None if following is None else cursor_of(following),
            ),
        )
    )


def _queue_mark(cursor: str | None) -> tuple[int, int] | None:
    mark = mark_of(cursor)
    if mark is None:
        return None
    try:
        priority, number = mark.split(" ")
        return int(priority), int(number)
    except ValueError:
        raise wrong_cursor() from None

"""Allocations in pages: the living from the replica, the ended from the journal; and the queue."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from msgspec import Meta

from slicewise.control.allocation_index import EVERY, Key, Place, place_of
from slicewise.control.answers import RefusedError, said
from slicewise.control.entries import AllocationRecord, AllocationState, Ended
from slicewise.control.lives import of_one_life, since
from slicewise.control.managed import as_gone
from slicewise.control.reports import AllocationPage, QueuePage
from slicewise.control.views import allocation_view
from slicewise.control.wire import encode
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pages import PageLimit, PageQuery, Word, cursor_of, mark_of, wrong_cursor
from slicewise.service.site import Site

_AT_A_TIME = 500
"""Allocations looked at before other requests get their turn."""
_MOST = 5000
"""Allocations looked at for one page; a page may be short, and the next one goes on from there."""

_TOLD_AT_ONCE = 50
"""Allocations encoded before other requests get their turn."""
_BEGINNING = b'{"allocations":['
"""How a page begins."""


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
        self.by_keys = query.profile is query.node is query.model is None and (
            query.state != "releasing" or own is query.tenant is None
        )
        """Whether the keys of the index say all of it."""

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
        page, following = await _ended(site, request, query, chosen, limit)
    else:
        page, following, total = await _living(site, request, query, chosen, limit)
    texts: list[bytes] = []
    for begin in range(0, len(page), _TOLD_AT_ONCE):
        if begin:
            await site.turns.take(request.share)
        some = page[begin : begin + _TOLD_AT_ONCE]
        views = [allocation_view(site.state, record) for record in some]
        texts.append(encode(views)[1:-1])
    rest = encode(AllocationPage(allocations=(), next=following, total=total))
    assert rest.startswith(_BEGINNING)
    return Reply(200, _BEGINNING + b",".join(texts) + rest[len(_BEGINNING) :])


_Page = tuple[list[AllocationRecord], str | None]


async def _living(
    site: Site, request: Request, query: ListQuery, chosen: _Filter, limit: int
) -> tuple[list[AllocationRecord], str | None, int | None]:
    """A page of those that fit, and how many there are where that is known."""
    mark = _living_mark(query.cursor)
    page: list[AllocationRecord] = []
    looked = 0
    while True:
        state = site.state
        index = state.index
        assert index is not None  # a state that is read has one
        keys = _keys(query, request.caller.tenant)
        shortest = min(keys, key=index.count)
        total = index.count(shortest) if len(keys) == 1 and chosen.by_keys else None
        among = state.leaving if query.state == "releasing" else state.allocations
        some = list(islice(index.walk(shortest, mark, query.newest), _AT_A_TIME))
        for _, identity in some:
            record = among.get(identity)
            if record is not None and chosen(record):
                if len(page) == limit:
                    return page, _cursor(place_of(page[-1])), total
                page.append(record)
        if len(some) < _AT_A_TIME:
            return page, None, total
        mark = some[-1]
        looked += len(some)
        if looked >= _MOST:
            return page, _cursor(mark), total
        await site.turns.take(request.share)


def _keys(query: ListQuery, own: str | None) -> list[Key]:
    """The lists of the index that every allocation asked for is in."""
    if query.state == "releasing":
        return [("state", "releasing")]
    keys: list[Key] = [("tenant", name) for name in (own, query.tenant) if name is not None]
    if query.state is not None:
        keys.append(("state", query.state))
    keys += [("label", *_label(text)) for text in query.label]
    return list(dict.fromkeys(keys)) or [EVERY]


def _cursor(place: Place) -> str:
    requested, identity = place
    return cursor_of(f"{requested!r} {identity}")


def _living_mark(cursor: str | None) -> Place | None:
    mark = mark_of(cursor)
    if mark is None:
        return None
    requested, _, identity = mark.partition(" ")
    try:
        return float(requested), identity
    except ValueError:
        raise wrong_cursor() from None


async def _ended(
    site: Site, request: Request, query: ListQuery, chosen: _Filter, limit: int
) -> _Page:
    before, own = before_of(query.cursor), request.caller.tenant
    tenant = own or query.tenant
    first = since(site.state, tenant)
    leaving = dict(site.state.leaving)  # the state goes on while somebody looks

    def look() -> tuple[list[AllocationRecord], int | None]:
        found: list[AllocationRecord] = []
        seen, at, size = 0, before, max(limit, 500)
        while len(found) < limit and seen < _MOST:
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
    async with site.looking.hold(request.share):
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

"""A tenant's life: the entries from its creation on. A name may be used again, for another tenant.

Images of older versions do not say when a tenant was created; the journal does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from slicewise.control.entries import Row, TenantRemoved, TenantSet
from slicewise.control.ports import Journal
from slicewise.control.state import State

_PAGE = 1000


def since(state: State, tenant: str | None) -> int:
    """The first entry that is this tenant's; 0 where nobody of that name lives, or none is named.

    So the entries of tenants that are gone are found by name until the name is used again.
    """
    standing = None if tenant is None else state.tenants.get(tenant)
    return 0 if standing is None else standing.since


def of_one_life(rows: Iterable[Row], first: int) -> Iterator[Row]:
    """Of rows, the newest first, those that are not older than the first of a life."""
    return takewhile(lambda row: row.seq >= first, rows)


def look_up(journal: Journal, state: State) -> None:
    """Find in the journal what an older image did not say, for a state that came from one."""
    first_of_their_name = set(state.tenants)
    before = state.seq + 1
    while rows := journal.history(
        before=before, limit=_PAGE, kinds=("tenant-set", "tenant-removed")
    ):
        for row in rows:
            match row.entry:
                case TenantSet(name) if name in first_of_their_name:
                    state.tenants[name].since = row.seq
                case TenantRemoved(name):
                    first_of_their_name.discard(name)
        before = rows[-1].seq
    for record in list(state.leaving.values()):
        if record.tenant not in first_of_their_name:
            ended = journal.history(
                before=state.seq + 1, limit=1, subject=record.id, kinds=("ended",)
            )
            if not ended or ended[0].seq < since(state, record.tenant):
                state.disown([record])

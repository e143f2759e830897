"""Check from a journal that no request waited or was refused while a window was open to it.

Usage: python scripts/check_waiting.py --data FOLDER | --database URL | --backup FILE

The state is built entry by entry. Each request that is refused, and after every batch (the entries
of one moment) each waiting request, is compared with every GPU: none may have a window for it,
except windows that are reserved for others and open before it would end. Requests beyond their
tenant's quota are left out, those that are held back after a reclaim, and those for several
instances, which would need a search. The journal must hold no refused batches: it does not tell
what of the batch had been placed before.
Exits with 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

from slicewise.control.quota import QuotaCheck, excess
from slicewise.control.state import State, request_of
from slicewise.core.cluster import Node
from slicewise.core.geometry import Profile
from slicewise.core.request import Reason
from slicewise.core.states import ILLEGAL
from slicewise.engine.queue import Ticket
from slicewise.journal.entries import Part, Rejected, Row, decode
from slicewise.store import open_backup, open_contents
from slicewise.store.contents import Contents


def is_open(state: State, ticket: Ticket, now: float) -> str:
    """Return a GPU with a window for a request, outside reservations that bind it; or nothing."""
    cluster = state.cluster
    tenant = state.tenants[ticket.tenant]
    if QuotaCheck(state).over_quota(ticket) is not None:
        return ""
    if ticket.held_until is not None and ticket.held_until > now:
        return ""
    for gpu in range(len(cluster.state_of)):
        if gpu not in cluster.schedulable:
            continue
        here = cluster.state(gpu)
        reservation = state.reservations.on(gpu)
        if reservation is not None:
            line, window = reservation
            ends = None if ticket.lease is None else now + ticket.lease
            free = window.opens is not None and ends is not None and ends <= window.opens
            if not free and (line != ticket.line or ticket.number not in state.waiting):
                number = cluster.once_cleared(gpu, window.placement)
                if number == ILLEGAL:
                    continue
                here = cluster.states[number]
        node = cluster.node_of(gpu)
        for _, profile in ticket.request.candidates(here.geometry):
            starts = here.feasible_starts(profile)
            if starts and excess(tenant, [_part(node, profile, starts[0])]) is None:
                return f"GPU {gpu - node.gpus.start} of {node.name!r}"
    return ""


def _part(node: Node, profile: Profile, start: int) -> Part:
    """An instance as the quota counts it."""
    model = node.geometry.model
    size, compute, memory = profile.size, profile.compute, profile.memory_gb
    return Part(node.name, 0, model, profile.name, start, size, compute, memory)


def check(rows: Iterable[Row]) -> tuple[Counter[str], list[str]]:
    """Replay a journal; return what was looked at, and the requests that waited for nothing."""
    state, seen, wrong = State(), Counter[str](), list[str]()

    def look(kind: str, ticket: Ticket, at: float) -> None:
        seen[kind] += 1
        where = is_open(state, ticket, at)
        if where:
            wrong.append(f"entry {state.seq}: {kind} {ticket.request}, open on {where}")

    for at, batch in groupby(rows, key=lambda row: row.at):
        for row in batch:
            state.apply(row)
            seen["entries"] += 1
            entry = row.entry
            if isinstance(entry, Rejected) and entry.count == 1 and entry.reason != Reason.QUOTA:
                # Now, and not after the batch, which may release something after the refusal.
                request = state.canonical(request_of(entry.want))
                look("refused", Ticket(0, request, 1, entry.tenant.id), at)
        waiting = [ticket for ticket in state.waiting if ticket.count == 1]
        # Requests of a line are alike but for their leases: the shortest is the easiest to place.
        waiting.sort(key=lambda ticket: (ticket.lease is None, ticket.lease or 0.0))
        for ticket in {ticket.line: ticket for ticket in reversed(waiting)}.values():
            look("waiting", ticket, at)
    return seen, wrong


def main() -> int:
    """Check a journal from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--database")
    source.add_argument("--backup", type=Path)
    given = parser.parse_args()
    contents: AbstractContextManager[Contents]
    if given.backup is not None:
        contents = open_backup(given.backup)
    else:
        contents = open_contents(given.data, given.database)
    with contents as opened:
        list(opened.snapshots())
        list(opened.answers())
        rows = [
            Row(row.seq, row.at, row.actor, decode(row.data), row.origin) for row in opened.rows()
        ]
    seen, wrong = check(rows)
    for line in wrong[:20]:
        print(line)
    print(
        f"{seen['entries']} entries; {seen['waiting']} looks at waiting requests and "
        f"{seen['refused']} at refused ones: {len(wrong)} had an open window"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

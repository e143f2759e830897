"""Entries of the journal, told to people one line each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slicewise.cli.telling import clean, fold, place, want_text
from slicewise.control.entries import (
    Allocated,
    AnyEntry,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeRemoved,
    NodeTurned,
    Overtaken,
    Part,
    Queued,
    QuotaRecord,
    Rejected,
    Served,
    TenantRemoved,
    TenantSet,
    TokenIssued,
    TokenRevoked,
    TurnTaken,
    Want,
)
from slicewise.control.reports import EventView
from slicewise.core.request import Need


def event_line(event: EventView) -> str:
    """One event: its number, when, what kind, and what it says."""
    moment = event.at[:19].replace("T", " ")
    line = f"{event.seq} {moment} {event.kind} {_told(event.entry)}"
    return fold(clean(line.rstrip()), 4)


def _told(entry: AnyEntry) -> str:
    match entry:
        case Allocated(record):
            return f"{record.id} of {record.tenant}: {_places(record.parts)}"
        case Queued(record):
            want = _want(record.want, record.count)
            return f"{record.id} of {record.tenant}: {want}; {record.detail}"
        case Served(identity, tenant, parts):
            return f"{identity} of {tenant}: {_places(parts)}"
        case Rejected(tenant, want, count, reason, detail):
            return f"{_want(want, count)} for {tenant} ({reason}): {detail}"
        case Ended(record):
            return f"{record.id} of {record.tenant}: {record.cause}"
        case Moved(identity, tenant, _, part):
            return f"{identity} of {tenant}: now {place(part)}"
        case NodeAdded(node, model, gpus):
            return f"{node}: {gpus} x {model}"
        case NodeTurned(node, phase):
            return f"{node}: {phase}"
        case NodeRemoved(node):
            return node
        case TenantSet(tenant, quota):
            return f"{tenant}: {_limits(quota)}"
        case TenantRemoved(tenant):
            return tenant
        case TokenIssued(token, _, role, tenant, node, note):
            about = " ".join(filter(None, (role, tenant, node)))
            return f"{token}: {about}{f' ({note})' if note else ''}"
        case TokenRevoked(token):
            return token
        case ModelEntered(geometry):
            return geometry.model
        case Overtaken(tickets):
            return ", ".join(f"number {one} {times} times" for one, times in tickets.items())
        case TurnTaken(turn):
            return f"to {turn}"


def _places(parts: Sequence[Part]) -> str:
    return ", ".join(map(place, parts))


def _want(want: Want, count: int) -> str:
    need = Need(want.compute or 0, want.memory_gb or 0)
    return want_text(want.profile or need, want.models, count)


def _limits(quota: QuotaRecord) -> str:
    limits = msgspec.structs.asdict(quota).items()
    return (
        ", ".join(f"{name} {limit}" for name, limit in limits if limit is not None) or "no limits"
    )

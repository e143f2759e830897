"""Journal entries as text, one line each."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slicewise.api.base import moment
from slicewise.api.events import EventView
from slicewise.cli.formatting import clean, fold, place, want_text
from slicewise.core.request import Need
from slicewise.journal.agent_entries import (
    AgentJoined,
    ForeignEvicted,
    ForeignGone,
    ForeignSeen,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
    PartTurned,
)
from slicewise.journal.entries import (
    Allocated,
    AnyEntry,
    Cause,
    ClockSet,
    Ended,
    ModelEntered,
    ModelForgotten,
    Moved,
    NodeAdded,
    NodeRemoved,
    NodeTurned,
    Part,
    Queued,
    QuotaRecord,
    Rejected,
    Reserved,
    Served,
    TenantRemoved,
    TenantSet,
    TokenExpiring,
    TokenIssued,
    TokenRevoked,
    TurnTaken,
    Want,
)
from slicewise.journal.lease_entries import LeaseEnding, LeaseExtended
from slicewise.journal.policy_entries import PolicyChosen
from slicewise.journal.reclaim_entries import HeldBack, Reclaiming


def event_line(event: EventView) -> str:
    """Format one event: number, time, kind, description and origin."""
    when = event.at[:19].replace("T", " ")
    line = f"{event.seq} {when} {event.kind} {_describe(event.entry)}".rstrip()
    if event.origin:
        who = f"{event.role} ({event.note})" if event.note else event.role or "certificate"
        line += f" [{event.actor}, {who}, from {event.origin}]"
    return fold(clean(line.rstrip()), 4)


def _describe(entry: AnyEntry) -> str:
    match entry:
        case Allocated(record):
            return f"{record.id} of {record.tenant.name}: {_places(record.parts)}"
        case Queued(record):
            want = _want(record.want, record.count)
            return f"{record.id} of {record.tenant.name}: {want}; {record.detail}"
        case Served(identity, tenant, parts):
            return f"{identity} of {tenant.name}: {_places(parts)}"
        case Rejected(tenant, want, count, reason, detail):
            return f"{_want(want, count)} for {tenant.name} ({reason}): {detail}"
        case Ended(record):
            why = f"; {record.detail}" if record.cause in (Cause.FAILED, Cause.RECLAIMED) else ""
            return f"{record.id} of {record.tenant.name}: {record.cause}{why}"
        case LeaseExtended(identity, tenant, _, ends):
            return f"{identity} of {tenant.name}: its lease now ends at {moment(ends)}"
        case LeaseEnding(identity, tenant, ends):
            return f"{identity} of {tenant.name}: its lease ends at {moment(ends)}"
        case Moved(identity, tenant, _, part):
            return f"{identity} of {tenant.name}: now {place(part)}"
        case NodeAdded(node, model, gpus):
            return f"{node}: {gpus} x {model}"
        case NodeTurned(node, phase):
            return f"{node}: {phase}"
        case NodeRemoved(node):
            return node
        case TenantSet(tenant, quota):
            return f"{tenant.name}: {_limits(quota)}"
        case TenantRemoved(tenant):
            return tenant.name
        case TokenIssued(token, _, role, tenant, node, note, replaces=replaces):
            name = None if tenant is None else tenant.name
            about = " ".join(filter(None, (role, name, node)))
            instead = f", replaces {replaces}" if replaces else ""
            return f"{token}: {about}{f' ({note})' if note else ''}{instead}"
        case TokenExpiring(token, expires):
            return f"{token}: expires at {moment(expires)}"
        case TokenRevoked(token):
            return token
        case ModelEntered(geometry):
            return geometry.model
        case ModelForgotten(model):
            return model
        case Reserved(tenant, want, count, windows):
            what = f"{tenant.name}: {_want(want, count)}"
            places = ", ".join(
                f"{one.node} GPU {one.gpu} slice {one.start}"
                + ("" if one.opens is None else f" from {moment(one.opens)}")
                for one in windows
            )
            return f"{what} at {places}" if places else f"{what}: none"
        case Reclaiming(identity, tenant, at):
            when = "its notice was withdrawn" if at is None else f"it ends at {moment(at)}"
            return f"{identity} of {tenant.name}: {when}"
        case HeldBack(identity, tenant, until):
            when = "it may be placed" if until is None else f"not before {moment(until)}"
            return f"{identity} of {tenant.name}: {when}"
        case PolicyChosen(choice, why):
            leases = "+leases" if choice.leases else ""
            return f"{choice.form}{leases}: {why}"
        case ClockSet(by):
            return f"service time moved by {by:+.3f} seconds"
        case TurnTaken(turn):
            return f"to {turn}"
        case _:
            return _describe_hardware(entry)


def _describe_hardware(entry: AnyEntry) -> str:
    match entry:
        case AgentJoined(node, _, _, driver, version, _, gpus, rebooted):
            after = ", after a reboot" if rebooted else ""
            count = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
            return f"{node}: agent {version}, driver {driver}, {count}{after}"
        case GeometryAccepted(node):
            return f"{node}: the geometry of its driver"
        case NodeHeld(node, reasons):
            return f"{node}: {_reasons(reasons)}"
        case GpuHeld(node, gpu, reasons):
            return f"{node} GPU {gpu}: {_reasons(reasons)}"
        case PartTurned(identity, tenant, index, node, phase, uuid, detail, attempts):
            tried = f", tried {attempts} times" if attempts else ""
            rest = f"{f' {uuid}' if uuid else ''}{tried}{f'; {detail}' if detail else ''}"
            return f"{identity} of {tenant.name}: instance {index} on {node} is {phase}{rest}"
        case ForeignSeen(node, name, found):
            what = f"{found.profile or 'an instance'} at slice {found.start} of GPU {found.gpu}"
            blocked = "its slices are blocked" if found.blocks else "its slices cannot be blocked"
            return f"{node}: {name}, {what}, is {found.why}; {blocked}"
        case ForeignEvicted(node, name):
            return f"{node}: {name} will be destroyed"
        case ForeignGone(node, name):
            return f"{node}: {name}"
        case _:  # pragma: no cover - all others are handled above
            return ""


def _reasons(reasons: dict[str, str]) -> str:
    held = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return f"no new instances ({held})" if held else "new instances allowed again"


def _places(parts: Sequence[Part]) -> str:
    return ", ".join(map(place, parts))


def _want(want: Want, count: int) -> str:
    need = Need(want.compute or 0, want.memory_gb or 0)
    return want_text(want.profile or need, want.models, count)


def _limits(quota: QuotaRecord) -> str:
    usual = QuotaRecord()
    changed = [
        f"{name} {value:g}"
        for name, value in msgspec.structs.asdict(quota).items()
        if value != getattr(usual, name)
    ]
    return ", ".join(changed) or "no limits"

"""Allocations: create, get, extend, release; `listing.py` has the lists."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from slicewise.api.allocations import (
    MAX_BATCH_INSTANCES,
    AllocationBody,
    BatchBody,
    ExtendBody,
    WaitView,
)
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import Create, CreateAll, Extend, Release, Terms
from slicewise.control.state import request_of
from slicewise.core.errors import UnknownNameError
from slicewise.core.request import Reason
from slicewise.journal.entries import AllocationRecord, Ended, Want
from slicewise.server.auth import Caller
from slicewise.server.cluster_views import reserved_view
from slicewise.server.context import AppContext
from slicewise.server.repacking import REPACKABLE, repack
from slicewise.server.requests import HttpRequest, Query, Reply, reply


async def create(context: AppContext, request: HttpRequest) -> Reply:
    """Create an allocation: 201 placed, 202 queued, 409 rejected."""
    body = await request.body(AllocationBody)
    tenant = request.caller.acts_for(body.tenant)
    return await context.write(request, Create(tenant, terms_of(context, body)), tenant)


async def create_batch(context: AppContext, request: HttpRequest) -> Reply:
    """Create several allocations, all or none."""
    body = await request.body(BatchBody)
    tenants = dict.fromkeys(request.caller.acts_for(one.tenant) for one in body.allocations)
    if len(tenants) > 1:
        raise RefusedError(400, "a batch must belong to one tenant", field="tenant")
    if sum(one.count for one in body.allocations) > MAX_BATCH_INSTANCES:
        raise RefusedError(
            400,
            f"a batch has at most {MAX_BATCH_INSTANCES} instances",
            field="allocations",
        )
    terms = []
    for index, one in enumerate(body.allocations):
        if one.wait_seconds:
            raise RefusedError(
                400, "allocations of a batch cannot be queued", index=index, field="wait_seconds"
            )
        terms.append(terms_of(context, one, index))
    (tenant,) = tenants
    return await context.write(request, CreateAll(tenant, tuple(terms)), tenant)


def terms_of(context: AppContext, body: AllocationBody, index: int | None = None) -> Terms:
    """The terms of a request; it must name either a profile or a need."""
    if (body.profile is None) == (body.need is None):
        raise RefusedError(400, "name either a profile or a need", index=index, field="profile")
    models = tuple(_model(context, name, index) for name in body.models) if body.models else ()
    if body.need is None:
        want = Want(body.profile, models=models)
    else:
        want = Want(None, body.need.compute, body.need.memory_gb, models)
    return Terms(
        want,
        body.count,
        body.priority,
        body.wait_seconds,
        body.lease_seconds,
        body.labels,
        body.preemptible,
        body.expected_seconds,
    )


def _model(context: AppContext, name: str, index: int | None) -> str:
    """The name of a model, given its name or an alias."""
    if name in context.state.geometries:
        return name
    try:
        return context.catalog.find(name).model
    except UnknownNameError as error:
        raise RefusedError(400, str(error), index=index, field="models") from None


class AllocationQuery(Query, frozen=True):
    """What to compute for a queued request."""

    plan: Annotated[
        bool, Meta(description="Also look for moves of instances that would make room.")
    ] = False


async def get(context: AppContext, request: HttpRequest) -> Reply:
    """An allocation, current or ended; for a queued one, also why it waits."""
    query = request.query(AllocationQuery)
    identity = request.parts[0]
    record = await _find(context, request.caller, identity)
    if record is None:
        raise _unknown(identity)
    view = context.view(record)
    if view.waiting is not None and record.id in context.state.tickets:
        waiting = _explained(context, request.caller, record, view.waiting)
        if query.plan and waiting.reason in REPACKABLE:
            asked = context.state.canonical(request_of(record.want))
            plan = await repack(context, request.share, asked, record.count)
            waiting = msgspec.structs.replace(waiting, repack=plan)
        view = msgspec.structs.replace(view, waiting=waiting)
    return reply(json_answer(200, view))


def _explained(
    context: AppContext, caller: Caller, record: AllocationRecord, waiting: WaitView
) -> WaitView:
    """Add the reasons that only the view of a single request shows."""
    state = context.state
    gpus = context.waiting.kept_from(record) if waiting.reason == Reason.RESERVED else ()
    windows = (reserved_view(state, gpu, caller) for gpu in gpus)
    return msgspec.structs.replace(
        waiting,
        others_ahead=context.waiting.others_ahead(record),
        kept_from=tuple(window for window in windows if window is not None),
    )


async def release(context: AppContext, request: HttpRequest) -> Reply:
    """End an allocation; one that has already ended is returned unchanged."""
    identity, caller = request.parts[0], request.caller
    current = context.state.allocations.get(identity)
    if current is not None and caller.sees(current.tenant):
        answer = await context.write(request, Release(identity, caller.tenant))
        if answer.status != 404:  # it may have ended meanwhile
            return answer
    if not context.runtime.leads:
        raise context.runtime.not_leading()
    record = await _find(context, caller, identity)
    ended = None if record is None else json_answer(200, context.view(record))
    if request.key() is not None:  # the command handler has the answers to keys
        return await context.write(request, Release(identity, caller.tenant, ended))
    if ended is None:
        raise _unknown(identity)
    context.check(caller)
    return reply(ended)


async def extend(context: AppContext, request: HttpRequest) -> Reply:
    """Extend the lease of an allocation."""
    identity, caller = request.parts[0], request.caller
    body = await request.body(ExtendBody)
    answer = await context.write(request, Extend(identity, body.lease_seconds, caller.tenant))
    if answer.status == 404 and await _find(context, caller, identity) is not None:
        sentence = f"allocation {identity!r} has ended: its lease cannot be extended"
        raise RefusedError(409, sentence, reason="ended")
    return answer


def _unknown(identity: str) -> RefusedError:
    return RefusedError(404, f"no allocation {identity!r}")


async def _find(context: AppContext, caller: Caller, identity: str) -> AllocationRecord | None:
    """The allocation of this id, current or ended, if the caller may see it.

    An allocation of another tenant takes the same steps as one that does not exist, so that the
    response time does not reveal it.
    """
    state = context.state
    record = state.allocations.get(identity) or state.leaving.get(identity)
    if record is not None and caller.sees(record.tenant):
        return record
    if not (0 < len(identity) <= 64 and identity.isascii()):
        return None
    return await _ended(context, identity, caller)


async def _ended(context: AppContext, identity: str, caller: Caller) -> AllocationRecord | None:
    """Return an allocation that ended, if the caller may see it."""
    tenant = None if caller.tenant is None else caller.tenant.id

    def read() -> AllocationRecord | None:
        rows = context.runtime.store.history(
            before=None, limit=1, tenant=tenant, subject=identity, kinds=("ended",)
        )
        entry = rows[0].entry if rows else None
        return entry.allocation if isinstance(entry, Ended) else None

    async with context.journal_lock.hold(caller.share):
        found = await context.runtime.in_thread(read)
    return None if found is None else context.state.ended(found)

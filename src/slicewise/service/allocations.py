"""Allocations: create, look at, list, release."""

from __future__ import annotations

from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import Create, CreateAll, Release, Terms
from slicewise.control.entries import AllocationRecord, Ended, Want
from slicewise.control.lives import since
from slicewise.control.views import allocation_view
from slicewise.control.wire import MAX_BATCH_INSTANCES, AllocationBody, BatchBody
from slicewise.core.errors import UnknownNameError
from slicewise.service.auth import Caller
from slicewise.service.http import Reply, Request, reply
from slicewise.service.site import Site


async def create(site: Site, request: Request) -> Reply:
    """Create an allocation: 201 placed, 202 waiting, 409 refused."""
    body = await request.body(AllocationBody)
    tenant = request.caller.acts_for(body.tenant)
    return await site.write(request, Create(tenant, terms_of(site, body)), tenant)


async def create_batch(site: Site, request: Request) -> Reply:
    """Create several allocations, all or none."""
    body = await request.body(BatchBody)
    tenants = dict.fromkeys(request.caller.acts_for(one.tenant) for one in body.allocations)
    if len(tenants) > 1:
        raise RefusedError(400, "the allocations of a batch must be one tenant's", field="tenant")
    if sum(one.count for one in body.allocations) > MAX_BATCH_INSTANCES:
        raise RefusedError(
            400, f"a batch has at most {MAX_BATCH_INSTANCES} instances in all", field="allocations"
        )
    every = []
    for index, one in enumerate(body.allocations):
        if one.wait_seconds:
            raise RefusedError(
                400, "allocations of a batch cannot wait", index=index, field="wait_seconds"
            )
        every.append(terms_of(site, one, index))
    (tenant,) = tenants
    return await site.write(request, CreateAll(tenant, tuple(every)), tenant)


def terms_of(site: Site, body: AllocationBody, index: int | None = None) -> Terms:
    """What a body asks for; refused unless it names a profile or a need."""
    if (body.profile is None) == (body.need is None):
        raise RefusedError(400, "name either a profile or a need", index=index, field="profile")
    models = tuple(_model(site, name, index) for name in body.models) if body.models else ()
    if body.need is None:
        want = Want(body.profile, models=models)
    else:
        want = Want(None, body.need.compute, body.need.memory_gb, models)
    return Terms(
        want, body.count, body.priority, body.wait_seconds, body.lease_seconds, body.labels
    )


def _model(site: Site, name: str, index: int | None) -> str:
    """A model by its proper name, whatever it was called."""
    if name in site.state.geometries:
        return name
    try:
        return site.catalog.find(name).model
    except UnknownNameError as error:
        raise RefusedError(400, str(error), index=index, field="models") from None


async def get(site: Site, request: Request) -> Reply:
    """An allocation, living or ended."""
    identity = request.parts[0]
    record = await _find(site, request.caller, identity)
    if record is None:
        raise _unknown(identity)
    return reply(said(200, allocation_view(site.state, record)))


async def release(site: Site, request: Request) -> Reply:
    """End an allocation; one that has ended already is told as it was."""
    identity, caller = request.parts[0], request.caller
    living = site.state.allocations.get(identity)
    if living is not None and caller.sees(living.tenant):
        answered = await site.write(request, Release(identity, caller.tenant), caller.tenant or "")
        if answered.status != 404:  # it may have ended meanwhile
            return answered
    if not site.plant.leads:
        raise site.plant.elsewhere()
    record = await _find(site, caller, identity)
    ended = None if record is None else said(200, allocation_view(site.state, record))
    if request.key() is not None:  # the writer knows what was answered to it before
        return await site.write(
            request, Release(identity, caller.tenant, ended), caller.tenant or ""
        )
    if ended is None:
        raise _unknown(identity)
    site.check(caller)
    return reply(ended)


def _unknown(identity: str) -> RefusedError:
    return RefusedError(404, f"no allocation {identity!r}")


async def _find(site: Site, caller: Caller, identity: str) -> AllocationRecord | None:
    """The allocation of that id, living or ended, if it exists for the caller.

    For another tenant's the same is done as for one that never was, or the time that takes would
    tell one from the other.
    """
    state = site.state
    record = state.allocations.get(identity) or state.leaving.get(identity)
    if record is not None and caller.sees(record.tenant):
        return record
    if not (0 < len(identity) <= 64 and identity.isascii()):
        return None
    return await _ended(site, identity, caller)


async def _ended(site: Site, identity: str, caller: Caller) -> AllocationRecord | None:
    """One of a tenant's that ended, unless that was before the tenant's first entry."""
    tenant = caller.tenant
    first = since(site.state, tenant)

    def look() -> AllocationRecord | None:
        rows = site.plant.store.history(
            before=None, limit=1, tenant=tenant, subject=identity, kinds=("ended",)
        )
        entry = rows[0].entry if rows and rows[0].seq >= first else None
        return entry.allocation if isinstance(entry, Ended) else None

    async with site.looking.hold(caller.share):
        found = await site.plant.in_thread(look)
    return None if found is None else site.state.ended(found)

"""Allocations: create, look at, list, release."""

from __future__ import annotations

from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import Create, CreateAll, Release, Terms
from slicewise.control.entries import AllocationRecord, Ended, Want
from slicewise.control.lives import since
from slicewise.control.views import allocation_view
from slicewise.control.wire import MAX_BATCH_INSTANCES, AllocationBody, BatchBody
from slicewise.core.errors import UnknownNameError
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
    record = await _find(site, request, request.parts[0])
    return reply(said(200, allocation_view(site.state, record)))


async def release(site: Site, request: Request) -> Reply:
    """End an allocation; one that has ended already is told as it was."""
    identity, caller = request.parts[0], request.caller
    living = site.state.allocations.get(identity)
    if (living is not None and caller.sees(living.tenant)) or request.key() is not None:
        answered = await site.write(request, Release(identity, caller.tenant), caller.tenant or "")
        if answered.status != 404:
            return answered
    elif not site.plant.leads:
        raise site.plant.elsewhere()
    record = await _find(site, request, identity)
    site.check(caller)
    return reply(said(200, allocation_view(site.state, record)))


async def _find(site: Site, request: Request, identity: str) -> AllocationRecord:
    state = site.state
    record = state.allocations.get(identity) or state.leaving.get(identity)
    if record is None and 0 < len(identity) <= 64 and identity.isascii():
        record = await _ended(site, identity, since(state, request.caller.tenant))
    if record is None or not request.caller.sees(record.tenant):
        raise RefusedError(404, f"no allocation {identity!r}")
    return record


async def _ended(site: Site, identity: str, first: int) -> AllocationRecord | None:
    """One that ended, unless that was before the first entry of whoever asks."""

    def look() -> AllocationRecord | None:
        rows = site.plant.store.history(before=None, limit=1, subject=identity, kinds=("ended",))
        entry = rows[0].entry if rows and rows[0].seq >= first else None
        return entry.allocation if isinstance(entry, Ended) else None

    found = await site.plant.in_thread(look)
    return None if found is None else site.state.ended(found)

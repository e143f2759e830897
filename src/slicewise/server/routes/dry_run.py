"""Dry run: the placement a request would get, its cost, and why alternatives were not chosen."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from slicewise.api.allocations import AllocationBody, Alternative, Cost, DryRun, PolicyChoice
from slicewise.api.base import Fragmentation, Spot
from slicewise.control.allocations import as_ticket
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import Terms
from slicewise.control.feasibility import as_capacity, refuse_unknown
from slicewise.control.policy_choices import deciding_as_for
from slicewise.control.quota import too_long, too_many_wait, with_lease
from slicewise.control.state import TenantStatus, request_of
from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine import explain
from slicewise.journal.entries import Part
from slicewise.policies.base import ScanPolicy
from slicewise.policies.registry import policy_class
from slicewise.server.context import AppContext
from slicewise.server.repacking import REPACKABLE, repack
from slicewise.server.requests import HttpRequest, Query, Reply, reply
from slicewise.server.routes.allocations import terms_of


class DryRunQuery(Query, frozen=True):
    """Alternatives and policies to compare with."""

    alternatives: Annotated[int, Meta(ge=0, le=50)] = 5
    plan: Annotated[
        bool, Meta(description="Also look for moves of instances that would make room.")
    ] = False
    policy: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...],
        Meta(max_length=8, description="Other policies whose choice to show."),
    ] = ()


async def dry_run(context: AppContext, request: HttpRequest) -> Reply:
    """Decide a request without placing it."""
    query = request.query(DryRunQuery)
    body = await request.body(AllocationBody)
    name = request.caller.acts_for(body.tenant)
    tenant = context.state.tenants_by_name.get(name)
    if tenant is None:
        raise RefusedError(404, f"no tenant {name!r}")
    terms = with_lease(terms_of(context, body), tenant)
    asked = request_of(terms.want)
    refuse_unknown(asked, context.state.geometries.values())
    kind = context.state.canonical(asked)  # as the command handler does
    choices = tuple(_choice_of(context, kind, other) for other in query.policy)
    state = context.state
    with deciding_as_for(state, kind) as table:
        explained = context.explainer.explain(kind, query.alternatives)
        outcome = _outcome(context, tenant, terms)
    ticket = as_ticket(state, tenant.ref, terms, context.runtime.clock())
    placed = not isinstance(outcome, Rejection)
    waits = not placed and terms.wait > 0
    if excessive := too_long(tenant, terms.lease):
        placed, waits, outcome = False, False, Rejection(asked, Reason.QUOTA, excessive)
    elif waits and (
        too_many := too_many_wait(tenant, ticket, state.waiting, context.settings.queue_limits)
    ):
        waits, outcome = False, Rejection(asked, Reason.QUOTA, too_many)
    cost = explained.outcome.cost if isinstance(explained.outcome, explain.Place) else None
    line = state.waiting.line(ticket.line)
    found = DryRun(
        outcome="placed" if placed else "queued" if waits else "rejected",
        reason=outcome.reason if isinstance(outcome, Rejection) else None,
        detail=_detail(outcome, asked),
        policy=state.scheduler.policy.name,
        table=None if table is None else table.name,
        ahead=0 if line is None else len(line),
        repack=None,
        instances=() if isinstance(outcome, Rejection) else outcome,
        cost=_cost(cost) if cost is not None and placed else None,
        alternatives=tuple(_alternative(state.cluster, o) for o in explained.others),
        policies=choices,
        seq=state.seq,
    )
    if query.plan and found.reason in REPACKABLE:
        plan = await repack(context, request.share, kind, terms.count)
        found = msgspec.structs.replace(found, repack=plan)
    return reply(json_answer(200, found))


def _outcome(
    context: AppContext, tenant: TenantStatus, terms: Terms
) -> tuple[Part, ...] | Rejection:
    """The instances a request would get, by the decision that the command handler makes.

    They are placed and removed again without awaiting, so no other request sees them.
    """
    state, waiting = context.state, context.waiting
    now = context.runtime.clock()
    ticket = as_ticket(state, tenant.ref, terms, now)
    turn = state.scheduler.turn
    got = waiting.dispatcher.place(ticket, now)
    try:
        if isinstance(got, Rejection):
            return as_capacity(got)
        parts, refusal = state.parts(got), waiting.quota_check.excess(ticket, got)
        for instance in reversed(got):
            state.cluster.undo_place(instance)
    finally:
        state.scheduler.turn = turn
    return parts if refusal is None else refusal


def _detail(outcome: tuple[Part, ...] | Rejection, asked: Request) -> str:
    if isinstance(outcome, Rejection):
        return outcome.detail
    first = outcome[0]
    more = f", and {len(outcome) - 1} more elsewhere" if len(outcome) > 1 else ""
    return f"{asked} would go to GPU {first.gpu} of {first.node!r} at slice {first.start}{more}"


def _choice_of(context: AppContext, asked: Request, name: str) -> PolicyChoice:
    try:
        cls = policy_class(name)
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="policy") from None
    if issubclass(cls, ScanPolicy):
        raise RefusedError(
            400,
            f"policy {name!r} scans every GPU: no dry run is possible",
            field="policy",
        )
    choice = context.explainer.choice(asked, context.policy(name))
    if isinstance(choice, Rejection):
        return PolicyChoice(policy=cls.name, spot=None, cost=None, detail=choice.detail)
    node = context.state.cluster.node_of(choice.gpu)
    start = choice.placement.start
    return PolicyChoice(
        policy=cls.name,
        spot=Spot(node=node.name, gpu=choice.gpu - node.gpus.start, start=start),
        cost=_cost(choice.cost),
        detail="",
    )


def _alternative(cluster: Cluster, other: explain.OtherPlace) -> Alternative:
    node, state = cluster.node_of(other.gpu), cluster.state(other.gpu)
    return Alternative(
        node=node.name,
        gpu=other.gpu - node.gpus.start,
        model=node.geometry.model,
        profile=other.placement.profile.name,
        start=other.placement.start,
        mask=node.geometry.mask_text(state.mask),
        alike=other.alike,
        cost=_cost(other.cost),
        why=other.why,
    )


def _cost(cost: explain.Cost) -> Cost:
    return Cost(
        fragmentation=Fragmentation(partial=cost.partial, overlap=cost.overlap),
        placements_lost=cost.lost,
    )

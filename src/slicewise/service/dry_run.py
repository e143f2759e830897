"""A dry run: where a request would go, what that would cost, and why the alternatives lost."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import Terms
from slicewise.control.entries import Part
from slicewise.control.offers import as_capacity, refuse_unknown
from slicewise.control.quota import excess, least_excess, too_many_wait
from slicewise.control.reports import (
    Alternative,
    Cost,
    DryRun,
    Fragmentation,
    PolicyChoice,
    Spot,
)
from slicewise.control.state import TenantStanding, request_of
from slicewise.control.wire import AllocationBody
from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection
from slicewise.core.request import Request as Asked
from slicewise.engine import explain
from slicewise.policies.base import ScanPolicy
from slicewise.policies.registry import policy_class
from slicewise.service.allocations import terms_of
from slicewise.service.http import Query, Reply, Request, reply
from slicewise.service.site import Site


class DryRunQuery(Query, frozen=True):
    """What to compare with."""

    alternatives: Annotated[int, Meta(ge=0, le=50)] = 5
    policy: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=64)], ...],
        Meta(max_length=8, description="Other policies to ask where they would go."),
    ] = ()


async def dry_run(site: Site, request: Request) -> Reply:
    """What would happen to a request, without it happening."""
    query = request.query(DryRunQuery)
    body = await request.body(AllocationBody)
    name = request.caller.acts_for(body.tenant)
    tenant = site.state.tenants.get(name)
    if tenant is None:
        raise RefusedError(404, f"no tenant {name!r}")
    terms = terms_of(site, body)
    asked = request_of(terms.want)
    refuse_unknown(asked, site.state.geometries.values())
    choices = tuple(_choice_of(site, asked, other) for other in query.policy)
    explained = site.explainer.explain(asked, query.alternatives)
    outcome = _outcome(site, tenant, terms, asked)
    state = site.state
    placed = not isinstance(outcome, Rejection)
    waits = not placed and terms.wait > 0
    if waits and (too_many := too_many_wait(tenant, site.settings.queued_per_tenant)):
        waits, outcome = False, Rejection(asked, Reason.QUOTA, too_many)
    cost = explained.outcome.cost if isinstance(explained.outcome, explain.Place) else None
    waiting = len(state.waiting)
    return reply(
        said(
            200,
            DryRun(
                outcome="placed" if placed else "queued" if waits else "rejected",
                reason=outcome.reason if isinstance(outcome, Rejection) else None,
                detail=_sentence(outcome, asked),
                policy=state.scheduler.policy.name,
                ahead=waiting,
                instances=() if isinstance(outcome, Rejection) else outcome,
                cost=_cost(cost) if cost is not None and placed else None,
                alternatives=tuple(_alternative(state.cluster, o) for o in explained.others),
                policies=choices,
                seq=state.seq,
            ),
        )
    )


def _outcome(
    site: Site, tenant: TenantStanding, terms: Terms, asked: Asked
) -> tuple[Part, ...] | Rejection:
    """The instances it would get, as the writer would decide if nobody waited.

    They are placed and taken back before anybody can look.
    """
    highest = tenant.quota.max_priority
    if highest is not None and terms.priority > highest:
        sentence = f"tenant {tenant.name!r} may use priorities up to {highest}"
        return Rejection(asked, Reason.QUOTA, sentence)
    state = site.state
    too_much = least_excess(tenant, asked, terms.count, (), state.geometries.values())
    if too_much is not None:
        return Rejection(asked, Reason.QUOTA, too_much)
    turn = state.scheduler.turn
    got = state.scheduler.submit_all(asked, terms.count, waits=True)
    try:
        if isinstance(got, Rejection):
            return as_capacity(got)
        parts = state.parts(got)
        for instance in reversed(got):
            state.cluster.undo_place(instance)
    finally:
        state.scheduler.turn = turn
    too_much = excess(tenant, parts)
    return parts if too_much is None else Rejection(asked, Reason.QUOTA, too_much)


def _sentence(outcome: tuple[Part, ...] | Rejection, asked: Asked) -> str:
    if isinstance(outcome, Rejection):
        return outcome.detail
    first = outcome[0]
    more = f", and {len(outcome) - 1} more elsewhere" if len(outcome) > 1 else ""
    return f"{asked} would go to GPU {first.gpu} of {first.node!r} at slice {first.start}{more}"


def _choice_of(site: Site, asked: Asked, name: str) -> PolicyChoice:
    try:
        cls = policy_class(name)
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="policy") from None
    if issubclass(cls, ScanPolicy):
        raise RefusedError(
            400, f"policy {name!r} looks at every GPU: it cannot be asked here", field="policy"
        )
    choice = site.explainer.choice(asked, site.policy(name))
    if isinstance(choice, Rejection):
        return PolicyChoice(policy=cls.name, spot=None, cost=None, detail=choice.detail)
    node = site.state.cluster.node_of(choice.gpu)
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

"""The policy in force: the table that places requests, and what rehearsals found."""

from __future__ import annotations

from slicewise.api.allocations import NeedBody, WantView
from slicewise.api.base import moment
from slicewise.api.policy import (
    CandidateView,
    DemandView,
    Estimate,
    PolicyStatus,
    RehearsalsView,
    RehearsalView,
    RequestShare,
    SeenView,
)
from slicewise.control.answers import json_answer
from slicewise.control.policy_state import PolicyState, as_choice
from slicewise.control.state import State
from slicewise.core.request import Request
from slicewise.engine.demand import DemandEstimate
from slicewise.journal.policy_entries import FindingRecord, IntervalRecord
from slicewise.policies.rehearsed import FORMS
from slicewise.runtime.rehearsals import Rehearsals
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, reply

_HOUR = 3600.0


async def status(context: AppContext, request: HttpRequest) -> Reply:
    """The table that decides and since when; the rest for callers that see all tenants."""
    state = context.state
    policy, standing = state.policy, state.policy.standing
    rehearses, sees_all = policy.rehearses, request.caller.sees_all
    view = PolicyStatus(
        seq=state.seq,
        policy=state.scheduler.policy.name,
        table=standing.choice.name if rehearses else None,
        words=FORMS[standing.choice.form] if rehearses else state.scheduler.policy.summary,
        since=moment(policy.since) if rehearses else None,
        switches=policy.switches if sees_all else None,
        rehearsals=_rehearsals(context.rehearsals) if sees_all else None,
        why=_why(policy) if sees_all and rehearses else None,
        asked_for=standing.choice.asked_for if sees_all and rehearses else None,
        demand=_demand(state.demand.estimate) if sees_all else None,
        seen=(
            SeenView(requests=state.demand.seen, rejected=state.demand.seen_rejected)
            if sees_all
            else None
        ),
        rehearsal=_rehearsal(state) if sees_all and rehearses else None,
    )
    return reply(json_answer(200, view))


def _why(policy: PolicyState) -> str:
    return "nothing has been rehearsed yet" if policy.chosen is None else policy.chosen.why


def _rehearsals(rehearsals: Rehearsals) -> RehearsalsView:
    return RehearsalsView(
        activity=rehearsals.activity.value,
        detail=rehearsals.why_off or rehearsals.problem,
        share=rehearsals.share,
        finished=rehearsals.finished,
        failed=rehearsals.failed,
        seconds=rehearsals.seconds,
    )


def _demand(estimate: DemandEstimate) -> DemandView:
    stays = estimate.stays
    shares = sorted(estimate.shares.items(), key=lambda item: (-item[1], str(item[0])))
    return DemandView(
        requests=estimate.requests,
        steady_for=estimate.steady_for,
        changes=estimate.changes,
        requests_per_hour=estimate.rate * _HOUR,
        mean_lifetime=estimate.mean_lifetime or None,
        stated=sum(stay.stated is not None for stay in stays) / len(stays) if stays else 0.0,
        shares=tuple(RequestShare(wanted=_wanted(r), share=share) for r, share in shares),
    )


def _wanted(request: Request) -> WantView:
    want = request.want
    if isinstance(want, str):
        return WantView(profile=want, need=None, models=request.models)
    need = NeedBody(compute=want.compute, memory_gb=want.memory_gb)
    return WantView(profile=None, need=need, models=request.models)


def _rehearsal(state: State) -> RehearsalView | None:
    policy = state.policy
    if policy.rehearsal is None:
        return None
    used = policy.standing.choice.name
    return RehearsalView(
        at=moment(policy.rehearsed_at) or "",
        load=policy.rehearsal.load,
        candidates=tuple(_candidate(finding, used) for finding in policy.rehearsal.findings),
    )


def _candidate(finding: FindingRecord, used: str) -> CandidateView:
    choice = as_choice(finding.choice)
    return CandidateView(
        table=choice.name,
        words=FORMS[choice.form],
        leases=choice.leases,
        in_use=choice.name == used,
        runs=finding.runs,
        rejected=_estimate(finding.requests),
        rejected_slices=_estimate(finding.slices),
        fewer=_estimate(finding.fewer_requests),
    )


def _estimate(interval: IntervalRecord) -> Estimate:
    return Estimate(value=interval.value, low=interval.low, high=interval.high)

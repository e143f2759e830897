"""Health, readiness and metrics: how the process is doing, for those who watch it."""

from __future__ import annotations

from typing import Literal

from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.reports import Health, Readiness
from slicewise.control.wire import encode
from slicewise.service.addresses import block_of
from slicewise.service.auth import WATCHERS
from slicewise.service.http import Reply, Request, reply
from slicewise.service.plant import Plant
from slicewise.service.site import Site

METRICS_CONTENT = b"text/plain; version=0.0.4; charset=utf-8"
_ALIVE = said(200, Health(status="ok"))


async def healthz(site: Site, request: Request) -> Reply:
    """The process is alive."""
    return reply(_ALIVE)


async def readyz(site: Site, request: Request) -> Reply:
    """Whether the journal is followed, somebody leads and the database answers."""
    view = readiness(site.plant)
    answer = Answer(200 if view.ready else 503, encode(view))
    made = reply(answer)
    made.content = b"application/json"
    return made


def readiness(plant: Plant) -> Readiness:
    """How things stand, with words for what is missing."""
    problems = []
    role: Literal["leading", "following", "starting", "stopping"]
    if plant.stopping:
        role = "stopping"
        problems.append("the process is stopping")
    elif not plant.loaded:
        role = "starting"
        problems.append("the journal is still being read")
    elif plant.source is not None:
        role = "leading" if plant.source.leads() else "following"
    elif plant.leads:
        role = "leading"
        if not plant.furnished:
            problems.append("the first entries are not written yet")
    else:
        role = "following"
        if plant.leader is None:
            problems.append("nobody leads")
    writer = plant.writer
    if plant.source is not None:
        if problem := plant.source.problem():
            problems.append(problem)
    elif plant.store_trouble is not None or (writer is not None and writer.trouble is not None):
        problems.append("the database does not answer; the log tells more")
    if plant.failure is not None:
        problems.append("the process cannot go on; the log tells more")
    warnings = list(plant.store.warnings)
    if step := plant.steady.step:
        way = "ahead of" if step > 0 else "behind"
        warnings.append(
            f"the wall clock is {abs(step):.0f} seconds {way} service time, which does not follow"
        )
    leader = plant.leader
    return Readiness(
        ready=not problems,
        role=role,
        leader=plant.address if plant.leads else leader.address if leader else None,
        seq=plant.replica.seq,
        history=plant.history,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


async def metrics(site: Site, request: Request) -> Reply:
    """Everything for Prometheus; needs a token that sees all, unless set otherwise."""
    if site.settings.metrics_public:
        site.limits.visitor(block_of(request.address))
    else:
        caller = await site.authenticate(request)
        if caller.role not in WATCHERS:
            raise RefusedError(403, f"a token of role {caller.role} may not do this")
        caller.must_see_all()
    return Reply(200, site.metrics.text(), content=METRICS_CONTENT)

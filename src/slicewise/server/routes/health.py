"""Health, readiness and metrics of the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from slicewise.api.base import encode
from slicewise.api.health import Health, Readiness
from slicewise.config.addresses import block_of
from slicewise.control.answers import RefusedError, json_answer
from slicewise.runtime.runtime import Runtime
from slicewise.server.auth import WATCHERS
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, reply

METRICS_CONTENT = b"text/plain; version=0.0.4; charset=utf-8"
_ALIVE = json_answer(200, Health(status="ok"))


async def healthz(context: AppContext, request: HttpRequest) -> Reply:
    """Answer as long as the process runs."""
    return reply(_ALIVE)


async def readyz(context: AppContext, request: HttpRequest) -> Reply:
    """Whether the process follows the journal, there is a leader, and the database answers."""
    view = readiness(context.runtime, context.sign_in.warnings())
    return Reply(200 if view.ready else 503, encode(view))


def readiness(runtime: Runtime, further: Sequence[str] = ()) -> Readiness:
    """The readiness of a process, with the reasons if it is not ready, and ``further`` warnings."""
    problems = []
    role: Literal["leading", "following", "starting", "stopping"]
    if runtime.stopping:
        role = "stopping"
        problems.append("the process is stopping")
    elif not runtime.loaded:
        role = "starting"
        problems.append("the journal is still being read")
    elif runtime.source is not None:
        role = "leading" if runtime.source.leads() else "following"
    elif runtime.leads:
        role = "leading"
        if not runtime.furnished:
            problems.append("the first entries are not written yet")
    else:
        role = "following"
        if runtime.leader is None:
            problems.append("there is no leader")
    commit_loop = runtime.commit_loop
    if runtime.source is not None:
        if problem := runtime.source.problem():
            problems.append(problem)
    elif runtime.store_trouble is not None or (
        commit_loop is not None and commit_loop.trouble is not None
    ):
        problems.append("the database does not answer; see the log")
    if runtime.failure is not None:
        problems.append("the process has failed; see the log")
    warnings = [*runtime.store.warnings, *further]
    if runtime.source is not None:
        warnings += runtime.source.warnings()
    if step := runtime.steady.step:
        way = "ahead of" if step > 0 else "behind"
        warnings.append(
            f"the wall clock is {abs(step):.0f} seconds {way} service time, which did not follow it"
        )
    leader = runtime.leader
    return Readiness(
        ready=not problems,
        role=role,
        leader=runtime.address if runtime.leads else leader.address if leader else None,
        seq=runtime.replica.seq,
        history=runtime.history,
        problems=tuple(problems),
        warnings=tuple(warnings),
    )


async def metrics(context: AppContext, request: HttpRequest) -> Reply:
    """All metrics. Needs a token that sees all tenants, unless metrics are public."""
    if context.settings.metrics_public:
        context.limits.check_visitor(block_of(request.address))
    else:
        caller = await context.authenticate(request)
        if caller.role not in WATCHERS:
            raise RefusedError(403, f"a token of role {caller.role} may not do this")
        caller.must_see_all()
    return Reply(200, context.metrics.text(), content=METRICS_CONTENT)

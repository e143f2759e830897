"""Service time and the wall clock, and accepting a step of the wall clock."""

from __future__ import annotations

from slicewise.api.base import moment
from slicewise.api.health import ClockStepBody, ClockView
from slicewise.control.answers import json_answer
from slicewise.control.commands import SetClock
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, reply


async def get(context: AppContext, request: HttpRequest) -> Reply:
    """Service time and the wall clock of this process."""
    steady = context.runtime.steady
    service, wall = context.runtime.clock(), steady.wall()
    view = ClockView(
        service_time=moment(service) or "",
        wall_time=moment(wall) or "",
        step_seconds=round(wall - service, 3),
        held=bool(steady.step),
    )
    return reply(json_answer(200, view))


async def accept(context: AppContext, request: HttpRequest) -> Reply:
    """Set service time to the wall clock of the leader."""
    body = await request.body(ClockStepBody)
    by = context.runtime.steady.wall() - context.runtime.clock()
    return await context.write(request, SetClock(by, body.step_seconds))

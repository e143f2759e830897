"""The clock: service time beside the wall clock, and how a step of the wall clock is accepted."""

from __future__ import annotations

from slicewise.control.answers import said
from slicewise.control.commands import SetClock
from slicewise.control.wire import ClockStepBody, ClockView, moment
from slicewise.service.http import Reply, Request, reply
from slicewise.service.site import Site


async def look(site: Site, request: Request) -> Reply:
    """Both times of this process."""
    steady = site.plant.steady
    service, wall = site.plant.clock(), steady.wall()
    view = ClockView(
        service_time=moment(service) or "",
        wall_time=moment(wall) or "",
        step_seconds=round(wall - service, 3),
        held=bool(steady.step),
    )
    return reply(said(200, view))


async def accept(site: Site, request: Request) -> Reply:
    """Let service time go on from the wall clock of this process, which must lead."""
    body = await request.body(ClockStepBody)
    by = site.plant.steady.wall() - site.plant.clock()
    return await site.write(request, SetClock(by, body.step_seconds))

"""What bench_service.py compares durable requests with: the same requests, and nothing done.

`/v1/no-op` runs the handlers of `/v1/allocations` themselves. All that is missing is what the
writer does: its place is taken by somebody who answers at once, with an allocation that is there
already. `/v1/bare` leaves out more than any real route can.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable
from typing import cast

import msgspec

from slicewise.control.actors import internal
from slicewise.control.answers import Answer, said
from slicewise.control.commands import Command, Create, Release
from slicewise.control.entries import Cause
from slicewise.control.ports import Key
from slicewise.control.state import State
from slicewise.control.views import allocation_view
from slicewise.control.wire import AllocationBody
from slicewise.control.writer import Job, Told
from slicewise.service import allocations
from slicewise.service.auth import USERS
from slicewise.service.http import Reply, Request, reply
from slicewise.service.plant import Plant
from slicewise.service.routes import Route
from slicewise.service.site import Site

NOTHING = Answer(200, b'{"id":"a00000000000000000000","nothing":"%s"}' % (b"." * 500))
"""As large as the answer to a request for an instance."""


class _Idle:
    """Stands where the plant is, decides nothing and writes nothing."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self.store = plant.store
        self.in_thread = plant.in_thread
        state = plant.state
        self._placed = next(one for one in state.allocations.values() if one.parts)
        self._ended = msgspec.structs.replace(
            self._placed, ended=self._placed.placed, cause=Cause.RELEASED
        )
        self._job = Job(Release(self._placed.id), internal("bench"))

    @property
    def state(self) -> State:
        return self._plant.state

    async def ask(
        self, command: Command, actor: str, key: Key | None = None, digest: str = ""
    ) -> Told:
        """Answer what the writer would answer, made and encoded anew every time."""
        created = isinstance(command, Create)
        record = self._placed if created else self._ended
        view = allocation_view(self._plant.state, record)
        return Told(self._job, said(201 if created else 200, view))


_stands: dict[Site, Site] = {}


def _idle(site: Site) -> Site:
    stand = _stands.get(site)
    if stand is None:
        stand = _stands[site] = copy.copy(site)
        stand.plant = cast("Plant", _Idle(site.plant))
    return stand


def no_op_create(site: Site, request: Request) -> Awaitable[Reply]:
    """Create an allocation, but for deciding and storing."""
    return allocations.create(_idle(site), request)


def no_op_release(site: Site, request: Request) -> Awaitable[Reply]:
    """Release an allocation, but for deciding and storing."""
    return allocations.release(_idle(site), request)


async def bare(site: Site, request: Request) -> Reply:
    """Check a body, and answer what does not depend on it."""
    if request.method == "POST":
        body = request.decode(await request.raw_body(), AllocationBody)
        allocations.terms_of(site, body)
    return reply(NOTHING)


def no_op_routes() -> tuple[Route, ...]:
    """The routes beside the service's own."""
    return (
        Route(
            *("POST", "/v1/no-op", "n1", "", no_op_create, USERS, {}),
            body=AllocationBody,
            key=True,
        ),
        Route("DELETE", "/v1/no-op/{id}", "n2", "", no_op_release, USERS, {}, key=True),
        Route("POST", "/v1/bare", "n3", "", bare, USERS, {}, body=AllocationBody, key=True),
        Route("DELETE", "/v1/bare/{id}", "n4", "", bare, USERS, {}),
    )

"""The reference routes of bench_service.py: the same requests without deciding and storing.

`/v1/no-op` runs the handlers of `/v1/allocations`. Only the commit loop is replaced, by a stub that
answers at once with an existing allocation. `/v1/bare` leaves out more than any real route can.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable
from typing import cast

import msgspec

from slicewise.api.allocations import AllocationBody
from slicewise.control.actors import internal
from slicewise.control.answers import Answer, json_answer
from slicewise.control.commands import Command, Create, Release
from slicewise.control.ports import IdempotencyKey
from slicewise.control.views import allocation_view
from slicewise.journal.entries import Cause
from slicewise.runtime.commit_loop import Outcome, Submission
from slicewise.runtime.runtime import Runtime
from slicewise.server.app import Route
from slicewise.server.auth import USERS
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, reply
from slicewise.server.routes import allocations

NOTHING = Answer(200, b'{"id":"a00000000000000000000","nothing":"%s"}' % (b"." * 500))
"""As large as the answer to an allocation request."""


class _NoOpRuntime:
    """A runtime that decides and writes nothing; everything else is that of the real one."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        state = runtime.state
        self._placed = next(one for one in state.allocations.values() if one.parts)
        self._ended = msgspec.structs.replace(
            self._placed, ended=self._placed.placed, cause=Cause.RELEASED
        )
        self._job = Submission(Release(self._placed.id), internal("bench"))

    def __getattr__(self, name: str) -> object:
        return getattr(self._runtime, name)

    async def submit(
        self,
        command: Command,
        actor: str,
        key: IdempotencyKey | None = None,
        digest: str = "",
        share: object = None,
    ) -> Outcome:
        """Build and encode an answer like that of the commit loop, for every request."""
        created = isinstance(command, Create)
        record = self._placed if created else self._ended
        view = allocation_view(self._runtime.state, record)
        return Outcome(self._job, json_answer(201 if created else 200, view))


_no_op_contexts: dict[AppContext, AppContext] = {}


def _no_op_context(context: AppContext) -> AppContext:
    found = _no_op_contexts.get(context)
    if found is None:
        found = _no_op_contexts[context] = copy.copy(context)
        found.runtime = cast("Runtime", _NoOpRuntime(context.runtime))
    return found


def no_op_create(context: AppContext, request: HttpRequest) -> Awaitable[Reply]:
    """Create an allocation without deciding and storing."""
    return allocations.create(_no_op_context(context), request)


def no_op_release(context: AppContext, request: HttpRequest) -> Awaitable[Reply]:
    """Release an allocation without deciding and storing."""
    return allocations.release(_no_op_context(context), request)


async def bare(context: AppContext, request: HttpRequest) -> Reply:
    """Decode a body and return a constant answer."""
    if request.method == "POST":
        body = request.decode(await request.raw_body(), AllocationBody)
        allocations.terms_of(context, body)
    return reply(NOTHING)


def no_op_routes() -> tuple[Route, ...]:
    """Return the routes to add to the service's own."""
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

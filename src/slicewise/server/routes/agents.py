"""The agent protocol: hello (begin a session), desired state, report."""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from slicewise.api.agents import HelloBody, ReportBody
from slicewise.control.agents import UNKNOWN, checked_session, geometry_told
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import Heard, Hello, Report
from slicewise.control.geometries import geometry_of, named, record_of, too_many_states
from slicewise.control.gpu_models import refuse_too_many
from slicewise.control.views import desired_view
from slicewise.core.errors import GeometryError, UnknownNameError
from slicewise.core.states import state_space
from slicewise.core.tables import drop_tables
from slicewise.journal.entries import GeometryRecord
from slicewise.server.context import AppContext
from slicewise.server.requests import DisconnectedError, HttpRequest, Query, Reply, reply

MAX_WAIT = 60
_MAX_PROFILES = 64
_MAX_STATES = 5_000
"""States of a GPU model that an agent may register. A larger model would block the commit loop for
too long. Existing GPUs have fewer than a thousand."""


class DesiredQuery(Query, frozen=True):
    """Parameters of the long poll for the desired state."""

    session: Annotated[str, Meta(max_length=128)] = ""
    after: Annotated[int, Meta(ge=0, le=10**17)] = 0
    """The journal entry up to which the agent knows the desired state; 0 answers immediately."""
    wait: Annotated[int, Meta(ge=0, le=MAX_WAIT)] = 25
    """Seconds."""


async def hello(context: AppContext, request: HttpRequest) -> Reply:
    """Begin a session; a new node is registered."""
    node = _node(request)
    _require_leader(context)
    context.limits.check_hello(node)
    body = await request.body(HelloBody)
    _check_geometry(body.geometry)
    catalog = _from_catalog(context, body.model)
    fail = context.settings.agents_after_reboot == "fail"
    command = Hello(node, body, catalog, fail)
    if _new_model(context, command) is None:
        answer = await context.write(request, command)
    else:
        answer = await _hello_of_new_model(context, request, command)
    if answer.status == 200:
        context.liveness.touch(node)
    return answer


async def _hello_of_new_model(context: AppContext, request: HttpRequest, command: Hello) -> Reply:
    """Compute the states of a new model in a thread, before the commit loop needs them.

    One model at a time, since its tables may be large. They are dropped if the hello is refused.
    """
    async with context.new_model:
        record = _new_model(context, command)
        if record is not None:
            known = context.state.nodes.get(command.node)
            leaving = None if known is None else known.geometry
            refuse_too_many(context.state, context.settings.models, leaving)
            try:
                await context.runtime.in_thread(_compute_states, record)
                return await context.write(request, command)
            finally:
                if record.model not in context.state.geometries:
                    drop_tables(geometry_of(record))
    return await context.write(request, command)


def _new_model(context: AppContext, command: Hello) -> GeometryRecord | None:
    """The model in a hello, if it is new."""
    record, _ = geometry_told(context.state, command.body, command.catalog)
    return None if record.model in context.state.geometries else record


def _from_catalog(context: AppContext, model: str) -> GeometryRecord | None:
    try:
        geometry = context.catalog.find(model).geometry
    except UnknownNameError:
        return None
    return None if geometry is None else record_of(geometry)


def _check_geometry(record: GeometryRecord) -> None:
    """Refuse an invalid geometry."""
    if len(record.profiles) > _MAX_PROFILES:
        raise RefusedError(
            400, f"a GPU has at most {_MAX_PROFILES} profiles", field="geometry.profiles"
        )
    try:
        geometry_of(named(record, record.model))
    except GeometryError as error:
        raise RefusedError(400, f"invalid geometry: {error}", field="geometry") from None


def _compute_states(record: GeometryRecord) -> None:
    """Compute the states of a geometry; refuse it if there are too many."""
    geometry = geometry_of(record)
    if too_many_states(geometry, _MAX_STATES):
        raise RefusedError(400, "this geometry has too many states", field="geometry")
    state_space(geometry)


async def desired(context: AppContext, request: HttpRequest) -> Reply:
    """The desired state of the node: immediately if it has changed, otherwise when it changes.

    A poll also ends when its token is revoked or expires.
    """
    query = request.query(DesiredQuery)
    runtime, liveness, name = context.runtime, context.liveness, _node(request)
    _require_leader(context)
    node, _ = checked_session(context.state.nodes, name, query.session)
    liveness.touch(name)
    if UNKNOWN in node.holds:
        await runtime.submit(Heard(name), request.caller.actor)
    deadline = asyncio.get_running_loop().time() + query.wait
    waited = False
    with liveness.poll(name) as changed:
        while True:
            _require_leader(context)
            state, now = context.state, runtime.latest()
            token = request.caller.check(state, now)
            node, agent = checked_session(state.nodes, name, query.session)
            known = 0 < query.after <= state.seq and node.desired <= query.after
            left = deadline - asyncio.get_running_loop().time()
            if not known or left <= 0:
                answer = reply(json_answer(200, desired_view(state, node, agent)))
                answer.waited = waited
                return answer
            changed.clear()
            waited = True
            if token.expires is not None:
                left = min(left, token.expires - now)
            await _wait(request, changed, left)


async def _wait(request: HttpRequest, changed: asyncio.Event, seconds: float) -> None:
    """Wait for a change, at most this long; raise when the agent disconnects."""
    change = asyncio.ensure_future(changed.wait())
    disconnect = asyncio.ensure_future(request.disconnected())
    try:
        await asyncio.wait(
            (change, disconnect), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if disconnect.done() and not change.done():
            raise DisconnectedError
    finally:
        change.cancel()
        disconnect.cancel()


async def report(context: AppContext, request: HttpRequest) -> Reply:
    """Accept the report of an agent; only differences are written."""
    body = await request.body(ReportBody)
    for index, one in enumerate(body.instances):
        if one.phase == "active" and not one.uuid:
            raise RefusedError(
                400, "an active instance must have a uuid", field=f"instances[{index}].uuid"
            )
    node = _node(request)
    answer = await context.write(request, Report(node, body))
    if answer.status == 200:
        context.liveness.touch(node)
        context.liveness.record(node, body)
    return answer


def _node(request: HttpRequest) -> str:
    """The node of an agent's token."""
    node = request.caller.token.node
    assert node is not None  # every token of an agent names its node
    return node


def _require_leader(context: AppContext) -> None:
    if context.runtime.stopping or not context.runtime.leads:
        raise context.runtime.not_leading()

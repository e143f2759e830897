"""What agents ask: to begin, what should be on their node, and to be heard."""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from slicewise.control.agent_wire import HelloBody, ReportBody
from slicewise.control.agents import UNKNOWN, checked_session, geometry_told
from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import Heard, Hello, Report
from slicewise.control.entries import GeometryRecord
from slicewise.control.geometries import geometry_of, named, record_of, too_many_states
from slicewise.control.models import refuse_too_many
from slicewise.control.views import desired_view
from slicewise.core.errors import GeometryError, UnknownNameError
from slicewise.core.states import state_space
from slicewise.core.tables import drop_tables
from slicewise.service.http import Gone, Query, Reply, Request, reply
from slicewise.service.site import Site

MAX_WAIT = 60
_MAX_PROFILES = 64
_MAX_STATES = 5_000
"""Of a model that an agent tells of: entering one with more would hold up everyone else for too
long. No GPU that there is has a thousand."""


class DesiredQuery(Query, frozen=True):
    """From where on, and how long to wait for it."""

    session: Annotated[str, Meta(max_length=128)] = ""
    after: Annotated[int, Meta(ge=0, le=10**17)] = 0
    """The journal's entry up to which it is known; 0 is told at once."""
    wait: Annotated[int, Meta(ge=0, le=MAX_WAIT)] = 25
    """Seconds."""


async def hello(site: Site, request: Request) -> Reply:
    """Begin a session; a node that is new is registered."""
    node = _node(request)
    _insist_on_leading(site)
    site.limits.hello(node)
    body = await request.body(HelloBody)
    _check_form(body.geometry)
    catalog = _catalogued(site, body.model)
    fail = site.settings.agents_after_reboot == "fail"
    command = Hello(node, body, catalog, fail)
    if _new_model(site, command) is None:
        answer = await site.write(request, command)
    else:
        answer = await _hello_of_new_model(site, request, command)
    if answer.status == 200:
        site.contacts.touch(node)
    return answer


async def _hello_of_new_model(site: Site, request: Request, command: Hello) -> Reply:
    """Work out the states of a model that is new, so that the writer does not have to.

    One model at a time: its tables may be large. They are dropped if it is not entered after all.
    """
    async with site.surveying:
        record = _new_model(site, command)
        if record is not None:
            standing = site.state.nodes.get(command.node)
            leaving = None if standing is None else standing.geometry
            refuse_too_many(site.state, site.settings.models, leaving)
            try:
                await site.plant.in_thread(_work_out, record)
                return await site.write(request, command)
            finally:
                if record.model not in site.state.geometries:
                    drop_tables()
    return await site.write(request, command)


def _new_model(site: Site, command: Hello) -> GeometryRecord | None:
    """The model that a hello tells of, unless it is known."""
    record, _ = geometry_told(site.state, command.said, command.catalog)
    return None if record.model in site.state.geometries else record


def _catalogued(site: Site, model: str) -> GeometryRecord | None:
    try:
        geometry = site.catalog.find(model).geometry
    except UnknownNameError:
        return None
    return None if geometry is None else record_of(geometry)


def _check_form(record: GeometryRecord) -> None:
    """Refuse what is no geometry."""
    if len(record.profiles) > _MAX_PROFILES:
        raise RefusedError(
            400, f"a GPU has at most {_MAX_PROFILES} profiles", field="geometry.profiles"
        )
    try:
        geometry_of(named(record, record.model))
    except GeometryError as error:
        raise RefusedError(400, f"this is no geometry: {error}", field="geometry") from None


def _work_out(record: GeometryRecord) -> None:
    """Work out the states of a geometry; refused if there are too many."""
    geometry = geometry_of(record)
    if too_many_states(geometry, _MAX_STATES):
        raise RefusedError(400, "this geometry has too many states", field="geometry")
    state_space(geometry)


async def desired(site: Site, request: Request) -> Reply:
    """All that should be on the node: at once if that has changed, or when it does.

    A poll ends with the token it was begun with: the service wakes it when that is revoked, and it
    waits no longer than until the token expires.
    """
    query = request.query(DesiredQuery)
    plant, contacts, name = site.plant, site.contacts, _node(request)
    _insist_on_leading(site)
    node, _ = checked_session(site.state.nodes, name, query.session)
    contacts.touch(name)
    if UNKNOWN in node.holds:
        await plant.ask(Heard(name), request.caller.actor)
    until = asyncio.get_running_loop().time() + query.wait
    waited = False
    with contacts.poll(name) as news:
        while True:
            _insist_on_leading(site)
            state, now = site.state, plant.latest()
            token = request.caller.check(state, now)
            node, agent = checked_session(state.nodes, name, query.session)
            known = 0 < query.after <= state.seq and node.desired <= query.after
            left = until - asyncio.get_running_loop().time()
            if not known or left <= 0:
                answer = reply(said(200, desired_view(state, node, agent)))
                answer.waited = waited
                return answer
            news.clear()
            waited = True
            if token.expires is not None:
                left = min(left, token.expires - now)
            await _wait(request, news, left)


async def _wait(request: Request, news: asyncio.Event, seconds: float) -> None:
    """Wait for news, for so long, or until the agent has hung up."""
    told = asyncio.ensure_future(news.wait())
    left = asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait((told, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if left.done() and not told.done():
            raise Gone
    finally:
        told.cancel()
        left.cancel()


async def report(site: Site, request: Request) -> Reply:
    """Take in what an agent sees; only what differs is written."""
    body = await request.body(ReportBody)
    for index, one in enumerate(body.instances):
        if one.phase == "active" and not one.uuid:
            raise RefusedError(
                400, "an instance that is active has a uuid", field=f"instances[{index}].uuid"
            )
    node = _node(request)
    answer = await site.write(request, Report(node, body))
    if answer.status == 200:
        site.contacts.touch(node)
        site.contacts.note(node, body)
    return answer


def _node(request: Request) -> str:
    """The node that an agent's token names."""
    node = request.caller.token.node
    assert node is not None  # no token of an agent is issued without one
    return node


def _insist_on_leading(site: Site) -> None:
    if site.plant.stopping or not site.plant.leads:
        raise site.plant.elsewhere()

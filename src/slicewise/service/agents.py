"""What agents ask: to begin, what should be on their node, and to be heard."""

from __future__ import annotations

import asyncio
from typing import Annotated

from msgspec import Meta

from slicewise.control.agent_wire import HelloBody, ReportBody
from slicewise.control.agents import UNKNOWN, checked_session
from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import Heard, Hello, Report
from slicewise.control.entries import GeometryRecord
from slicewise.control.geometries import (
    distinct,
    geometry_of,
    named,
    record_of,
    too_many_states,
)
from slicewise.control.views import desired_view
from slicewise.core.errors import GeometryError, UnknownNameError
from slicewise.core.states import state_space
from slicewise.service.http import Gone, Query, Reply, Request, reply
from slicewise.service.site import Site

MAX_WAIT = 60
_MAX_PROFILES = 64


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
    site.limits.hello(node)
    body = await request.body(HelloBody)
    catalog = _catalogued(site, body.model)
    name = body.model if catalog is None else catalog.model
    await site.plant.in_thread(_check_geometry, named(body.geometry, name), catalog)
    fail = site.settings.agents_after_reboot == "fail"
    answer = await site.write(request, Hello(node, body, catalog, fail))
    if answer.status == 200:
        site.contacts.touch(node)
    return answer


def _catalogued(site: Site, model: str) -> GeometryRecord | None:
    try:
        geometry = site.catalog.find(model).geometry
    except UnknownNameError:
        return None
    return None if geometry is None else record_of(geometry)


def _check_geometry(record: GeometryRecord, catalog: GeometryRecord | None) -> None:
    """Refuse what is no geometry, or one too intricate.

    The states of a good one are worked out here, under every name that it may get: nobody waits
    for that later.
    """
    if len(record.profiles) > _MAX_PROFILES:
        raise RefusedError(
            400, f"a GPU has at most {_MAX_PROFILES} profiles", field="geometry.profiles"
        )
    try:
        geometry = geometry_of(record)
    except GeometryError as error:
        raise RefusedError(400, f"this is no geometry: {error}", field="geometry") from None
    if too_many_states(geometry):
        raise RefusedError(400, "this geometry has too many states", field="geometry")
    for known in (record, distinct(record), catalog):
        if known is not None:
            state_space(geometry_of(known))


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

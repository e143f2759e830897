"""Nodes: register, look at, cordon, drain, remove."""

from __future__ import annotations

import msgspec

from slicewise.control.agent_wire import AdoptBody
from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import (
    Accept,
    AddNode,
    Adopt,
    Cordon,
    Drain,
    Evict,
    RemoveNode,
    Uncordon,
)
from slicewise.control.entries import Role
from slicewise.control.geometries import record_of
from slicewise.control.reports import NodeDetail, NodePage
from slicewise.control.views import node_view
from slicewise.control.wire import DrainBody, NodeBody
from slicewise.core.errors import SlicewiseError
from slicewise.service.devices import agent_view, gpu_details
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pages import PageQuery, page_by_name
from slicewise.service.site import Site


async def add(site: Site, request: Request) -> Reply:
    """Register a node."""
    body = await request.body(NodeBody)
    try:
        geometry = site.state.geometries.get(body.model) or site.catalog.find(body.model).require()
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="model") from None
    command = AddNode(body.name, record_of(geometry), body.gpus, body.labels)
    return await site.write(request, command)


async def every(site: Site, request: Request) -> Reply:
    """Some of the nodes, by name."""
    query = request.query(PageQuery)
    state = site.state
    names, following = page_by_name(state.nodes, site.page(query.limit), query.cursor)
    views = tuple(node_view(state, state.nodes[name]) for name in names)
    return reply(said(200, NodePage(nodes=views, next=following)))


async def get(site: Site, request: Request) -> Reply:
    """A node and what is on its GPUs; an agent sees its own node only."""
    name, caller, state = request.parts[0], request.caller, site.state
    node = state.nodes.get(name)
    if node is None or (caller.role is Role.AGENT and caller.token.node != name):
        raise RefusedError(404, f"no node {name!r}")
    view = msgspec.structs.asdict(node_view(state, node))
    devices = gpu_details(state, node, caller, site.contacts)
    agent = agent_view(node, site.contacts)
    return reply(said(200, NodeDetail(**view, devices=devices, agent=agent)))


async def accept(site: Site, request: Request) -> Reply:
    """Use a node although its driver does not agree with the catalog."""
    return await site.write(request, Accept(request.parts[0]))


async def adopt(site: Site, request: Request) -> Reply:
    """Make an instance that is nobody's an allocation of a tenant, where it is."""
    body = await request.body(AdoptBody)
    node, foreign = request.parts
    return await site.write(request, Adopt(node, foreign, body.tenant, body.labels))


async def evict(site: Site, request: Request) -> Reply:
    """Have an instance that is nobody's destroyed by the node's agent."""
    node, foreign = request.parts
    return await site.write(request, Evict(node, foreign))


async def cordon(site: Site, request: Request) -> Reply:
    """Let a node take no new instances."""
    return await site.write(request, Cordon(request.parts[0]))


async def uncordon(site: Site, request: Request) -> Reply:
    """Let a node take new instances again."""
    return await site.write(request, Uncordon(request.parts[0]))


async def drain(site: Site, request: Request) -> Reply:
    """Let a node become empty."""
    body = await request.body_if_any(DrainBody)
    return await site.write(request, Drain(request.parts[0], body.evict))


async def remove(site: Site, request: Request) -> Reply:
    """Remove a node that is empty."""
    return await site.write(request, RemoveNode(request.parts[0]))

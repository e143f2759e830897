"""Nodes: register, show, cordon, drain, remove; foreign instances on them."""

from __future__ import annotations

import msgspec

from slicewise.api.agents import AdoptBody
from slicewise.api.nodes import DrainBody, NodeBody, NodeDetail, NodePage
from slicewise.control.answers import RefusedError, json_answer
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
from slicewise.control.geometries import record_of
from slicewise.control.views import node_view
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Role
from slicewise.server.cluster_views import agent_view, gpu_details
from slicewise.server.context import AppContext
from slicewise.server.pagination import PageQuery, page_by_name
from slicewise.server.requests import HttpRequest, Reply, reply


async def add(context: AppContext, request: HttpRequest) -> Reply:
    """Register a node."""
    body = await request.body(NodeBody)
    try:
        geometry = (
            context.state.geometries.get(body.model) or context.catalog.find(body.model).require()
        )
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="model") from None
    command = AddNode(body.name, record_of(geometry), body.gpus, body.labels)
    return await context.write(request, command)


async def list_page(context: AppContext, request: HttpRequest) -> Reply:
    """A page of nodes, by name."""
    query = request.query(PageQuery)
    state = context.state
    names, following = page_by_name(state.nodes, context.page(query.limit), query.cursor)
    views = tuple(node_view(state, state.nodes[name]) for name in names)
    return reply(json_answer(200, NodePage(nodes=views, next=following)))


async def get(context: AppContext, request: HttpRequest) -> Reply:
    """A node and the instances on its GPUs. An agent sees its own node only."""
    name, caller, state = request.parts[0], request.caller, context.state
    node = state.nodes.get(name)
    if node is None or (caller.role is Role.AGENT and caller.token.node != name):
        raise RefusedError(404, f"no node {name!r}")
    view = msgspec.structs.asdict(node_view(state, node))
    devices = gpu_details(state, node, caller, context.liveness)
    agent = agent_view(node, context.liveness)
    return reply(json_answer(200, NodeDetail(**view, devices=devices, agent=agent)))


async def accept(context: AppContext, request: HttpRequest) -> Reply:
    """Use a node although its driver reports another geometry than the catalog."""
    return await context.write(request, Accept(request.parts[0]))


async def adopt(context: AppContext, request: HttpRequest) -> Reply:
    """Make a foreign instance an allocation of a tenant."""
    body = await request.body(AdoptBody)
    node, foreign = request.parts
    return await context.write(request, Adopt(node, foreign, body.tenant, body.labels))


async def evict(context: AppContext, request: HttpRequest) -> Reply:
    """Have the agent destroy a foreign instance."""
    node, foreign = request.parts
    return await context.write(request, Evict(node, foreign))


async def cordon(context: AppContext, request: HttpRequest) -> Reply:
    """Stop placing instances on a node."""
    return await context.write(request, Cordon(request.parts[0]))


async def uncordon(context: AppContext, request: HttpRequest) -> Reply:
    """Resume placing instances on a node."""
    return await context.write(request, Uncordon(request.parts[0]))


async def drain(context: AppContext, request: HttpRequest) -> Reply:
    """Stop placing instances on a node until it is empty; optionally evict the remaining ones."""
    body = await request.body_if_any(DrainBody)
    return await context.write(request, Drain(request.parts[0], body.evict))


async def remove(context: AppContext, request: HttpRequest) -> Reply:
    """Remove an empty node."""
    return await context.write(request, RemoveNode(request.parts[0]))

"""Nodes: register, look at, cordon, drain, remove."""

from __future__ import annotations

from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import AddNode, Cordon, Drain, RemoveNode, Uncordon
from slicewise.control.entries import Role
from slicewise.control.geometries import record_of
from slicewise.control.reports import NodeDetail, NodePage
from slicewise.control.views import node_view
from slicewise.control.wire import DrainBody, NodeBody
from slicewise.core.errors import SlicewiseError
from slicewise.service.devices import gpu_views
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pages import PageQuery, page_by_name
from slicewise.service.site import Site


async def add(site: Site, request: Request) -> Reply:
    """Register a node."""
    raw = await request.raw_body()
    body = request.decode(raw, NodeBody)
    try:
        geometry = site.state.geometries.get(body.model) or site.catalog.find(body.model).require()
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="model") from None
    command = AddNode(body.name, record_of(geometry), body.gpus, body.labels)
    return await site.write(request, command, body=raw)


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
    view = node_view(state, node)
    return reply(
        said(
            200,
            NodeDetail(
                name=view.name,
                model=view.model,
                gpus=view.gpus,
                state=view.state,
                instances=view.instances,
                slices=view.slices,
                free_slices=view.free_slices,
                labels=view.labels,
                devices=gpu_views(state, node, caller),
            ),
        )
    )


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

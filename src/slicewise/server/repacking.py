"""Whether moves of other instances would make room for a request: the shortest plan known."""

from __future__ import annotations

from collections.abc import Hashable

from slicewise.api.allocations import RepackView
from slicewise.api.base import Spot
from slicewise.core.cluster import Cluster
from slicewise.core.request import Reason, Request
from slicewise.engine.defrag import Plan, Planner
from slicewise.server.cluster_snapshot import ClusterSnapshot
from slicewise.server.context import AppContext

REPACKABLE = (Reason.FRAGMENTED, Reason.CAPACITY)
"""The reasons that moves of instances may remove."""
MAX_MOVES = 4
"""The longest plan that is looked for."""


async def repack(
    context: AppContext, share: Hashable, request: Request, count: int
) -> RepackView | None:
    """What moves would do for a request that finds no room; None if that is not known.

    Plans are made for one instance.
    """
    hopeless = _hopeless(context, request, count)
    if hopeless is not None:
        return RepackView(moves=None, room_at=None, detail=hopeless)
    if count > 1:
        return None
    async with context.computing.hold(share):
        snapshot = ClusterSnapshot.of(context.state)
        return await context.runtime.in_thread(_plan, snapshot, request)


def _hopeless(context: AppContext, request: Request, count: int) -> str | None:
    """Why not even moving all instances would make room, if the free slices in all show that."""
    geometries = context.state.geometries
    most, names, free, least = 0, [], 0, 0
    for model in context.capacity.models():
        sizes = [profile.size for _, profile in request.candidates(geometries[model.model])]
        if sizes:
            size = min(sizes)
            most += model.free_slices // size
            names.append(model.model)
            free += model.free_slices
            least = min(least or size, size)
    if most >= count:
        return None
    if not names:
        return f"no node has a GPU model that offers {request}"
    are = "1 slice is" if free == 1 else f"{free} slices are"
    return (
        f"not even moving all instances would make room: {are} free on {' and '.join(names)}, "
        f"and it takes {count * least}"
    )


def _plan(snapshot: ClusterSnapshot, request: Request) -> RepackView:
    cluster, _, pinned = snapshot.build()
    found = Planner(cluster, pinned=pinned).to_fit(request, MAX_MOVES)
    if found is None:
        detail = f"no plan of up to {MAX_MOVES} moves is known that makes room for it"
        return RepackView(moves=None, room_at=None, detail=detail)
    spot = spot_of(cluster, found)
    assert spot is not None  # the plan was made for a request
    where = f"GPU {spot.gpu} of {spot.node!r} at slice {spot.start}"
    moves = len(found.moves)
    if not moves:
        detail = f"there is room on {where}, but the policy picked another GPU"
    else:
        plan = "1 move of an instance" if moves == 1 else f"{moves} moves of instances"
        detail = f"{plan} would make room for it on {where}"
    return RepackView(moves=moves, room_at=spot, detail=detail)


def spot_of(cluster: Cluster, found: Plan) -> Spot | None:
    """Where a plan makes room for the request it was made for."""
    if found.gpu is None or found.placement is None:
        return None
    node = cluster.node_of(found.gpu)
    return Spot(node=node.name, gpu=found.gpu - node.gpus.start, start=found.placement.start)

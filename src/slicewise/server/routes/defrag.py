"""Defragmentation: plan moves of instances, and execute a plan."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slicewise.api.defrag import MAX_MOVES, MoveBody, MovesBody, PlanView
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import CarryOut, MoveInstance
from slicewise.control.state import State
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Request
from slicewise.engine.defrag import EXACT, Plan, Planner
from slicewise.engine.moves import Move, carry_out
from slicewise.policies.base import AdaptivePolicy, TablePolicy
from slicewise.server.cluster_snapshot import ClusterSnapshot
from slicewise.server.context import AppContext
from slicewise.server.pagination import Word
from slicewise.server.repacking import spot_of
from slicewise.server.requests import HttpRequest, Query, Reply, reply


class PlanQuery(Query, frozen=True):
    """Parameters of a plan."""

    profile: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """The profile that must fit; without it, the plan increases the free capacity."""
    model: Word | None = None
    budget: Annotated[int, Meta(ge=0, le=MAX_MOVES)] = 8
    policy: Word | None = None


async def plan(context: AppContext, request: HttpRequest) -> Reply:
    """Plan moves of instances, to make a request fit or to increase the free capacity."""
    request.caller.must_see_all()
    query = request.query(PlanQuery)
    ranking = _ranking(context, query.policy)
    asked = _asked(context, query)
    async with context.computing.hold(request.share):
        snapshot = ClusterSnapshot.of(context.state)
        view = await context.runtime.in_thread(_plan, snapshot, query, asked, ranking)
    return reply(json_answer(200, view))


def _ranking(context: AppContext, name: str | None) -> TablePolicy | AdaptivePolicy | None:
    if name is None:
        return None
    try:
        chosen = context.policy(name)
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="policy") from None
    if not isinstance(chosen, TablePolicy | AdaptivePolicy):
        raise RefusedError(
            400, f"policy {name!r} scans every GPU and cannot rank states", field="policy"
        )
    return chosen


def _asked(context: AppContext, query: PlanQuery) -> Request | None:
    if query.profile is None:
        if query.model is not None:
            raise RefusedError(400, "model requires a profile", field="model")
        return None
    asked = Request(query.profile, () if query.model is None else (query.model,))
    if not any(asked.candidates(geometry) for geometry in context.state.cluster.models):
        raise RefusedError(400, f"no GPU model of this cluster offers {asked}", field="profile")
    return asked


def _plan(
    snapshot: ClusterSnapshot,
    query: PlanQuery,
    asked: Request | None,
    ranking: TablePolicy | AdaptivePolicy | None,
) -> PlanView:
    cluster, owner, pinned = snapshot.build()
    planner = Planner(cluster, ranking, pinned)
    found = (
        planner.to_win_room(query.budget) if asked is None else planner.to_fit(asked, query.budget)
    )
    fits = None if found is None else spot_of(cluster, found)
    moves = [] if found is None else _moves(cluster, found, owner)
    return PlanView(
        wanted=None if asked is None else str(asked),
        budget=query.budget,
        found=found is not None,
        fewest=found is not None and asked is not None and len(moves) <= EXACT + 1,
        moves=tuple(moves),
        moved_slices=0 if found is None else found.moved_slices,
        room_before=None if found is None else found.room_before,
        room_after=None if found is None else found.room_after,
        fits=fits,
        seq=snapshot.seq,
    )


def _moves(cluster: Cluster, found: Plan, owner: dict[int, tuple[str, int]]) -> list[MoveBody]:
    """The moves of a plan; each is made on the snapshot to keep track of owners."""
    moves: list[MoveBody] = []

    def step(move: Move, made: Instance) -> None:
        source, target = cluster.node_of(move.instance.gpu), cluster.node_of(move.gpu)
        allocation, index = owner[made.id] = owner[move.instance.id]
        moves.append(
            MoveBody(
                allocation=allocation,
                index=index,
                profile=made.profile,
                node=source.name,
                gpu=move.instance.gpu - source.gpus.start,
                start=move.instance.start,
                to_node=target.name,
                to_gpu=move.gpu - target.gpus.start,
                to_start=move.start,
            )
        )

    carry_out(cluster, found.moves, step)
    return moves


async def move(context: AppContext, request: HttpRequest) -> Reply:
    """Execute planned moves in order, all or none."""
    body = await request.body(MovesBody)
    for index, one in enumerate(body.moves):
        _check(context.state, one, index)
    return await context.write(
        request,
        CarryOut(
            tuple(
                MoveInstance(
                    one.allocation,
                    one.index,
                    one.node,
                    one.gpu,
                    one.start,
                    one.to_node,
                    one.to_gpu,
                    one.to_start,
                )
                for one in body.moves
            )
        ),
    )


def _check(state: State, one: MoveBody, index: int) -> None:
    """Refuse a move of an instance that has changed since it was planned."""
    record = state.allocations.get(one.allocation)
    parts = () if record is None else record.parts
    if one.index >= len(parts) or parts[one.index].profile != one.profile:
        raise RefusedError(
            409,
            f"move {index + 1} cannot be made: allocation {one.allocation!r} has no "
            f"{one.profile} as instance {one.index}",
            reason="stale",
            index=index,
        )
    target = state.nodes.get(one.to_node)
    if target is not None and target.geometry.model != parts[one.index].model:
        raise RefusedError(
            409,
            f"move {index + 1} cannot be made: node {one.to_node!r} has GPUs of another model",
            reason="stale",
            index=index,
        )

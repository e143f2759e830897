"""Defragmentation: plan moves of instances, and execute a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from slicewise.api.base import Spot
from slicewise.api.defrag import MAX_MOVES, MoveBody, MovesBody, PlanView
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import CarryOut, MoveInstance
from slicewise.control.state import NodeStatus, State
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Request as Asked
from slicewise.engine.defrag import EXACT, Plan, Planner
from slicewise.engine.moves import Move, carry_out
from slicewise.journal.agent_entries import Foreign, Phase
from slicewise.journal.entries import AllocationRecord, NodePhase
from slicewise.policies.base import AdaptivePolicy, TablePolicy
from slicewise.server.context import AppContext
from slicewise.server.pagination import Word
from slicewise.server.requests import Query, Reply, Request, reply


class PlanQuery(Query, frozen=True):
    """Parameters of a plan."""

    profile: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    """The profile that must fit; without it, the plan increases the free capacity."""
    model: Word | None = None
    budget: Annotated[int, Meta(ge=0, le=MAX_MOVES)] = 8
    policy: Word | None = None


class _Node(NamedTuple):
    """A node in a snapshot."""

    name: str
    geometry: Geometry
    gpus: int
    phase: NodePhase
    held: Sequence[int]
    """Indices of GPUs that accept no new instances."""
    foreign: Sequence[Foreign]
    """Foreign instances that occupy slices."""

    @classmethod
    def of(cls, node: NodeStatus, cluster: Cluster) -> _Node:
        held = [index for index, gpu in enumerate(node.gpus) if cluster.is_held(gpu)]
        found = node.agent.foreign.values() if node.agent is not None else ()
        foreign = [one for one in found if one.blocks]
        return cls(node.name, node.geometry, len(node.gpus), node.phase, held, foreign)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The cluster at one journal entry. A thread plans on it while the service continues."""

    seq: int
    nodes: Sequence[_Node]
    records: Sequence[AllocationRecord]

    @classmethod
    def of(cls, state: State) -> _Snapshot:
        """Take a snapshot. Nodes keep the order of their GPUs, which decides ties."""
        nodes = sorted(state.nodes.values(), key=lambda node: node.gpus.start)
        return cls(
            state.seq,
            [_Node.of(node, state.cluster) for node in nodes],
            [*state.allocations.values(), *state.leaving.values()],
        )

    def build(self) -> tuple[Cluster, dict[int, tuple[str, int]], set[int]]:
        """Build the cluster, the owners of its instances, and the instances that must not move.

        An owner is an allocation and the index of one of its instances. Instances on nodes with
        an agent never move, since their jobs are running.
        """
        cluster = Cluster()
        owner: dict[int, tuple[str, int]] = {}
        pinned: set[int] = set()
        for node in self.nodes:
            made = cluster.add_node(node.name, node.geometry, node.gpus)
            for found in node.foreign:
                pinned.add(cluster.place(made.gpus[found.gpu], found.profile, found.start).id)
        for record in self.records:
            for index, part in enumerate(record.parts):
                if part.phase is Phase.GONE or (part.phase is None and record.ended is not None):
                    continue
                gpu = cluster.node(part.node).gpus[part.gpu]
                instance = cluster.place(gpu, part.profile, part.start).id
                owner[instance] = record.id, index
                if part.phase is not None:
                    pinned.add(instance)
        for node in self.nodes:
            for index in node.held:
                cluster.hold(cluster.node(node.name).gpus[index])
            if node.phase is not NodePhase.READY:
                cluster.drain(node.name)
        return cluster, owner, pinned


async def plan(context: AppContext, request: Request) -> Reply:
    """Plan moves of instances, to make a request fit or to increase the free capacity."""
    request.caller.must_see_all()
    query = request.query(PlanQuery)
    ranking = _ranking(context, query.policy)
    asked = _asked(context, query)
    async with context.computing.hold(request.share):
        snapshot = _Snapshot.of(context.state)
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


def _asked(context: AppContext, query: PlanQuery) -> Asked | None:
    if query.profile is None:
        if query.model is not None:
            raise RefusedError(400, "model requires a profile", field="model")
        return None
    asked = Asked(query.profile, () if query.model is None else (query.model,))
    if not any(asked.candidates(geometry) for geometry in context.state.cluster.models):
        raise RefusedError(400, f"no GPU model of this cluster offers {asked}", field="profile")
    return asked


def _plan(
    snapshot: _Snapshot,
    query: PlanQuery,
    asked: Asked | None,
    ranking: TablePolicy | AdaptivePolicy | None,
) -> PlanView:
    cluster, owner, pinned = snapshot.build()
    planner = Planner(cluster, ranking, pinned)
    found = (
        planner.to_win_room(query.budget) if asked is None else planner.to_fit(asked, query.budget)
    )
    fits = _spot(cluster, found)
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


def _spot(cluster: Cluster, found: Plan | None) -> Spot | None:
    if found is None or found.gpu is None or found.placement is None:
        return None
    node = cluster.node_of(found.gpu)
    return Spot(node=node.name, gpu=found.gpu - node.gpus.start, start=found.placement.start)


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


async def move(context: AppContext, request: Request) -> Reply:
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

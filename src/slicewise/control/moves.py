"""Moves: carries out a defragmentation plan, as long as it still fits the cluster."""

from __future__ import annotations

from slicewise.api.defrag import MovesView
from slicewise.control.allocations import Allocations
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import CarryOut, MoveInstance
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.core.cluster import Instance
from slicewise.core.errors import SlicewiseError
from slicewise.engine.moves import Trail
from slicewise.journal.entries import Moved, NodePhase, Part


class Moves:
    """Makes planned moves, all or none."""

    def __init__(self, work: UnitOfWork, allocations: Allocations) -> None:
        self._work = work
        self._state = work.state
        self._allocations = allocations

    def carry_out(self, command: CarryOut) -> Answer:
        """Make the moves in order. All are tried first, because all or none are made."""
        parts = self._try_out(command.moves)
        for move, part in zip(command.moves, parts, strict=True):
            allocation = self._state.allocations[move.allocation]
            self._allocations.note_freed([allocation.parts[move.index]])
            self._work.enter(Moved(allocation.id, allocation.tenant, move.index, part))
            self._work.finish_draining(move.node)
        self._work.room_appeared = True
        return json_answer(200, MovesView(moves=len(parts)))

    def _try_out(self, moves: tuple[MoveInstance, ...]) -> list[Part]:
        state = self._state
        trail = Trail(state.cluster)
        moved: dict[tuple[str, int], Instance] = {}
        parts: list[Part] = []
        try:
            for move in moves:
                key = move.allocation, move.index
                instance = moved.get(key) or self._instance(*key)
                target = self._work.node(move.to_node)
                if target.phase is not NodePhase.READY:
                    raise SlicewiseError(f"node {target.name!r} is {target.phase}")
                if not 0 <= move.to_gpu < len(target.gpus):
                    raise SlicewiseError(f"node {target.name!r} has no GPU {move.to_gpu}")
                at = state.parts([instance])[0]
                if (at.node, at.gpu, at.start) != (move.node, move.gpu, move.start):
                    raise SlicewiseError(
                        f"it is now on GPU {at.gpu} of {at.node!r} at slice {at.start}"
                    )
                if at.phase is not None:
                    raise SlicewiseError(
                        f"it is on managed node {at.node!r}, where instances cannot be moved"
                    )
                if state.cluster.is_held(target.gpus[move.to_gpu]):
                    raise SlicewiseError(f"GPU {move.to_gpu} of {target.name!r} is held")
                if state.cluster.reserved(target.gpus[move.to_gpu]) is not None:
                    # Plans keep off such GPUs; this one was made before the window was reserved.
                    raise SlicewiseError(
                        f"a window of GPU {move.to_gpu} of {target.name!r} is reserved for a "
                        "queued request"
                    )
                if target.geometry.model != at.model:
                    raise SlicewiseError(
                        f"it is on {at.model}, and node {target.name!r} has {target.geometry.model}"
                    )
                placement = target.geometry.placement(instance.profile, move.to_start)
                if placement is None:
                    raise SlicewiseError(
                        f"{instance.profile} cannot start at slice {move.to_start} on "
                        f"{target.geometry.model}"
                    )
                trail.make(instance, target.gpus[move.to_gpu], placement.number)
                moved[key] = trail.made[-1]
                parts += state.parts([trail.made[-1]])
        except SlicewiseError as error:
            number = len(parts)
            raise RefusedError(
                409, f"move {number + 1} cannot be made: {error}", reason="stale", index=number
            ) from error
        finally:
            trail.back_to(0)
        return parts

    def _instance(self, allocation: str, index: int) -> Instance:
        ids = self._state.instances.get(allocation, ())
        if not 0 <= index < len(ids):
            raise SlicewiseError(f"allocation {allocation!r} has no instance {index}")
        return self._state.cluster.instance(ids[index])

"""Moving instances: a plan someone approved, carried out as long as it still fits."""

from __future__ import annotations

from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import CarryOut, MoveInstance
from slicewise.control.entries import Moved, NodePhase, Part
from slicewise.control.ledger import Ledger
from slicewise.control.wire import MovesView
from slicewise.core.cluster import Instance
from slicewise.core.errors import SlicewiseError
from slicewise.engine.moves import Trail


class Moving:
    """Makes planned moves, all or none."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state

    def carry_out(self, command: CarryOut) -> Answer:
        """Make the moves in order; all are tried out first, so that none is made in vain."""
        parts = self._try_out(command.moves)
        for move, part in zip(command.moves, parts, strict=True):
            allocation = self._state.allocations[move.allocation]
            self._ledger.enter(Moved(allocation.id, allocation.tenant, move.index, part))
            self._ledger.finish_draining(move.node)
        self._ledger.room_appeared = True
        return said(200, MovesView(moves=len(parts)))

    def _try_out(self, moves: tuple[MoveInstance, ...]) -> list[Part]:
        state = self._state
        trail = Trail(state.cluster)
        now_at: dict[tuple[str, int], Instance] = {}
        parts: list[Part] = []
        try:
            for move in moves:
                which = move.allocation, move.index
                instance = now_at.get(which) or self._instance(*which)
                target = self._ledger.node(move.to_node)
                if target.phase is not NodePhase.READY:
                    raise SlicewiseError(f"node {target.name!r} is {target.phase}")
                if not 0 <= move.to_gpu < len(target.gpus):
                    raise SlicewiseError(f"node {target.name!r} has no GPU {move.to_gpu}")
                at = state.parts([instance])[0]
                if (at.node, at.gpu, at.start) != (move.node, move.gpu, move.start):
                    raise SlicewiseError(
                        f"it is on GPU {at.gpu} of {at.node!r} at slice {at.start} by now"
                    )
                if at.phase is not None:
                    raise SlicewiseError(
                        f"it is on node {at.node!r}, whose agent cannot move what runs"
                    )
                if state.cluster.is_held(target.gpus[move.to_gpu]):
                    raise SlicewiseError(f"GPU {move.to_gpu} of {target.name!r} is held")
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
                now_at[which] = trail.made[-1]
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

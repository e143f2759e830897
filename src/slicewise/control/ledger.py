"""The ledger: a state and the rows written since the last commit, which it already reflects."""

from __future__ import annotations

from collections.abc import Callable

from slicewise.control.actors import Actor, internal
from slicewise.control.answers import RefusedError
from slicewise.control.entries import AnyEntry, NodePhase, NodeTurned, Row, Seconds
from slicewise.control.state import NodeStanding, State, TenantStanding
from slicewise.core.cluster import Instance

NewId = Callable[[str], str]
"""Makes an id nobody has yet, beginning with the letter given."""


class Ledger:
    """Where decisions are written down; what is written is applied to the state at once."""

    def __init__(self, state: State, new_id: NewId) -> None:
        self.state = state
        self.new_id = new_id
        self.rows: list[Row] = []
        """What was decided since the rows were last taken."""
        self.now: Seconds = 0
        self.actor: Actor = internal("")
        self.room_appeared = False
        """Whether something ended, or joined, since the queue was last served."""

    def open(self, actor: Actor, steady: Seconds) -> None:
        """Whatever is entered next is this actor's doing, at this moment of steady time.

        Service time is made of it here, so that a step that was accepted counts from its own entry
        on; and it never goes back behind the last entry.
        """
        self.actor = actor
        self.now = max(steady + self.state.accepted, self.state.at)

    def enter(self, entry: AnyEntry, in_place: tuple[Instance, ...] | None = None) -> None:
        """Write an entry; ``in_place`` are its instances, where they have been placed."""
        row = Row(self.state.seq + 1, self.now, self.actor.name, entry, self.actor.origin)
        self.state.apply(row, in_place)
        self.rows.append(row)

    def take_rows(self) -> list[Row]:
        """Hand out the rows that are to be committed together."""
        rows, self.rows = self.rows, []
        return rows

    def finish_draining(self, name: str) -> None:
        """A node that was to become empty, and is, has been drained."""
        node = self.state.nodes[name]
        if node.phase is NodePhase.DRAINING and not node.instances:
            self.enter(NodeTurned(name, NodePhase.DRAINED))

    def node(self, name: str) -> NodeStanding:
        """The node of that name, or a refusal."""
        node = self.state.nodes.get(name)
        if node is None:
            raise RefusedError(404, f"no node {name!r}")
        return node

    def tenant(self, name: str) -> TenantStanding:
        """The tenant of that name, or a refusal."""
        tenant = self.state.tenants.get(name)
        if tenant is None:
            raise RefusedError(404, f"no tenant {name!r}")
        return tenant

"""The unit of work: a state, and the rows written since the last commit."""

from __future__ import annotations

from collections.abc import Callable

from slicewise.control.actors import Actor, internal
from slicewise.control.answers import RefusedError
from slicewise.control.state import NodeStatus, State, TenantStatus
from slicewise.core.cluster import Instance
from slicewise.journal.entries import AnyEntry, NodePhase, NodeTurned, Row, Seconds

NewId = Callable[[str], str]
"""Returns a new unique id that begins with the given letter."""


class UnitOfWork:
    """Collects entries for the next commit, and applies each of them to the state at once."""

    def __init__(self, state: State, new_id: NewId) -> None:
        self.state = state
        self.new_id = new_id
        self.rows: list[Row] = []
        """The rows that are not committed yet."""
        self.now: Seconds = 0
        """Service time of the current command."""
        self.actor: Actor = internal("")
        """The actor of the current command."""
        self.room_appeared = False
        """Whether the queue must be served: a request may fit now that did not fit before."""

    def open(self, actor: Actor, steady: Seconds) -> None:
        """Begin a command of this actor, at this steady time.

        Service time is derived here, entry by entry, so an accepted clock step takes effect with
        its own entry. It never goes back behind the last entry.
        """
        self.actor = actor
        self.now = max(steady + self.state.clock_offset, self.state.at)

    def enter(self, entry: AnyEntry, in_place: tuple[Instance, ...] | None = None) -> None:
        """Write an entry and apply it; see `State.apply` for ``in_place``."""
        row = Row(self.state.seq + 1, self.now, self.actor.name, entry, self.actor.origin)
        self.state.apply(row, in_place)
        self.rows.append(row)

    def take_rows(self) -> list[Row]:
        """Return the rows to commit, and begin a new list."""
        rows, self.rows = self.rows, []
        return rows

    def finish_draining(self, name: str) -> None:
        """Set a draining node to drained once it is empty."""
        node = self.state.nodes[name]
        if node.phase is NodePhase.DRAINING and not node.instances:
            self.enter(NodeTurned(name, NodePhase.DRAINED))

    def node(self, name: str) -> NodeStatus:
        """Return the node of that name; refuse the command if there is none."""
        node = self.state.nodes.get(name)
        if node is None:
            raise RefusedError(404, f"no node {name!r}")
        return node

    def tenant(self, name: str) -> TenantStatus:
        """Return the tenant of that name; refuse the command if there is none."""
        tenant = self.state.tenants_by_name.get(name)
        if tenant is None:
            raise RefusedError(404, f"no tenant {name!r}")
        return tenant

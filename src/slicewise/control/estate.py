"""What there is to place on, for whom, and by what time: nodes, tenants, tokens, the clock."""

from __future__ import annotations

from slicewise.control.actors import expired
from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import (
    AddNode,
    Drain,
    IssueToken,
    RemoveNode,
    RemoveTenant,
    RevokeToken,
    RotateToken,
    SetClock,
    SetTenant,
)
from slicewise.control.entries import (
    EARLIEST,
    LATEST,
    STEP_SECONDS,
    Cause,
    ClockSet,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    TenantRemoved,
    TenantSet,
    TokenExpiring,
    TokenIssued,
    TokenRevoked,
)
from slicewise.control.geometries import record_of
from slicewise.control.ledger import Ledger
from slicewise.control.models import Models
from slicewise.control.placing import Placing
from slicewise.control.views import node_view, tenant_view, token_view
from slicewise.control.wire import ClockStepView, moment


class Estate:
    """Registers and removes nodes, tenants and tokens, and sets the clock."""

    def __init__(self, ledger: Ledger, placing: Placing, models: Models) -> None:
        self._models = models
        self._ledger = ledger
        self._state = ledger.state
        self._placing = placing

    # Nodes

    def add_node(self, command: AddNode) -> Answer:
        """Register a node, and its model if that is new."""
        state, geometry = self._state, command.geometry
        if command.node in state.nodes:
            raise RefusedError(409, f"node {command.node!r} exists already", reason="exists")
        known = state.geometries.get(geometry.model)
        if known is not None and record_of(known) != geometry:
            raise RefusedError(
                409,
                f"another geometry named {geometry.model!r} is in use: nodes of one model must "
                "agree on it",
                reason="geometry",
            )
        self._models.check(geometry)
        self._models.enter(geometry)
        first = state.cluster.next_gpus(command.gpus)
        self._ledger.enter(
            NodeAdded(command.node, geometry.model, command.gpus, first, command.labels)
        )
        self._ledger.room_appeared = True
        return said(201, node_view(state, state.nodes[command.node]))

    def turn_node(self, name: str, phase: NodePhase) -> Answer:
        """Take a node to another phase."""
        node = self._ledger.node(name)
        if node.phase is not phase:
            self._ledger.enter(NodeTurned(name, phase))
            self._ledger.room_appeared |= phase is NodePhase.READY
        return said(200, node_view(self._state, node))

    def drain(self, command: Drain) -> Answer:
        """Let a node become empty; it is drained when it is."""
        node = self._ledger.node(command.node)
        if not node.instances:
            return self.turn_node(command.node, NodePhase.DRAINED)
        answer = self.turn_node(command.node, NodePhase.DRAINING)
        if command.evict:
            for allocation in list(self._state.allocations.values()):
                if any(part.node == node.name for part in allocation.parts):
                    self._placing.end(allocation, Cause.EVICTED)
            answer = said(200, node_view(self._state, node))
        return answer

    def remove_node(self, command: RemoveNode) -> Answer:
        """Remove an empty node."""
        node = self._ledger.node(command.node)
        if node.instances:
            raise RefusedError(
                409,
                f"node {node.name!r} still has {node.instances} instances: drain it first",
                reason="busy",
            )
        view = node_view(self._state, node)
        self._ledger.enter(NodeRemoved(node.name))
        self._models.forget(node.geometry)
        return said(200, view)

    # Tenants and tokens

    def set_tenant(self, command: SetTenant) -> Answer:
        """Create a tenant or change its quota."""
        name = command.tenant
        if command.new and name in self._state.tenants:
            raise RefusedError(409, f"tenant {name!r} exists already", reason="exists")
        if not command.new:
            self._ledger.tenant(name)
        self._ledger.enter(TenantSet(name, command.quota))
        self._ledger.room_appeared = True
        status = 201 if command.new else 200
        return said(status, tenant_view(self._state, self._state.tenants[name]))

    def remove_tenant(self, command: RemoveTenant) -> Answer:
        """Remove a tenant that holds nothing."""
        tenant = self._ledger.tenant(command.tenant)
        if tenant.allocations:
            raise RefusedError(
                409,
                f"tenant {tenant.name!r} still has {len(tenant.allocations)} allocations: "
                "release them first",
                reason="busy",
            )
        view = tenant_view(self._state, tenant)
        self._ledger.enter(TenantRemoved(tenant.name))
        return said(200, view)

    def issue_token(self, command: IssueToken) -> Answer:
        """Make a token known."""
        if command.tenant is not None:
            self._ledger.tenant(command.tenant)
        if command.digest in self._state.tokens_by_digest:
            raise RefusedError(409, "a token with this secret exists already", reason="exists")
        expires = None if command.expires_in is None else self._ledger.now + command.expires_in
        token = TokenIssued(
            self._ledger.new_id("t"),
            command.digest,
            command.role,
            command.tenant,
            command.node,
            command.note,
            expires,
        )
        self._ledger.enter(token)
        return said(201, token_view(token))

    def rotate_token(self, command: RotateToken) -> Answer:
        """Make another token with the same rights; both are valid for a while."""
        old, now = self._token(command.token), self._ledger.now
        if expired(old, now):
            raise RefusedError(
                409, f"token {old.token!r} has expired: issue another", reason="expired"
            )
        if command.digest in self._state.tokens_by_digest:
            raise RefusedError(409, "a token with this secret exists already", reason="exists")
        until = now + command.overlap
        new = TokenIssued(
            self._ledger.new_id("t"),
            command.digest,
            old.role,
            old.tenant,
            old.node,
            old.note,
            old.expires if command.expires_in is None else now + command.expires_in,
            old.token,
        )
        self._ledger.enter(new)
        if old.expires is None or until < old.expires:
            self._ledger.enter(TokenExpiring(old.token, until))
        return said(201, token_view(new))

    def revoke_token(self, command: RevokeToken) -> Answer:
        """Make a token void."""
        token = self._token(command.token)
        self._ledger.enter(TokenRevoked(token.token))
        return said(200, token_view(token))

    def _token(self, identity: str) -> TokenIssued:
        token = self._state.tokens.get(identity)
        if token is None:
            raise RefusedError(404, f"no token {identity!r}")
        return token

    # The clock

    def set_clock(self, command: SetClock) -> Answer:
        """Let service time go on where the wall clock is; what is over by then ends next."""
        by, before = command.by, self._ledger.now
        after = before + by
        if abs(by) < STEP_SECONDS:
            raise RefusedError(
                409, "the wall clock agrees with service time: there is no step", reason="clock"
            )
        if abs(by - command.seen) >= STEP_SECONDS:
            raise RefusedError(
                409,
                f"the leader's wall clock is {by:+.3f} seconds from service time, and "
                f"{command.seen:+.3f} was to be accepted: look again",
                reason="clock",
            )
        if not EARLIEST <= after <= LATEST:
            raise RefusedError(409, "the wall clock shows no time of this century", reason="clock")
        self._ledger.enter(ClockSet(by))
        return said(
            200,
            ClockStepView(before=moment(before) or "", after=moment(after) or "", step_seconds=by),
        )

"""The command handler: decides commands one by one and records the decisions as entries.

Entries are applied to the handler's state at once, so the next decision sees them. They are not
final until they are committed: the commit loop answers only then. If a commit fails, it discards
the handler with its state and builds both again from the journal.
"""

from __future__ import annotations

from slicewise.control.actors import Actor, internal
from slicewise.control.agents import Agents
from slicewise.control.allocations import Allocations, OnPolicyError
from slicewise.control.answers import Answer, RefusedError
from slicewise.control.commands import (
    Accept,
    AddNode,
    Adopt,
    CarryOut,
    ChoosePolicy,
    Command,
    Cordon,
    Create,
    CreateAll,
    CreateOn,
    Drain,
    Evict,
    Extend,
    Heard,
    Hello,
    IssueToken,
    KeepLeastLost,
    Lost,
    Release,
    RemoveNode,
    RemoveTenant,
    Report,
    RevokeToken,
    RotateToken,
    SetClock,
    SetTenant,
    Uncordon,
)
from slicewise.control.foreign_instances import ForeignInstances
from slicewise.control.gpu_models import MAX_CLUSTER_STATES, MAX_MODELS, GpuModels
from slicewise.control.inventory import Inventory
from slicewise.control.leases import Leases
from slicewise.control.moves import Moves
from slicewise.control.policy_choices import PolicyChoices
from slicewise.control.quota import QueueLimits
from slicewise.control.reclaim import Reclaims
from slicewise.control.state import State
from slicewise.control.tenants import Tenants
from slicewise.control.unit_of_work import NewId, UnitOfWork
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import Cause, NodePhase, Row, Seconds

CLOCK, QUEUE = internal("clock"), internal("queue")


class CommandHandler:
    """Decides commands on one state."""

    def __init__(
        self,
        state: State,
        new_id: NewId,
        limits: QueueLimits | None = None,
        on_policy_error: OnPolicyError = lambda error: None,
        rules: ReservationRules | None = None,
        max_models: int = MAX_MODELS,
        max_states: int = MAX_CLUSTER_STATES,
        reclaim: ReclaimRules | None = None,
    ) -> None:
        self.state = state
        self._work = UnitOfWork(state, new_id)
        self._policies = PolicyChoices(self._work)
        self._allocations = Allocations(
            self._work,
            limits or QueueLimits(),
            rules or ReservationRules(),
            on_policy_error,
            self._policies,
        )
        self._leases = Leases(self._work, self._allocations)
        self._reclaims = Reclaims(self._work, self._allocations, reclaim or ReclaimRules())
        models = GpuModels(self._work, max_models, max_states)
        self._inventory = Inventory(self._work, self._allocations, models)
        self._tenants = Tenants(self._work)
        self._moves = Moves(self._work, self._allocations)
        self._foreign = ForeignInstances(self._work)
        self._agents = Agents(self._work, self._allocations, self._foreign, models)

    def take_rows(self) -> list[Row]:
        """Return the rows to commit together."""
        return self._work.take_rows()

    def decide(self, command: Command, actor: Actor, steady: Seconds) -> Answer:
        """Decide a command, and return the answer to give once the rows are committed."""
        self._work.open(actor, steady)
        try:
            self.check(actor)
            return self._decide(command)
        except RefusedError as refusal:
            return refusal.answer()

    def check(self, actor: Actor) -> None:
        """Refuse an actor whose token is no longer valid."""
        actor.check(self.state, self._work.now)

    def expire(self, steady: Seconds) -> None:
        """End allocations whose lease, time in the queue or notice is over; warn of the next."""
        self._work.open(CLOCK, steady)
        state, now = self.state, self._work.now
        self._leases.expire()
        for ticket in state.waiting.due(now):
            queued = state.allocations[state.by_ticket[ticket.number]]
            self._allocations.end(queued, Cause.TIMEOUT)
        self._reclaims.expire()

    def serve_queue(self, steady: Seconds) -> None:
        """Place queued requests if one may have room; reserve or claim windows for others."""
        if len(self.state.waiting) or self._reclaims.active:
            self._work.open(QUEUE, steady)
            self._allocations.serve()
            if self._reclaims.may_claim:
                self._reclaims.serve()
        self._work.room_appeared = False

    @property
    def next_time(self) -> Seconds | None:
        """The service time at which something is due: a lease, a deadline, a window."""
        state = self.state
        times = (
            state.next_lease,
            state.waiting.next_deadline,
            self._allocations.dispatcher.next_due,
            self._reclaims.next_time,
        )
        return min((time for time in times if time is not None), default=None)

    def _decide(self, command: Command) -> Answer:
        match command:
            case Create():
                return self._allocations.create(command)
            case CreateAll():
                return self._allocations.create_all(command)
            case CreateOn():
                return self._allocations.create_on(command)
            case Release():
                return self._allocations.release(command)
            case Extend():
                return self._leases.extend(command)
            case AddNode():
                return self._inventory.add_node(command)
            case Cordon(node):
                return self._inventory.set_phase(node, NodePhase.CORDONED)
            case Uncordon(node):
                return self._inventory.set_phase(node, NodePhase.READY)
            case Drain():
                return self._inventory.drain(command)
            case RemoveNode():
                return self._inventory.remove_node(command)
            case SetTenant():
                return self._tenants.set_tenant(command)
            case RemoveTenant():
                return self._tenants.remove_tenant(command)
            case IssueToken():
                return self._tenants.issue_token(command)
            case RotateToken():
                return self._tenants.rotate_token(command)
            case RevokeToken():
                return self._tenants.revoke_token(command)
            case CarryOut():
                return self._moves.carry_out(command)
            case Report():
                return self._agents.report(command)
            case Hello():
                return self._agents.hello(command)
            case Heard():
                return self._agents.heard(command)
            case Lost():
                return self._agents.lost(command)
            case Accept():
                return self._agents.accept(command)
            case Adopt():
                return self._foreign.adopt(command)
            case Evict():
                return self._foreign.evict(command)
            case SetClock():
                return self._inventory.set_clock(command)
            case ChoosePolicy():
                return self._policies.choose(command)
            case KeepLeastLost():
                return self._policies.keep_least_lost(command)

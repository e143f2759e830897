"""The desk: takes commands one by one, decides, and writes down what it decided as entries.

Everything it does is applied to its state at once, so that the next decision sees it. Nothing of
it is true, though, until the rows are committed: whoever runs the desk answers only then, and
when a commit fails the desk and its state are thrown away and built anew from the journal.
"""

from __future__ import annotations

from slicewise.control.actors import Actor, check, internal
from slicewise.control.agents import Agents
from slicewise.control.answers import Answer, RefusedError
from slicewise.control.commands import (
    Accept,
    AddNode,
    Adopt,
    CarryOut,
    Command,
    Cordon,
    Create,
    CreateAll,
    CreateOn,
    Drain,
    Evict,
    Heard,
    Hello,
    IssueToken,
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
from slicewise.control.entries import Cause, NodePhase, Row, Seconds
from slicewise.control.estate import Estate
from slicewise.control.foreign import Strangers
from slicewise.control.ledger import Ledger, NewId
from slicewise.control.models import MOST_MODELS, MOST_STATES, Models
from slicewise.control.moving import Moving
from slicewise.control.placing import OnPolicyError, Placing
from slicewise.control.reporting import Reporting
from slicewise.control.state import State

QUEUED_PER_TENANT = 1000
"""How many requests of one tenant may wait in the queue, unless told otherwise."""

CLOCK, QUEUE = internal("clock"), internal("queue")


class Desk:
    """Decides on one state."""

    def __init__(
        self,
        state: State,
        new_id: NewId,
        queued_per_tenant: int = QUEUED_PER_TENANT,
        on_policy_error: OnPolicyError = lambda error: None,
        most_models: int = MOST_MODELS,
        most_states: int = MOST_STATES,
    ) -> None:
        self.state = state
        self._ledger = Ledger(state, new_id)
        self._placing = Placing(self._ledger, queued_per_tenant, on_policy_error)
        models = Models(self._ledger, most_models, most_states)
        self._estate = Estate(self._ledger, self._placing, models)
        self._moving = Moving(self._ledger)
        self._strangers = Strangers(self._ledger)
        self._agents = Agents(self._ledger, self._placing, self._strangers, models)
        self._reporting = Reporting(self._ledger, self._placing, self._agents, self._strangers)

    def take_rows(self) -> list[Row]:
        """Hand out the rows that are to be committed together."""
        return self._ledger.take_rows()

    def decide(self, command: Command, actor: Actor, steady: Seconds) -> Answer:
        """Carry out a command, or say why not."""
        self._ledger.open(actor, steady)
        try:
            self.check(actor)
            return self._decide(command)
        except RefusedError as refusal:
            return refusal.answer()

    def check(self, actor: Actor) -> None:
        """Refuse an actor whose token is not valid any more, as this state has it."""
        if actor.token is not None:
            check(self.state.tokens, actor.token, self._ledger.now)

    def pass_time(self, steady: Seconds) -> None:
        """End what is over: leases, and waits that were long enough."""
        self._ledger.open(CLOCK, steady)
        state, now = self.state, self._ledger.now
        for allocation in state.leases_over(now):
            self._placing.end(allocation, Cause.LEASE)
        for ticket in state.waiting.expired(now):
            waited = state.allocations[state.waits_for[ticket.number]]
            self._placing.end(waited, Cause.TIMEOUT)

    def serve_queue(self, steady: Seconds) -> None:
        """Place those who wait, if room has appeared since this was last done."""
        if self._ledger.room_appeared and len(self.state.waiting):
            self._ledger.open(QUEUE, steady)
            self._placing.serve()
        self._ledger.room_appeared = False

    def _decide(self, command: Command) -> Answer:
        match command:
            case Create():
                return self._placing.create(command)
            case CreateAll():
                return self._placing.create_all(command)
            case CreateOn():
                return self._placing.create_on(command)
            case Release():
                return self._placing.release(command)
            case AddNode():
                return self._estate.add_node(command)
            case Cordon(node):
                return self._estate.turn_node(node, NodePhase.CORDONED)
            case Uncordon(node):
                return self._estate.turn_node(node, NodePhase.READY)
            case Drain():
                return self._estate.drain(command)
            case RemoveNode():
                return self._estate.remove_node(command)
            case SetTenant():
                return self._estate.set_tenant(command)
            case RemoveTenant():
                return self._estate.remove_tenant(command)
            case IssueToken():
                return self._estate.issue_token(command)
            case RotateToken():
                return self._estate.rotate_token(command)
            case RevokeToken():
                return self._estate.revoke_token(command)
            case CarryOut():
                return self._moving.carry_out(command)
            case Report():
                return self._reporting.take(command)
            case Hello():
                return self._agents.hello(command)
            case Heard():
                return self._agents.heard(command)
            case Lost():
                return self._agents.lost(command)
            case Accept():
                return self._agents.accept(command)
            case Adopt():
                return self._strangers.adopt(command)
            case Evict():
                return self._strangers.evict(command)
            case SetClock():
                return self._estate.set_clock(command)

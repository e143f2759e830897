"""Reports of agents: what differs from what is known is entered, and nothing else.

A report may be late, sent twice, or about something that has changed since. So it can only bring
an instance forward on the way that was decided for it: what should be there comes into being, or
fails; what should not be there goes. Nothing is freed that was not to be gone.
"""

from __future__ import annotations

from slicewise.control.agent_wire import InstanceReport, ReportView
from slicewise.control.agents import Agents
from slicewise.control.answers import Answer, said
from slicewise.control.commands import Report
from slicewise.control.entries import AllocationRecord, Cause, Part
from slicewise.control.foreign import Strangers
from slicewise.control.hardware import PartTurned, Phase
from slicewise.control.ledger import Ledger
from slicewise.control.placing import Placing

_FORWARD = {"creating": Phase.CREATING, "active": Phase.ACTIVE}
_AWAY = {"releasing": Phase.RELEASING, "quarantined": Phase.QUARANTINED, "gone": Phase.GONE}


class Reporting:
    """Takes in what agents report."""

    def __init__(
        self, ledger: Ledger, placing: Placing, agents: Agents, strangers: Strangers
    ) -> None:
        self._ledger = ledger
        self._state = ledger.state
        self._placing = placing
        self._agents = agents
        self._strangers = strangers

    def take(self, command: Report) -> Answer:
        """One report."""
        body = command.said
        node, agent = self._agents.session(command.node, body.session)
        self._strangers.check(node, body.foreign)  # before anything is entered
        for one in body.instances:
            self._instance(node.name, one)
        self._strangers.take(node, agent, body)
        self._agents.hold_gpus(node, agent, body.gpus)
        self._agents.reported(node)  # last: nobody who follows row by row sees room too early
        return said(200, ReportView(seq=self._state.seq))

    def _instance(self, node: str, one: InstanceReport) -> None:
        state = self._state
        record = state.allocations.get(one.allocation) or state.leaving.get(one.allocation)
        if record is None or one.index >= len(record.parts):
            return
        part = record.parts[one.index]
        if part.node != node or part.phase in (None, Phase.GONE):
            return
        if record.ended is None:
            if one.phase == "failed":
                what = f"{part.profile} on {node} GPU {part.gpu} at slice {part.start}"
                why = one.detail or "no reason was given"
                self._placing.end(record, Cause.FAILED, f"{what} could not be made: {why}")
            elif one.phase in _FORWARD:
                self._turn(record, part, one, _FORWARD[one.phase])
        elif one.phase == "gone":
            self._agents.vacate(record.id, one.index)
        elif one.phase in _AWAY:
            self._turn(record, part, one, _AWAY[one.phase])

    def _turn(
        self, record: AllocationRecord, part: Part, one: InstanceReport, phase: Phase
    ) -> None:
        uuid = one.uuid or (part.uuid if phase is not Phase.CREATING else "")
        news = phase, uuid, one.detail
        # In quarantine it is tried for ever: that it was tried again is no news.
        tried = phase is not Phase.QUARANTINED and one.attempts != part.attempts
        if news == (part.phase, part.uuid, part.detail) and not tried:
            return
        self._ledger.enter(
            PartTurned(record.id, record.tenant, one.index, part.node, *news, attempts=one.attempts)
        )

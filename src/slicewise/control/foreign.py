"""Instances that are no allocation's: their slices are blocked, and operators decide about them.

What cannot be blocked, because its profile is unknown or an allocation is to be in the same place,
keeps its whole GPU from taking anything new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from slicewise.control.agent_wire import ForeignReport, ReportBody
from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import Adopt, Evict
from slicewise.control.entries import Allocated, AllocationRecord, Part, Want
from slicewise.control.hardware import Foreign, ForeignEvicted, ForeignGone, ForeignSeen, Phase
from slicewise.control.ledger import Ledger
from slicewise.control.quota import excess
from slicewise.control.standings import AgentStanding
from slicewise.control.state import NodeStanding
from slicewise.control.views import allocation_view, foreign_view
from slicewise.core.request import Reason
from slicewise.core.states import ILLEGAL


class Strangers:
    """Keeps account of what agents find, and does what operators say about it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = ledger.state

    def take(self, node: NodeStanding, agent: AgentStanding, said: ReportBody) -> None:
        """Enter what has changed since the last report.

        The list is complete but for GPUs that cannot be read: what was there may still be.
        """
        listed = self._listed(node, agent, said.foreign)
        readable = {gpu.uuid for gpu in said.gpus if not gpu.problem}
        for name, old in list(agent.foreign.items()):
            if name not in listed and agent.gpus[old.gpu] in readable:
                self._gone(node, name)
        for name, found in listed.items():
            known = agent.foreign.get(name)
            if (
                known is not None
                and msgspec.structs.replace(known, blocks=found.blocks, why=found.why) != found
            ):  # another one by the same name
                self._gone(node, name)
                known = None
            if known is None or known.why != found.why:
                blocks = self._fits(node, found) if known is None else known.blocks
                found = msgspec.structs.replace(found, blocks=blocks)
                self._ledger.enter(ForeignSeen(node.name, name, found))
        self.block(node, agent)

    def block(self, node: NodeStanding, agent: AgentStanding) -> None:
        """Block the slices of those for which there was no place before."""
        for name, found in list(agent.foreign.items()):
            if not found.blocks and self._fits(node, found):
                found = msgspec.structs.replace(found, blocks=True)
                self._ledger.enter(ForeignSeen(node.name, name, found))

    def check(self, node: NodeStanding, reports: Sequence[ForeignReport]) -> None:
        """Refuse what no driver tells: a GPU with more instances than slices."""
        slices = node.geometry.slices
        for gpu, count in Counter(one.gpu for one in reports).items():
            if count > slices:
                raise RefusedError(
                    400,
                    f"{gpu} has {slices} slices, and {count} instances cannot be there",
                    field="foreign",
                )

    def reasons(self, agent: AgentStanding) -> dict[int, str]:
        """By GPU: why it is held, where something on it could not be blocked."""
        found: dict[int, str] = {}
        for name, one in agent.foreign.items():
            if not one.blocks:
                what = one.profile or "an instance of no known profile"
                found[one.gpu] = (
                    f"{what} at slice {one.start} ({name}) is no allocation's, and its slices "
                    "cannot be blocked"
                )
        return found

    def _listed(
        self, node: NodeStanding, agent: AgentStanding, reports: Sequence[ForeignReport]
    ) -> dict[str, Foreign]:
        index = {uuid: number for number, uuid in enumerate(agent.gpus)}
        listed: dict[str, Foreign] = {}
        for one in reports:
            gpu = index.get(one.gpu)
            if gpu is None:
                continue  # on no GPU of this node that is known: nothing is placed there
            found = Foreign(gpu, one.uuid, one.profile, one.start, one.size, one.why)
            if not self._is_ours(node, found):
                taken = not one.uuid or one.uuid in listed
                listed[found.place if taken else one.uuid] = found
        return listed

    def _is_ours(self, node: NodeStanding, found: Foreign) -> bool:
        """Whether it is an allocation's by now, though the agent did not know that yet."""
        state = self._state
        for instance in state.cluster.instances_on(node.gpus[found.gpu]):
            identity = state.owner.get(instance.id)
            if identity is not None and found.uuid:
                part = state.record(identity).parts[state.instances[identity].index(instance.id)]
                if part.uuid == found.uuid:
                    return True
        return False

    def _fits(self, node: NodeStanding, found: Foreign) -> bool:
        cluster = self._state.cluster
        placement = node.geometry.placement(found.profile, found.start)
        if placement is None or placement.profile.size != found.size:
            return False
        here = cluster.state_of[node.gpus[found.gpu]]
        return cluster.after_place[here][placement.number] != ILLEGAL

    def _gone(self, node: NodeStanding, name: str) -> None:
        self._ledger.enter(ForeignGone(node.name, name))
        self._ledger.room_appeared = True

    # What operators say

    def adopt(self, command: Adopt) -> Answer:
        """Make an instance an allocation of a tenant, where it is."""
        node, agent, found = self._find(command.node, command.foreign)
        tenant = self._ledger.tenant(command.tenant)
        if command.foreign in agent.evicted:
            raise RefusedError(409, f"{command.foreign} is to be destroyed", reason="evicted")
        if not (found.uuid and found.blocks):
            why = "no compute instance" if not found.uuid else "no place of its own"
            raise RefusedError(409, f"{command.foreign} has {why}", reason="unusable")
        profile = node.geometry.profile(found.profile)
        part = Part(
            node=node.name,
            gpu=found.gpu,
            model=node.geometry.model,
            profile=profile.name,
            start=found.start,
            size=profile.size,
            compute=profile.compute,
            memory_gb=profile.memory_gb,
            phase=Phase.ACTIVE,
            uuid=found.uuid,
            gpu_uuid=agent.gpus[found.gpu],
        )
        too_much = excess(tenant, [part])
        if too_much is not None:
            raise RefusedError(409, too_much, reason=Reason.QUOTA)
        now = self._ledger.now
        record = AllocationRecord(
            id=self._ledger.new_id("a"),
            tenant=tenant.name,
            want=Want(profile=profile.name, models=(node.geometry.model,)),
            labels=command.labels,
            requested=now,
            placed=now,
            parts=(part,),
        )
        self._ledger.enter(ForeignGone(node.name, command.foreign))
        self._ledger.enter(Allocated(record))
        return said(201, allocation_view(self._state, record))

    def evict(self, command: Evict) -> Answer:
        """Have an instance destroyed by the agent."""
        node, agent, found = self._find(command.node, command.foreign)
        if command.foreign not in agent.evicted:
            self._ledger.enter(ForeignEvicted(node.name, command.foreign))
        return said(202, foreign_view(command.foreign, found, evicting=True))

    def _find(self, name: str, foreign: str) -> tuple[NodeStanding, AgentStanding, Foreign]:
        node = self._ledger.node(name)
        found = node.agent.foreign.get(foreign) if node.agent is not None else None
        if node.agent is None or found is None:
            raise RefusedError(404, f"no instance {foreign!r} of nobody's is on node {name!r}")
        return node, node.agent, found

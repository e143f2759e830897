"""Foreign instances: those on a managed node that belong to no allocation.

Their slices are blocked until an operator adopts or evicts them. An instance that cannot be
blocked, because its profile is unknown or overlaps an allocation, holds its whole GPU instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from slicewise.api.agents import ForeignReport, ReportBody
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import Adopt, Evict
from slicewise.control.quota import excess
from slicewise.control.state import NodeStatus
from slicewise.control.status import AgentStatus
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import allocation_view, foreign_view
from slicewise.core.request import Reason
from slicewise.journal.agent_entries import Foreign, ForeignEvicted, ForeignGone, ForeignSeen, Phase
from slicewise.journal.entries import Allocated, AllocationRecord, Part, Want


class ForeignInstances:
    """Tracks the foreign instances that agents report, and applies the decisions of operators."""

    def __init__(self, work: UnitOfWork) -> None:
        self._work = work
        self._state = work.state

    def report(self, node: NodeStatus, agent: AgentStatus, body: ReportBody) -> None:
        """Record the foreign instances that appeared, changed or are gone since the last report.

        A report is complete except for GPUs that cannot be read: their instances are kept.
        """
        listed = self._listed(node, agent, body.foreign)
        readable = {gpu.uuid for gpu in body.gpus if not gpu.problem}
        for name, old in list(agent.foreign.items()):
            if name not in listed and agent.gpus[old.gpu] in readable:
                self._gone(node, name)
        for name, found in listed.items():
            known = agent.foreign.get(name)
            if (
                known is not None
                and msgspec.structs.replace(known, blocks=found.blocks, why=found.why) != found
            ):  # another instance of the same name
                self._gone(node, name)
                known = None
            if known is None or known.why != found.why:
                blocks = self._fits(node, found) if known is None else known.blocks
                found = msgspec.structs.replace(found, blocks=blocks)
                self._work.enter(ForeignSeen(node.name, name, found))
        self._block(node, agent)

    def _block(self, node: NodeStatus, agent: AgentStatus) -> None:
        """Block the slices of instances that overlapped another one before."""
        for name, found in list(agent.foreign.items()):
            if not found.blocks and self._fits(node, found):
                found = msgspec.structs.replace(found, blocks=True)
                self._work.enter(ForeignSeen(node.name, name, found))

    def check(self, node: NodeStatus, reports: Sequence[ForeignReport]) -> None:
        """Refuse an impossible report: a GPU with more instances than slices."""
        slices = node.geometry.slices
        for gpu, count in Counter(one.gpu for one in reports).items():
            if count > slices:
                raise RefusedError(
                    400,
                    f"{gpu} has {slices} slices and cannot hold {count} instances",
                    field="foreign",
                )

    def reasons(self, agent: AgentStatus) -> dict[int, str]:
        """Return why GPUs are held, by index: an instance on them could not be blocked."""
        found: dict[int, str] = {}
        for name, one in agent.foreign.items():
            if not one.blocks:
                what = one.profile or "an instance of no known profile"
                found[one.gpu] = (
                    f"{what} at slice {one.start} ({name}) is foreign, and its slices "
                    "cannot be blocked"
                )
        return found

    def _listed(
        self, node: NodeStatus, agent: AgentStatus, reports: Sequence[ForeignReport]
    ) -> dict[str, Foreign]:
        index = {uuid: number for number, uuid in enumerate(agent.gpus)}
        listed: dict[str, Foreign] = {}
        for one in reports:
            gpu = index.get(one.gpu)
            if gpu is None:
                continue  # nothing is ever placed on a GPU that the node does not have
            found = Foreign(gpu, one.uuid, one.profile, one.start, one.size, one.why)
            if not self._is_allocated(node, found):
                taken = not one.uuid or one.uuid in listed
                listed[found.place if taken else one.uuid] = found
        return listed

    def _is_allocated(self, node: NodeStatus, found: Foreign) -> bool:
        """Return whether an allocation adopted it, which the agent did not know yet."""
        state = self._state
        for instance in state.cluster.instances_on(node.gpus[found.gpu]):
            identity = state.owner.get(instance.id)
            if identity is not None and found.uuid:
                part = state.record(identity).parts[state.instances[identity].index(instance.id)]
                if part.uuid == found.uuid:
                    return True
        return False

    def _fits(self, node: NodeStatus, found: Foreign) -> bool:
        cluster = self._state.cluster
        placement = node.geometry.placement(found.profile, found.start)
        if placement is None or placement.profile.size != found.size:
            return False
        return cluster.is_open(node.gpus[found.gpu], placement.number)

    def _gone(self, node: NodeStatus, name: str) -> None:
        self._work.enter(ForeignGone(node.name, name))
        self._work.room_appeared = True

    # Decisions of operators

    def adopt(self, command: Adopt) -> Answer:
        """Turn a foreign instance into an allocation, in place."""
        node, agent, found = self._find(command.node, command.foreign)
        tenant = self._work.tenant(command.tenant)
        if command.foreign in agent.evicted:
            raise RefusedError(409, f"{command.foreign} is being evicted", reason="evicted")
        if not (found.uuid and found.blocks):
            why = "has no compute instance" if not found.uuid else "overlaps another instance"
            raise RefusedError(409, f"{command.foreign} {why}", reason="unusable")
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
        now = self._work.now
        record = AllocationRecord(
            id=self._work.new_id("a"),
            tenant=tenant.ref,
            want=Want(profile=profile.name, models=(node.geometry.model,)),
            labels=command.labels,
            requested=now,
            placed=now,
            parts=(part,),
        )
        self._work.enter(ForeignGone(node.name, command.foreign))
        self._work.enter(Allocated(record))
        return json_answer(201, allocation_view(self._state, record))

    def evict(self, command: Evict) -> Answer:
        """Order the agent to destroy a foreign instance."""
        node, agent, found = self._find(command.node, command.foreign)
        if command.foreign not in agent.evicted:
            self._work.enter(ForeignEvicted(node.name, command.foreign))
        return json_answer(202, foreign_view(command.foreign, found, evicting=True))

    def _find(self, name: str, foreign: str) -> tuple[NodeStatus, AgentStatus, Foreign]:
        node = self._work.node(name)
        found = node.agent.foreign.get(foreign) if node.agent is not None else None
        if node.agent is None or found is None:
            raise RefusedError(404, f"no foreign instance {foreign!r} on node {name!r}")
        return node, node.agent, found

"""A second, slow implementation of cluster occupancy, with which `verify` checks the journal.

It uses none of the cluster's states, masks and indexes. Every GPU is a list of instances, and a new
instance is compared with each of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import msgspec

from slicewise.control.snapshot import Snapshot
from slicewise.journal.agent_entries import (
    AgentJoined,
    Foreign,
    ForeignGone,
    ForeignSeen,
    PartTurned,
    Phase,
)
from slicewise.journal.entries import (
    Allocated,
    AnyEntry,
    Ended,
    GeometryRecord,
    ModelEntered,
    ModelForgotten,
    Moved,
    NodeAdded,
    NodeRemoved,
    Part,
    ProfileRecord,
    Served,
)

_LEAVING = (Phase.RELEASING, Phase.QUARANTINED)


class HeldResources(NamedTuple):
    """The resources that a tenant holds."""

    memory_slices: int
    compute_slices: int
    instances: int


class Occupancy:
    """Instances by GPU, and allocations with their instances."""

    def __init__(self) -> None:
        self._models: dict[str, GeometryRecord] = {}
        self._profiles: dict[tuple[str, str], ProfileRecord] = {}
        self._nodes: dict[str, tuple[str, int]] = {}
        self._agents: dict[str, tuple[str, ...]] = {}
        """The UUIDs of the GPUs of each node that has an agent."""
        self._there: defaultdict[tuple[str, int], list[tuple[str, Part]]] = defaultdict(list)
        self.allocations: dict[str, tuple[str, list[Part]]] = {}
        """The tenant and the instances of each placed allocation."""
        self.leaving: dict[str, dict[int, Part]] = {}
        """The instances of ended allocations that may still exist, by allocation and index."""
        self.foreign: dict[tuple[str, str], Part] = {}
        """Instances that occupy slices but belong to no allocation, by node and name."""

    def begin_at(self, snapshot: Snapshot) -> list[str]:
        """Load a snapshot and return the problems found in it."""
        for geometry in snapshot.geometries:
            self._enter_model(geometry)
        for node in snapshot.nodes:
            self._nodes[node.name] = node.model, node.gpus
            if node.agent is not None:
                self._agents[node.name] = node.agent.joined.gpus
        problems = [
            problem
            for allocation in snapshot.allocations
            if allocation.parts
            for problem in self._settle(allocation.id, allocation.tenant.id, allocation.parts)
        ]
        for record in snapshot.leaving:
            parts = dict(enumerate(record.parts))
            left = self.leaving[record.id] = {
                index: part for index, part in parts.items() if part.phase in _LEAVING
            }
            for part in left.values():
                problems += self._put(record.id, part)
        for node in snapshot.nodes:
            if node.agent is not None:
                for name, found in node.agent.foreign.items():
                    problems += self._block(node.name, name, found)
        return problems

    def take(self, entry: AnyEntry) -> list[str]:
        """Apply an entry and return the problems found in it."""
        match entry:
            case ModelEntered(geometry):
                self._enter_model(geometry)
            case ModelForgotten(model):
                return self._forget_model(model)
            case NodeAdded(node, model, gpus):
                if node in self._nodes:
                    return [f"node {node!r} is added but already exists"]
                if model not in self._models:
                    return [f"node {node!r} has the model {model!r}, which is not known"]
                self._nodes[node] = model, gpus
            case NodeRemoved(node):
                return self._remove_node(node)
            case Allocated(record):
                return self._settle(record.id, record.tenant.id, record.parts)
            case Served(identity, tenant, parts):
                return self._settle(identity, tenant.id, parts)
            case Ended(record):
                return self._end(record.id, record.parts)
            case Moved(identity, _, index, part):
                return self._move(identity, index, part)
            case AgentJoined():
                return self._join(entry)
            case PartTurned():
                return self._turn(entry)
            case ForeignSeen(node, name, found):
                return self._block(node, name, found)
            case ForeignGone(node, name):
                self._unblock(node, name)
        return []

    def usage(self) -> dict[str, HeldResources]:
        """The resources held, by tenant id; tenants that hold nothing are left out."""
        parts_of: defaultdict[str, list[Part]] = defaultdict(list)
        for tenant, parts in self.allocations.values():
            parts_of[tenant] += parts
        return {
            tenant: HeldResources(
                sum(p.size for p in parts), sum(p.compute for p in parts), len(parts)
            )
            for tenant, parts in parts_of.items()
        }

    def instances_by_node(self) -> dict[str, int]:
        """The number of instances on each node, without foreign ones."""
        counts = dict.fromkeys(self._nodes, 0)
        for (node, _), there in self._there.items():
            counts[node] = counts.get(node, 0) + len(there)
        for node, _ in self.foreign:
            counts[node] -= 1
        return counts

    @property
    def instances(self) -> int:
        """The number of all instances, including foreign ones."""
        return sum(map(len, self._there.values()))

    def _enter_model(self, geometry: GeometryRecord) -> None:
        self._models[geometry.model] = geometry
        for profile in geometry.profiles:
            self._profiles[geometry.model, profile.name] = profile

    def _forget_model(self, model: str) -> list[str]:
        geometry = self._models.pop(model, None)
        if geometry is None:
            return [f"the model {model!r} is forgotten and was not known"]
        for profile in geometry.profiles:
            del self._profiles[model, profile.name]
        users = [node for node, (used, _) in self._nodes.items() if used == model]
        return [f"the model {model!r} is forgotten, and node {node!r} has it" for node in users]

    def _remove_node(self, node: str) -> list[str]:
        if self._nodes.pop(node, None) is None:
            return [f"node {node!r} leaves and is not there"]
        for other, name in list(self.foreign):
            if other == node:
                self._unblock(node, name)
        self._agents.pop(node, None)
        gone = [self._there.pop(key) for key in list(self._there) if key[0] == node]
        return [f"node {node!r} leaves with instances on it"] if any(gone) else []

    def _settle(self, identity: str, tenant: str, parts: tuple[Part, ...]) -> list[str]:
        if not parts:
            return [f"allocation {identity} is placed without an instance"]
        if identity in self.allocations:
            return [f"allocation {identity} is placed a second time"]
        self.allocations[identity] = tenant, list(parts)
        problems = [problem for part in parts for problem in self._put(identity, part)]
        for part in parts:
            if (part.node in self._agents) != (part.phase is not None) or part.phase in _LEAVING:
                problems.append(
                    f"{part.profile} of allocation {identity} on node {part.node!r} is "
                    f"{part.phase or 'just there'}"
                )
        return problems

    def _end(self, identity: str, parts: tuple[Part, ...]) -> list[str]:
        _, held = self.allocations.pop(identity, ("", []))
        for index, part in enumerate(held):
            if part.phase is None:
                self._take_out(identity, part)
            else:
                left = msgspec.structs.replace(part, phase=Phase.RELEASING, detail="", attempts=0)
                self._replace(identity, part, left)
                self.leaving.setdefault(identity, {})[index] = left
        if held != list(parts):
            return [f"allocation {identity} ends with other instances than it had"]
        return []

    def _move(self, identity: str, index: int, part: Part) -> list[str]:
        _, parts = self.allocations.get(identity, ("", []))
        if not 0 <= index < len(parts):
            return [f"instance {index} of allocation {identity} moves and is not there"]
        problems = self._put(identity, part)  # the new instance exists before the old one goes
        old, parts[index] = parts[index], part
        self._take_out(identity, old)
        return problems

    # Nodes with agents

    def _join(self, entry: AgentJoined) -> list[str]:
        if entry.node not in self._nodes:
            return [f"node {entry.node!r} has an agent and is not there"]
        self._agents[entry.node] = entry.gpus
        for identity, (_, parts) in self.allocations.items():
            for index, part in enumerate(parts):
                if part.node == entry.node and (part.phase is None or entry.rebooted):
                    uuid = part.gpu_uuid or entry.gpus[part.gpu]
                    parts[index] = self._fresh(identity, part, Phase.PLACED, uuid)
        for identity, left in self.leaving.items():
            for index, part in left.items():
                if part.node == entry.node and entry.rebooted:
                    left[index] = self._fresh(identity, part, Phase.RELEASING, part.gpu_uuid)
        return []

    def _fresh(self, identity: str, part: Part, phase: Phase, gpu_uuid: str) -> Part:
        made = msgspec.structs.replace(
            part, phase=phase, uuid="", detail="", attempts=0, gpu_uuid=gpu_uuid
        )
        self._replace(identity, part, made)
        return made

    def _replace(self, identity: str, old: Part, new: Part) -> None:
        self._take_out(identity, old)
        self._there[old.node, old.gpu].append((identity, new))

    def _take_out(self, identity: str, part: Part) -> None:
        """Remove an instance from its GPU, unless the removal of its node already did."""
        there = self._there[part.node, part.gpu]
        if (identity, part) in there:
            there.remove((identity, part))

    def _turn(self, entry: PartTurned) -> list[str]:
        identity, index = entry.allocation, entry.index
        who = f"instance {index} of allocation {identity}"
        parts = dict(enumerate(self.allocations.get(identity, ("", []))[1]))
        living = index in parts
        part = parts.get(index) or self.leaving.get(identity, {}).get(index)
        if part is None:
            return [f"{who} is {entry.phase} and is not there"]
        if part.phase is None or living == (entry.phase in (*_LEAVING, Phase.GONE)):
            return [f"{who} was {part.phase or 'just there'} and is {entry.phase}"]
        if entry.phase is Phase.GONE:
            self._take_out(identity, part)
            del self.leaving[identity][index]
            if not self.leaving[identity]:
                del self.leaving[identity]
            return []
        made = msgspec.structs.replace(
            part,
            phase=entry.phase,
            uuid=entry.uuid,
            detail=entry.detail,
            attempts=entry.attempts,
        )
        self._replace(identity, part, made)
        if living:
            self.allocations[identity][1][index] = made
        else:
            self.leaving[identity][index] = made
        return []

    def _block(self, node: str, name: str, found: Foreign) -> list[str]:
        self._unblock(node, name)
        if not found.blocks:
            return []
        model, _ = self._nodes.get(node, ("", 0))
        profile = self._profiles.get((model, found.profile))
        part = Part(
            node=node,
            gpu=found.gpu,
            model=model,
            profile=found.profile,
            start=found.start,
            size=found.size,
            compute=profile.compute if profile is not None else 0,
            memory_gb=0,
        )
        self.foreign[node, name] = part
        return self._put(name, part)

    def _unblock(self, node: str, name: str) -> None:
        part = self.foreign.pop((node, name), None)
        if part is not None:
            self._take_out(name, part)

    def _put(self, identity: str, part: Part) -> list[str]:
        """Put an instance on its GPU in any case, and return the problems with it."""
        who = f"{part.profile} of allocation {identity} at slice {part.start}"
        where = f"GPU {part.gpu} of node {part.node!r}"
        problems: list[str] = []
        there = self._there[part.node, part.gpu]
        for other, its in there:
            if part.start < its.start + its.size and its.start < part.start + part.size:
                problems.append(
                    f"{who} overlaps {its.profile} of allocation {other} at slice {its.start} "
                    f"on {where}"
                )
        there.append((identity, part))
        model, gpus = self._nodes.get(part.node, ("", 0))
        if not 0 <= part.gpu < gpus:
            return [*problems, f"{who} is on {where}, which does not exist"]
        profile = self._profiles.get((model, part.profile))
        if part.model != model or profile is None or part.start not in profile.starts:
            return [*problems, f"{who} is on {where}, where the model {model} does not allow it"]
        if (part.size, part.compute) != (profile.size, profile.compute):
            problems.append(f"{who} on {where} is not as large as its profile")
        return problems + [
            f"the instances on {where} take {taken} of {total} {what}"
            for what, taken, total in self._budgets(model, [its for _, its in there])
            if taken > total
        ]

    def _budgets(self, model: str, parts: list[Part]) -> list[tuple[str, int, int]]:
        geometry = self._models[model]
        profiles = [self._profiles.get((model, part.profile)) for part in parts]
        return [
            ("compute slices", sum(part.compute for part in parts), geometry.compute),
            *(
                (name, sum(p.uses.get(name, 0) for p in profiles if p is not None), total)
                for name, total in geometry.budgets.items()
            ),
        ]

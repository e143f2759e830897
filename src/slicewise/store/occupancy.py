"""Who is where, worked out from the entries alone: the slow twin of the cluster, for `verify`.

It knows nothing of states, masks or indexes. Every GPU is a list of instances, and a new one is
held against each of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from slicewise.control.entries import (
    Allocated,
    AnyEntry,
    Ended,
    GeometryRecord,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeRemoved,
    Part,
    ProfileRecord,
    Served,
)
from slicewise.control.image import Image


class Held(NamedTuple):
    """What a tenant holds, counted."""

    memory_slices: int
    compute_slices: int
    instances: int


class Occupancy:
    """Instances by GPU, and allocations with their instances."""

    def __init__(self) -> None:
        self._models: dict[str, GeometryRecord] = {}
        self._profiles: dict[tuple[str, str], ProfileRecord] = {}
        self._nodes: dict[str, tuple[str, int]] = {}
        self._there: defaultdict[tuple[str, int], list[tuple[str, Part]]] = defaultdict(list)
        self.allocations: dict[str, tuple[str, list[Part]]] = {}
        """By placed allocation: its tenant and its instances."""

    def begin_at(self, image: Image) -> list[str]:
        """Take over what an image says; returns what is wrong with it."""
        for geometry in image.geometries:
            self._enter_model(geometry)
        for node in image.nodes:
            self._nodes[node.name] = node.model, node.gpus
        return [
            problem
            for allocation in image.allocations
            if allocation.parts
            for problem in self._settle(allocation.id, allocation.tenant, allocation.parts)
        ]

    def take(self, entry: AnyEntry) -> list[str]:
        """Take in an entry; returns what is wrong with it."""
        match entry:
            case ModelEntered(geometry):
                self._enter_model(geometry)
            case NodeAdded(node, model, gpus):
                if node in self._nodes:
                    return [f"node {node!r} joins and is there already"]
                if model not in self._models:
                    return [f"node {node!r} has the model {model!r}, which is not known"]
                self._nodes[node] = model, gpus
            case NodeRemoved(node):
                return self._remove_node(node)
            case Allocated(record):
                return self._settle(record.id, record.tenant, record.parts)
            case Served(identity, tenant, parts):
                return self._settle(identity, tenant, parts)
            case Ended(record):
                return self._end(record.id, record.parts)
            case Moved(identity, _, index, part):
                return self._move(identity, index, part)
        return []

    def usage(self) -> dict[str, Held]:
        """What every tenant holds that holds anything."""
        parts_of: defaultdict[str, list[Part]] = defaultdict(list)
        for tenant, parts in self.allocations.values():
            parts_of[tenant] += parts
        return {
            tenant: Held(sum(p.size for p in parts), sum(p.compute for p in parts), len(parts))
            for tenant, parts in parts_of.items()
        }

    def instances_by_node(self) -> dict[str, int]:
        """How many instances are on each node."""
        counts = dict.fromkeys(self._nodes, 0)
        for (node, _), there in self._there.items():
            counts[node] = counts.get(node, 0) + len(there)
        return counts

    def _enter_model(self, geometry: GeometryRecord) -> None:
        self._models[geometry.model] = geometry
        for profile in geometry.profiles:
            self._profiles[geometry.model, profile.name] = profile

    def _remove_node(self, node: str) -> list[str]:
        if self._nodes.pop(node, None) is None:
            return [f"node {node!r} leaves and is not there"]
        gone = [self._there.pop(key) for key in list(self._there) if key[0] == node]
        return [f"node {node!r} leaves with instances on it"] if any(gone) else []

    def _settle(self, identity: str, tenant: str, parts: tuple[Part, ...]) -> list[str]:
        if not parts:
            return [f"allocation {identity} is placed without an instance"]
        if identity in self.allocations:
            return [f"allocation {identity} is placed a second time"]
        self.allocations[identity] = tenant, list(parts)
        return [problem for part in parts for problem in self._put(identity, part)]

    def _end(self, identity: str, parts: tuple[Part, ...]) -> list[str]:
        _, held = self.allocations.pop(identity, ("", []))
        for part in held:
            self._there[part.node, part.gpu].remove((identity, part))
        if held != list(parts):
            return [f"allocation {identity} ends with other instances than it had"]
        return []

    def _move(self, identity: str, index: int, part: Part) -> list[str]:
        _, parts = self.allocations.get(identity, ("", []))
        if not 0 <= index < len(parts):
            return [f"instance {index} of allocation {identity} moves and is not there"]
        problems = self._put(identity, part)  # it is made anew before the old one goes
        old, parts[index] = parts[index], part
        self._there[old.node, old.gpu].remove((identity, old))
        return problems

    def _put(self, identity: str, part: Part) -> list[str]:
        """Put an instance on its GPU, whatever is wrong with that, and say what is."""
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
            return [*problems, f"{who} is on {where}, which there is not"]
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

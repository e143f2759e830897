"""How nodes, their agents and tenants stand: what a state keeps of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from slicewise.control.entries import NodePhase, QuotaRecord, Seconds, Want
from slicewise.control.hardware import Foreign
from slicewise.core.geometry import Geometry
from slicewise.core.request import Need, Request


@dataclass(slots=True)
class AgentStanding:
    """A node's agent, and what it found."""

    session: str
    boot: str
    driver: str
    version: str
    since: Seconds
    gpus: tuple[str, ...]
    """The UUIDs of the node's GPUs, by index."""
    accepted: bool = False
    """Whether an operator accepted a geometry that is not the catalog's."""
    gpu_holds: dict[int, dict[str, str]] = field(default_factory=dict)
    """By GPU that is held for itself: why."""
    foreign: dict[str, Foreign] = field(default_factory=dict)
    """By name: the instances that are no allocation's."""
    evicted: dict[str, None] = field(default_factory=dict)
    """The names of those that are to be destroyed."""
    blocks: dict[str, int] = field(default_factory=dict)
    """By name: what stands for it in the cluster, where its slices are blocked."""


@dataclass(slots=True)
class NodeStanding:
    """A node as the service sees it."""

    name: str
    geometry: Geometry
    gpus: range
    phase: NodePhase
    labels: dict[str, str]
    instances: int = 0
    """Those of allocations, the ones that are leaving included."""
    agent: AgentStanding | None = None
    """None where nobody makes and destroys its instances: they are just there."""
    holds: dict[str, str] = field(default_factory=dict)
    """Why it takes no new instances whatever its phase, by keyword."""
    desired: int = 0
    """The last entry that changed what should be on it."""
    version: int = 0
    """Another one whenever something that is shown of it changes."""


@dataclass(slots=True)
class Usage:
    """What a tenant holds."""

    memory_slices: int = 0
    compute_slices: int = 0
    instances: int = 0


@dataclass(slots=True)
class TenantStanding:
    """A tenant, what it may have and what it has."""

    name: str
    quota: QuotaRecord
    usage: Usage = field(default_factory=Usage)
    allocations: dict[str, None] = field(default_factory=dict)
    """Its living allocations by id, the oldest first."""
    waiting: int = 0
    """How many of them wait in the queue."""
    since: int = 0
    """The entry that created it: what is older is of another tenant, which had the same name."""


@lru_cache(maxsize=1024)  # most ask for one of a few profiles
def request_of(want: Want) -> Request:
    """What is wanted, as the engine understands it."""
    if want.profile is not None:
        return Request(want.profile, want.models)
    return Request(Need(want.compute or 0, want.memory_gb or 0.0), want.models)

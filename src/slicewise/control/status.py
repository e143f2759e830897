"""The status of nodes, agents and tenants in a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from slicewise.core.geometry import Geometry
from slicewise.core.request import Need, Request
from slicewise.journal.agent_entries import Foreign
from slicewise.journal.entries import NodePhase, QuotaRecord, Seconds, TenantRef, Want


@dataclass(slots=True)
class AgentStatus:
    """The agent of a node, and what it reported."""

    session: str
    boot: str
    driver: str
    version: str
    since: Seconds
    gpus: tuple[str, ...]
    """The UUIDs of the node's GPUs, by index."""
    accepted: bool = False
    """Whether an operator accepted a geometry that differs from the catalog's."""
    gpu_holds: dict[int, dict[str, str]] = field(default_factory=dict)
    """The reasons why single GPUs are held, by the GPU's index."""
    foreign: dict[str, Foreign] = field(default_factory=dict)
    """Foreign instances, by name."""
    evicted: dict[str, None] = field(default_factory=dict)
    """The names of foreign instances that the agent must destroy, in order."""
    blocks: dict[str, int] = field(default_factory=dict)
    """The ids in the cluster of foreign instances whose slices are blocked, by name."""


@dataclass(slots=True)
class NodeStatus:
    """A node."""

    name: str
    geometry: Geometry
    gpus: range
    phase: NodePhase
    labels: dict[str, str]
    instances: int = 0
    """The number of instances of allocations, including leaving ones."""
    agent: AgentStatus | None = None
    """None on a node without an agent, where instances exist in the books only."""
    holds: dict[str, str] = field(default_factory=dict)
    """The reasons why it takes no new instances in any phase, by keyword."""
    desired: int = 0
    """The sequence number of the last entry that changed its desired state."""
    version: int = 0
    """Changes whenever a detail changes that views show."""


@dataclass(slots=True)
class Usage:
    """The resources that a tenant holds."""

    memory_slices: int = 0
    compute_slices: int = 0
    instances: int = 0


@dataclass(slots=True)
class TenantStatus:
    """A tenant: its quota and what it holds."""

    ref: TenantRef
    quota: QuotaRecord
    usage: Usage = field(default_factory=Usage)
    allocations: dict[str, None] = field(default_factory=dict)
    """The ids of its allocations that have not ended, oldest first."""
    waiting: int = 0
    """The number of its queued allocations."""

    @property
    def name(self) -> str:
        """The name, unique among existing tenants."""
        return self.ref.name


@lru_cache(maxsize=1024)  # most requests name one of a few profiles
def request_of(want: Want) -> Request:
    """Return the engine's request for a record."""
    if want.profile is not None:
        return Request(want.profile, want.models)
    return Request(Need(want.compute or 0, want.memory_gb or 0.0), want.models)

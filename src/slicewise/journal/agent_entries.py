"""The entries that agents cause, and their records.

A node with an agent is *managed*: its instances exist on hardware, and creating or destroying them
takes time. Each of them has a phase, its slices are free only when it is gone, and instances that
do not belong to an allocation occupy slices too.
"""

from __future__ import annotations

from enum import StrEnum

from slicewise.journal.records import Entry, Record, Seconds, TenantRef


class Phase(StrEnum):
    """The lifecycle phase of an instance on a managed node."""

    PLACED = "placed"
    """Decided; the agent has not begun."""
    CREATING = "creating"
    ACTIVE = "active"
    """It exists and can be used."""
    RELEASING = "releasing"
    """Its allocation has ended; it may still exist."""
    QUARANTINED = "quarantined"
    """Like releasing, after many failed attempts to destroy it."""
    GONE = "gone"


class Foreign(Record, frozen=True):
    """An instance on a managed node that belongs to no allocation."""

    gpu: int
    """The GPU's index on its node."""
    uuid: str
    """Empty for a GPU instance without a compute instance."""
    profile: str
    """Empty if the model has no such profile."""
    start: int
    size: int
    why: str = "foreign"
    """`foreign`, or `stray` if the agent created it for an allocation that is unknown now."""
    blocks: bool = False
    """Whether it occupies its slices in the cluster. If not, its whole GPU is held."""

    @property
    def place(self) -> str:
        """A name for an instance without a UUID."""
        return f"gpu{self.gpu}-{self.profile or 'unknown'}-{self.start}"


class AgentJoined(Entry, frozen=True, tag="agent-joined"):
    """An agent began a session for its node, which ends the session before it."""

    node: str
    session: str
    boot: str
    driver: str
    version: str
    """The version of the agent."""
    since: Seconds
    gpus: tuple[str, ...]
    """The UUIDs of the node's GPUs, by index."""
    rebooted: bool = False
    """Whether the node was restarted since the last session, which destroys every instance."""


class GeometryAccepted(Entry, frozen=True, tag="geometry-accepted"):
    """An operator accepted a node whose driver disagrees with the catalog."""

    node: str


class NodeHeld(Entry, frozen=True, tag="node-held"):
    """The reasons why a node takes no new instances changed."""

    node: str
    reasons: dict[str, str]
    """All current reasons, by keyword; empty if the hold was lifted."""


class GpuHeld(Entry, frozen=True, tag="gpu-held"):
    """The reasons why one GPU takes no new instances changed."""

    node: str
    gpu: int
    reasons: dict[str, str]
    """All current reasons, by keyword; empty if the hold was lifted."""


class PartTurned(Entry, frozen=True, tag="part-turned"):
    """An instance changed its phase or its details. The phase `gone` frees its slices."""

    allocation: str
    tenant: TenantRef
    index: int
    """The instance's index in its allocation."""
    node: str
    phase: Phase
    uuid: str = ""
    detail: str = ""
    attempts: int = 0


class ForeignSeen(Entry, frozen=True, tag="foreign-seen"):
    """A foreign instance was found, or its slices could be blocked at last."""

    node: str
    name: str
    """Its UUID, or its place if it has none."""
    foreign: Foreign


class ForeignEvicted(Entry, frozen=True, tag="foreign-evicted"):
    """An operator ordered the agent to destroy a foreign instance."""

    node: str
    name: str


class ForeignGone(Entry, frozen=True, tag="foreign-gone"):
    """A foreign instance no longer exists, or was adopted by an allocation."""

    node: str
    name: str

"""What agents make of what was decided: their records and entries in the journal.

A node with an agent is *managed*: its instances are really made and destroyed. So each of them has
a phase, a slice is free only when its instance is gone, and what somebody else made there is in
the way.
"""

from __future__ import annotations

from enum import StrEnum

from slicewise.control.records import Entry, Record, Seconds


class Phase(StrEnum):
    """How far an instance on a managed node has come."""

    PLACED = "placed"
    """It was decided, and the agent has not begun."""
    CREATING = "creating"
    ACTIVE = "active"
    """It exists, and can be used."""
    RELEASING = "releasing"
    """Its allocation has ended, and it may still exist."""
    QUARANTINED = "quarantined"
    """As releasing, and destroying it was tried often in vain."""
    GONE = "gone"


class Foreign(Record, frozen=True):
    """An instance on a managed node that is no allocation's."""

    gpu: int
    """The GPU's index on its node."""
    uuid: str
    """Empty where it has none: a GPU instance without a compute instance."""
    profile: str
    """Empty where its model knows no such profile."""
    start: int
    size: int
    why: str = "foreign"
    """`foreign`, or `stray` where the agent made it and nobody asks for it any more."""
    blocks: bool = False
    """Whether its slices are taken in the cluster; if not, its GPU is held instead."""

    @property
    def place(self) -> str:
        """A name for it where it has no UUID."""
        return f"gpu{self.gpu}-{self.profile or 'unknown'}-{self.start}"


class AgentJoined(Entry, frozen=True, tag="agent-joined"):
    """A node's agent began a session; sessions before it are over."""

    node: str
    session: str
    boot: str
    driver: str
    version: str
    """The agent's own."""
    since: Seconds
    gpus: tuple[str, ...]
    """The UUIDs of the node's GPUs, by index."""
    rebooted: bool = False
    """Whether the node was restarted since the last session: no instance is there any more."""


class GeometryAccepted(Entry, frozen=True, tag="geometry-accepted"):
    """An operator accepted a node whose driver does not agree with the catalog."""

    node: str


class NodeHeld(Entry, frozen=True, tag="node-held"):
    """Why a node takes no new instances, by keyword; all reasons there are, perhaps none."""

    node: str
    reasons: dict[str, str]


class GpuHeld(Entry, frozen=True, tag="gpu-held"):
    """Why one GPU takes no new instances, by keyword; all reasons there are, perhaps none."""

    node: str
    gpu: int
    reasons: dict[str, str]


class PartTurned(Entry, frozen=True, tag="part-turned"):
    """An instance came to another phase, or something else about it changed.

    One that is gone leaves its slices free.
    """

    allocation: str
    tenant: str
    index: int
    """Which of its instances."""
    node: str
    phase: Phase
    uuid: str = ""
    detail: str = ""
    attempts: int = 0


class ForeignSeen(Entry, frozen=True, tag="foreign-seen"):
    """An instance that is no allocation's was found, or its slices could be blocked by now."""

    node: str
    name: str
    """Its UUID, or its place where it has none."""
    foreign: Foreign


class ForeignEvicted(Entry, frozen=True, tag="foreign-evicted"):
    """An operator wants such an instance destroyed."""

    node: str
    name: str


class ForeignGone(Entry, frozen=True, tag="foreign-gone"):
    """Such an instance is not there any more, or is an allocation's now."""

    node: str
    name: str

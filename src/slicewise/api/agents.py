"""Agents: their protocol with the service, and the views of agents and foreign instances."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from slicewise.api.base import MAX_GPUS, Body, Labels, Moment, Name, View
from slicewise.journal.entries import GeometryRecord

MAX_PARTS = 16384
"""Instances in a report."""

Short = Annotated[str, Meta(max_length=128)]
Sentence = Annotated[str, Meta(max_length=1024)]
Uuid = Annotated[str, Meta(max_length=128, pattern=r"^[ -~]*$(?!\n)")]
GpuUuid = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[ -~]*$(?!\n)")]
Slice = Annotated[int, Meta(ge=0, le=64)]
Index = Annotated[int, Meta(ge=0, le=1000)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Degrees = Annotated[float, Meta(ge=-300, le=1000)]


class GpuFound(Body, frozen=True):
    """A GPU that an agent found."""

    uuid: GpuUuid
    mig: bool
    problem: Sentence = ""
    """Why it gets no new instances; empty if it is healthy."""


class HelloBody(Body, frozen=True):
    """The start of an agent's session: the node as its driver reports it."""

    boot: Annotated[str, Meta(min_length=1, max_length=128)]
    """The boot id of the node."""
    agent: Short
    driver: Short
    model: Annotated[str, Meta(min_length=1, max_length=64)]
    geometry: GeometryRecord
    gpus: Annotated[tuple[GpuFound, ...], Meta(min_length=1, max_length=MAX_GPUS)]
    """In the driver's order; the position is the GPU's index on the node."""
    life: Annotated[str, Meta(max_length=32, pattern=r"^[a-z0-9]*$(?!\n)")] = ""
    """An id of the agent's process: its own delayed hello does not end its session."""
    disagreements: Annotated[tuple[Sentence, ...], Meta(max_length=64)] = ()
    """Differences between the driver's geometry and the catalog's, one sentence each."""


class SessionView(View, frozen=True):
    """A new session of an agent; it ends the previous one."""

    session: str
    node: str


class DesiredInstance(View, frozen=True):
    """An instance that should be present or absent."""

    allocation: str
    index: int
    gpu: str
    """The GPU's UUID."""
    profile: str
    start: int
    size: int
    wanted: Literal["present", "absent"]
    uuid: str
    """The UUID that the agent reported; empty before the first report."""
    notice: str = ""
    """When it will be absent because its slices are reclaimed, as RFC 3339; empty if unknown."""


class Eviction(View, frozen=True):
    """A foreign instance to destroy, on an operator's request."""

    gpu: str
    uuid: str
    profile: str
    start: int


class DesiredView(View, frozen=True):
    """The desired state of a node; unlisted instances are left alone."""

    seq: int
    """Pass it as `after` to wait for the next change."""
    instances: tuple[DesiredInstance, ...]
    evict: tuple[Eviction, ...]


class GpuReport(GpuFound, frozen=True):
    """The current state of a GPU."""

    temperature: Degrees | None = None
    memory_used: Bytes | None = None


class InstanceReport(Body, frozen=True):
    """The current state of an instance."""

    allocation: Annotated[str, Meta(min_length=1, max_length=64)]
    index: Index
    phase: Literal["creating", "active", "releasing", "gone", "failed", "quarantined"]
    uuid: Uuid = ""
    detail: Sentence = ""
    attempts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    memory_used: Bytes | None = None


class ForeignReport(Body, frozen=True):
    """An instance that the desired state does not contain."""

    gpu: GpuUuid
    uuid: Uuid
    profile: Annotated[str, Meta(max_length=64)]
    start: Slice
    size: Slice
    why: Literal["foreign", "stray"] = "foreign"


class ReportBody(Body, frozen=True):
    """All GPUs and instances that an agent sees on its node."""

    session: Short
    gpus: Annotated[tuple[GpuReport, ...], Meta(max_length=MAX_GPUS)]
    instances: Annotated[tuple[InstanceReport, ...], Meta(max_length=MAX_PARTS)] = ()
    foreign: Annotated[tuple[ForeignReport, ...], Meta(max_length=MAX_PARTS)] = ()


class ReportView(View, frozen=True):
    """A report was accepted."""

    seq: int


class AdoptBody(Body, frozen=True):
    """The owner of an adopted instance."""

    tenant: Name
    labels: Labels = field(default_factory=dict)


class ForeignView(View, frozen=True):
    """A foreign instance: one without an allocation."""

    name: str
    """The name to adopt or evict it by: its UUID, or its placement if it has none."""
    gpu: int
    uuid: str
    profile: str
    start: int
    size: int
    why: Literal["foreign", "stray"]
    blocks: bool
    """Whether its slices are blocked; if not, its GPU is held."""
    evicting: bool


class AgentView(View, frozen=True):
    """The agent of a node."""

    session: str
    since: Moment
    """Start of the session."""
    version: str
    driver: str
    boot: str
    reachable: bool
    last_contact: Moment | None
    """Null if this process had no contact."""

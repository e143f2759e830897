"""What agents and the service say to each other, and what operators see and ask about agents."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from slicewise.control.entries import GeometryRecord
from slicewise.control.wire import MAX_GPUS, Body, Labels, Moment, Name, View

MAX_PARTS = 16384
"""Instances of one node that a report may speak of."""

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
    """What is wrong with it, if so: it then takes no new instances."""


class HelloBody(Body, frozen=True):
    """An agent begins: what its node is, as the driver tells it."""

    boot: Annotated[str, Meta(min_length=1, max_length=128)]
    """Another one after every restart of the node."""
    agent: Short
    driver: Short
    model: Annotated[str, Meta(min_length=1, max_length=64)]
    geometry: GeometryRecord
    gpus: Annotated[tuple[GpuFound, ...], Meta(min_length=1, max_length=MAX_GPUS)]
    """In the driver's order: the position is the GPU's index on the node."""
    life: Annotated[str, Meta(max_length=32, pattern=r"^[a-z0-9]*$(?!\n)")] = ""
    """Of the agent's process: a hello of its own that arrives late does not end it."""
    disagreements: Annotated[tuple[Sentence, ...], Meta(max_length=64)] = ()
    """Where the driver's geometry is not the catalog's, one sentence each."""


class SessionView(View, frozen=True):
    """A session of an agent; those before it are over."""

    session: str
    node: str


class DesiredInstance(View, frozen=True):
    """An instance that should be there, or should not."""

    allocation: str
    index: int
    gpu: str
    """The GPU's UUID."""
    profile: str
    start: int
    size: int
    wanted: Literal["present", "absent"]
    uuid: str
    """By which the service knows it; empty if it does not yet."""


class Eviction(View, frozen=True):
    """An instance that is no allocation's, and that an operator wants destroyed."""

    gpu: str
    uuid: str
    profile: str
    start: int


class DesiredView(View, frozen=True):
    """All that should be on a node; what is not listed is left alone."""

    seq: int
    """Give it as `after` to be told when something changes."""
    instances: tuple[DesiredInstance, ...]
    evict: tuple[Eviction, ...]


class GpuReport(GpuFound, frozen=True):
    """A GPU as it is now."""

    temperature: Degrees | None = None
    memory_used: Bytes | None = None


class InstanceReport(Body, frozen=True):
    """How far an instance has come."""

    allocation: Annotated[str, Meta(min_length=1, max_length=64)]
    index: Index
    phase: Literal["creating", "active", "releasing", "gone", "failed", "quarantined"]
    uuid: Uuid = ""
    detail: Sentence = ""
    attempts: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    memory_used: Bytes | None = None


class ForeignReport(Body, frozen=True):
    """An instance that is on a GPU and was not asked for."""

    gpu: GpuUuid
    uuid: Uuid
    profile: Annotated[str, Meta(max_length=64)]
    start: Slice
    size: Slice
    why: Literal["foreign", "stray"] = "foreign"


class ReportBody(Body, frozen=True):
    """All that an agent sees on its node."""

    session: Short
    gpus: Annotated[tuple[GpuReport, ...], Meta(max_length=MAX_GPUS)]
    instances: Annotated[tuple[InstanceReport, ...], Meta(max_length=MAX_PARTS)] = ()
    foreign: Annotated[tuple[ForeignReport, ...], Meta(max_length=MAX_PARTS)] = ()


class ReportView(View, frozen=True):
    """A report was taken in."""

    seq: int


class AdoptBody(Body, frozen=True):
    """Whose an instance is to be."""

    tenant: Name
    labels: Labels = field(default_factory=dict)


class ForeignView(View, frozen=True):
    """An instance that is no allocation's."""

    name: str
    """By which it is adopted or evicted: its UUID, or its place if it has none."""
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
    """When the session began."""
    version: str
    driver: str
    boot: str
    reachable: bool
    last_contact: Moment | None
    """As far as this process knows."""

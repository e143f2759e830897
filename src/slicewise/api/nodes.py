"""Nodes, their GPUs and the instances on them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from slicewise.api.agents import AgentView, ForeignView
from slicewise.api.base import MAX_GPUS, Body, Cursor, Labels, ModelName, Moment, Name, View
from slicewise.journal.entries import NodePhase


class NodeBody(Body, frozen=True):
    """A node to register."""

    name: Name
    model: ModelName
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)]
    labels: Labels = field(default_factory=dict)


class DrainBody(Body, frozen=True):
    """How to drain a node."""

    evict: bool = False
    """End the allocations on it at once instead of waiting until they end."""


class NodeView(View, frozen=True):
    """A node."""

    name: str
    model: str
    gpus: int
    state: NodePhase
    instances: int
    slices: int
    free_slices: int
    labels: dict[str, str]
    managed: bool = False
    """Whether an agent creates and destroys its instances."""
    holds: dict[str, str] = field(default_factory=dict)
    """Why it takes no new instances although it is ready, by keyword."""
    held_gpus: int = 0
    """GPUs with holds of their own, which get no new instances."""
    foreign: int = 0
    """Instances on it that belong to no allocation."""


class NodePage(View, frozen=True):
    """A page of nodes, by name."""

    nodes: tuple[NodeView, ...]
    next: Cursor


class InstanceView(View, frozen=True):
    """An instance on a GPU."""

    profile: str
    start: int
    size: int
    allocation: str | None
    """Null if it belongs to another tenant."""
    tenant: str | None
    phase: str | None = None
    """Its phase on a node with an agent; `foreign` or `stray` if it belongs to no allocation."""
    memory_used: int | None = None
    """Bytes, as the agent last reported."""


class ReservedView(View, frozen=True):
    """A window on a GPU that is reserved for a queued request.

    What it is reserved for is null if the request belongs to another tenant.
    """

    node: str
    gpu: int
    start: int
    size: int
    tenant: str | None
    profile: str | None
    count: int | None
    """The number of instances of the request."""
    opens_at: Moment | None
    """When the last instance in it ends, if that is known."""


class GpuView(View, frozen=True):
    """A GPU, slice by slice."""

    node: str
    gpu: int
    """Its index on its node."""
    mask: str
    """Its slices, slice 0 first: 1 is taken."""
    fragmentation: int
    """F, windows blocked in part."""
    instances: tuple[InstanceView, ...]
    holds: dict[str, str] = field(default_factory=dict)
    """Why it takes no new instances, by keyword."""
    reserved: ReservedView | None = None
    """The window that is reserved on it."""


class GpuDetail(GpuView, frozen=True):
    """A GPU with what the agent of its node reports."""

    uuid: str | None = None
    mig: bool | None = None
    foreign: tuple[ForeignView, ...] = ()
    """Instances on it that belong to no allocation; only shown to operators."""
    quarantined: int = 0
    """Instances of ended allocations that could not be destroyed."""
    temperature: float | None = None
    """Degrees Celsius, as last reported to this process; not for a tenant's token."""
    memory_used: int | None = None
    """Bytes, as last reported to this process; not for a tenant's token."""


class NodeDetail(NodeView, frozen=True, kw_only=True):
    """A node and its GPUs."""

    devices: tuple[GpuDetail, ...]
    agent: AgentView | None = None

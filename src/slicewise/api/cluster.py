"""The cluster as a whole, GPU models, and policies."""

from __future__ import annotations

from msgspec import field

from slicewise.api.base import Fragmentation, View
from slicewise.api.nodes import GpuView, NodeView


class ModelUse(View, frozen=True):
    """Free capacity of the GPUs of one model."""

    model: str
    gpus: int
    schedulable_gpus: int
    slices: int
    free_slices: int
    placements: dict[str, int]
    """By profile: the windows open to it on schedulable GPUs, each start counted."""
    fits: dict[str, int]
    """By profile: the schedulable GPUs that could take one now."""


class ClusterView(View, frozen=True):
    """The cluster as a whole."""

    seq: int
    """The last journal entry this reflects."""
    history: str
    """The id of the journal's history; a restore starts a new one."""
    policy: str
    gpus: int
    active_gpus: int
    """GPUs with at least one instance."""
    slices: int
    free_slices: int
    instances: int
    waiting: int
    """The length of the queue; for a tenant's token, the number of its own entries."""
    fragmentation: Fragmentation
    """Mean over all GPUs."""
    models: tuple[ModelUse, ...]
    nodes: tuple[NodeView, ...]
    devices: tuple[GpuView, ...] | None
    """Every GPU, if requested."""


class ProfileView(View, frozen=True):
    """A profile of a GPU model."""

    name: str
    size: int
    compute: int
    memory_gb: float
    starts: tuple[int, ...]
    variant_of: str | None
    uses: dict[str, int] = field(default_factory=dict)
    """What it takes of the model's budgets, beyond compute."""


class ModelView(View, frozen=True):
    """A GPU model."""

    name: str
    aliases: tuple[str, ...]
    memory_gb: float
    slices: int
    compute_slices: int
    in_use: bool
    refusal: str | None
    """Why it cannot be scheduled, if it cannot."""
    profiles: tuple[ProfileView, ...]
    budgets: dict[str, int] = field(default_factory=dict)
    """Resources shared by the instances of one GPU beyond slices and compute, with amounts."""


class ModelList(View, frozen=True):
    """All GPU models."""

    models: tuple[ModelView, ...]


class PolicyView(View, frozen=True):
    """A policy."""

    name: str
    summary: str
    in_use: bool


class PolicyList(View, frozen=True):
    """All policies."""

    policies: tuple[PolicyView, ...]

"""The entry of one GPU model in the catalog, schedulable or not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry


class Level(StrEnum):
    """How well a fact is known."""

    PRIMARY = "primary"
    """Read from NVIDIA's tables or from a real GPU."""
    SECONDARY = "secondary"
    """Read from configuration files or third parties."""
    INFERRED = "inferred"
    """Assumed from models of the same family, or derived from other figures."""
    UNKNOWN = "unknown"
    """Not found."""


@dataclass(frozen=True)
class Confidence:
    """How well the parts of an entry are known."""

    profiles: Level
    """Names, counts and sizes of the profiles."""
    placements: Level
    """Where the profiles may start."""
    engines: Level
    """Copy and media engines, hence most budgets."""


@dataclass(frozen=True)
class Engines:
    """The copy and media engines an instance gets."""

    copy: int
    decoder: int
    encoder: int
    jpeg: int
    ofa: int


@dataclass(frozen=True)
class ProfileFacts:
    """The hardware facts of a profile, without its starts; None is unknown."""

    name: str
    size: int
    compute: int
    memory_gb: float
    variant_of: str | None = None
    id: int | None = None
    """The id nvidia-smi prints and accepts."""
    nvml_enum: int | None = None
    """The number of NVML's GPU instance profile constant, which is not the id."""
    max_instances: int | None = None
    """How many an empty GPU can hold."""
    sm_count: int | None = None
    memory_mib: float | None = None
    memory_gib: float | None = None
    engines: Engines | None = None


@dataclass(frozen=True, eq=False)
class CatalogEntry:
    """One GPU model of the catalog.

    Exactly one of ``geometry`` and ``refusal`` is set: a model with unknown placements is listed
    but cannot be scheduled.
    """

    model: str
    aliases: tuple[str, ...]
    architecture: str
    memory_gb: float
    memory_slices: int
    compute_slices: int
    confidence: Confidence | None
    """None if the file does not state it, as in most users' files."""
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    pci_device_ids: tuple[str, ...]
    facts: tuple[ProfileFacts, ...]
    geometry: Geometry | None
    refusal: str | None
    """Why the model cannot be scheduled."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's name, then its aliases."""
        return (self.model, *self.aliases)

    def require(self) -> Geometry:
        """Return the geometry; raise an error with the reason if there is none."""
        if self.geometry is None:
            raise SlicewiseError(f"{self.model} cannot be scheduled: {self.refusal}")
        return self.geometry

    def __repr__(self) -> str:
        return f"Entry({self.model})"

"""What a tenant asks for, and what it is told: a placement, or a rejection with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile


@dataclass(frozen=True, slots=True)
class Need:
    """A request in words of need: at least this much compute and memory, on any fitting profile."""

    compute: int
    memory_gb: float

    def __post_init__(self) -> None:
        if self.compute < 0 or not 0 <= self.memory_gb < 1e9:
            raise SlicewiseError(
                f"a need of {self.compute} compute slices and {self.memory_gb} GB is negative, "
                "not a number, or more than there is"
            )

    def __str__(self) -> str:
        slices = "slice" if self.compute == 1 else "slices"
        return f"{self.compute} compute {slices} and {self.memory_gb:g} GB"


@dataclass(frozen=True, slots=True)
class Request:
    """One instance wanted: a profile by name or a need, on these models (any unless named)."""

    want: str | Need
    models: tuple[str, ...] = ()

    def candidates(self, geometry: Geometry) -> tuple[tuple[Fraction, Profile], ...]:
        """The profiles of a model that would serve, each with the share of a GPU it would waste.

        Waste is what the tenant would get and did not ask for: the mean of the surplus shares of
        the GPU's memory and compute. A named profile wastes nothing.
        """
        if self.models and geometry.model not in self.models:
            return ()
        if isinstance(self.want, str):
            if not geometry.has(self.want):
                return ()
            return ((Fraction(0), geometry.profile(self.want)),)
        need = self.want
        return tuple(
            (_waste(geometry, profile, need), profile)
            for profile in geometry.plain_profiles
            if profile.compute >= need.compute and profile.memory_gb >= need.memory_gb
        )

    def least_size(self, geometry: Geometry) -> int:
        """The memory slices that it takes at least on a model that can serve it."""
        return min(profile.size for _, profile in self.candidates(geometry))

    def __str__(self) -> str:
        on = f" on {' or '.join(self.models)}" if self.models else ""
        return f"{self.want}{on}"


def _waste(geometry: Geometry, profile: Profile, need: Need) -> Fraction:
    compute = Fraction(profile.compute - need.compute, geometry.compute)
    surplus_gb = Fraction(profile.memory_gb) - Fraction(need.memory_gb)
    memory = surplus_gb / Fraction(geometry.memory_gb) if geometry.memory_gb else Fraction(0)
    return (compute + memory) / 2


class Reason(StrEnum):
    """Why a request was rejected."""

    CAPACITY = "capacity"
    """No GPU has enough free slices, or enough of another budget."""
    FRAGMENTED = "fragmented"
    """Enough slices are free on some GPU, but every legal window there is blocked."""
    UNKNOWN_PROFILE = "unknown profile"
    """No GPU model of this cluster offers what was asked for."""
    RESERVED = "reserved"
    """A window is open, but it is reserved for a request that has waited longer."""
    OWN_RESERVATION = "own reservation"
    """A window is reserved for this request, and the instances in it have not ended yet."""
    HELD = "held back"
    """It was reclaimed, and is not placed before the tenant that claimed the slices has them."""
    QUOTA = "quota"
    """The tenant has reached its quota; requests of other tenants are not affected."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that was not placed, with the reason as a value and as a sentence."""

    request: Request
    reason: Reason
    detail: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.detail

"""A policy whose table is chosen for the demand: the default.

A *choice* is a form of table and the profiles that tenants ask for. Rehearsals find it: they
simulate the forms on the demand as it was seen (`engine/rehearsal.py`). Until then, and whenever
something is asked for that the choice does not know, the table is that of `least-lost`.

The policy only carries out the choice in force. Its owner changes it, because a choice is a fact
that a service must record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Request
from slicewise.policies.base import AdaptivePolicy, Key, TablePolicy
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost import LeastLost
from slicewise.policies.least_lost_time import LeastLostTime

if TYPE_CHECKING:
    from slicewise.core.cluster import Cluster

FORMS: Mapping[str, str] = {
    "least-lost": "fewest legal placements lost",
    "least-lost-asked-for": "fewest placements of what tenants ask for lost",
    "time": "keeps the places your tenants ask for shut for the shortest time",
    "time-stranding-1": "the same, with less regard to slices that no place can use",
    "time-stranding-0": "the same, without regard to slices that no place can use",
    "time-all-profiles": "keeps places of all profiles shut for the shortest time",
    "time-scarce": "the same as time, and places of profiles with few starts count eight times",
    "time-scarce-stranding-1": "the same, with less regard to slices that no place can use",
    "time-shares": "the same as time, and places of rare profiles count less",
    "time-roots": "the same as time, and places of large profiles count less",
}
"""Every form of table that is rehearsed, in words."""

LEAST_LOST = "least-lost"

_STRANDING = {"stranding-1": 1.0, "stranding-0": 0.0}
_SCARCE = 8.0
_COMMON = 0.15
"""From this share on, a profile counts fully in the form that counts rare ones less."""
_STEPS = 4
"""Shares are rounded to so many steps below that, so that a table lasts while they vary."""


@dataclass(frozen=True)
class Choice:
    """Which table decides."""

    form: str = LEAST_LOST
    asked_for: tuple[str, ...] = ()
    """The plain profiles that requests ask for; empty for `least-lost`, for which all count."""
    weights: tuple[tuple[str, float], ...] = ()
    """By profile, how much its places count; 1 if it is not named."""
    leases: bool = False
    """Whether known ends of instances count."""
    mean_lifetime: float = 0.0
    """The mean lifetime, by which the times of known ends are judged."""

    @property
    def name(self) -> str:
        """The form, and whether leases count."""
        return f"{self.form}+leases" if self.leases else self.form

    def covers(self, request: Request, geometries: Iterable[Geometry]) -> bool:
        """Whether the choice knows what a request asks for on these GPU models."""
        if not self.asked_for:
            return True
        return all(
            profile is None or profile.name in self.asked_for
            for geometry in geometries
            for profile in (asked_profile(request, geometry),)
        )


DEFAULT_CHOICE = Choice()


def asked_profile(request: Request, geometry: Geometry) -> Profile | None:
    """Return the plain profile that serves a request with the least waste, or None."""
    candidates = request.candidates(geometry)
    if not candidates:
        return None
    profile = min(candidates, key=lambda candidate: candidate[0])[1]
    return geometry.profile(profile.variant_of) if profile.variant_of else profile


def forms_for(
    shares: Mapping[Request, float], geometries: Iterable[Geometry]
) -> tuple[Choice, ...]:
    """Return a choice for each form that makes a difference for this demand, `least-lost` first.

    Requests with a share of zero count as asked for.
    """
    asked: dict[str, float] = {}
    scarce: set[str] = set()
    sizes: dict[str, int] = {}
    everything: set[str] = set()
    for geometry in geometries:
        here: dict[Profile, float] = {}
        for request, share in shares.items():
            profile = asked_profile(request, geometry)
            if profile is not None:
                here[profile] = here.get(profile, 0.0) + share
        for profile in geometry.plain_profiles:
            if here:
                everything.add(profile.name)
            if profile in here:
                asked[profile.name] = max(asked.get(profile.name, 0.0), here[profile])
                sizes[profile.name] = profile.size
                scarce |= {profile.name} if is_scarce(profile, geometry) else set()
    if not asked:
        return (DEFAULT_CHOICE,)
    different: dict[TablePolicy, Choice] = {}
    for form in FORMS:
        names = tuple(asked)
        weights: dict[str, float] = {}
        match form:
            case "least-lost":
                names = ()
            case "least-lost-asked-for" if len(asked) == len(everything):
                continue
            case "time-all-profiles":
                if len(asked) == len(everything):
                    continue
            case "time-scarce" | "time-scarce-stranding-1":
                weights = dict.fromkeys((name for name in asked if name in scarce), _SCARCE)
            case "time-shares":
                weights = {name: _part(share) for name, share in asked.items()}
            case "time-roots":
                weights = {name: round(32 * sizes[name] ** -0.5) / 32 for name in asked}
        counted = tuple((name, weight) for name, weight in weights.items() if weight != 1)
        choice = Choice(form, names, counted)
        different.setdefault(table_for(choice), choice)
    return tuple(different.values())


def _part(share: float) -> float:
    """How much the places of a profile with this share count, in few steps."""
    return min(1.0, max(1, round(_STEPS * share / _COMMON)) / _STEPS)


def is_scarce(profile: Profile, geometry: Geometry) -> bool:
    """Whether a profile starts at half of the places or fewer that its size would leave it."""
    places = geometry.slices // profile.size
    return places > 1 and 2 * len(profile.starts) <= places


@lru_cache(256)
def table_for(choice: Choice) -> LeastLost | LeastLostTime | LeaseAware:
    """Return the table of a choice; the same one for the same choice, as rows are kept by table."""
    if choice.leases:
        base = table_for(replace(choice, leases=False, mean_lifetime=0.0))
        if isinstance(base, LeastLostTime):
            return LeaseAware(base, choice.mean_lifetime)
        return base  # the count of lost placements knows no time
    asked_for = frozenset(choice.asked_for)
    match choice.form:
        case "least-lost":
            return LeastLost()
        case "least-lost-asked-for":
            return LeastLost(asked_for)
        case "time-all-profiles":
            return LeastLostTime()
    stranding = next(
        (value for suffix, value in _STRANDING.items() if choice.form.endswith(suffix)), 4.0
    )
    # A whole-GPU profile may be asked for that never was: all forms leave empty GPUs for it.
    return LeastLostTime(asked_for, stranding, choice.weights, spares=True)


class Rehearsed(AdaptivePolicy):
    """The table that suits the demand best in rehearsals, and `least-lost` unless one is better."""

    name = "rehearsed"
    summary = "The table that suits the demand best, least-lost unless one is better (the default)."

    def __init__(self, choice: Choice = DEFAULT_CHOICE) -> None:
        self.use(choice)

    @property
    def choice(self) -> Choice:
        """The choice in force."""
        return self._choice

    def use(self, choice: Choice) -> None:
        """Decide by another choice from now on."""
        self._choice, self._table = choice, table_for(choice)

    def table(self, cluster: Cluster) -> TablePolicy:
        """The table of the choice in force."""
        return self._table

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """In the words of the table in force."""
        return self._table.in_words(key, geometry)

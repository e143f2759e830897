"""Scenarios: tenants that share a cluster, each with its own mix, part of the load, and bursts.

In every slot one tenant, drawn at random, asks for an instance. Some tenants ask for many at once
instead: these bursts come once in every period, at a random moment of it. Lifetimes are uniform, as
in the steady experiment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Request
from slicewise.lab.mix import Mix
from slicewise.lab.workload import Ints, draw_kinds, longest_lifetime, run_generator

_STREAM_OF_LEASES = 1
"""Leases have their own random stream, so that arrivals do not depend on them."""


@dataclass(frozen=True)
class Tenant:
    """A tenant of a scenario."""

    name: str
    load: float
    """Its part of the offered slices; the parts of all tenants are scaled to a sum of 1."""
    mix: Mix
    """What it asks for."""
    weight: float = 1.0
    burst: int = 1
    """How many of its requests come at once."""
    guarantee: float = 0.0
    """The part of the cluster's slices that it is guaranteed, where that is reclaimed."""

    def __post_init__(self) -> None:
        if self.load <= 0 or self.burst < 1:
            raise SlicewiseError(
                f"tenant {self.name!r} needs a load above 0 and bursts of at least 1"
            )


@dataclass(frozen=True)
class Scenario:
    """Tenants on GPUs of one model."""

    name: str
    geometry: Geometry
    tenants: tuple[Tenant, ...]
    affected: tuple[str, ...] = ()
    """The tenants that the others harm; they have figures of their own."""

    def __post_init__(self) -> None:
        if all(tenant.burst > 1 for tenant in self.tenants):
            raise SlicewiseError(f"scenario {self.name!r} needs a tenant without bursts")

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """The profiles that are asked for."""
        asked = {profile for tenant in self.tenants for profile in tenant.mix.profiles}
        return tuple(profile for profile in self.geometry.plain_profiles if profile in asked)

    @property
    def requests(self) -> tuple[Request, ...]:
        """A request for each profile."""
        return tuple(Request(profile.name) for profile in self.profiles)

    @property
    def turns(self) -> tuple[float, ...]:
        """By tenant: the probability that a slot is its own."""
        rates = [t.load / (t.burst * t.mix.mean_size) for t in self.tenants]
        return tuple(rate / sum(rates) for rate in rates)

    @property
    def requests_per_slot(self) -> float:
        """The mean number of requests that arrive in a slot."""
        return sum(p * t.burst for p, t in zip(self.turns, self.tenants, strict=True))

    @property
    def mix(self) -> Mix:
        """The requests of all tenants together."""
        counts = dict.fromkeys(self.profiles, 0.0)
        for turn, tenant in zip(self.turns, self.tenants, strict=True):
            for profile, part in zip(tenant.mix.profiles, tenant.mix.probabilities, strict=True):
                counts[profile] += turn * tenant.burst * part
        total = sum(counts.values())
        return Mix(
            self.name, self.geometry, self.profiles, tuple(n / total for n in counts.values())
        )

    def longest_lifetime(self, gpus: int, load: float) -> int:
        """The longest lifetime in slots at which the offered load is ``load``."""
        return longest_lifetime(self.mix, gpus, load, self.requests_per_slot)


class Asked(NamedTuple):
    """A request that arrives."""

    number: int
    slot: int
    tenant: int
    kind: int
    """Its profile, by index among those of the scenario."""
    lifetime: int
    """How long it runs once placed, in slots."""
    stretch: float
    """By which factor its tenant would overestimate that."""


Stream = list[list[Asked]]
"""The requests of every slot."""


def draw(
    scenario: Scenario, seed: int, run: int, slots: int, longest: int, most_stretch: float
) -> Stream:
    """Draw the requests of a run: the same for every policy and discipline."""
    rng = run_generator(seed, run)
    tenants = scenario.tenants
    turn = _draw_turns(rng, scenario, slots)
    bursts = np.array([tenant.burst for tenant in tenants], np.int64)
    owner = np.repeat(turn, bursts[turn])
    at = np.repeat(np.arange(slots), bursts[turn])
    kinds = _draw_kinds(rng, scenario, owner)
    lifetimes = rng.integers(1, longest, size=len(owner), endpoint=True)
    of_leases = np.random.default_rng(
        np.random.SeedSequence(seed, spawn_key=(run, _STREAM_OF_LEASES))
    )
    stretches = of_leases.uniform(1.0, most_stretch, size=len(owner))
    stream: Stream = [[] for _ in range(slots)]
    columns = (at, owner, kinds, lifetimes, stretches)
    for number, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        stream[row[0]].append(Asked(number, *row))
    return stream


def _draw_turns(rng: np.random.Generator, scenario: Scenario, slots: int) -> Ints:
    """Draw the tenant of every slot."""
    turns = np.array(scenario.turns)
    steady = np.array([tenant.burst == 1 for tenant in scenario.tenants])
    edges = np.cumsum(np.where(steady, turns, 0.0)) / turns[steady].sum()
    turn = np.searchsorted(edges, rng.random(slots), side="right").astype(np.int64)
    for number in np.flatnonzero(~steady):
        periods = np.arange(int(slots * turns[number]) + 1)
        moments = ((periods + rng.random(len(periods))) / turns[number]).astype(np.int64)
        turn[moments[moments < slots]] = number
    return turn


def _draw_kinds(rng: np.random.Generator, scenario: Scenario, owner: Ints) -> Ints:
    """Draw a profile for every request, by its tenant."""
    place = {profile: kind for kind, profile in enumerate(scenario.profiles)}
    kinds = np.empty(len(owner), np.int64)
    for number, tenant in enumerate(scenario.tenants):
        mine = owner == number
        wanted = np.array([place[profile] for profile in tenant.mix.profiles])
        kinds[mine] = wanted[draw_kinds(rng, tenant.mix, int(mine.sum()))]
    return kinds


# The scenarios by name


def _mix(geometry: Geometry, parts: Mapping[Profile, float]) -> Mix:
    total = sum(parts.values())
    name = ",".join(f"{profile.name}={part / total:.3g}" for profile, part in parts.items())
    return Mix(name, geometry, tuple(parts), tuple(part / total for part in parts.values()))


def _every(geometry: Geometry) -> Mix:
    return _mix(geometry, dict.fromkeys(geometry.plain_profiles, 1.0))


def _largest(geometry: Geometry) -> Mix:
    return _mix(geometry, {max(geometry.plain_profiles, key=lambda profile: profile.size): 1.0})


def _smaller(geometry: Geometry) -> Mix:
    largest = _largest(geometry).profiles
    return _mix(geometry, {p: 1.0 for p in geometry.plain_profiles if p not in largest})


def _small(geometry: Geometry) -> Mix:
    """At most a quarter of a GPU; the variants with more memory are rare."""
    fitting = [p for p in geometry.plain_profiles if 4 * p.size <= geometry.slices]
    return _mix(geometry, {p: 1.0 if p.size > p.compute else 5.0 for p in fitting})


def _flood(geometry: Geometry) -> Scenario:
    others, names = _smaller(geometry), ("ana", "bob", "cem")
    return Scenario(
        "flood",
        geometry,
        (
            Tenant("flood", 0.5, _largest(geometry), burst=40),
            *(Tenant(name, 0.5 / 3, others, guarantee=0.15) for name in names),
        ),
        affected=names,
    )


def _starving(geometry: Geometry) -> Scenario:
    return Scenario(
        "starving",
        geometry,
        (
            Tenant("large", 0.1, _largest(geometry), guarantee=0.15),
            *(Tenant(name, 0.3, _small(geometry)) for name in ("ana", "bob", "cem")),
        ),
        affected=("large",),
    )


def _even(geometry: Geometry) -> Scenario:
    every = _every(geometry)
    return Scenario(
        "even",
        geometry,
        tuple(Tenant(name, 0.25, every, guarantee=0.2) for name in ("ana", "bob", "cem", "dia")),
    )


def _weights(geometry: Geometry) -> Scenario:
    every = _every(geometry)
    return Scenario(
        "weights",
        geometry,
        (
            Tenant("triple", 0.4, every, weight=3.0, burst=40, guarantee=0.3),
            Tenant("single", 0.4, every, burst=40, guarantee=0.1),
            Tenant("little", 0.2, every, guarantee=0.2),
        ),
    )


SCENARIOS: dict[str, tuple[Callable[[Geometry], Scenario], str]] = {
    "flood": (_flood, "one tenant asks for many of the largest instances at once"),
    "starving": (_starving, "a steady stream of small instances leaves no GPU empty"),
    "even": (_even, "four equal tenants"),
    "weights": (_weights, "two tenants with bursts, one of three times the weight"),
}
"""By name: how a scenario is made for a GPU model, and what happens in it."""


def scenario(name: str, geometry: Geometry) -> Scenario:
    """Return a scenario by name; the error for an unknown one names close names."""
    if name not in SCENARIOS:
        raise UnknownNameError("scenario", name, SCENARIOS)
    return SCENARIOS[name][0](geometry)

"""What a GPU model allows: its slices, its profiles, and where each may start.

A GPU has memory slices 0..S-1. A profile takes a contiguous window of ``size`` slices at one of
its legal starts; two instances may coexist when their windows do not overlap and no *budget* is
overdrawn. A budget is anything else the instances of one GPU share: compute slices always, and
whatever the hardware hands out only once (the media extension of ``+me`` profiles, say).
A set of slices is an int mask: bit i stands for slice i.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from slicewise.core.errors import GeometryError, UnknownNameError

MAX_SLICES = 16
"""Tables span every mask, so a GPU may have at most this many slices (65,536 masks)."""

COMPUTE = "compute"
"""The budget every model has: its compute slices."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_~-]*")


@dataclass(frozen=True, eq=False)
class Profile:
    """A kind of instance: how much it takes and at which slices it may start."""

    name: str
    size: int
    """Memory slices of its window."""
    compute: int
    """Compute slices."""
    memory_gb: float
    starts: tuple[int, ...]
    preferred: tuple[int, ...] = ()
    """The same starts in the order the driver itself tries them; ascending when not given."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """What it takes of the model's budgets, beyond compute."""
    variant_of: str | None = None
    """The plain profile whose window it shares; variants are not counted in fragmentation."""

    @property
    def start_order(self) -> tuple[int, ...]:
        """Starts from most to least preferred."""
        return self.preferred or self.starts

    def window(self, start: int) -> int:
        """The mask of the slices taken by an instance at ``start``."""
        return ((1 << self.size) - 1) << start

    def __repr__(self) -> str:
        return f"Profile({self.name})"


@dataclass(frozen=True)
class Budget:
    """Something the instances of one GPU share, of which there is only so much."""

    name: str
    total: int


class Placement(NamedTuple):
    """A profile at one of its legal starts; the placements of a model are numbered."""

    number: int
    profile: Profile
    start: int
    window: int


@dataclass(frozen=True, eq=False)
class Geometry:
    """One GPU model, checked: everything about where instances can go.

    >>> Geometry("tiny", slices=2, compute=2, profiles=(Profile("1g", 1, 1, 5, (0, 1)),)).slices
    2
    """

    model: str
    slices: int
    compute: int
    profiles: tuple[Profile, ...]
    memory_gb: float = 0
    budgets: tuple[Budget, ...] = ()
    """Shared resources beyond compute slices."""

    def __post_init__(self) -> None:
        _check_name("model", self.model)
        if not 1 <= self.slices <= MAX_SLICES:
            raise GeometryError("memory_slices", f"{self.slices} is not in 1..{MAX_SLICES}")
        if self.compute < 1:
            raise GeometryError("compute_slices", f"{self.compute} is not positive")
        if not 0 <= self.memory_gb < math.inf:
            raise GeometryError("memory_gb", f"{self.memory_gb} is not an amount")
        if not self.profiles:
            raise GeometryError("profile", "a GPU needs at least one profile")
        seen: set[str] = set()
        for budget in self.budgets:
            _check_name("budget.name", budget.name)
            where = f"budget {budget.name}"
            if budget.name in seen or budget.name == COMPUTE:
                raise GeometryError(where, "the name is taken")
            if budget.total < 0:
                raise GeometryError(f"{where}.total", f"{budget.total} is negative")
            seen.add(budget.name)
        names: set[str] = set()
        for profile in self.profiles:
            self._check_profile(profile)
            if profile.name in names:
                raise GeometryError(f"profile {profile.name}", "named twice")
            names.add(profile.name)
        for profile in self.profiles:
            if profile.variant_of is not None and profile.variant_of not in names:
                raise GeometryError(
                    f"profile {profile.name}.variant_of", f"no profile {profile.variant_of!r}"
                )
        if not self.plain_profiles:
            raise GeometryError("profile", "every profile is a variant of another")

    def _check_profile(self, profile: Profile) -> None:
        _check_name("profile.name", profile.name)
        where = f"profile {profile.name}"
        if not 1 <= profile.size <= self.slices:
            raise GeometryError(f"{where}.size", f"{profile.size} is not in 1..{self.slices}")
        if not 0 <= profile.compute <= self.compute:
            raise GeometryError(
                f"{where}.compute", f"{profile.compute} is not in 0..{self.compute}"
            )
        if not 0 <= profile.memory_gb < math.inf:
            raise GeometryError(f"{where}.memory_gb", f"{profile.memory_gb} is not an amount")
        if not profile.starts:
            raise GeometryError(f"{where}.starts", "needs at least one legal start")
        if list(profile.starts) != sorted(set(profile.starts)):
            raise GeometryError(f"{where}.starts", "must ascend without repeats")
        for start in profile.starts:
            if start < 0 or start + profile.size > self.slices:
                raise GeometryError(
                    f"{where}.starts",
                    f"a window of {profile.size} at {start} leaves the GPU's "
                    f"slices 0..{self.slices - 1}",
                )
        if profile.preferred and sorted(profile.preferred) != list(profile.starts):
            raise GeometryError(f"{where}.preferred", "must hold exactly the legal starts")
        totals = {budget.name: budget.total for budget in self.budgets}
        for name, amount in profile.uses.items():
            if name not in totals:
                raise GeometryError(f"{where}.uses", f"no budget {name!r} on this model")
            if not 0 <= amount <= totals[name]:
                raise GeometryError(f"{where}.uses.{name}", f"{amount} is not in 0..{totals[name]}")

    @cached_property
    def all_budgets(self) -> tuple[Budget, ...]:
        """Compute slices first, then the model's own budgets."""
        return (Budget(COMPUTE, self.compute), *self.budgets)

    @cached_property
    def plain_profiles(self) -> tuple[Profile, ...]:
        """The profiles that count in fragmentation: no variants."""
        return tuple(p for p in self.profiles if p.variant_of is None)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Every profile at every legal start, numbered."""
        pairs = [(profile, start) for profile in self.profiles for start in profile.starts]
        return tuple(
            Placement(number, profile, start, profile.window(start))
            for number, (profile, start) in enumerate(pairs)
        )

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The windows of all placements, each once, ascending."""
        return tuple(sorted({placement.window for placement in self.placements}))

    @cached_property
    def _by_name(self) -> dict[str, Profile]:
        return {profile.name: profile for profile in self.profiles}

    @cached_property
    def _by_place(self) -> dict[tuple[str, int], Placement]:
        return {(p.profile.name, p.start): p for p in self.placements}

    @property
    def full(self) -> int:
        """The mask of a GPU with every slice taken."""
        return (1 << self.slices) - 1

    def has(self, profile: str) -> bool:
        """Whether the model knows a profile of that name."""
        return profile in self._by_name

    def profile(self, name: str) -> Profile:
        """The profile of that name; an unknown one is refused with the close ones."""
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownNameError(f"profile on {self.model}", name, self._by_name) from None

    def placement(self, profile: str, start: int) -> Placement | None:
        """That profile at that start, or None where the hardware does not offer it."""
        return self._by_place.get((profile, start))

    def needs(self, profile: Profile) -> tuple[int, ...]:
        """What an instance takes of each of ``all_budgets``."""
        return (profile.compute, *(profile.uses.get(b.name, 0) for b in self.budgets))

    def mask(self, text: str) -> int:
        """The mask written slice by slice, slice 0 first: ``11000100`` is {0, 1, 5}."""
        if len(text) != self.slices or set(text) - {"0", "1"}:
            raise GeometryError(
                "mask", f"{text!r} is not {self.slices} digits 0 or 1, slice 0 first"
            )
        return sum(1 << i for i, digit in enumerate(text) if digit == "1")

    def mask_text(self, mask: int) -> str:
        """The mask slice by slice, slice 0 first."""
        return "".join("1" if mask >> i & 1 else "0" for i in range(self.slices))

    def __repr__(self) -> str:
        return f"Geometry({self.model})"


def _check_name(where: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise GeometryError(
            where, f"{name!r} is not a name (letters, digits, '.', '+', '-', '_', '~', no spaces)"
        )

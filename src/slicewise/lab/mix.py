"""Mixes: distributions of requests over the profiles of a GPU model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.geometry import Geometry, Profile

_SHAPES = ((7, 8), (4, 4), (3, 4), (2, 2), (1, 2), (1, 1))
"""Compute and memory slices of the six plain profiles of an A100, largest first."""

PUBLISHED: dict[str, tuple[float, ...]] = {
    "uniform": (1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6),
    "skew-small": (0.05, 0.10, 0.10, 0.20, 0.25, 0.30),
    "skew-big": (0.30, 0.25, 0.20, 0.10, 0.10, 0.05),
    "bimodal": (0.30, 0.15, 0.05, 0.05, 0.15, 0.30),
}
"""The paper's distributions over those six profiles (its Table II)."""

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Mix:
    """A distribution over the profiles of one GPU model."""

    name: str
    geometry: Geometry
    profiles: tuple[Profile, ...]
    probabilities: tuple[float, ...]

    @property
    def mean_size(self) -> float:
        """The mean size of a request in memory slices."""
        pairs = zip(self.profiles, self.probabilities, strict=True)
        return sum(profile.size * probability for profile, probability in pairs)


def parse_mix(text: str, geometry: Geometry) -> Mix:
    """Return a mix by published name, or from text such as ``1g.10gb=0.5,7g.80gb=0.5``."""
    if "=" in text:
        return _parse_custom(text, geometry)
    if text == "uniform":
        profiles = geometry.plain_profiles
        return Mix(text, geometry, profiles, (1 / len(profiles),) * len(profiles))
    if text not in PUBLISHED:
        raise UnknownNameError("distribution", text, PUBLISHED)
    by_shape = {(p.compute, p.size): p for p in geometry.plain_profiles}
    if set(by_shape) != set(_SHAPES):
        raise SlicewiseError(
            f"distribution {text!r} is defined over the six profiles of an A100; "
            f"{geometry.model} has others: write it out, as in "
            f"{geometry.plain_profiles[0].name}=0.5,{geometry.plain_profiles[-1].name}=0.5"
        )
    return Mix(text, geometry, tuple(by_shape[shape] for shape in _SHAPES), PUBLISHED[text])


def _parse_custom(text: str, geometry: Geometry) -> Mix:
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            share = float(number)
        except ValueError:
            raise SlicewiseError(
                f"distribution {text!r}: {part.strip()!r} is not PROFILE=PROBABILITY"
            ) from None
        if not (math.isfinite(share) and share >= 0):
            raise SlicewiseError(f"distribution {text!r}: the probability of {name} is {number}")
        if geometry.profile(name).name in shares:
            raise SlicewiseError(f"distribution {text!r}: {name} is named twice")
        shares[name] = share
    total = math.fsum(shares.values())
    if abs(total - 1) > _TOLERANCE:
        raise SlicewiseError(f"distribution {text!r} sums to {total:g}, not to 1")
    shares = {name: share for name, share in shares.items() if share > 0}
    profiles = tuple(geometry.profile(name) for name in shares)
    return Mix(text, geometry, profiles, tuple(share / total for share in shares.values()))

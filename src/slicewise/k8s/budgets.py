"""Which of the counters that a driver publishes really limit what fits on a GPU.

A driver counts everything: multiprocessors, copy engines, bytes. Most of it never runs out before
the slices do. A counter that forbids nothing the others allow is left out, so that a GPU has few
states; this is found by walking every combination of devices, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from slicewise.control.geometries import MAX_STATES
from slicewise.core.errors import SlicewiseError
from slicewise.k8s.quantities import Amount


@dataclass(frozen=True)
class Limit:
    """What there is of a counter, and what each profile takes of it."""

    name: str
    total: int
    needs: tuple[int, ...]
    """By the number of the profile."""


@dataclass(frozen=True)
class Limits:
    """All that limits a GPU besides its slices."""

    compute: int
    """Compute slices: as many as can ever be in use."""
    others: tuple[Limit, ...]


def in_whole_numbers(name: str, total: Amount, needs: Sequence[Amount]) -> Limit:
    """A counter in the largest unit that all profiles take multiples of."""
    scale = math.lcm(*(Fraction(need).denominator for need in needs))
    whole = [int(need * scale) for need in needs]
    unit = math.gcd(*whole) or 1
    return Limit(name, math.floor(total * scale / unit), tuple(need // unit for need in whole))


def binding(
    windows: Sequence[tuple[int, int]], compute: Sequence[int], counters: Mapping[str, Limit]
) -> Limits:
    """The limits that allow exactly what all counters together allow.

    ``windows`` are the masks that can be taken, each with the number of its profile.
    """
    # Those that the slices alone keep within bounds go first: this takes a walk over masks only.
    every = [counters[name] for name in sorted(counters)]
    left = [
        limit
        for limit, most in zip(every, _most(windows, (), every), strict=True)
        if most > limit.total
    ]
    usable = _most(windows, left, [Limit("compute", 0, tuple(compute))])[0]
    slots = Limit("compute", max(usable, *compute, 1), tuple(compute))
    # Large totals first: of two that forbid the same, the one that is counted by ones stays.
    for limit in sorted(left, key=lambda limit: (-limit.total, limit.name)):
        others = [other for other in left if other is not limit]
        if _most(windows, [slots, *others], [limit])[0] <= limit.total:
            left = others
    return Limits(slots.total, tuple(left))


def _most(
    windows: Sequence[tuple[int, int]], limits: Sequence[Limit], watched: Sequence[Limit]
) -> tuple[int, ...]:
    """The most of each of ``watched`` that can be in use when only ``limits`` and slices hold."""
    taking = [
        (
            window,
            tuple(limit.needs[profile] for limit in limits),
            tuple(limit.needs[profile] for limit in watched),
        )
        for window, profile in windows
    ]
    totals = tuple(limit.total for limit in limits)
    most = (0,) * len(watched)
    # Every device takes a slice, so the states with fewer slices taken are complete first.
    width = max(window for window, _ in windows).bit_length()
    layers: list[dict[tuple[int, tuple[int, ...]], tuple[int, ...]]] = [
        {} for _ in range(width + 1)
    ]
    layers[0][0, (0,) * len(limits)] = most
    states = 1
    for layer in layers:
        for (mask, used), seen in layer.items():
            most = tuple(map(max, most, seen))
            for window, needs, takes in taking:
                if window & mask:
                    continue
                after = tuple(u + n for u, n in zip(used, needs, strict=True))
                if any(u > total for u, total in zip(after, totals, strict=True)):
                    continue
                key = (mask | window, after)
                would = tuple(s + t for s, t in zip(seen, takes, strict=True))
                there = layers[key[0].bit_count()]
                if key in there:
                    there[key] = tuple(map(max, there[key], would))
                    continue
                there[key] = would
                states += 1
                if states > MAX_STATES:
                    raise SlicewiseError(f"its GPU can be in more than {MAX_STATES:,} states")
    return most

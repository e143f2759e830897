"""The geometry of a GPU, derived from the counters and devices that its driver publishes.

Nothing is assumed about the GPU or its driver. A family of counters with a total of one each
(``memory-slice-0``, ``memory-slice-1``, ...) is the slices of the GPU. The slices that a device
takes are its window, and devices with the same profile are the starts of that profile. Other
counters become budgets if they limit anything. Equal GPUs share one Geometry and its tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import msgspec

from slicewise.control.geometries import MAX_STATES, distinct, geometry_of, named, too_many_states
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import COMPUTE, Geometry
from slicewise.journal.entries import GeometryRecord, ProfileRecord
from slicewise.kubernetes.api import Counter
from slicewise.kubernetes.api.quantities import Amount, amount

WHOLE = "gpu"
"""The profile of the whole GPU; a suffix is added if the name is taken."""

_MAX_SHAPES = 4096
"""The number of cached shapes."""
_FAMILY = re.compile(r"(?P<prefix>.+)-(?P<number>0|[1-9][0-9]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_~-]*")
_MIG = re.compile(r"(?P<compute>[0-9]+)g\.(?P<memory>[0-9]+)gb(?:[+-].*)?")

encode = msgspec.json.Encoder(order="deterministic").encode
"""Encode counters as JSON; equal counters give equal bytes."""

Place = tuple[str, int]
"""The profile and the start of a device."""


class DeviceProperties(NamedTuple):
    """The properties of a device that determine the geometry of its GPU."""

    profile: str | None
    kind: str | None
    """The type attribute of the device."""
    memory: str | None
    takes: bytes
    """The consumed counters as JSON, ordered by name."""


@dataclass(frozen=True)
class GpuLayout:
    """The geometry of a GPU, and the place of each device."""

    geometry: Geometry | None
    """None if no device has a place."""
    places: tuple[Place | str, ...]
    """For each device its place, or the reason why it has none."""


class Library:
    """A cache of shapes and models: equal ones are computed once and are the same object."""

    def __init__(self) -> None:
        self._shapes: dict[object, GpuLayout] = {}
        self._records: dict[str, GeometryRecord] = {}
        self._geometries: dict[str, Geometry] = {}

    def shape(
        self, product: str | None, counters: bytes, parts: tuple[DeviceProperties, ...]
    ) -> GpuLayout:
        """The shape of a GPU with these counters (as JSON) and devices."""
        key = (product, counters, parts)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = self._compute_shape(product, counters, parts)
        return shape

    def _compute_shape(
        self, product: str | None, counters: bytes, parts: Sequence[DeviceProperties]
    ) -> GpuLayout:
        try:
            totals = _amounts(counters)
            taken = [_readable(part.takes) for part in parts]
            slices = _slices(totals, taken, parts)
            readings = _alike(
                [
                    takes if isinstance(takes, str) else _piece(part, takes, totals, slices)
                    for part, takes in zip(parts, taken, strict=True)
                ],
                _whole_name(parts),
            )
            pieces = [reading for reading in readings if isinstance(reading, Piece)]
            if not pieces:
                return GpuLayout(None, tuple(map(str, readings)))
            geometry = self._intern(named(_record(pieces, totals, len(slices)), product or ""))
        except SlicewiseError as error:
            return GpuLayout(None, (str(error),) * len(parts))
        places = ((r.profile, r.start) if isinstance(r, Piece) else r for r in readings)
        return GpuLayout(geometry, tuple(places))

    def _intern(self, record: GeometryRecord) -> Geometry:
        """The geometry of a record, under another model name if the name is taken."""
        if self._records.get(record.model, record) != record:
            record = distinct(record)
        if record.model not in self._geometries:
            geometry = geometry_of(record)
            if too_many_states(geometry):
                raise SlicewiseError(f"its GPU can be in more than {MAX_STATES:,} states")
            self._records[record.model] = record
            self._geometries[record.model] = geometry
        return self._geometries[record.model]


@dataclass(frozen=True)
class Piece:
    """A device with a place."""

    profile: str
    start: int
    size: int
    needs: Mapping[str, Amount]
    """The amounts of counters that are not slices."""
    memory: str | None
    whole: bool = False
    """Whether the device is the whole GPU."""

    @property
    def window(self) -> int:
        """The mask of the slices."""
        return ((1 << self.size) - 1) << self.start


def _amounts(counters: bytes) -> dict[str, Amount]:
    """Decode counters into numbers."""
    texts = msgspec.json.decode(counters, type=dict[str, Counter])
    return {name: amount(counter.value) for name, counter in texts.items()}


def _readable(counters: bytes) -> dict[str, Amount] | str:
    """Decode the counters that are not zero; or the reason why that is impossible."""
    try:
        return {name: taken for name, taken in _amounts(counters).items() if taken}
    except SlicewiseError as error:
        return str(error)


def _slices(
    totals: Mapping[str, Amount],
    taken: Sequence[dict[str, Amount] | str],
    parts: Sequence[DeviceProperties],
) -> tuple[str, ...]:
    """The counters that are the slices of the GPU, in order."""
    families: dict[str, set[int]] = {}
    for name, total in totals.items():
        match = _FAMILY.fullmatch(name)
        if match and total == 1:
            families.setdefault(match["prefix"], set()).add(int(match["number"]))
    found = {
        prefix: tuple(f"{prefix}-{number}" for number in range(len(numbers)))
        for prefix, numbers in families.items()
        if len(numbers) >= 2 and max(numbers) == len(numbers) - 1
    }
    if not found:
        raise SlicewiseError("its GPU has no counters that could be slices (NAME-0, NAME-1, ...)")
    profiled = [
        takes
        for part, takes in zip(parts, taken, strict=True)
        if part.profile is not None and not isinstance(takes, str)
    ]

    def suits(prefix: str) -> tuple[bool, int, str]:
        """Rank by: taken by all devices with a profile; number of slices; name."""
        shared = all(not takes.keys().isdisjoint(found[prefix]) for takes in profiled)
        return not shared, -len(found[prefix]), prefix

    return found[min(found, key=suits)]


def _piece(
    part: DeviceProperties,
    takes: Mapping[str, Amount],
    totals: Mapping[str, Amount],
    slices: Sequence[str],
) -> Piece | str:
    """The place and the needs of a device, or the reason why it has none."""
    whole = part.profile is None
    everything = {name: total for name, total in totals.items() if total}
    if whole and (part.kind not in (None, "gpu") or takes != everything):
        return "it has no profile and is not the whole of its GPU"
    if part.profile is not None and not _NAME.fullmatch(part.profile):
        return f"its profile {part.profile!r} is not a name"
    for name, taken in takes.items():
        if not 0 <= taken <= totals[name]:
            return f"it takes {taken} of counter {name}, of which there is {totals[name]}"
    window = [number for number, name in enumerate(slices) if name in takes]
    if not window:
        return "it takes no slices"
    if any(takes[slices[number]] != 1 for number in window):
        return "it takes a part of a slice"
    if window[-1] - window[0] + 1 != len(window):
        return f"its slices {', '.join(map(str, window))} are not next to each other"
    needs = {name: taken for name, taken in takes.items() if name not in slices}
    return Piece(part.profile or "", window[0], len(window), needs, part.memory, whole)


def _whole_name(parts: Iterable[DeviceProperties]) -> str:
    """A name for the whole GPU that no profile has."""
    taken = {part.profile for part in parts}
    name = WHOLE
    while name in taken:
        name += "~"
    return name


def _alike(readings: Iterable[Piece | str], whole_name: str) -> list[Piece | str]:
    """Exclude profiles with devices that take different amounts: a profile must be one size."""
    readings = [
        replace(reading, profile=whole_name) if isinstance(reading, Piece) and reading.whole
        else reading
        for reading in readings
    ]  # fmt: skip
    kinds: dict[str, list[tuple[int, Mapping[str, Amount]]]] = {}
    for reading in readings:
        if isinstance(reading, Piece):
            known = kinds.setdefault(reading.profile, [])
            if (reading.size, reading.needs) not in known:
                known.append((reading.size, reading.needs))
    alike = [
        f"the devices of its profile {reading.profile} do not all take the same"
        if isinstance(reading, Piece) and len(kinds[reading.profile]) > 1
        else reading
        for reading in readings
    ]
    if all(isinstance(reading, str) or reading.whole for reading in alike):
        return [r if isinstance(r, str) else "its GPU has no device with a profile" for r in alike]
    return alike


def _record(pieces: Sequence[Piece], totals: Mapping[str, Amount], slices: int) -> GeometryRecord:
    """The model of a GPU with these devices, without a name."""
    kinds = {piece.profile: piece for piece in pieces}
    compute = _compute(kinds)
    names = sorted(kinds, key=lambda name: _rank(name, kinds, compute))
    kinds = {name: kinds[name] for name in names}
    numbers = {name: number for number, name in enumerate(names)}
    windows = sorted({(piece.window, numbers[piece.profile]) for piece in pieces})
    counters = {
        name: _in_whole_numbers(name, total, [kind.needs.get(name, 0) for kind in kinds.values()])
        for name, total in totals.items()
        if any(name in kind.needs for kind in kinds.values())
    }
    limits = binding_limits(windows, [compute[name] for name in names], counters)
    for name, kind in kinds.items():
        if kind.whole:  # it excludes all others, so any amount is right
            compute[name] = limits.compute
    memory = {name: _memory(kind) for name, kind in kinds.items()}
    most = max((memory[name] for name, kind in kinds.items() if not kind.whole), default=0)
    plain = {name: _plain(name, kinds, slices) for name in names}
    uses = [
        {_budget(limit.name): limit.needs[n] for limit in limits.others if limit.needs[n]}
        for n in range(len(names))
    ]
    return GeometryRecord(
        model="",
        slices=slices,
        compute=limits.compute,
        memory_gb=most,
        budgets={_budget(limit.name): limit.total for limit in limits.others},
        profiles=tuple(
            ProfileRecord(
                name=name,
                size=kind.size,
                compute=compute[name],
                memory_gb=most if kind.whole and plain[name] else memory[name],
                starts=tuple(sorted({p.start for p in pieces if p.profile == name})),
                uses=uses[numbers[name]],
                variant_of=plain[name],
            )
            for name, kind in kinds.items()
        ),
    )


def _compute(kinds: Mapping[str, Piece]) -> dict[str, int]:
    """The compute slices of each profile, from its name or its share of multiprocessors."""
    parts = {name: kind for name, kind in kinds.items() if not kind.whole}
    forms = {name: _MIG.fullmatch(name) for name in parts}
    compute = {name: int(form["compute"]) for name, form in forms.items() if form}
    if len(compute) < len(parts):
        counters = sorted({name for kind in parts.values() for name in kind.needs})
        counter = next((name for name in counters if "multiprocessor" in name.lower()), None)
        shares = {name: kind.needs.get(counter or "", 0) for name, kind in parts.items()}
        unit = min((share for share in shares.values() if share), default=0)
        compute = {
            name: max(1, round(share / unit)) if share else int(not unit)
            for name, share in shares.items()
        }
    return {name: compute.get(name, 0) for name in kinds}


def _memory(kind: Piece) -> float:
    """Gigabytes, from the name of the profile or the memory of the device."""
    form = None if kind.whole else _MIG.fullmatch(kind.profile)
    if form:
        return int(form["memory"])
    try:
        return round(amount(kind.memory or "0") / 2**30)
    except SlicewiseError:
        return 0


def _plain(name: str, kinds: Mapping[str, Piece], slices: int) -> str | None:
    """The profile of which this one is a variant: the same size, with or without an extension."""
    kind = kinds[name]
    if kind.whole:
        same = [n for n, k in kinds.items() if k.size == slices and not k.whole]
        return next((n for n in same if _plain(n, kinds, slices) is None), None)
    plain = kinds.get(re.split("[+-]", name)[0])
    if plain is None or plain.profile == name or plain.whole or plain.size != kind.size:
        return None
    return plain.profile


def _rank(name: str, kinds: Mapping[str, Piece], compute: Mapping[str, int]) -> tuple[object, ...]:
    """Small profiles first, each before its variants, and the whole GPU last."""
    return kinds[name].whole, kinds[name].size, compute[name], re.split("[+-]", name)[0], name


def _budget(counter: str) -> str:
    """The name of a counter as a budget."""
    return f"{counter}~" if counter == COMPUTE else counter


# Counters that limit what fits


@dataclass(frozen=True)
class CounterLimit:
    """The total of a counter, and the amount that each profile takes."""

    name: str
    total: int
    needs: tuple[int, ...]
    """By number of the profile."""


@dataclass(frozen=True)
class Limits:
    """The limits of a GPU besides its slices."""

    compute: int
    """The most compute slices that can be in use."""
    others: tuple[CounterLimit, ...]


def _in_whole_numbers(name: str, total: Amount, needs: Sequence[Amount]) -> CounterLimit:
    """A counter in the largest unit of which all profiles take multiples."""
    scale = math.lcm(*(Fraction(need).denominator for need in needs))
    whole = [int(need * scale) for need in needs]
    unit = math.gcd(*whole) or 1
    return CounterLimit(
        name, math.floor(total * scale / unit), tuple(need // unit for need in whole)
    )


def binding_limits(
    windows: Sequence[tuple[int, int]], compute: Sequence[int], counters: Mapping[str, CounterLimit]
) -> Limits:
    """The smallest set of limits that allows exactly what all counters together allow.

    A driver counts everything: multiprocessors, copy engines, bytes. Most counters never run out
    before the slices do, and without them a GPU has fewer states. All combinations of devices are
    searched. ``windows`` are the masks of the placements, with the number of their profile.
    """
    # First drop counters that the slices alone keep within bounds: this needs only masks.
    every = [counters[name] for name in sorted(counters)]
    left = [
        limit
        for limit, most in zip(every, _most(windows, (), every), strict=True)
        if most > limit.total
    ]
    usable = _most(windows, left, [CounterLimit("compute", 0, tuple(compute))])[0]
    slots = CounterLimit("compute", max(usable, *compute, 1), tuple(compute))
    # Large totals first: of two equivalent counters, the one with the larger unit stays.
    for limit in sorted(left, key=lambda limit: (-limit.total, limit.name)):
        others = [other for other in left if other is not limit]
        if _most(windows, [slots, *others], [limit])[0] <= limit.total:
            left = others
    return Limits(slots.total, tuple(left))


def _most(
    windows: Sequence[tuple[int, int]],
    limits: Sequence[CounterLimit],
    watched: Sequence[CounterLimit],
) -> tuple[int, ...]:
    """The most of each ``watched`` counter that can be in use under ``limits`` and the slices."""
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
    # Every device takes a slice, so layers by number of taken slices are complete in order.
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

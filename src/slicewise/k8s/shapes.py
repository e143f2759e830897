"""From the counters and devices that a driver publishes for one GPU to its geometry.

Nothing is known beforehand about the GPU or its driver. A family of counters of one each
(``memory-slice-0``, ``memory-slice-1``, ...) is the GPU's slices; what a device takes of them is
its window; devices with the same profile are that profile at its starts; every other counter is a
budget. Equal GPUs get the same Geometry, so that the tables made from it are made once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from slicewise.control.entries import GeometryRecord, ProfileRecord
from slicewise.control.geometries import MAX_STATES, distinct, geometry_of, named, too_many_states
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import COMPUTE, Geometry
from slicewise.k8s.api import Counter
from slicewise.k8s.budgets import binding, in_whole_numbers
from slicewise.k8s.quantities import Amount, amount

WHOLE = "gpu"
"""The profile of the device that is the GPU as a whole; a mark is added where it is taken."""

_MAX_SHAPES = 4096
"""What is remembered of publications; beyond it, all is worked out again."""
_FAMILY = re.compile(r"(?P<prefix>.+)-(?P<number>0|[1-9][0-9]*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_~-]*")
_MIG = re.compile(r"(?P<compute>[0-9]+)g\.(?P<memory>[0-9]+)gb(?:[+-].*)?")

encode = msgspec.json.Encoder(order="deterministic").encode
"""Counters as JSON: equal ones are equal bytes."""

Place = tuple[str, int]
"""A profile and the start at which a device has it."""


class Part(NamedTuple):
    """A device as far as it decides on its GPU's geometry: what equal GPUs have in common."""

    profile: str | None
    kind: str | None
    """Its type: a GPU, a part of one, something else."""
    memory: str | None
    takes: bytes
    """Its counters as JSON, in the order of their names."""


@dataclass(frozen=True)
class Shape:
    """What the devices of a GPU come to."""

    geometry: Geometry | None
    """None where none of them has a place."""
    places: tuple[Place | str, ...]
    """For each device its place, or why it has none, in words."""


class Library:
    """The shapes and models met so far: equal ones are worked out once and are the same object."""

    def __init__(self) -> None:
        self._shapes: dict[object, Shape] = {}
        self._records: dict[str, GeometryRecord] = {}
        self._geometries: dict[str, Geometry] = {}

    def shape(self, product: str | None, counters: bytes, parts: tuple[Part, ...]) -> Shape:
        """The shape of a GPU with these counters (as JSON) and devices."""
        key = (product, counters, parts)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            shape = self._shapes[key] = self._work_out(product, counters, parts)
        return shape

    def _work_out(self, product: str | None, counters: bytes, parts: Sequence[Part]) -> Shape:
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
                return Shape(None, tuple(map(str, readings)))
            geometry = self._intern(named(_record(pieces, totals, len(slices)), product or ""))
        except SlicewiseError as error:
            return Shape(None, (str(error),) * len(parts))
        places = ((r.profile, r.start) if isinstance(r, Piece) else r for r in readings)
        return Shape(geometry, tuple(places))

    def _intern(self, record: GeometryRecord) -> Geometry:
        """The one geometry of that content; by a name of its own where the name is taken."""
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
    """A device that has a place."""

    profile: str
    start: int
    size: int
    needs: Mapping[str, Amount]
    """What it takes of the counters that are not slices."""
    memory: str | None
    whole: bool = False
    """Whether it is the GPU as a whole."""

    @property
    def window(self) -> int:
        """The mask of its slices."""
        return ((1 << self.size) - 1) << self.start


def _amounts(counters: bytes) -> dict[str, Amount]:
    """Counters, written as JSON, as numbers."""
    texts = msgspec.json.decode(counters, type=dict[str, Counter])
    return {name: amount(counter.value) for name, counter in texts.items()}


def _readable(counters: bytes) -> dict[str, Amount] | str:
    """Counters as numbers without those of which there are none, or what is wrong with them."""
    try:
        return {name: taken for name, taken in _amounts(counters).items() if taken}
    except SlicewiseError as error:
        return str(error)


def _slices(
    totals: Mapping[str, Amount], taken: Sequence[dict[str, Amount] | str], parts: Sequence[Part]
) -> tuple[str, ...]:
    """The counters that are the GPU's slices, in their order."""
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
        """All devices with a profile take of it; then the longest; then the first by name."""
        shared = all(not takes.keys().isdisjoint(found[prefix]) for takes in profiled)
        return not shared, -len(found[prefix]), prefix

    return found[min(found, key=suits)]


def _piece(
    part: Part,
    takes: Mapping[str, Amount],
    totals: Mapping[str, Amount],
    slices: Sequence[str],
) -> Piece | str:
    """A device by itself: where it is and what it takes, or why that cannot be said."""
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


def _whole_name(parts: Iterable[Part]) -> str:
    """A name for the GPU as a whole that no profile has."""
    taken = {part.profile for part in parts}
    name = WHOLE
    while name in taken:
        name += "~"
    return name


def _alike(readings: Iterable[Piece | str], whole_name: str) -> list[Piece | str]:
    """Without the profiles whose devices take different amounts: nobody could tell them apart."""
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
    """The model of a GPU with these devices, still without a name."""
    kinds = {piece.profile: piece for piece in pieces}
    compute = _compute(kinds)
    names = sorted(kinds, key=lambda name: _rank(name, kinds, compute))
    kinds = {name: kinds[name] for name in names}
    numbers = {name: number for number, name in enumerate(names)}
    windows = sorted({(piece.window, numbers[piece.profile]) for piece in pieces})
    counters = {
        name: in_whole_numbers(name, total, [kind.needs.get(name, 0) for kind in kinds.values()])
        for name, total in totals.items()
        if any(name in kind.needs for kind in kinds.values())
    }
    limits = binding(windows, [compute[name] for name in names], counters)
    for name, kind in kinds.items():
        if kind.whole:  # It shares its GPU with nobody, so it may count as all there is.
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
    """Compute slices of each profile: by its name, or by its share of the multiprocessors."""
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
    """Gigabytes by the profile's name, or by the device's own memory."""
    form = None if kind.whole else _MIG.fullmatch(kind.profile)
    if form:
        return int(form["memory"])
    try:
        return round(amount(kind.memory or "0") / 2**30)
    except SlicewiseError:
        return 0


def _plain(name: str, kinds: Mapping[str, Piece], slices: int) -> str | None:
    """The profile that this one is a variant of: the same window, with or without something."""
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

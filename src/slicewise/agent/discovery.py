"""From what the driver says of a GPU to a geometry, and how that differs from the catalog's.

The driver wins: its placements are the ones that can be had. What it does not tell (budgets, the
order in which it tries starts itself) is taken from the catalog where the profile is known there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slicewise.agent.driver import GpuReading, ProfileReading
from slicewise.catalog.entry import Entry
from slicewise.catalog.library import Catalog, name_key
from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Budget, Geometry, Profile

_MEDIA = "media-extension"
"""The budget of ``+me`` profiles, of which the driver tells only that there can be one."""


@dataclass(frozen=True)
class Finding:
    """What a GPU model is, as this machine's driver has it."""

    model: str
    """The catalog's name where the geometries agree, else what the driver calls the GPU."""
    geometry: Geometry
    disagreements: tuple[str, ...]
    """One sentence a difference; none where the catalog says the same."""


def examine(gpu: GpuReading, catalog: Catalog | None = None) -> Finding | None:
    """The geometry of a GPU and how it differs from the catalog's; None for one without MIG."""
    if not gpu.profiles:
        return None
    candidates = _candidates(gpu, catalog or Catalog.builtin())
    judged = [(_differences(gpu, entry), entry) for entry in candidates]
    if not judged:
        model = model_name(gpu.name)
        told = f"the catalog does not know {gpu.name}; its geometry is the driver's alone"
        return _finding(gpu, model, None, [told])
    differences, entry = min(judged, key=lambda pair: len(pair[0]))
    if not differences and entry.geometry is not None:
        return Finding(entry.model, entry.geometry, ())
    return _finding(gpu, model_name(gpu.name), entry, differences)


def _finding(
    gpu: GpuReading, model: str, entry: Entry | None, told: Sequence[str]
) -> Finding | None:
    try:
        return Finding(model, _geometry(gpu, model, entry), tuple(told))
    except GeometryError:
        return None  # Nothing that could be scheduled; `problem` says so.


def problem(gpu: GpuReading) -> str:
    """Why a GPU cannot be used at all; nothing where it can."""
    if gpu.mig is None:
        return f"{gpu.name} does not support MIG"
    try:
        _geometry(gpu, model_name(gpu.name), None)
    except GeometryError as error:
        return f"the driver's profiles make no geometry: {error}"
    return ""


def geometry_record(geometry: Geometry) -> dict[str, object]:
    """A geometry as it is sent."""
    return {
        "model": geometry.model,
        "slices": geometry.slices,
        "compute": geometry.compute,
        "memory_gb": geometry.memory_gb,
        "budgets": {budget.name: budget.total for budget in geometry.budgets},
        "profiles": [
            {
                "name": profile.name,
                "size": profile.size,
                "compute": profile.compute,
                "memory_gb": profile.memory_gb,
                "starts": list(profile.starts),
                "preferred": list(profile.preferred),
                "uses": dict(profile.uses),
                "variant_of": profile.variant_of,
            }
            for profile in geometry.profiles
        ],
    }


def model_name(told: str) -> str:
    """What the driver calls a GPU, as a name: without blanks, and without its maker."""
    words = re.sub(r"[^A-Za-z0-9.+_-]+", "-", told).strip("-")
    return re.sub(r"^nvidia-", "", words, flags=re.IGNORECASE) or "GPU"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in few words: 0-6, or 0,2,4."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _candidates(gpu: GpuReading, catalog: Catalog) -> list[Entry]:
    """The models it may be: by its name, or by its PCI device, which several models may share."""
    entries = catalog.entries()
    device = gpu.pci_device.casefold()
    by_device = [e for e in entries if device in {i.casefold() for i in e.pci_device_ids}]
    name = name_key(gpu.name)
    by_name = [e for e in entries if name in map(name_key, e.names)]
    return list(dict.fromkeys((*by_name, *by_device)))


def _differences(gpu: GpuReading, entry: Entry) -> list[str]:
    """How the driver and the catalog differ, profile by profile."""
    if entry.geometry is None:
        return [f"the catalog cannot schedule {entry.model}: {entry.refusal}"]
    told: list[str] = []
    known = {profile.name: profile for profile in entry.geometry.profiles}
    facts = {fact.name: fact for fact in entry.facts}
    offered = {profile.name: profile for profile in gpu.profiles}
    for name, profile in offered.items():
        ours = known.get(name)
        if ours is None:
            told.append(f"{name}: the driver offers it, the catalog does not know it")
            continue
        if profile.starts != ours.starts:
            told.append(
                f"{name}: the driver offers starts {ranges(profile.starts)}, "
                f"the catalog {ranges(ours.starts)}"
            )
        if profile.size != ours.size:
            told.append(
                f"{name}: it takes {profile.size} memory slices by the driver, "
                f"{ours.size} by the catalog"
            )
        if profile.compute != ours.compute:
            told.append(
                f"{name}: it has {profile.compute} compute slices by the driver, "
                f"{ours.compute} by the catalog"
            )
        most = facts[name].max_instances if name in facts else None
        if most is not None and most != profile.maximum:
            told.append(
                f"{name}: a GPU holds {profile.maximum} by the driver, {most} by the catalog"
            )
    told += [f"{name}: the driver does not offer it" for name in known if name not in offered]
    return told


def _geometry(gpu: GpuReading, model: str, entry: Entry | None) -> Geometry:
    """The driver's placements with what only the catalog can know."""
    ours = entry.geometry if entry is not None else None
    budgets = {budget.name: budget.total for budget in ours.budgets} if ours else {}
    names = {profile.name for profile in gpu.profiles}
    profiles = tuple(_profile(profile, ours, names, budgets) for profile in gpu.profiles)
    memory = ours.memory_gb if ours else max((p.memory_gb for p in profiles), default=0)
    return Geometry(
        model=model,
        slices=max((s + p.size for p in profiles for s in p.starts), default=0),
        compute=max((p.compute for p in profiles), default=0),
        profiles=profiles,
        memory_gb=memory,
        budgets=tuple(Budget(name, total) for name, total in budgets.items()),
    )


def _profile(
    told: ProfileReading, ours: Geometry | None, names: set[str], budgets: dict[str, int]
) -> Profile:
    """One profile; a budget that an unknown one needs is added to ``budgets``."""
    known = ours.profile(told.name) if ours is not None and ours.has(told.name) else None
    if known is not None:
        uses = dict(known.uses)
        preferred = known.preferred if sorted(known.preferred) == list(told.starts) else ()
        variant = known.variant_of if known.variant_of in names else None
        memory = known.memory_gb
    else:
        uses, preferred = {}, ()
        base = re.split(r"[+-]", told.name)[0]
        variant = base if base != told.name and base in names else None
        if "+me" in told.name:
            budgets.setdefault(_MEDIA, 1)
            uses = {_MEDIA: 1}
        memory = _gigabytes(told)
    return Profile(
        name=told.name,
        size=told.size,
        compute=told.compute,
        memory_gb=memory,
        starts=told.starts,
        preferred=preferred,
        uses=uses,
        variant_of=variant,
    )


def _gigabytes(told: ProfileReading) -> float:
    """A profile's memory as its name has it."""
    match = re.search(r"\.(\d+)gb", told.name)
    return float(match[1]) if match else float(round(told.memory_mib / 1024))

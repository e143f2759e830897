"""Discovery: the GPU model behind a driver's readings, and the output of ``--discover``.

The geometry comes from the driver, because only its placements can be used. What the driver does
not report (budgets, the order in which it tries starts) comes from the catalog.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slicewise.agent.driver import Driver, DriverError, GpuReading, ProfileReading
from slicewise.catalog.entry import CatalogEntry
from slicewise.catalog.library import Catalog, name_key
from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Budget, Geometry, Profile

_MEDIA_BUDGET = "media-extension"
"""The budget of ``+me`` profiles; the driver only reports that one such instance fits."""


@dataclass(frozen=True)
class GpuModel:
    """The model of a GPU according to the driver of this node."""

    name: str
    """The catalog's name if the geometries agree, otherwise derived from the driver's name."""
    geometry: Geometry
    differences: tuple[str, ...]
    """One message per difference from the catalog; empty if both agree."""


def identify(gpu: GpuReading, catalog: Catalog | None = None) -> GpuModel | None:
    """Return the model of a GPU and its differences from the catalog; None without MIG."""
    if not gpu.profiles:
        return None
    candidates = _candidates(gpu, catalog or Catalog.builtin())
    compared = [(_differences(gpu, entry), entry) for entry in candidates]
    if not compared:
        message = f"the catalog does not know {gpu.name}; its geometry comes from the driver alone"
        return _model_from_driver(gpu, None, [message])
    differences, entry = min(compared, key=lambda pair: len(pair[0]))
    if not differences and entry.geometry is not None:
        return GpuModel(entry.model, entry.geometry, ())
    return _model_from_driver(gpu, entry, differences)


def _model_from_driver(
    gpu: GpuReading, entry: CatalogEntry | None, differences: Sequence[str]
) -> GpuModel | None:
    name = model_name(gpu.name)
    try:
        return GpuModel(name, _geometry(gpu, name, entry), tuple(differences))
    except GeometryError:
        return None  # The GPU cannot be scheduled; `unusable_reason` has the message.


def unusable_reason(gpu: GpuReading) -> str:
    """Why a GPU cannot be used at all; empty if it can."""
    if gpu.mig is None:
        return f"{gpu.name} does not support MIG"
    try:
        _geometry(gpu, model_name(gpu.name), None)
    except GeometryError as error:
        return f"the driver's profiles are not a valid geometry: {error}"
    return ""


def model_name(driver_name: str) -> str:
    """Turn the driver's name of a GPU into a model name: no spaces, no vendor."""
    words = re.sub(r"[^A-Za-z0-9.+_-]+", "-", driver_name).strip("-")
    return re.sub(r"^nvidia-", "", words, flags=re.IGNORECASE) or "GPU"


def format_numbers(numbers: Iterable[int]) -> str:
    """Format numbers briefly: 0-6, or 0,2,4."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def _candidates(gpu: GpuReading, catalog: Catalog) -> list[CatalogEntry]:
    """Catalog entries with the GPU's name or PCI device id; several models may share an id."""
    entries = catalog.entries()
    device = gpu.pci_device.casefold()
    by_device = [e for e in entries if device in {i.casefold() for i in e.pci_device_ids}]
    name = name_key(gpu.name)
    by_name = [e for e in entries if name in map(name_key, e.names)]
    return list(dict.fromkeys((*by_name, *by_device)))


def _differences(gpu: GpuReading, entry: CatalogEntry) -> list[str]:
    """Compare the driver's profiles with the catalog's."""
    if entry.geometry is None:
        return [f"the catalog cannot schedule {entry.model}: {entry.refusal}"]
    found: list[str] = []
    known = {profile.name: profile for profile in entry.geometry.profiles}
    facts = {fact.name: fact for fact in entry.facts}
    offered = {profile.name: profile for profile in gpu.profiles}
    for name, profile in offered.items():
        expected = known.get(name)
        if expected is None:
            found.append(f"{name}: offered by the driver, unknown to the catalog")
            continue
        maximum = facts[name].max_instances if name in facts else None
        for text, driver, catalog in (
            ("starts {}", format_numbers(profile.starts), format_numbers(expected.starts)),
            ("{} memory slices", profile.size, expected.size),
            ("{} compute slices", profile.compute, expected.compute),
            ("{} instances per GPU", profile.maximum, maximum),
        ):
            if catalog is not None and driver != catalog:
                found.append(
                    f"{name}: {text.format(driver)} in the driver, {catalog} in the catalog"
                )
    found += [f"{name}: not offered by the driver" for name in known if name not in offered]
    return found


def _geometry(gpu: GpuReading, model: str, entry: CatalogEntry | None) -> Geometry:
    """Combine the driver's placements with the catalog's budgets and preferences."""
    known = entry.geometry if entry is not None else None
    budgets = {budget.name: budget.total for budget in known.budgets} if known else {}
    names = {profile.name for profile in gpu.profiles}
    profiles = tuple(_profile(profile, known, names, budgets) for profile in gpu.profiles)
    memory = known.memory_gb if known else max((p.memory_gb for p in profiles), default=0)
    return Geometry(
        model=model,
        slices=max((s + p.size for p in profiles for s in p.starts), default=0),
        compute=max((p.compute for p in profiles), default=0),
        profiles=profiles,
        memory_gb=memory,
        budgets=tuple(Budget(name, total) for name, total in budgets.items()),
    )


def _profile(
    offered: ProfileReading, geometry: Geometry | None, names: set[str], budgets: dict[str, int]
) -> Profile:
    """Build one profile; a budget that an unknown profile needs is added to ``budgets``."""
    known = None
    if geometry is not None and geometry.has(offered.name):
        known = geometry.profile(offered.name)
    if known is not None:
        uses = dict(known.uses)
        preferred = known.preferred if sorted(known.preferred) == list(offered.starts) else ()
        variant = known.variant_of if known.variant_of in names else None
        memory = known.memory_gb
    else:
        uses, preferred = {}, ()
        base = re.split(r"[+-]", offered.name)[0]
        variant = base if base != offered.name and base in names else None
        if "+me" in offered.name:
            budgets.setdefault(_MEDIA_BUDGET, 1)
            uses = {_MEDIA_BUDGET: 1}
        memory = _nominal_memory_gb(offered)
    return Profile(
        name=offered.name,
        size=offered.size,
        compute=offered.compute,
        memory_gb=memory,
        starts=offered.starts,
        preferred=preferred,
        uses=uses,
        variant_of=variant,
    )


def _nominal_memory_gb(profile: ProfileReading) -> float:
    """The memory in the profile's name, such as 10 for 1g.10gb."""
    match = re.search(r"\.(\d+)gb", profile.name)
    return float(match[1]) if match else float(round(profile.memory_mib / 1024))


# The output of --discover


def discover(driver: Driver, as_json: bool) -> str:
    """Describe the GPUs of this node as text or JSON; change nothing."""
    version = driver.version()
    readings: list[GpuReading | DriverError] = []
    for gpu in driver.gpus():
        try:
            readings.append(gpu if isinstance(gpu, DriverError) else driver.read(gpu))
        except DriverError as error:
            readings.append(DriverError(error.code, error.call, f"{gpu}: {error.message}"))
    if as_json:
        gpus = [_gpu_json(index, gpu) for index, gpu in enumerate(readings)]
        return json.dumps({"driver": version, "gpus": gpus}, indent=2) + "\n"
    return _text(version, readings)


def _gpu_json(index: int, gpu: GpuReading | DriverError) -> dict[str, object]:
    if isinstance(gpu, DriverError):
        return {"index": index, "problem": str(gpu)}
    model = identify(gpu)
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci_device": gpu.pci_device,
        "memory_mib": gpu.memory_mib,
        "mig": gpu.mig,
        "mig_pending": gpu.pending,
        "model": None if model is None else model.name,
        "problem": unusable_reason(gpu),
        "disagreements": [] if model is None else list(model.differences),
        "profiles": [
            {
                "name": profile.name,
                "id": profile.id,
                "starts": list(profile.starts),
                "size": profile.size,
                "max": profile.maximum,
                "free": profile.free,
                "compute": profile.compute,
                "memory_mib": profile.memory_mib,
            }
            for profile in sorted(gpu.profiles, key=_by_size)
        ],
        "instances": [
            {
                "id": instance.id,
                "profile": instance.profile,
                "start": instance.start,
                "size": instance.size,
                "uuids": [compute.uuid for compute in instance.compute],
            }
            for instance in gpu.instances
        ],
    }


def _text(version: str, readings: Sequence[GpuReading | DriverError]) -> str:
    count = f"{len(readings)} GPU{'' if len(readings) == 1 else 's'}"
    sections = [f"driver {version}, {count}"]
    by_model: dict[object, list[GpuReading]] = {}
    for gpu in readings:
        if isinstance(gpu, GpuReading) and gpu.profiles:
            offers = tuple((p.name, p.id, p.starts, p.size, p.maximum) for p in gpu.profiles)
            by_model.setdefault((gpu.name, offers), []).append(gpu)
    sections += [_model_section(gpus) for gpus in by_model.values()]
    lines = [line for index, gpu in enumerate(readings) for line in _gpu_lines(index, gpu)]
    if lines:
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _model_section(gpus: Sequence[GpuReading]) -> str:
    """The profiles of one model, and their differences from the catalog."""
    first = gpus[0]
    rows = [("profile", "id", "starts:size", "max", "free")]
    for profile in sorted(first.profiles, key=_by_size):
        same = [gpu.profile(profile.name) for gpu in gpus]
        free = [p.free for p in same if p is not None and p.free is not None]
        rows.append(
            (
                profile.name,
                str(profile.id),
                format_placements(profile),
                str(profile.maximum),
                str(sum(free)) if free else "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(
            cell.rjust(width) if column in (1, 3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([_heading(first), *table])


def _heading(gpu: GpuReading) -> str:
    model = identify(gpu)
    if model is None:
        return f"{gpu.name}: {unusable_reason(gpu)}"
    if not model.differences:
        return f"{gpu.name}: matches {model.name} in the catalog"
    return "\n  ".join([f"{gpu.name}: differs from the catalog", *model.differences])


def _gpu_lines(index: int, gpu: GpuReading | DriverError) -> list[str]:
    """One GPU and its instances."""
    if isinstance(gpu, DriverError):
        return [f"GPU {index}: {gpu}"]
    if gpu.mig is None:
        return [f"GPU {index} {gpu.uuid} ({gpu.name}): does not support MIG"]
    mode = "on" if gpu.mig else "off"
    if gpu.pending != gpu.mig:
        mode += f", {'on' if gpu.pending else 'off'} after a reset"
    count = len(gpu.instances)
    instances = "1 instance" if count == 1 else f"{count or 'no'} instances"
    lines = [f"GPU {index} {gpu.uuid}: MIG {mode}, {instances}"]
    for instance in gpu.instances:
        uuids = " ".join(c.uuid for c in instance.compute) or "no compute instance"
        name = instance.profile or f"profile id {instance.profile_id}"
        lines.append(f"  {name} at slice {instance.start}, GPU instance {instance.id}: {uuids}")
    return lines


def _by_size(profile: ProfileReading) -> tuple[int, int, str]:
    return profile.compute, profile.size, profile.name


def format_placements(profile: ProfileReading) -> str:
    """Format placements as nvidia-smi does: {0..6}:1, {0,2,4}:2."""
    starts = profile.starts
    if len(starts) > 2 and starts == tuple(range(starts[0], starts[-1] + 1)):
        shown = f"{starts[0]}..{starts[-1]}"
    else:
        shown = ",".join(map(str, starts))
    return f"{{{shown}}}:{profile.size}"

"""What ``--discover`` prints: the GPUs of this machine and what they offer, changing nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slicewise.agent.discovery import Finding, examine, problem
from slicewise.agent.driver import Driver, DriverError, GpuReading, ProfileReading


def discover(driver: Driver, as_json: bool) -> str:
    """Everything there is, for people or as JSON."""
    version = driver.version()
    readings: list[GpuReading | DriverError] = []
    for gpu in driver.gpus():
        try:
            readings.append(gpu if isinstance(gpu, DriverError) else driver.read(gpu))
        except DriverError as error:
            readings.append(DriverError(error.code, error.call, f"{gpu}: {error.sentence}"))
    if as_json:
        return json.dumps(_document(version, readings), indent=2) + "\n"
    return _text(version, readings)


def _document(version: str, readings: Sequence[GpuReading | DriverError]) -> dict[str, object]:
    return {"driver": version, "gpus": [_gpu(i, one) for i, one in enumerate(readings)]}


def _gpu(index: int, gpu: GpuReading | DriverError) -> dict[str, object]:
    if isinstance(gpu, DriverError):
        return {"index": index, "problem": str(gpu)}
    finding = examine(gpu)
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci_device": gpu.pci_device,
        "memory_mib": gpu.memory_mib,
        "mig": gpu.mig,
        "mig_pending": gpu.pending,
        "model": None if finding is None else finding.model,
        "problem": problem(gpu),
        "disagreements": [] if finding is None else list(finding.disagreements),
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
            for profile in sorted(gpu.profiles, key=_order)
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
    parts = [f"driver {version}, {count}"]
    models: dict[object, list[GpuReading]] = {}
    for gpu in readings:
        if isinstance(gpu, GpuReading) and gpu.profiles:
            offers = tuple((p.name, p.id, p.starts, p.size, p.maximum) for p in gpu.profiles)
            models.setdefault((gpu.name, offers), []).append(gpu)
    parts += [_model(gpus) for gpus in models.values()]
    lines: list[str] = []
    for index, one in enumerate(readings):
        lines += _lines(index, one)
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts) + "\n"


def _model(gpus: Sequence[GpuReading]) -> str:
    """The profiles of one model, and how they differ from the catalog's."""
    first = gpus[0]
    rows = [("profile", "id", "starts:size", "max", "free")]
    for profile in sorted(first.profiles, key=_order):
        same = [gpu.profile(profile.name) for gpu in gpus]
        free = [p.free for p in same if p is not None and p.free is not None]
        rows.append(
            (
                profile.name,
                str(profile.id),
                places(profile),
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
    return "\n".join([_verdict(first, examine(first)), *table])


def _verdict(gpu: GpuReading, finding: Finding | None) -> str:
    if finding is None:
        return f"{gpu.name}: {problem(gpu)}"
    if not finding.disagreements:
        return f"{gpu.name}: {finding.model} in the catalog, which agrees"
    told = "\n".join(f"  {sentence}" for sentence in finding.disagreements)
    return f"{gpu.name}: not as the catalog has it\n{told}"


def _lines(index: int, gpu: GpuReading | DriverError) -> list[str]:
    """One GPU and its instances."""
    if isinstance(gpu, DriverError):
        return [f"GPU {index}: {gpu}"]
    if gpu.mig is None:
        return [f"GPU {index} {gpu.uuid} ({gpu.name}): does not support MIG"]
    mode = "on" if gpu.mig else "off"
    if gpu.pending != gpu.mig:
        mode += f", {'on' if gpu.pending else 'off'} after a reset"
    count = len(gpu.instances)
    held = "1 instance" if count == 1 else f"{count or 'no'} instances"
    found = [f"GPU {index} {gpu.uuid}: MIG {mode}, {held}"]
    for instance in gpu.instances:
        uuids = " ".join(c.uuid for c in instance.compute) or "no compute instance"
        name = instance.profile or f"profile id {instance.profile_id}"
        found.append(f"  {name} at slice {instance.start}, GPU instance {instance.id}: {uuids}")
    return found


def _order(profile: ProfileReading) -> tuple[int, int, str]:
    """Small profiles first."""
    return profile.compute, profile.size, profile.name


def places(profile: ProfileReading) -> str:
    """Where a profile may be, as nvidia-smi has it: {0..6}:1, {0,2,4}:2."""
    starts = profile.starts
    if len(starts) > 2 and starts == tuple(range(starts[0], starts[-1] + 1)):
        shown = f"{starts[0]}..{starts[-1]}"
    else:
        shown = ",".join(map(str, starts))
    return f"{{{shown}}}:{profile.size}"

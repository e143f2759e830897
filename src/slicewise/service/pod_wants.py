"""What a pod asks for in MIG instances, and which of them each of its containers gets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slicewise.control.answers import RefusedError
from slicewise.control.entries import Part, Want
from slicewise.control.pods import Container, Pod
from slicewise.control.wire import MAX_COUNT
from slicewise.core.geometry import Geometry

RESOURCE = "nvidia.com/mig-"
"""How the resource of a profile begins; NVIDIA's device plugin names them so."""
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,6})(?P<times>k?)")


def wanted(pod: Pod, geometries: Iterable[Geometry]) -> dict[str, int]:
    """How many instances of each profile a pod needs, as Kubernetes sums what containers ask for.

    Containers run together, with the sidecars; an init container runs alone, but for the sidecars
    in front of it. What a pod needs is the most that it needs at any time.
    """
    named = _names(geometries)
    totals: Counter[str] = Counter()
    sidecars: Counter[str] = Counter()
    for container in pod.spec.init_containers or ():
        asked = _asked(container, named)
        if container.restart_policy == "Always":
            sidecars += asked
            totals |= sidecars
        else:
            totals |= sidecars + asked
    together = sum((_asked(one, named) for one in pod.spec.containers or ()), sidecars)
    totals |= together
    if totals.total() > MAX_COUNT:
        raise RefusedError(
            400, f"{pod} asks for {totals.total()} MIG instances; {MAX_COUNT} are the most"
        )
    return dict(sorted(totals.items()))


def shares(
    pod: Pod, parts: Sequence[Part], geometries: Iterable[Geometry]
) -> Iterator[tuple[str, list[Part]]]:
    """The instances of a pod by container: its own, or before it runs those of later ones."""
    named = _names(geometries)
    free: dict[str, list[Part]] = {}
    for part in parts:
        free.setdefault(part.profile, []).append(part)
    for container in pod.spec.init_containers or ():
        yield container.name, _share(container, named, free, container.restart_policy == "Always")
    for container in pod.spec.containers or ():
        yield container.name, _share(container, named, free, True)


def _share(
    container: Container, named: Mapping[str, str], free: dict[str, list[Part]], keeps: bool
) -> list[Part]:
    mine = []
    for profile, count in _asked(container, named).items():
        mine += free[profile][:count]
        if keeps:
            free[profile] = free[profile][count:]
    return mine


def wants_of(pod: Pod, geometries: Iterable[Geometry]) -> list[tuple[Want, int]]:
    """The same as requests; none where a pod asks for nothing that is placed here."""
    return [(Want(profile), count) for profile, count in wanted(pod, geometries).items()]


def _names(geometries: Iterable[Geometry]) -> dict[str, str]:
    """Profiles by what is behind the prefix: a resource's name has no ``+``."""
    every = (profile.name for geometry in geometries for profile in geometry.profiles)
    return {name.replace("+", "."): name for name in every}


def _asked(container: Container, named: Mapping[str, str]) -> Counter[str]:
    """What one container asks for; what is only a limit is a request as well."""
    resources = container.resources
    asked: Counter[str] = Counter()
    if resources is None:
        return asked
    for name, quantity in ((resources.limits or {}) | (resources.requests or {})).items():
        if name.startswith(RESOURCE):
            short = name.removeprefix(RESOURCE)
            asked[named.get(short, short)] = _count(name, quantity)
    return +asked


def _count(name: str, quantity: str | int) -> int:
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        raise RefusedError(400, f"{quantity!r} of {name} is no number of instances")
    return int(found["number"]) * (1000 if found["times"] else 1)


def notes_for(
    pod: Pod, allocations: Iterable[str], parts: Sequence[Part], geometries: Iterable[Geometry]
) -> dict[str, str]:
    """What a pod is annotated with: whose instances it has, and how its containers get them.

    By pod for those who take devices for all containers; by container for those who tell them
    apart, and for variables that are filled from an annotation.
    """
    said = {"slicewise.dev/allocations": ",".join(allocations)}
    if not all(part.uuid for part in parts):  # on nodes without an agent
        return said
    said["slicewise.dev/devices"] = ",".join(part.uuid for part in parts)
    said["cdi.k8s.io/slicewise"] = ",".join(map(_cdi, parts))
    for name, mine in shares(pod, parts, geometries):
        if mine:
            said[f"{name}.slicewise.dev/devices"] = ",".join(part.uuid for part in mine)
            key = f"cdi-devices.noderesource.dev/container.{name}"
            if len(key.partition("/")[2]) <= _LONGEST_NAME:
                said[key] = "".join(f"- {_cdi(part)}\n" for part in mine)
    return said


_LONGEST_NAME = 63
"""What stands behind the slash of an annotation's key must not be longer."""


def _cdi(part: Part) -> str:
    return f"slicewise.dev/mig={part.uuid}"

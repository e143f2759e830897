"""The MIG instances that a pod requests, and their distribution to its containers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from slicewise.api.allocations import MAX_COUNT
from slicewise.control.answers import RefusedError
from slicewise.control.pods import Container, Pod
from slicewise.core.geometry import Geometry
from slicewise.journal.entries import Part, Want

RESOURCE = "nvidia.com/mig-"
"""Prefix of the resource of a profile, as NVIDIA's device plugin names it."""
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,6})(?P<times>k?)")


def instances_wanted(pod: Pod, geometries: Iterable[Geometry]) -> dict[str, int]:
    """The instances that a pod needs by profile, summed as Kubernetes does.

    Containers run together, with the sidecars. An init container runs with the sidecars before it
    only. A pod needs the maximum over time.
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
            400, f"{pod} requests {totals.total()} MIG instances; the maximum is {MAX_COUNT}"
        )
    return dict(sorted(totals.items()))


def shares(
    pod: Pod, parts: Sequence[Part], geometries: Iterable[Geometry]
) -> Iterator[tuple[str, list[Part]]]:
    """The instances of a pod by container. Init containers share those of later containers."""
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
    """The requests of a pod and their counts; empty if it requests no MIG instances."""
    return [(Want(profile), count) for profile, count in instances_wanted(pod, geometries).items()]


def _names(geometries: Iterable[Geometry]) -> dict[str, str]:
    """Profiles by the suffix of their resource, which cannot contain ``+``."""
    every = (profile.name for geometry in geometries for profile in geometry.profiles)
    return {name.replace("+", "."): name for name in every}


def _asked(container: Container, named: Mapping[str, str]) -> Counter[str]:
    """The instances of one container. A limit without a request counts as a request."""
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
        raise RefusedError(400, f"{quantity!r} of {name} is not a number of instances")
    return int(found["number"]) * (1000 if found["times"] else 1)


def annotations_for(
    pod: Pod, allocations: Iterable[str], parts: Sequence[Part], geometries: Iterable[Geometry]
) -> dict[str, str]:
    """The annotations of a pod: its allocations, and the devices of the pod and its containers.

    The annotations of the pod serve runtimes that give every device to all containers. Those by
    container serve runtimes that distinguish them, and environment variables from annotations.
    """
    annotations = {"slicewise.dev/allocations": ",".join(allocations)}
    if not all(part.uuid for part in parts):  # on nodes without an agent
        return annotations
    annotations["slicewise.dev/devices"] = ",".join(part.uuid for part in parts)
    annotations["cdi.k8s.io/slicewise"] = ",".join(map(_cdi, parts))
    for name, mine in shares(pod, parts, geometries):
        if mine:
            annotations[f"{name}.slicewise.dev/devices"] = ",".join(part.uuid for part in mine)
            key = f"cdi-devices.noderesource.dev/container.{name}"
            if len(key.partition("/")[2]) <= _LONGEST_NAME:
                annotations[key] = "".join(f"- {_cdi(part)}\n" for part in mine)
    return annotations


_LONGEST_NAME = 63
"""Maximum length of the part of an annotation's key after the slash."""


def _cdi(part: Part) -> str:
    return f"slicewise.dev/mig={part.uuid}"

"""Objects of the API for tests, decoded as they come from the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slicewise.kubernetes.api import DeviceClass, Node, Pod, ResourceClaim

OURS = "mig.slicewise.dev"
PARAMETERS = {"apiVersion": "slicewise.dev/v1", "kind": "Slices"}


def device_class(name: str = OURS, sealed: bool = True, **parameters: object) -> DeviceClass:
    """A class of slicewise; ``sealed=False`` gives one that the stock scheduler serves."""
    config = [{"opaque": {"driver": "slicewise.dev", "parameters": PARAMETERS | parameters}}]
    expression = "false" if sealed else 'device.driver == "gpu.nvidia.com"'
    spec = {"selectors": [{"cel": {"expression": expression}}], "config": config if sealed else []}
    return msgspec.convert({"metadata": {"name": name}, "spec": spec}, DeviceClass)


def wants(**parameters: object) -> dict[str, Any]:
    """A claim's configuration."""
    return {"opaque": {"driver": "slicewise.dev", "parameters": PARAMETERS | parameters}}


def claim(
    name: str,
    *requests: Mapping[str, Any],
    config: Sequence[Mapping[str, Any]] = (),
    seats: Sequence[tuple[str, str]] = (),
    node: str = "n1",
    version: int = 1,
    uid: str = "",
    reserved: Sequence[str] = (),
    tentative: bool = False,
    **metadata: object,
) -> ResourceClaim:
    """A claim; with ``seats`` (pool, device) it has been given these."""
    asked = requests or ({"name": "r", "exactly": {"deviceClassName": OURS}},)
    more = {"bindingConditions": ["slicewise.dev/confirmed"]} if tentative else {}
    status: dict[str, Any] = {"reservedFor": [{"uid": one} for one in reserved]}
    if seats:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        status["allocation"] = {
            "devices": {
                "results": [
                    {"request": "r", "driver": "gpu.nvidia.com", "pool": pool, "device": d} | more
                    for pool, d in seats
                ]
            },
            "nodeSelector": {"nodeSelectorTerms": [term]},
        }
    made = {
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            **metadata,
        },
        "spec": {"devices": {"requests": list(asked), "config": list(config)}},
        "status": status,
    }
    return msgspec.convert(made, ResourceClaim)


def pod(name: str, claims: Sequence[str] = (), namespace: str = "team", **spec: object) -> Pod:
    """A pod with claims that exist."""
    wanted = [{"name": f"c{i}", "resourceClaimName": c} for i, c in enumerate(claims)]
    made = {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{name}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"resourceClaims": wanted, **spec},
    }
    return msgspec.convert(made, Pod)


def node(name: str, cpu: str = "8", unschedulable: bool = False) -> Node:
    """A node."""
    made = {
        "metadata": {"name": name},
        "spec": {"unschedulable": unschedulable},
        "status": {"allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "100"}},
    }
    return msgspec.convert(made, Node)

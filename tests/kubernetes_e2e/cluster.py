"""Nodes, pods and claims for the tests: created quickly, and removed afterwards."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial

from tests.kubernetes_e2e.api import CORE, RESOURCE, Api, ApiError, Json, until
from tests.kubernetes_e2e.nvidia import (
    CLASSES,
    DRIVER,
    MIG_CLASS,
    profile_selector,
    resource_slices,
)

FINALIZER = "resource.kubernetes.io/delete-protection"
"""The finalizer of an allocated claim."""
_WRITERS = 8


def node(
    name: str, cpu: str = "64", memory: str = "512Gi", pods: str = "250", **labels: str
) -> Json:
    """A node simulated by kwok, with these resources."""
    room = {"cpu": cpu, "memory": memory, "pods": pods}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **labels},
        },
        "status": {"allocatable": room, "capacity": room},
    }


def publish(api: Api, nodes: Iterable[Json], model: str, gpus: int) -> list[str]:
    """Create nodes, each with GPUs of a model as NVIDIA's driver shows them; returns the names."""
    with ThreadPoolExecutor(_WRITERS) as pool:
        made = list(pool.map(partial(api.create, f"{CORE}/nodes"), nodes))
        slices = (
            slice_
            for one in made
            for slice_ in resource_slices(
                one["metadata"]["name"], model, gpus, one["metadata"]["uid"]
            )
        )
        for _ in pool.map(partial(api.create, f"{RESOURCE}/resourceslices"), slices):
            pass
    return [one["metadata"]["name"] for one in made]


def withdraw(api: Api, names: Iterable[str]) -> None:
    """Delete nodes, with their slices."""
    gone = set(names)
    paths = [f"{CORE}/nodes/{name}" for name in gone]
    paths += [
        f"{RESOURCE}/resourceslices/{found['metadata']['name']}"
        for found in api.items(f"{RESOURCE}/resourceslices")
        if found["spec"].get("nodeName") in gone
    ]
    with ThreadPoolExecutor(_WRITERS) as pool:
        for _ in pool.map(api.delete, paths):
            pass


def make_classes(api: Api, classes: Iterable[Json] = CLASSES) -> None:
    """Create missing classes; NVIDIA's by default."""
    for one in classes:
        with suppress_conflict():
            api.create(f"{RESOURCE}/deviceclasses", one)


@contextmanager
def suppress_conflict() -> Iterator[None]:
    """Ignore that it already exists."""
    try:
        yield
    except ApiError as error:
        if error.status != 409:
            raise


@contextmanager
def namespace(api: Api, name: str | None = None) -> Iterator[str]:
    """A separate namespace, which is emptied afterwards."""
    name = name or f"t-{uuid.uuid4().hex[:10]}"
    api.create(
        f"{CORE}/namespaces",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}},
    )
    try:
        yield name
    finally:
        clear(api, name)
        api.delete(f"{CORE}/namespaces/{name}")


def clear(api: Api, space: str) -> None:
    """Delete a namespace's pods and claims, and wait until nothing is allocated."""
    pods, claims = pods_in(space), claims_in(space)
    with suppress(ApiError):
        api.call("DELETE", pods, {"kind": "DeleteOptions", "gracePeriodSeconds": 0})
    until(f"the pods of {space} are gone", lambda: not api.items(pods) or None)
    api.call("DELETE", claims)
    until(f"the claims of {space} are gone", lambda: not api.items(claims) or None)


def pods_in(space: str) -> str:
    """The path of a namespace's pods."""
    return f"{CORE}/namespaces/{space}/pods"


def claims_in(space: str) -> str:
    """The path of a namespace's claims."""
    return f"{RESOURCE}/namespaces/{space}/resourceclaims"


def templates_in(space: str) -> str:
    """The path of a namespace's claim templates."""
    return f"{RESOURCE}/namespaces/{space}/resourceclaimtemplates"


def device_request(
    device_class: str = MIG_CLASS, profile: str | None = None, count: int = 1, name: str = "slice"
) -> Json:
    """A request for devices of a class; with a profile, as users of the stock driver ask for it."""
    exactly: Json = {"deviceClassName": device_class, "count": count}
    if profile is not None:
        exactly["selectors"] = [{"cel": {"expression": profile_selector(profile)}}]
    return {"name": name, "exactly": exactly}


def claim(name: str, *requests: Json, config: Sequence[Json] = ()) -> Json:
    """A claim that pods may share."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": _devices(requests, config)},
    }


def template(name: str, *requests: Json, config: Sequence[Json] = ()) -> Json:
    """A template, from which each pod gets a claim of its own."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": _devices(requests, config)}},
    }


def _devices(requests: Sequence[Json], config: Sequence[Json]) -> Json:
    devices: Json = {"requests": list(requests)}
    if config:
        devices["config"] = list(config)
    return devices


def pod(
    name: str,
    templates: Sequence[str] = (),
    claims: Sequence[str] = (),
    cpu: str = "100m",
    memory: str = "64Mi",
    labels: Mapping[str, str] | None = None,
    **spec: object,
) -> Json:
    """A pod with claims, from templates or shared ones; ``spec`` adds to its specification."""
    sources = [("resourceClaimTemplateName", t) for t in templates]
    sources += [("resourceClaimName", c) for c in claims]
    wanted = [{"name": f"c{i}", key: value} for i, (key, value) in enumerate(sources)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "none",
                    "resources": {
                        "requests": {"cpu": cpu, "memory": memory},
                        "claims": [{"name": one["name"]} for one in wanted],
                    },
                }
            ],
            "resourceClaims": wanted,
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def claims_of(api: Api, space: str, name: str) -> list[str]:
    """The names of a pod's claims, in the order it lists them; those from templates once made."""
    found = api.get(f"{pods_in(space)}/{name}")
    made = {
        status["name"]: status.get("resourceClaimName")
        for status in found.get("status", {}).get("resourceClaimStatuses", [])
    }
    wanted = found["spec"].get("resourceClaims", [])
    names = [one.get("resourceClaimName") or made.get(one["name"]) for one in wanted]
    return [one for one in names if one]


def allocated(api: Api, space: str, name: str) -> list[tuple[str, str]]:
    """Node and device of all that is allocated for a pod."""
    return [
        (result["pool"], result["device"])
        for one in claims_of(api, space, name)
        for result in api.get(f"{claims_in(space)}/{one}")
        .get("status", {})
        .get("allocation", {})
        .get("devices", {})
        .get("results", [])
    ]


def until_running(api: Api, space: str, name: str) -> Json:
    """Wait until a pod runs, and return it."""

    def runs() -> Json | None:
        found = api.get(f"{pods_in(space)}/{name}")
        return found if found["status"].get("phase") == "Running" else None

    return until(f"{space}/{name} runs", runs)


def results(device_node: str, devices: Iterable[str], **more: object) -> list[Json]:
    """What an allocation of these devices says of each; ``more`` is added to every one."""
    result = {"request": "slice", "driver": DRIVER, "pool": device_node, **more}
    return [{**result, "device": device} for device in devices]


def write_allocation(
    api: Api, space: str, name: str, device_node: str, devices: Sequence[Json], **more: object
) -> Json:
    """Allocate a claim as the scheduler would, finalizer first, with what ``results`` gives."""
    path = f"{claims_in(space)}/{name}"
    found = api.get(path)
    finalizers = found["metadata"].setdefault("finalizers", [])
    if FINALIZER not in finalizers:
        finalizers.append(FINALIZER)
        found = api.put(path, found)
    term = {"key": "metadata.name", "operator": "In", "values": [device_node]}
    found["status"] = {
        "allocation": {
            "devices": {"results": list(devices)},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [term]}]},
            "allocationTimestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            **more,
        }
    }
    return api.put(f"{path}/status", found)


def clear_allocation(api: Api, space: str, name: str) -> Json:
    """Deallocate a claim, even if it is reserved."""
    path = f"{claims_in(space)}/{name}"
    return api.put(f"{path}/status", {**api.get(path), "status": {}})


def set_condition(api: Api, space: str, name: str, condition: str) -> Json:
    """Set a condition on every device of a claim."""
    path = f"{claims_in(space)}/{name}"
    found = api.get(path)
    told = {
        "type": condition,
        "status": "True",
        "reason": "PlacementMessage",
        "message": "",
        "lastTransitionTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    found["status"]["devices"] = [
        {key: result[key] for key in ("driver", "pool", "device")} | {"conditions": [told]}
        for result in found["status"]["allocation"]["devices"]["results"]
    ]
    return api.put(f"{path}/status", found)


def unscheduled_because(api: Api, space: str, name: str) -> str:
    """The scheduler's message for a pod without a node; empty before its first attempt."""
    for condition in api.get(f"{pods_in(space)}/{name}")["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return ""

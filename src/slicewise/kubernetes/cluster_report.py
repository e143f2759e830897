"""What the commands of `kubectl slicewise` report about a cluster, as data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from slicewise.core.cluster import Instance
from slicewise.core.request import Request
from slicewise.engine.defrag import Plan, Planner
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.claim_templates import missing_templates
from slicewise.kubernetes.devices.pools import home_of
from slicewise.kubernetes.event_recorder import CONDITION
from slicewise.kubernetes.pending_claims import PendingPod
from slicewise.kubernetes.snapshot import Snapshot

Json = dict[str, Any]

_DEVICE_PLUGIN = "nvidia.com/mig-"
_MOST_PLANS = 10
"""The number of different requests of waiting pods that are planned for."""


def users(snapshot: Snapshot, claim: str) -> list[str]:
    """The pods of a claim, by its uid."""
    record = snapshot.cache.records.get(claim)
    return [] if record is None else list(snapshot.pending.users(record.claim.metadata.key))


def place(snapshot: Snapshot, gpu: int, start: int) -> Json:
    """A place on a GPU: its node, the number of the GPU there, and the first slice."""
    node = snapshot.cache.state.cluster.node_of(gpu)
    return {"node": home_of(node.name), "gpu": gpu - node.gpus.start, "start": start}


# map


def slice_map(snapshot: Snapshot, only: str | None = None) -> list[Json]:
    """Every GPU of the nodes, or of one of them, with its instances."""
    cluster = snapshot.cache.state.cluster
    return [
        {
            "node": home_of(node.name),
            "model": node.geometry.model,
            "schedulable": node.schedulable,
            "gpus": [_gpu(snapshot, gpu) for gpu in node.gpus],
        }
        for node in sorted(cluster.nodes, key=lambda node: node.name)
        if only in (None, home_of(node.name))
    ]


def _gpu(snapshot: Snapshot, gpu: int) -> Json:
    cluster = snapshot.cache.state.cluster
    instances = sorted(cluster.instances_on(gpu), key=lambda one: one.start)
    return {
        "gpu": gpu - cluster.node_of(gpu).gpus.start,
        "slices": cluster.state(gpu).geometry.slices,
        "free": cluster.state(gpu).free_slices,
        "takes_instances": cluster.takes_instances(gpu),
        "instances": [_instance(snapshot, one) for one in instances],
    }


def _instance(snapshot: Snapshot, instance: Instance) -> Json:
    owner = snapshot.cache.state.owner.get(instance.id, "")
    record = snapshot.cache.records.get(owner)
    return {
        "profile": instance.profile,
        "start": instance.start,
        "size": instance.size,
        "claim": "" if record is None else record.claim.metadata.key,
        "pods": users(snapshot, owner),
        "of_slicewise": record is not None and snapshot.pending.is_ours(record.claim),
    }


# top


def usage(snapshot: Snapshot) -> Json:
    """How much of each node and by each namespace is in use, and what waits."""
    waiting = list(waiting_pods(snapshot))
    names = Counter(one.pod.metadata.namespace for one in waiting)
    return {
        "nodes": [_node_usage(snapshot, node) for node in slice_map(snapshot)],
        "namespaces": [
            {
                "namespace": name,
                "memory_slices": tenant.usage.memory_slices,
                "compute_slices": tenant.usage.compute_slices,
                "instances": tenant.usage.instances,
                "quota": {
                    "memory_slices": tenant.quota.memory_slices,
                    "compute_slices": tenant.quota.compute_slices,
                    "instances": tenant.quota.instances,
                },
                "waiting": names[name],
            }
            for name, tenant in sorted(snapshot.cache.state.tenants_by_name.items())
            if tenant.usage.instances or names[name]
        ],
        "waiting": [
            {"pod": one.key, "asks_for": [str(want) for want in one.requests], **said(one.pod)}
            for one in waiting
        ],
        "hidden": list(snapshot.hidden),
    }


def _node_usage(snapshot: Snapshot, node: Json) -> Json:
    cluster = snapshot.cache.state.cluster
    gpus = [
        gpu
        for one in cluster.nodes
        if home_of(one.name) == node["node"] and one.geometry.model == node["model"]
        for gpu in one.gpus
    ]
    geometry = cluster.state(gpus[0]).geometry
    open_ = [gpu for gpu in gpus if cluster.takes_instances(gpu)]
    fitting = [
        profile
        for profile in geometry.plain_profiles
        if any(cluster.state(gpu).feasible_starts(profile) for gpu in open_)
    ]
    largest = max(fitting, key=lambda profile: (profile.size, profile.compute), default=None)
    return {
        "node": node["node"],
        "model": node["model"],
        "schedulable": node["schedulable"],
        "gpus": len(gpus),
        "slices": sum(one["slices"] for one in node["gpus"]),
        "free": sum(one["free"] for one in node["gpus"]),
        "instances": sum(len(one["instances"]) for one in node["gpus"]),
        "largest_fit": None if largest is None else largest.name,
    }


def waiting_pods(snapshot: Snapshot) -> Iterator[PendingPod]:
    """The pods that wait for devices from slicewise: by priority, then by age."""
    pods = sorted(
        snapshot.pending.pods.values(),
        key=lambda pod: (
            -pod.spec.priority,
            parse_time(pod.metadata.creation_timestamp, 0.0),
            pod.metadata.key,
        ),
    )
    for pod in pods:
        pending = snapshot.pending.pending_pod(pod.metadata.key)
        if pending is not None:
            yield pending


def said(pod: Pod) -> Json:
    """What slicewise last said to a waiting pod."""
    for condition in pod.status.conditions:
        if condition.type == CONDITION and condition.status == "False":
            return {"reason": condition.reason, "message": condition.message}
    return {"reason": "", "message": ""}


# why


def why(pod: Pod, snapshot: Snapshot | None) -> Json:
    """Why a pod waits, or where its devices are; without a snapshot as far as the pod says it."""
    found: Json = {
        "pod": pod.metadata.key,
        "phase": pod.status.phase,
        "node": pod.spec.node_name,
        "state": "",
        "text": "",
        "asks_for": [],
        "devices": [],
        "nodes": [],
        **said(pod),
    }
    if pod.over or pod.metadata.deletion_timestamp:
        return found | {"state": "ended", "text": "it has ended, or is being deleted"}
    if not pod.spec.resource_claims:
        return found | {"state": "none", "text": _no_claims(pod)}
    if snapshot is None:
        state = "waits" if found["reason"] else "runs" if pod.spec.node_name else "unknown"
        return found | {"state": state}
    known = snapshot.pending.pods.get(pod.metadata.key)
    found["devices"] = [] if known is None else _devices(snapshot, known)
    pending = snapshot.pending.pending_pod(pod.metadata.key)
    if pending is not None:
        found |= {"state": "waits", "asks_for": [str(want) for want in pending.requests]}
        found["text"] = pending.problem
        if not pending.problem:
            found["nodes"] = _nodes(snapshot, pending)
    elif pod.spec.node_name:
        found["state"] = "runs"
    elif found["devices"]:
        text = "it has its devices; kube-scheduler has not bound it yet"
        found |= {"state": "placed", "text": text}
    else:
        found |= {"state": "not ready", "text": _not_ready(pod)}
    return found


def _no_claims(pod: Pod) -> str:
    asked = [
        f"container {one.name}: {name}"
        for one in (*pod.spec.containers, *pod.spec.init_containers)
        for name in one.resources.requests
        if name.startswith(_DEVICE_PLUGIN)
    ]
    if asked:
        return (
            f"it asks a device plugin for slices ({asked[0]}), not slicewise: it was created "
            "before the policies for unmodified pods, or it or its namespace has opted out"
        )
    return "it has no resource claims, so slicewise has nothing to do with it"


def _not_ready(pod: Pod) -> str:
    if pod.spec.scheduling_gates:
        gates = ", ".join(gate.name for gate in pod.spec.scheduling_gates)
        return f"it has scheduling gates: {gates}"
    missing = list(missing_templates(pod))
    if missing:
        return f"its claim from the template {missing[0]} has not been created yet"
    return "its claims have not been created yet, or slicewise does not allocate them"


def _devices(snapshot: Snapshot, pod: Pod) -> list[Json]:
    state = snapshot.cache.state
    mine = {claim.metadata.uid for claim in snapshot.pending.claims_of(pod)}
    return [
        {"profile": part.profile, **place(snapshot, instance.gpu, instance.start)}
        for instance in state.cluster.instances()
        if state.owner.get(instance.id) in mine
        for part in state.parts((instance,))
    ]


def _nodes(snapshot: Snapshot, pending: PendingPod) -> list[Json]:
    """What each node lacks for a pod, grouped by that."""
    state, offers = snapshot.cache.state, snapshot.cache.offers
    requests = [state.canonical(want) for want in pending.requests]
    groups: dict[str, list[str]] = {}
    tolerations = frozenset(device.tolerations for _, p in pending.claims for device in p.devices)
    with snapshot.cache.pools.tolerating(tolerations):
        nodes = sorted(state.cluster.nodes, key=lambda node: node.name)
        roomy = set(offers.nodes(requests, {node.name for node in nodes}))
        for node in nodes:
            home = home_of(node.name)
            if not node.schedulable:
                text = "the node is cordoned, or its devices are withdrawn"
            elif node.name in roomy:
                lack = snapshot.node_resources.misfit(pending.pod, home)
                text = "there is room" if lack is None else f"there is room, but the node {lack}"
            else:
                text = offers.why_not(node.name, requests).detail
            groups.setdefault(text, []).append(home)
    return [{"why": text, "nodes": homes} for text, homes in groups.items()]


# plan


def plans(snapshot: Snapshot, budget: int, of: PendingPod | Request | None) -> list[Json]:
    """Which pods would have to move so that a pod, a profile, or each waiting pod fits."""
    if isinstance(of, Request):
        wanted: dict[Request, list[str]] = {of: []}
    else:
        wanted = {}
        for pending in waiting_pods(snapshot) if of is None else (of,):
            if len(pending.requests) == 1 and not pending.problem:
                want = snapshot.cache.state.canonical(pending.requests[0])
                wanted.setdefault(want, []).append(pending.key)
    pinned = _pinned(snapshot)
    found = []
    for request, pods in list(wanted.items())[:_MOST_PLANS]:
        cluster = snapshot.cache.state.cluster
        plan = Planner(cluster, None, pinned).to_fit(request, budget)
        found.append({"for": str(request), "pods": pods, **_plan(snapshot, plan)})
    return found


def _plan(snapshot: Snapshot, plan: Plan | None) -> Json:
    if plan is None or plan.gpu is None or plan.placement is None:
        return {"found": False, "moves": [], "fits": None}
    moves = []
    owner = snapshot.cache.state.owner
    for move in plan.moves:
        one = move.instance
        moves.append(
            {
                "pods": users(snapshot, owner.get(one.id, "")),
                "profile": one.profile,
                "from": place(snapshot, one.gpu, one.start),
                "to": place(snapshot, move.gpu, move.start),
            }
        )
    fits = place(snapshot, plan.gpu, plan.placement.start)
    return {"found": True, "moves": moves, "fits": fits}


def _pinned(snapshot: Snapshot) -> set[int]:
    """The instances that cannot move, because no single pod would be created again for them."""
    state, pending = snapshot.cache.state, snapshot.pending
    pinned = set()
    for instance in state.cluster.instances():
        uid = state.owner.get(instance.id, "")
        record = snapshot.cache.records.get(uid)
        pods = users(snapshot, uid)
        if (
            record is None
            or not pending.is_ours(record.claim)
            or len(record.claim.spec.devices.requests) != 1
            or len(pods) != 1
            or len(pending.pods[pods[0]].spec.resource_claims) != 1
            or not any(one.controller for one in pending.pods[pods[0]].metadata.owner_references)
        ):
            pinned.add(instance.id)
    return pinned

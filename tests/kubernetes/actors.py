"""The simulated parts of a cluster besides slicewise: users, ResourceClaim controller, scheduler.

Each does one small step on request, as its counterpart in Kubernetes would. The scheduler decides
on the versions of claims that it has read so far, and writes with these versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.kubernetes.fake_api import FakeApi, Json, key_of
from tests.kubernetes.objects import OURS, wants
from tests.kubernetes.publishing import nvidia
from tests.kubernetes_e2e.nvidia import CLASSES as STOCK_CLASSES
from tests.kubernetes_e2e.nvidia import DRIVER, MIG_CLASS, devices_at

from slicewise.control.pods import EXPECTED
from slicewise.kubernetes.api.quantities import amount
from slicewise.kubernetes.api_client import KubernetesApiError
from slicewise.kubernetes.claim_client import CONFIRMED, CONFLICT, FINALIZER
from slicewise.kubernetes.informer import CLAIMS, CLASSES, NAMESPACES, NODES, PODS, SLICES
from slicewise.kubernetes.pending_claims import POD_CLAIM_NAME

MODEL = "A30-24GB"
PROFILES = ("1g.6gb", "2g.12gb", "4g.24gb")
NODE_NAMES = ("n1", "n2")
TEAM = "team"
STOCK = "stock "
"""The prefix of templates with claims that kube-scheduler allocates."""

Seats = list[tuple[str, str]]
"""Nodes and devices."""


# Contents


def _counters(found: Json) -> Counter[str]:
    return Counter({name: int(amount(one["value"]) * 1000) for name, one in found.items()})


_PUBLISHED: list[Json] = nvidia(MODEL, 1, "n1")
_TOTALS = _counters(_PUBLISHED[0]["spec"]["sharedCounters"][0]["counters"])
_TAKES = {
    one["name"]: _counters(one["consumesCounters"][0]["counters"])
    for one in _PUBLISHED[1]["spec"]["devices"]
}
DEVICES = {profile: tuple(devices_at(MODEL, 0, profile).values()) for profile in PROFILES}
"""By profile: the devices that each node has for it."""


def fits(seats: Iterable[tuple[str, str]]) -> bool:
    """Whether these devices can all exist at once."""
    used: dict[str, Counter[str]] = {}
    for node, device in seats:
        used.setdefault(node, Counter()).update(_TAKES[device])
    return all(
        much <= _TOTALS[counter] for amounts in used.values() for counter, much in amounts.items()
    )


def seats_of(claim: Json) -> Seats:
    """The devices of a claim."""
    allocation = claim["status"].get("allocation")
    return (
        [(one["pool"], one["device"]) for one in allocation["devices"]["results"]]
        if (allocation)
        else []
    )


def node_of(claim: Json) -> str:
    """The node of an allocated claim."""
    (term,) = claim["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
    return str(term["matchFields"][0]["values"][0])


def is_stock(claim: Json) -> bool:
    """Whether kube-scheduler allocates a claim."""
    found = claim["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"]
    return bool(found == MIG_CLASS)


def profile_of(claim: Json) -> str:
    """The requested profile of a claim."""
    return str(claim["metadata"]["annotations"]["profile"])


def is_over(pod: Json | None) -> bool:
    """Whether a pod was deleted or has ended."""
    return pod is None or pod["status"]["phase"] == "Succeeded"


def claim_names(pod: Json) -> list[str | None]:
    """The claims of a pod; None for one that is not created yet."""
    made = {one["name"]: one["resourceClaimName"] for one in pod["status"]["resourceClaimStatuses"]}
    names = [one.get("resourceClaimName") or made.get(one["name"]) for one in _claims(pod)]
    return [None if name is None else f"{TEAM}/{name}" for name in names]


def _sets(part: str, **fields: Any) -> Callable[[Json], None]:
    """A change that sets fields of a part of an object."""
    return lambda thing: thing[part].update(fields)


def _claims(pod: Json) -> list[Json]:
    return list(pod["spec"]["resourceClaims"])


def add_base_objects(api: FakeApi) -> None:
    """Create a namespace, nodes with devices, and the driver's classes."""
    api.make(NAMESPACES.name, {"metadata": {"name": TEAM}})
    for device_class in STOCK_CLASSES:
        api.make(CLASSES.name, dict(device_class))
    for name in NODE_NAMES:
        add_node(api, name)
        publish(api, name)


def add_node(api: FakeApi, name: str) -> None:
    """Create a node."""
    has = {"cpu": "8", "memory": "64Gi", "pods": "100"}
    made = {"metadata": {"name": name}, "spec": {}, "status": {"allocatable": has}}
    api.make(NODES.name, made)


def publish(api: FakeApi, node: str) -> None:
    """Publish the devices of a node."""
    for one in nvidia(MODEL, 1, node):
        api.make(SLICES.name, one)


def withdraw(api: FakeApi, node: str) -> None:
    """Delete the slices of a node."""
    for key in slices_of(api, node):
        api.delete(SLICES.name, key)


def slices_of(api: FakeApi, node: str) -> list[str]:
    """The slices that are published for a node."""
    there = api.there[SLICES.name]
    return sorted(key for key, one in there.items() if one["spec"]["pool"]["name"] == node)


def is_open(api: FakeApi, node: str) -> bool:
    """Whether a node is schedulable and its devices are published."""
    found = api.there[NODES.name].get(node)
    return (
        found is not None
        and not found["spec"].get("unschedulable")
        and len(slices_of(api, node)) == len(_PUBLISHED)
    )


# Users


def make_claim(
    api: FakeApi, name: str, profile: str, owner: Json | None = None, reference: str = ""
) -> str:
    """Create a claim, separately or from a template for a pod; returns its key."""
    plain = profile.removeprefix(STOCK)
    ours = profile == plain
    meta: Json = {"name": name, "namespace": TEAM, "annotations": {"profile": plain}}
    if owner is not None:
        whose = owner["metadata"]
        meta["annotations"][POD_CLAIM_NAME] = reference
        meta["ownerReferences"] = [
            {"kind": "Pod", "name": whose["name"], "uid": whose["uid"], "controller": True}
        ]
    request = {"name": "r", "exactly": {"deviceClassName": OURS if ours else MIG_CLASS}}
    devices = {"requests": [request], "config": [wants(profile=plain)] if ours else []}
    return key_of(
        api.make(CLAIMS.name, {"metadata": meta, "spec": {"devices": devices}, "status": {}})
    )


def make_pod(
    api: FakeApi,
    name: str,
    templates: Iterable[str],
    claims: Iterable[str],
    deadline: int | None = None,
    expected: str = "",
) -> None:
    """Create a pod with claims from templates, named by profile, and with existing claims."""
    asked: list[Json] = [
        {"name": f"t{i}", "resourceClaimTemplateName": one} for i, one in enumerate(templates)
    ]
    asked += [{"name": f"c{i}", "resourceClaimName": one} for i, one in enumerate(claims)]
    made = {
        "metadata": {
            "name": name,
            "namespace": TEAM,
            "annotations": {EXPECTED: expected} if expected else {},
        },
        "spec": {"resourceClaims": asked, "activeDeadlineSeconds": deadline},
        "status": {"phase": "Pending", "resourceClaimStatuses": [], "conditions": []},
    }
    api.make(PODS.name, made)


def end_pod(api: FakeApi, key: str, done: bool) -> None:
    """Let a pod succeed, or delete it; a running pod is marked first and ends later."""
    pod = api.there[PODS.name][key]
    runs = pod["spec"].get("nodeName") and not is_over(pod)
    if runs and (done or pod["metadata"].get("deletionTimestamp")):
        api.change(PODS.name, key, lambda one: one["status"].update(phase="Succeeded"))
    elif runs:
        api.change(PODS.name, key, lambda one: one["metadata"].update(deletionTimestamp="now"))
    else:
        api.delete(PODS.name, key)


# The controller of claims, and the collection of garbage


class ClaimController:
    """The ResourceClaim controller: creates claims from templates and cleans up unused ones."""

    def __init__(self, api: FakeApi) -> None:
        self._api = api
        self._flapping: set[str] = set()
        self._made = 0

    def see_to_pod(self, key: str) -> None:
        """Create a missing claim of a pod, or record one in the pod's status."""
        pod = self._api.there[PODS.name][key]
        if is_over(pod) or pod["metadata"].get("deletionTimestamp"):
            return
        recorded = pod["status"]["resourceClaimStatuses"]
        noted = {one["name"] for one in recorded}
        for one in _claims(pod):
            if "resourceClaimTemplateName" not in one or one["name"] in noted:
                continue
            start = f"{pod['metadata']['name']}-{one['name']}-"
            mine = [
                claim["metadata"]["name"]
                for claim in self._api.there[CLAIMS.name].values()
                if claim["metadata"]["name"].startswith(start)
                and claim["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"]
            ]
            if mine:
                entry = {"name": one["name"], "resourceClaimName": mine[0]}
                if pod["metadata"]["uid"] in self._flapping:
                    recorded = self._applied_by_slicewise(pod)
                made = [*recorded, entry]
                self._api.change(PODS.name, key, _sets("status", resourceClaimStatuses=made))
            else:
                self._made += 1
                make_claim(
                    self._api,
                    f"{start}{self._made}",
                    one["resourceClaimTemplateName"],
                    pod,
                    one["name"],
                )
            return

    def start_flapping(self, key: str) -> bool:
        """Record the claims of a pod in turns from now on, as Kubernetes 1.36.4 may do.

        Each time, the entries that slicewise does not own as well are dropped. Returns whether the
        pod has several claims on record.
        """
        pod = self._api.there[PODS.name][key]
        recorded = pod["status"]["resourceClaimStatuses"]
        if len(recorded) < 2 or pod["spec"].get("nodeName"):
            return False
        self._flapping.add(pod["metadata"]["uid"])
        kept = self._applied_by_slicewise(pod) or recorded[1:]
        self._api.change(PODS.name, key, _sets("status", resourceClaimStatuses=kept))
        return True

    def _applied_by_slicewise(self, pod: Json) -> list[Json]:
        applied = self._api.applied.get(pod["metadata"]["uid"], ())
        return [one for one in pod["status"]["resourceClaimStatuses"] if one["name"] in applied]

    def see_to_claim(self, key: str) -> None:
        """Remove ended pods from a claim; deallocate and delete an unused one."""
        claim = self._api.there[CLAIMS.name][key]
        pods = {pod["metadata"]["uid"]: pod for pod in self._api.there[PODS.name].values()}
        reserved = claim["status"].get("reservedFor", [])
        valid = [
            one
            for one in reserved
            if not is_over(pods.get(one["uid"])) and not _is_given_up(pods[one["uid"]])
        ]
        deleted = claim["metadata"].get("deletionTimestamp")

        def clear(one: Json) -> None:
            one["status"]["reservedFor"] = valid
            if not valid:
                for name in ("allocation", "devices", "reservedFor"):
                    one["status"].pop(name, None)

        if len(valid) < len(reserved) or (deleted and seats_of(claim) and not valid):
            self._api.change(CLAIMS.name, key, clear)
        elif not seats_of(claim) and (deleted or self._api.version % 2):
            self._api.change(CLAIMS.name, key, lambda one: one["metadata"].pop("finalizers", None))
        owners = claim["metadata"].get("ownerReferences", [])
        if owners and not deleted and is_over(pods.get(owners[0]["uid"])):
            self._api.delete(CLAIMS.name, key)


def _is_given_up(pod: Json) -> bool:
    """Whether a pod was deleted before it was bound."""
    return bool(pod["metadata"].get("deletionTimestamp")) and not pod["spec"].get("nodeName")


# The scheduler


@dataclass
class _Binding:
    """A pod that kube-scheduler is about to bind."""

    node: str
    todo: list[Json]
    """The claims to reserve, as kube-scheduler knows them."""
    planned: dict[str, str] = field(default_factory=dict)
    """By uid of a claim of the stock classes: the chosen device."""


class StockScheduler:
    """kube-scheduler: binds pods with allocated claims, and allocates claims of stock classes."""

    def __init__(self, api: FakeApi) -> None:
        self._api = api
        self._heard = 0
        self._claims: dict[str, Json] = {}
        self.binding: dict[str, _Binding] = {}
        """By uid of a pod."""
        self._refusals = 0

    def hear(self, many: int = 1) -> bool:
        """Read a number of changes of claims; returns whether there were any."""
        log = self._api.log[CLAIMS.name][self._heard : self._heard + many]
        self._heard += len(log)
        for gone, data in log:
            claim = msgspec.json.decode(data)
            if gone:
                self._claims.pop(key_of(claim), None)
            else:
                self._know(claim)
        return bool(log)

    def _know(self, claim: Json) -> None:
        """Keep the newest known version of a claim; own writes are known at once."""
        known = self._claims.get(key_of(claim))
        if known is None or _version(known) < _version(claim):
            self._claims[key_of(claim)] = claim

    @property
    def plans(self) -> bool:
        """Whether chosen devices are not written yet."""
        return any(one.planned and one.todo for one in self.binding.values())

    def see_to(self, key: str, refuse: bool = False) -> None:
        """Do the next step for a pod."""
        pod = self._api.there[PODS.name][key]
        uid = pod["metadata"]["uid"]
        if pod["spec"].get("nodeName") or is_over(pod):
            self.binding.pop(uid, None)
        elif pod["metadata"].get("deletionTimestamp"):
            self._unreserve(pod)
        elif uid in self.binding:
            self._go_on(pod, self.binding[uid])
        else:
            self._begin(pod, refuse)

    def finish_plans(self) -> None:
        """Write all chosen devices."""
        while self.plans:
            for key, pod in list(self._api.there[PODS.name].items()):
                one = self.binding.get(pod["metadata"]["uid"])
                if one is not None and one.planned and one.todo:
                    self.see_to(key)
            there = {pod["metadata"]["uid"] for pod in self._api.there[PODS.name].values()}
            self.binding = {uid: one for uid, one in self.binding.items() if uid in there}

    def _begin(self, pod: Json, refuse: bool) -> None:
        names = claim_names(pod)
        claims = [self._claims[name] for name in names if name is not None and name in self._claims]
        if len(claims) < len(names) or any(c["metadata"].get("deletionTimestamp") for c in claims):
            return
        if any(not seats_of(one) and not is_stock(one) for one in claims):
            self._say(pod, "device class does not exist")
            return
        nodes = {node_of(one) for one in claims if seats_of(one)}
        planned = self._plan([one for one in claims if not seats_of(one)], nodes)
        free = nodes or {node for node, _ in planned.values()} if planned is not None else set()
        if refuse or len(free) != 1 or not is_open(self._api, next(iter(free))):
            self._refusals += refuse
            self._refuse(pod, claims, f"refused {self._refusals}" if refuse else "no node fits")
            return
        (node,) = free
        if planned:
            self._nominate(pod, node)
        devices = {uid: device for uid, (_, device) in (planned or {}).items()}
        self.binding[pod["metadata"]["uid"]] = _Binding(node, list(claims), devices)

    def _plan(self, claims: list[Json], nodes: set[str]) -> dict[str, tuple[str, str]] | None:
        """Devices for claims of the stock classes, as far as known; None if none are free."""
        taken = [seat for one in self._claims.values() for seat in seats_of(one)]
        for one in self.binding.values():
            waiting = {claim["metadata"]["uid"] for claim in one.todo}
            taken += [(one.node, device) for uid, device in one.planned.items() if uid in waiting]
        if not fits(taken):
            return None if claims else {}
        for node in sorted(nodes or NODE_NAMES):
            planned: dict[str, tuple[str, str]] = {}
            for claim in claims if is_open(self._api, node) else ():
                for device in DEVICES[profile_of(claim)]:
                    if fits([*taken, *planned.values(), (node, device)]):
                        planned[claim["metadata"]["uid"]] = node, device
                        break
            if len(planned) == len(claims):
                return planned
        return None

    def _refuse(self, pod: Json, claims: list[Json], why: str) -> None:
        """Deallocate an unused claim of a pod that fits no node."""
        self._say(pod, why)
        for claim in claims:
            if seats_of(claim) and not claim["status"].get("reservedFor"):
                version = claim["metadata"]["resourceVersion"]
                self._api.change(CLAIMS.name, key_of(claim), deallocate, version)
                return

    def _say(self, pod: Json, text: str) -> None:
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": text,
        }

        def note(one: Json) -> None:
            rest = [c for c in one["status"]["conditions"] if c["type"] != "PodScheduled"]
            one["status"]["conditions"] = [*rest, condition]

        self._api.change(PODS.name, key_of(pod), note)

    def _nominate(self, pod: Json, node: str) -> None:
        self._api.change(
            PODS.name, key_of(pod), lambda one: one["status"].update(nominatedNodeName=node)
        )

    def _go_on(self, pod: Json, one: _Binding) -> None:
        if one.todo:
            self._reserve(pod, one)
            return
        claims = [self._api.there[CLAIMS.name].get(name or "") for name in claim_names(pod)]
        there = [claim for claim in claims if claim is not None]
        if len(there) < len(claims) or not all(_is_reserved(claim, pod) for claim in there):
            self._unreserve(pod)
            return
        said = [_said(claim) for claim in there]
        for claim, word in zip(there, said, strict=True):
            if word == CONFLICT:
                self._api.change(CLAIMS.name, key_of(claim), deallocate)
        if CONFLICT in said:
            self._unreserve(pod)
        elif "" not in said:
            self._api.change(PODS.name, key_of(pod), lambda p: _bind(p, one.node))
            del self.binding[pod["metadata"]["uid"]]

    def _reserve(self, pod: Json, one: _Binding) -> None:
        """Reserve the next claim for a pod; a claim of a stock class is allocated with it."""
        claim = one.todo[0]
        meta = claim["metadata"]
        key, version = key_of(claim), meta["resourceVersion"]
        device = one.planned.get(meta["uid"])
        if device is not None and FINALIZER not in meta.get("finalizers", ()):
            done = self._try(key, lambda c: c["metadata"].update(finalizers=[FINALIZER]), version)
            if done:
                one.todo[0] = self._api.there[CLAIMS.name][key]
                return
        else:
            whom = {
                "resource": "pods",
                "name": pod["metadata"]["name"],
                "uid": pod["metadata"]["uid"],
            }

            def reserve(c: Json) -> None:
                if device is not None:
                    c["status"]["allocation"] = _allocation(one.node, device)
                c["status"]["reservedFor"] = [*c["status"].get("reservedFor", []), whom]

            if self._try(key, reserve, version):
                one.todo.pop(0)
                return
        self._unreserve(pod)

    def _try(self, key: str, how: Any, version: str) -> bool:
        try:
            done = self._api.change(CLAIMS.name, key, how, version)
        except KubernetesApiError:
            return False
        if done:
            self._know(self._api.there[CLAIMS.name][key])
        return done

    def _unreserve(self, pod: Json) -> None:
        """Undo the reservations of a pod that was not bound."""
        uid = pod["metadata"]["uid"]
        self.binding.pop(uid, None)
        self._api.change(
            PODS.name, key_of(pod), lambda one: one["status"].pop("nominatedNodeName", None)
        )
        for name in claim_names(pod):
            claim = self._api.there[CLAIMS.name].get(name or "")
            if claim is not None and _is_reserved(claim, pod):
                rest = [one for one in claim["status"]["reservedFor"] if one["uid"] != uid]
                self._api.change(CLAIMS.name, name or "", _sets("status", reservedFor=rest))


def _version(thing: Json) -> int:
    return int(thing["metadata"]["resourceVersion"])


def _allocation(node: str, device: str) -> Json:
    field_ = {"key": "metadata.name", "operator": "In", "values": [node]}
    result = {"request": "r", "driver": DRIVER, "pool": node, "device": device}
    return {
        "devices": {"results": [result]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field_]}]},
    }


def deallocate(claim: Json) -> None:
    """Deallocate a claim."""
    for name in ("allocation", "devices", "reservedFor"):
        claim["status"].pop(name, None)


def _is_reserved(claim: Json, pod: Json) -> bool:
    return any(
        one["uid"] == pod["metadata"]["uid"] for one in claim["status"].get("reservedFor", ())
    )


def _said(claim: Json) -> str:
    """The verdict of slicewise on an allocation; empty if there is none."""
    results = claim["status"]["allocation"]["devices"]["results"]
    if not any(result.get("bindingConditions") for result in results):
        return CONFIRMED
    said = {c["type"] for one in claim["status"].get("devices", ()) for c in one["conditions"]}
    return CONFLICT if CONFLICT in said else CONFIRMED if CONFIRMED in said else ""


def _bind(pod: Json, node: str) -> None:
    pod["spec"]["nodeName"] = node
    pod["status"]["phase"] = "Running"
    pod["status"].pop("nominatedNodeName", None)

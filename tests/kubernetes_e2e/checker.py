"""A checker of the history of claims and pods, independent of slicewise.

It follows every version of all claims, pods and published slices with its own watches. The
API server numbers all versions of everything in one order, so they are checked in the order in
which they happened, not in which they were received. Whether two claims may hold devices at the
same time is computed from the published counters alone.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from urllib.parse import urlsplit

from tests.kubernetes_e2e.api import CORE, RESOURCE, Api, Json, until
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS

CLAIMS, PODS, SLICES = "claims", "pods", "slices"
PATHS = {
    CLAIMS: f"{RESOURCE}/resourceclaims",
    PODS: f"{CORE}/pods",
    SLICES: f"{RESOURCE}/resourceslices",
}
_ENDED = ("Succeeded", "Failed")
_UNITS = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTP", 1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTP", 1)},
}

CounterSet = tuple[str, str, str]
"""Driver, pool and name."""
Seat = tuple[str, str, str]
"""Driver, pool and device."""
Counts = Mapping[str, Fraction]
Taken = tuple[tuple[CounterSet, Counts], ...]
"""What a device takes of which counter sets."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A version of an object; for a deleted object, the last one."""

    version: int
    kind: str
    gone: bool
    object: Json


class Follower:
    """Follows one kind of object, and hands on every version."""

    def __init__(self, plane: Plane, kind: str) -> None:
        self.kind = kind
        self.seen: list[Seen] = []
        self.current: dict[str, tuple[str, int]] = {}
        """By uid: the name and the version that was seen last."""
        self.relisted = -1
        """How often the thread was lost, so that versions may have been missed."""
        self.listed = threading.Event()
        self._plane = plane
        self._tls = ssl.create_default_context(cafile=str(plane.ca))
        self._stop = threading.Event()
        self._version: int | None = None
        """Everything up to this one was seen."""
        self._connection: http.client.HTTPSConnection | None = None
        self._answer: http.client.HTTPResponse | None = None
        self._thread = threading.Thread(target=self._run, name=f"witness {kind}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop following."""
        self._stop.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._version is None:
                    self._version = self._list()
                    self.relisted += 1
                    self.listed.set()
                self._watch(self._version)
            except _TooOldError:
                self._version = None
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                self._stop.wait(0.05)
            finally:
                self._hang_up()

    def _hang_up(self) -> None:
        """Close both: an answer keeps its socket open, whatever becomes of the connection."""
        if self._answer is not None:
            self._answer.close()
        if self._connection is not None:
            self._connection.close()

    def _list(self) -> int:
        answer = self._ask(PATHS[self.kind])
        found = json.loads(answer.read())
        if answer.status != 200:
            raise http.client.HTTPException(str(found))
        there = {one["metadata"]["uid"] for one in found["items"]}
        version = int(found["metadata"]["resourceVersion"])
        for uid, (name, _) in list(self.current.items()):
            if uid not in there:
                self._note({"metadata": {"uid": uid, "name": name}}, version, True)
        for one in found["items"]:
            self._note(one, int(one["metadata"]["resourceVersion"]), False)
        return version

    def _watch(self, version: int) -> None:
        query = f"?watch=1&allowWatchBookmarks=true&resourceVersion={version}"
        answer = self._ask(PATHS[self.kind] + query)
        if answer.status == 410:
            raise _TooOldError
        if answer.status != 200:
            raise http.client.HTTPException(str(answer.status))
        while line := answer.readline():
            event = json.loads(line)
            thing = event["object"]
            if event["type"] == "ERROR":
                raise _TooOldError
            self._version = int(thing["metadata"]["resourceVersion"])
            if event["type"] != "BOOKMARK":
                self._note(thing, self._version, event["type"] == "DELETED")

    def _ask(self, path: str) -> http.client.HTTPResponse:
        address = urlsplit(self._plane.server)
        self._hang_up()
        self._connection = http.client.HTTPSConnection(
            str(address.hostname), address.port, context=self._tls
        )
        headers = {"Authorization": f"Bearer {self._plane.token}"}
        self._connection.request("GET", path, headers=headers)
        self._answer = self._connection.getresponse()
        return self._answer

    def _note(self, thing: Json, version: int, gone: bool) -> None:
        meta = thing["metadata"]
        if version <= self.current.get(meta["uid"], ("", 0))[1]:
            return
        self.seen.append(Seen(version, self.kind, gone, thing))
        if gone:
            self.current.pop(meta["uid"], None)
        else:
            self.current[meta["uid"]] = meta["name"], version


class _TooOldError(Exception):
    """Raised when the API server cannot continue from a version."""


@dataclass(slots=True)
class Overlap:
    """An interval in which claims exceeded a counter, at least one of them unconfirmed."""

    where: CounterSet
    begin: int
    claims: list[str]
    end: int | None = None


@dataclass(slots=True)
class Verdict:
    """The findings of the checker."""

    versions: dict[str, int] = field(default_factory=dict)
    claims: int = 0
    pods: int = 0
    bound: int = 0
    allocations: int = 0
    tentative: int = 0
    """Allocations that had to be confirmed."""
    relisted: int = 0
    overlaps: list[str] = field(default_factory=list)
    """Confirmed claims that held the same resource at the same time: never allowed."""
    moments: list[Overlap] = field(default_factory=list)
    """The same, where one of them was not confirmed."""
    wrongs: list[str] = field(default_factory=list)
    """Pods that were bound without their devices, or lost them."""
    unpublished: list[str] = field(default_factory=list)
    """Allocations of devices that were not published at that moment."""

    @property
    def faults(self) -> list[str]:
        """All violations."""
        unresolved = [f"not resolved: {one}" for one in self.moments if one.end is None]
        return self.overlaps + self.wrongs + unresolved

    def __str__(self) -> str:
        versions = ", ".join(f"{count} of {kind}" for kind, count in self.versions.items())
        return (
            f"{versions} seen; {self.claims} claims, {self.allocations} allocations "
            f"({self.tentative} tentative), {self.pods} pods, {self.bound} bound; "
            f"{len(self.overlaps)} overlaps, {len(self.moments)} moments, "
            f"{len(self.unpublished)} unpublished, {self.relisted} relisted"
        )


class Witness:
    """Follows a cluster from here on; ``verdict`` at any time, best when it is quiet."""

    def __init__(self, plane: Plane) -> None:
        self._api = plane.api
        self._followers = [Follower(plane, kind) for kind in PATHS]

    def __enter__(self) -> Witness:
        for one in self._followers:
            until(f"the {one.kind} are listed", one.listed.is_set)
        return self

    def __exit__(self, *raised: object) -> None:
        for one in self._followers:
            one.stop()

    def verdict(self) -> Verdict:
        """The findings for everything that has happened so far."""
        for one in self._followers:
            until(f"the witness has seen all {one.kind}", partial(self._caught_up, one))
        seen = sorted(
            (version for one in self._followers for version in list(one.seen)),
            key=lambda version: version.version,
        )
        verdict = Ledger().go_through(seen)
        verdict.relisted = sum(one.relisted for one in self._followers)
        return verdict

    def _caught_up(self, follower: Follower) -> bool:
        there = {
            one["metadata"]["uid"]: int(one["metadata"]["resourceVersion"])
            for one in self._api.items(PATHS[follower.kind])
        }
        return there == {uid: version for uid, (_, version) in list(follower.current.items())}


class Ledger:
    """Processes versions in order and tracks the devices of each claim."""

    def __init__(self) -> None:
        self._slices: dict[str, Json] = {}
        self._totals: dict[CounterSet, Counts] = {}
        self._devices: dict[Seat, Taken] = {}
        self._claims: dict[str, Json] = {}
        self._pods: dict[str, Json] = {}
        self._held: dict[str, dict[Seat, Taken]] = {}
        """By claim: its devices, and what they took when it got them."""
        self._going_on: dict[CounterSet, Overlap] = {}
        self.verdict = Verdict()

    def go_through(self, seen: Iterable[Seen]) -> Verdict:
        """All versions, in order."""
        claims: set[str] = set()
        pods: set[str] = set()
        for one in seen:
            uid = one.object["metadata"]["uid"]
            versions = self.verdict.versions
            versions[one.kind] = versions.get(one.kind, 0) + 1
            if one.kind == SLICES:
                self._slice(one)
            elif one.kind == PODS:
                pods.add(uid)
                self._pod(one)
            else:
                claims.add(uid)
                self._claim(one)
        self.verdict.claims, self.verdict.pods = len(claims), len(pods)
        return self.verdict

    # What is published

    def _slice(self, seen: Seen) -> None:
        name = seen.object["metadata"]["name"]
        before = self._slices.pop(name, None)
        if not seen.gone:
            self._slices[name] = seen.object
        for one in (before, seen.object):
            if one is not None and "spec" in one:
                self._publish(one["spec"]["driver"], one["spec"]["pool"]["name"])

    def _publish(self, driver: str, pool: str) -> None:
        specs = [
            one["spec"]
            for one in self._slices.values()
            if (one["spec"]["driver"], one["spec"]["pool"]["name"]) == (driver, pool)
        ]
        newest = max((spec["pool"]["generation"] for spec in specs), default=0)
        for table in (self._totals, self._devices):
            for key in [key for key in table if key[:2] == (driver, pool)]:
                del table[key]
        for spec in specs:
            if spec["pool"]["generation"] != newest:
                continue
            for one in spec.get("sharedCounters", []):
                self._totals[driver, pool, one["name"]] = _counts(one["counters"])
            for one in spec.get("devices", []):
                self._devices[driver, pool, one["name"]] = tuple(
                    ((driver, pool, taken["counterSet"]), _counts(taken["counters"]))
                    for taken in one.get("consumesCounters", [])
                )

    # Claims

    def _claim(self, seen: Seen) -> None:
        claim = seen.object
        uid = claim["metadata"]["uid"]
        before = self._claims.pop(uid, None)
        if not seen.gone:
            self._claims[uid] = claim
        had = set(self._held.get(uid, {}))
        has = set() if seen.gone else set(seats(claim))
        touched = {where for seat in had | has for where, _ in self._taken(uid, seat)}
        became_final = before is not None and is_tentative(before) and not is_tentative(claim)
        if has != had:
            self._robbed(seen.version, uid, before)
            self._held[uid] = {seat: self._devices.get(seat, ()) for seat in has}
            if not has:
                del self._held[uid]
            elif not seen.gone:
                self.verdict.allocations += 1
                self.verdict.tentative += is_tentative(claim)
                for seat in has - self._devices.keys():
                    self.verdict.unpublished.append(f"{_name(claim)} got {seat} at {seen.version}")
            touched |= {where for seat in has for where, _ in self._taken(uid, seat)}
        for where in touched:
            self._look(where, seen.version, uid if has and (has != had or became_final) else None)

    def _taken(self, uid: str, seat: Seat) -> Taken:
        """What a claim's device takes; nothing if another device has that name by now."""
        recorded = self._held.get(uid, {}).get(seat, ())
        return recorded if self._devices.get(seat, recorded) == recorded else ()

    def _look(self, where: CounterSet, version: int, new: str | None) -> None:
        """Whether claims exceed a counter set."""
        holders = [
            uid
            for uid, held in self._held.items()
            if any(place == where for seat in held for place, _ in self._taken(uid, seat))
        ]
        final = [uid for uid in holders if not is_tentative(self._claims[uid])]
        if new in final and (too_much := self._excess(where, final)):
            names = [_name(self._claims[uid]) for uid in final]
            self.verdict.overlaps.append(f"{where} {too_much}: {names} at {version}")
        going_on = self._going_on.get(where)
        if self._excess(where, holders):
            if going_on is None and new is not None:
                names = [_name(self._claims[uid]) for uid in holders]
                self._going_on[where] = Overlap(where, version, names)
                self.verdict.moments.append(self._going_on[where])
        elif going_on is not None:
            going_on.end = version
            del self._going_on[where]

    def _excess(self, where: CounterSet, holders: Iterable[str]) -> str:
        """The counters that these claims exceed."""
        sums: dict[str, Fraction] = {}
        for uid in holders:
            for seat in self._held[uid]:
                for place, counts in self._taken(uid, seat):
                    if place == where:
                        for name, count in counts.items():
                            sums[name] = sums.get(name, Fraction(0)) + count
        totals = self._totals.get(where)
        if totals is None:  # no longer published: only memory slices can be checked
            return ", ".join(n for n, s in sums.items() if n.startswith("memory-slice-") and s > 1)
        return ", ".join(name for name, count in sums.items() if count > totals.get(name, 0))

    # Pods

    def _pod(self, seen: Seen) -> None:
        pod = seen.object
        uid = pod["metadata"]["uid"]
        before = self._pods.pop(uid, None)
        if seen.gone:
            return
        self._pods[uid] = pod
        node = pod["spec"].get("nodeName")
        if node and not (before and before["spec"].get("nodeName")):
            self.verdict.bound += 1
            for name, claim in self._claims_of(pod):
                trouble = _unusable(claim, node)
                if trouble:
                    self.verdict.wrongs.append(
                        f"{_name(pod)} was bound to {node} at {seen.version}, but {name} {trouble}"
                    )

    def _claims_of(self, pod: Json) -> Iterator[tuple[str, Json | None]]:
        by_name = {
            one["metadata"]["name"]: one
            for one in self._claims.values()
            if one["metadata"]["namespace"] == pod["metadata"]["namespace"]
        }
        for name in claim_names(pod):
            yield name, by_name.get(name)

    def _robbed(self, version: int, uid: str, before: Json | None) -> None:
        """Note pods that are bound and lose what they have."""
        if before is None or not seats(before):
            return
        users = {one["uid"] for one in before["status"].get("reservedFor", [])}
        for pod in self._pods.values():
            if (
                pod["metadata"]["uid"] in users
                and pod["spec"].get("nodeName")
                and lives(pod)
                and before["metadata"]["name"] in claim_names(pod)
            ):
                self.verdict.wrongs.append(f"{_name(pod)} lost {_name(before)} at {version}")


# Fields of objects


def seats(claim: Json) -> list[Seat]:
    """The devices that a claim has for itself."""
    allocation = claim.get("status", {}).get("allocation") or {}
    return [
        (one["driver"], one["pool"], one["device"])
        for one in allocation.get("devices", {}).get("results", [])
        if not one.get("adminAccess")
    ]


def is_tentative(claim: Json) -> bool:
    """Whether the scheduler has to wait for a condition of a device before it binds the pod."""
    status = claim.get("status", {})
    said = {
        (one["driver"], one["pool"], one["device"], condition["type"])
        for one in status.get("devices", [])
        for condition in one.get("conditions", [])
        if condition["status"] == "True"
    }
    allocation = status.get("allocation") or {}
    return any(
        (one["driver"], one["pool"], one["device"], needed) not in said
        for one in allocation.get("devices", {}).get("results", [])
        for needed in one.get("bindingConditions", [])
    )


def is_ours(claim: Json) -> bool:
    """Whether a claim is of slicewise's class."""
    requests = claim["spec"]["devices"].get("requests", [])
    return any(one.get("exactly", {}).get("deviceClassName") == OUR_CLASS for one in requests)


def claim_names(pod: Json) -> list[str]:
    """The claims of a pod; those from templates once they are made."""
    made = {
        one["name"]: one.get("resourceClaimName")
        for one in pod.get("status", {}).get("resourceClaimStatuses", [])
    }
    wanted = pod["spec"].get("resourceClaims", [])
    names = [one.get("resourceClaimName") or made.get(one["name"]) for one in wanted]
    return [name for name in names if name]


def lives(pod: Json) -> bool:
    """Whether a pod has neither ended nor been deleted."""
    ended = pod.get("status", {}).get("phase") in _ENDED
    return not ended and "deletionTimestamp" not in pod["metadata"]


def _unusable(claim: Json | None, node: str) -> str:
    """Why a pod on a node cannot use a claim, if so."""
    if claim is None:
        return "is not there"
    if not seats(claim):
        return "has no devices"
    if is_tentative(claim):
        return "is not confirmed"
    if node not in json.dumps(claim["status"]["allocation"].get("nodeSelector", {})):
        return "is on another node"
    return ""


def unquiet(api: Api) -> list[str]:
    """Conditions that are allowed temporarily, but not when the cluster is quiet."""
    claims = {
        (one["metadata"]["namespace"], one["metadata"]["name"]): one
        for one in api.items(PATHS[CLAIMS])
    }
    pods = [one for one in api.items(PATHS[PODS]) if lives(one)]
    said: list[str] = []
    used = set()
    for pod in pods:
        space = pod["metadata"]["namespace"]
        mine = [(space, name) for name in claim_names(pod)]
        used.update(mine)
        if pod["status"].get("phase") == "Running":
            for key in mine:
                trouble = _unusable(claims.get(key), pod["spec"]["nodeName"])
                if trouble:
                    said.append(f"{_name(pod)} runs, but {key} {trouble}")
        ours = [claims[key] for key in mine if key in claims and is_ours(claims[key])]
        if len({bool(seats(one)) for one in ours}) > 1:
            said.append(f"{_name(pod)} has some of its devices and not all")
    for key, claim in claims.items():
        if is_ours(claim) and seats(claim) and key not in used:
            said.append(f"{key} has devices, and no pod uses it")
    return said


def until_quiet(api: Api) -> None:
    """Wait until no temporary conditions are left."""
    last: list[str] = []

    def quiet() -> bool:
        last[:] = unquiet(api)
        return not last

    try:
        until("it is quiet", quiet)
    except AssertionError:
        raise AssertionError("; ".join(last)) from None


def _counts(counters: Json) -> Counts:
    return {name: _amount(one["value"]) for name, one in counters.items()}


def _amount(text: str) -> Fraction:
    """A quantity of Kubernetes as a number."""
    digits = text.rstrip("mkMGTPi" + "K")
    return Fraction(digits) * _UNITS[text[len(digits) :]]


def _name(thing: Json) -> str:
    meta = thing["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"

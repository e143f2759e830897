"""An in-memory fake of the Kubernetes API for the controller.

It stores objects with uids and increasing versions, refuses outdated and invalid writes, and logs
every change, so watches can deliver it at any later time. It replaces `ApiClient`. The simulated
parts of Kubernetes and its users call `make`, `change` and `delete`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import ListOf
from slicewise.kubernetes.api_client import APPLY, ConflictError, KubernetesApiError, NotFoundError
from slicewise.kubernetes.informer import (
    CLAIMS,
    KINDS,
    PODS,
    Changed,
    Deleted,
    Kind,
    Listed,
    WatchError,
    WatchNotification,
)

Json = dict[str, Any]
LEASES = "Leases"
TIME = "2026-01-01T00:00:00Z"
_PLACES = {"resourceclaims": CLAIMS.name, "pods": PODS.name, "leases": LEASES}


class FakeApi:
    """All objects, and a log of all changes."""

    server = "https://fake"

    def __init__(self) -> None:
        self.version = 100
        self.changes = 0
        """The number of changes, except those of leases."""
        self.there: dict[str, dict[str, Json]] = {name: {} for name in (*_names(), LEASES)}
        self.log: dict[str, list[tuple[bool, bytes]]] = {name: [] for name in (*_names(), LEASES)}
        """By kind: each version of an object, and whether it is its deletion."""
        self.gate: Callable[[str], SlicewiseError | None] = lambda _: None
        """Called before each request with its method: raises, or returns a later error."""
        self.tell: Callable[[str], object] = lambda _: None
        """Receives a line of text for each change."""
        self.protected: set[str] = set()
        """The claims that an admission policy protects from slicewise."""
        self.applied: dict[str, set[str]] = {}
        """By uid of a pod: the claims in its status that slicewise has applied."""
        self._uids = 0

    # For the simulated parts of Kubernetes

    def get_one(self, kind: str, key: str, uid: str = "") -> Json | None:
        """An object, if it exists and has this uid."""
        found = self.there[kind].get(key)
        return found if found is not None and uid in ("", found["metadata"]["uid"]) else None

    def make(self, kind: str, thing: Json) -> Json:
        """Create an object."""
        self._uids += 1
        made = _copy(thing)
        meta = made["metadata"]
        meta |= {"uid": f"u{self._uids}", "creationTimestamp": TIME}
        key = key_of(made)
        if key in self.there[kind]:
            raise ConflictError(409, "AlreadyExists", key)
        self._store(kind, key, made)
        return self.there[kind][key]

    def change(self, kind: str, key: str, how: Callable[[Json], None], version: str = "") -> bool:
        """Change an object, if it has this version; returns whether it was changed."""
        old = self.there[kind].get(key)
        if old is None or version not in ("", old["metadata"]["resourceVersion"]):
            return False
        new = _copy(old)
        how(new)
        self._replace(kind, key, old, new)
        return True

    def delete(self, kind: str, key: str) -> None:
        """Delete an object, or mark it as deleted if it has finalizers."""
        old = self.there[kind].get(key)
        if old is None:
            return
        if old["metadata"].get("finalizers"):
            self.change(kind, key, _mark_deleted)
        else:
            self._remove(kind, key, old)

    def _replace(self, kind: str, key: str, old: Json, new: Json) -> Json:
        if kind == CLAIMS.name:
            _check_claim(old, new)
        if new == old:
            return old
        if new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers"):
            self._remove(kind, key, new)
            return new
        self._store(kind, key, new)
        return new

    def _store(self, kind: str, key: str, thing: Json) -> None:
        self._next(kind, thing)
        self.there[kind][key] = thing
        self._note(kind, thing, False)

    def _remove(self, kind: str, key: str, thing: Json) -> None:
        last = _copy(thing)
        self._next(kind, last)
        del self.there[kind][key]
        self._note(kind, last, True)

    def _note(self, kind: str, thing: Json, gone: bool) -> None:
        self.log[kind].append((gone, msgspec.json.encode(thing)))
        if kind != LEASES:
            what = "is gone" if gone else _brief(thing)
            self.tell(f"    {key_of(thing)} {thing['metadata']['uid']} v{self.version} {what}")

    def _next(self, kind: str, thing: Json) -> None:
        self.version += 1
        self.changes += kind != LEASES
        thing["metadata"]["resourceVersion"] = str(self.version)

    # In place of ApiClient

    def get(self, path: str, kind: type[Any]) -> Any:
        """Read an object."""
        self._ask("GET")
        name, key, _ = _place(path)
        if key not in self.there[name]:
            raise NotFoundError(404, "NotFound", path)
        return msgspec.json.decode(msgspec.json.encode(self.there[name][key]), type=kind)

    def pages(self, path: str, kind: type[Any], fields: str = "") -> Iterator[Any]:
        """List all objects of a kind."""
        self._ask("GET")
        name = next(one.name for one in KINDS if one.path == path)
        items = list(self.there[name].values())
        page = {"metadata": {"resourceVersion": str(self.version)}, "items": items}
        yield msgspec.json.decode(msgspec.json.encode(page), type=ListOf[kind])  # type: ignore[valid-type]

    def write(self, method: str, path: str, body: Any, content: str = "", **_: str) -> bytes:
        """Create, replace or patch an object."""
        afterwards = self.gate(method)
        body = _copy(body)
        if "/events" in path:
            return b"{}"
        name, key, part = _place(path)
        if method == "POST":
            return msgspec.json.encode(self.make(name, body))
        old = self.there[name].get(key)
        if old is None:
            raise NotFoundError(404, "NotFound", path)
        if name == CLAIMS.name and key in self.protected:
            raise KubernetesApiError(422, "Invalid", "a policy protects it")
        meta = body["metadata"]
        for field in ("uid", "resourceVersion"):
            if meta.get(field, old["metadata"][field]) != old["metadata"][field]:
                raise ConflictError(409, "Conflict", f"{field} of {key}")
        new = _copy(old)
        if method == "PUT":
            new["spec"] = body["spec"]
            new["metadata"]["annotations"] = meta.get("annotations", {})
        elif part == "status":
            if content == APPLY:
                names = {one["name"] for one in body["status"]["resourceClaimStatuses"]}
                self.applied.setdefault(meta["uid"], set()).update(names)
            _merge(new["status"], body["status"])
        else:
            _merge(new["metadata"], meta)
        if part == "status" and name == CLAIMS.name and not new["status"].get("allocation"):
            new["status"].pop("devices", None)  # as the API itself does
        written = self._replace(name, key, old, new)
        if afterwards is not None:
            raise afterwards
        return msgspec.json.encode(written)

    def _ask(self, method: str) -> None:
        fault = self.gate(method)
        if fault is not None:
            raise fault


class Stream:
    """A watch of one kind that delivers its notifications on request."""

    def __init__(self, api: FakeApi, kind: Kind) -> None:
        self._api = api
        self.kind = kind
        self._first: deque[WatchNotification] = deque()
        """Notifications to deliver before the log continues."""
        self._at = 0
        self.cut_off = False
        self._list()

    def _list(self) -> None:
        """List all objects in two pages of one version."""
        name, version = self.kind.name, str(self._api.version)
        things = [
            self.kind.read(msgspec.json.encode(one)) for one in self._api.there[name].values()
        ]
        half = len(things) // 2
        self._first.append(Listed(self.kind, things[:half], True, False, version))
        self._first.append(Listed(self.kind, things[half:], False, True, version))
        self._at = len(self._api.log[name])

    def next(self) -> WatchNotification | None:
        """The next notification; None if there is none."""
        if self._first:
            return self._first.popleft()
        log = self._api.log[self.kind.name]
        if self.cut_off or self._at == len(log):
            return None
        gone, data = log[self._at]
        self._at += 1
        thing = self.kind.read(data)
        return Deleted(self.kind, thing) if gone else Changed(self.kind, thing)

    def cut(self) -> None:
        """Interrupt the watch."""
        if not self.cut_off:
            self.cut_off = True
            self._first.append(WatchError(self.kind, "cut off"))

    def mend(self, lost: bool) -> None:
        """Continue the watch; with ``lost``, all objects are listed again."""
        if self.cut_off:
            self.cut_off = False
            if lost:
                self._list()
            self._first.append(WatchError(self.kind, ""))


def key_of(thing: Json) -> str:
    """Namespace and name of an object."""
    meta = thing["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if "namespace" in meta else str(meta["name"])


def _names() -> list[str]:
    return [kind.name for kind in KINDS]


def _copy(thing: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(thing))


def _brief(thing: Json) -> str:
    """A short description of an object."""
    meta, status = thing["metadata"], thing.get("status", {})
    given = status.get("allocation") or {"devices": {"results": []}}
    words = [f"{one['pool']}/{one['device']}" for one in given["devices"]["results"]]
    words += [f"for {one['uid']}" for one in status.get("reservedFor", ())]
    words += [c["type"] for one in status.get("devices", ()) for c in one["conditions"]]
    words += [c.get("message", "") for c in status.get("conditions", ())]
    words += [str(meta[name]) for name in ("deletionTimestamp", "finalizers") if meta.get(name)]
    words += [thing["spec"]["nodeName"]] if thing.get("spec", {}).get("nodeName") else []
    return ", ".join([status.get("phase", ""), *words])


def _mark_deleted(thing: Json) -> None:
    thing["metadata"]["deletionTimestamp"] = TIME


def _place(path: str) -> tuple[str, str, str]:
    """The kind, key and subresource of a path."""
    namespace, resource, *rest = path.partition("/namespaces/")[2].split("/")
    name, part = (*rest, "", "")[:2]
    return _PLACES[resource], f"{namespace}/{name}", part


def _merge(old: Json, patch: Mapping[str, Any]) -> None:
    """Apply a merge patch; lists are replaced, except conditions."""
    for field, value in patch.items():
        if value is None:
            old.pop(field, None)
        elif field == "conditions":
            kept = [one for one in old.get(field, ()) if one["type"] != value[0]["type"]]
            old[field] = [*kept, *value]
        elif isinstance(value, dict) and isinstance(old.get(field), dict):
            _merge(old[field], value)
        elif field not in ("uid", "resourceVersion"):
            old[field] = value


def _check_claim(old: Json, new: Json) -> None:
    """Raise ApiError for changes that the API refuses."""
    before, after = old["status"], new["status"]
    had, has = before.get("allocation"), after.get("allocation")
    why = ""
    if had and has and had != has:
        why = "an allocation cannot be changed"
    elif after.get("reservedFor") and not has:
        why = "what is not allocated cannot be reserved"
    elif after.get("devices") and not has:
        why = "devices without an allocation"
    more = set(new["metadata"].get("finalizers", ())) - set(old["metadata"].get("finalizers", ()))
    if old["metadata"].get("deletionTimestamp") and more:
        why = "no finalizer can be added to what is being deleted"
    if why:
        raise KubernetesApiError(422, "Invalid", why)

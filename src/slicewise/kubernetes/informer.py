"""The informer: one thread for each kind lists its objects, watches them and reports changes.

An interrupted watch continues from its last version, or lists all objects again if that version has
expired. No change is missed either way: an object that is missing from a list was deleted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import (
    DeviceClass,
    DeviceTaintRule,
    Job,
    KubeletEvent,
    Meta,
    Namespace,
    Node,
    PersistentVolume,
    PersistentVolumeClaim,
    Pod,
    ResourceClaim,
    StorageClass,
)
from slicewise.kubernetes.api_client import (
    ApiClient,
    ApiUnreachableError,
    ExpiredError,
    NotFoundError,
)
from slicewise.kubernetes.devices.pool_reading import read_slice

WATCH_SECONDS = 290
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0
_ABSENT_SECONDS = 300.0
"""How long it is assumed that the cluster does not serve an optional kind."""

RESOURCE = "/apis/resource.k8s.io/v1"


class Kind(NamedTuple):
    """A kind of object: its API path and its decoder."""

    name: str
    path: str
    read: Callable[[bytes | msgspec.Raw], Any]
    fields: str = ""
    """A selector: only these objects are listed and watched."""
    essential: bool = True
    """Whether nothing is decided while the watch of these objects fails."""
    optional: bool = False
    """Whether some clusters do not serve this kind."""


def _as(kind: type[Any]) -> Callable[[bytes | msgspec.Raw], Any]:
    return msgspec.json.Decoder(kind).decode


SLICES = Kind("ResourceSlices", f"{RESOURCE}/resourceslices", read_slice)
CLAIMS = Kind("ResourceClaims", f"{RESOURCE}/resourceclaims", _as(ResourceClaim))
CLASSES = Kind("DeviceClasses", f"{RESOURCE}/deviceclasses", _as(DeviceClass))
NODES = Kind("Nodes", "/api/v1/nodes", _as(Node))
PODS = Kind("Pods", "/api/v1/pods", _as(Pod))
NAMESPACES = Kind("Namespaces", "/api/v1/namespaces", _as(Namespace))
VOLUMES = Kind("PersistentVolumes", "/api/v1/persistentvolumes", _as(PersistentVolume))
VOLUME_CLAIMS = Kind(
    "PersistentVolumeClaims", "/api/v1/persistentvolumeclaims", _as(PersistentVolumeClaim)
)
STORAGE = Kind("StorageClasses", "/apis/storage.k8s.io/v1/storageclasses", _as(StorageClass))
EVENTS = Kind(
    "Events",
    "/api/v1/events",
    _as(KubeletEvent),
    "reason=FailedPrepareDynamicResources",
    essential=False,
)
JOBS = Kind("Jobs", "/apis/batch/v1/jobs", _as(Job), essential=False)
KUBELET_STARTS = Kind(
    "Starts of kubelets",
    "/api/v1/events",
    _as(KubeletEvent),
    "reason=Starting,source=kubelet",
    essential=False,
)
TAINT_RULES = Kind(
    "DeviceTaintRules",
    "/apis/resource.k8s.io/v1beta2/devicetaintrules",
    _as(DeviceTaintRule),
    essential=False,
    optional=True,
)
KINDS = (
    SLICES,
    CLASSES,
    NAMESPACES,
    NODES,
    STORAGE,
    VOLUMES,
    VOLUME_CLAIMS,
    TAINT_RULES,
    JOBS,
    KUBELET_STARTS,
    CLAIMS,
    PODS,
    EVENTS,
)


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of the list of all objects of a kind."""

    kind: Kind
    objects: list[Any]
    first: bool
    last: bool
    version: str = ""
    """The resource version of the list."""


@dataclass(frozen=True, slots=True)
class Changed:
    """An object was created or changed."""

    kind: Kind
    object: Any


@dataclass(frozen=True, slots=True)
class Deleted:
    """An object was deleted; ``object`` is its last version."""

    kind: Kind
    object: Any


@dataclass(frozen=True, slots=True)
class WatchError:
    """A watch fails, or works again (an empty text)."""

    kind: Kind
    text: str


WatchNotification = Listed | Changed | Deleted | WatchError


class _Bookmark(msgspec.Struct):
    metadata: Meta


_mark = msgspec.json.Decoder(_Bookmark).decode


class Watch:
    """Watches one kind of object in a background thread."""

    def __init__(
        self, api: ApiClient, kind: Kind, post: Callable[[WatchNotification], None]
    ) -> None:
        self._api = api
        self._kind = kind
        self._post = post
        self._stop = threading.Event()
        self._failing = False
        self._version: str | None = None
        """All changes up to this version are reported; None: list first."""
        self._relisted = False
        """Whether the last list followed an expired watch and no event has arrived since."""
        self._wait = _FIRST_WAIT
        self._thread = threading.Thread(target=self._run, name=f"watch {kind.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Report nothing more; an open connection ends by its timeout."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._version is None:
                    self._version = self._list()
                self._follow(self._version)
            except ExpiredError as error:
                self._version = None
                if self._relisted:  # the list just read has expired already
                    self._pause(error)
                self._relisted = True
            except NotFoundError as error:
                self._version = None
                if self._kind.optional:
                    self._notify(Listed(self._kind, [], True, True))
                    self._stop.wait(_ABSENT_SECONDS)
                else:
                    self._pause(error)
            except Exception as error:  # the thread must not end: no other part would notice
                self._pause(error)
                if not isinstance(error, ApiUnreachableError):
                    self._version = None

    def _pause(self, error: Exception) -> None:
        self._report_error(str(error) or type(error).__name__)
        # Jitter, so that not all watches reconnect at once.
        self._stop.wait(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _list(self) -> str:
        first = True
        version = ""
        for page in self._api.pages(self._kind.path, msgspec.Raw, self._kind.fields):
            version = page.metadata.resource_version
            last = not page.metadata.continue_
            objects = list(map(self._read, page.items))
            self._notify(Listed(self._kind, objects, first, last, version))
            first = False
        return version

    def _follow(self, version: str) -> None:
        """Report events until the connection ends."""
        kind = self._kind
        with self._api.watch(kind.path, version, WATCH_SECONDS, kind.fields) as events:
            self._report_error("")
            self._wait = _FIRST_WAIT
            for event in events:
                if self._stop.is_set():
                    break
                self._relisted = False
                if event.type == "BOOKMARK":
                    self._version = _mark(event.object).metadata.resource_version
                    continue
                found = self._read(event.object)
                deleted = event.type == "DELETED"
                self._notify(Deleted(self._kind, found) if deleted else Changed(self._kind, found))
                self._version = found.metadata.resource_version

    def _read(self, data: msgspec.Raw) -> Any:
        try:
            return self._kind.read(data)
        except msgspec.MsgspecError as error:
            raise SlicewiseError(f"one of the {self._kind.name} is invalid: {error}") from None

    def _report_error(self, text: str) -> None:
        if bool(text) != self._failing:
            self._failing = bool(text)
            self._notify(WatchError(self._kind, text))

    def _notify(self, notification: WatchNotification) -> None:
        if not self._stop.is_set():
            self._post(notification)

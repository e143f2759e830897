"""Watches: a thread for each kind of object lists it, follows it, and reports what changes.

A watch that is cut off goes on from where it was; one that cannot lists everything again. Either
way nothing is missed: a list says everything there is, so whatever it does not say is gone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import DeviceClass, Meta, Namespace, Node, Pod, ResourceClaim
from slicewise.k8s.link import ExpiredError, Link, UnreachableError
from slicewise.k8s.shelf import read_parcel

WATCH_SECONDS = 290
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0

RESOURCE = "/apis/resource.k8s.io/v1"


class Kind(NamedTuple):
    """A kind of object: where it is listed, and how it is read."""

    name: str
    path: str
    read: Callable[[bytes | msgspec.Raw], Any]


def _as(kind: type[Any]) -> Callable[[bytes | msgspec.Raw], Any]:
    return msgspec.json.Decoder(kind).decode


SLICES = Kind("ResourceSlices", f"{RESOURCE}/resourceslices", read_parcel)
CLAIMS = Kind("ResourceClaims", f"{RESOURCE}/resourceclaims", _as(ResourceClaim))
CLASSES = Kind("DeviceClasses", f"{RESOURCE}/deviceclasses", _as(DeviceClass))
NODES = Kind("Nodes", "/api/v1/nodes", _as(Node))
PODS = Kind("Pods", "/api/v1/pods", _as(Pod))
NAMESPACES = Kind("Namespaces", "/api/v1/namespaces", _as(Namespace))
KINDS = (SLICES, CLASSES, NAMESPACES, NODES, CLAIMS, PODS)


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of everything there is of a kind."""

    kind: Kind
    objects: list[Any]
    first: bool
    last: bool
    version: str = ""
    """Of the moment at which it was so."""


@dataclass(frozen=True, slots=True)
class Changed:
    """An object is new, or different."""

    kind: Kind
    object: Any


@dataclass(frozen=True, slots=True)
class Gone:
    """An object was deleted; this is how it was last."""

    kind: Kind
    object: Any


@dataclass(frozen=True, slots=True)
class Trouble:
    """A watch does not get through, or does again (an empty text)."""

    kind: Kind
    text: str


News = Listed | Changed | Gone | Trouble


class _Bookmark(msgspec.Struct):
    metadata: Meta


_mark = msgspec.json.Decoder(_Bookmark).decode


class Watch:
    """Follows one kind of object in a thread of its own, until it is stopped."""

    def __init__(self, link: Link, kind: Kind, post: Callable[[News], None]) -> None:
        self._link = link
        self._kind = kind
        self._post = post
        self._stop = threading.Event()
        self._troubled = False
        self._version: str | None = None
        """Everything up to this one was told; None if it has to be listed."""
        self._listed_anew = False
        """Whether it was listed because a watch could not go on, and nothing has come since."""
        self._wait = _FIRST_WAIT
        self._thread = threading.Thread(target=self._run, name=f"watch {kind.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Report nothing more; a connection that waits is left to end by itself."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._version is None:
                    self._version = self._list()
                self._follow(self._version)
            except ExpiredError as error:
                self._version = None
                if self._listed_anew:  # what was listed just now is too old already
                    self._try_later(error)
                self._listed_anew = True
            except Exception as error:  # a thread that ended here would be missed by nobody
                self._try_later(error)
                if not isinstance(error, UnreachableError):
                    self._version = None

    def _try_later(self, error: Exception) -> None:
        self._trouble(str(error) or type(error).__name__)
        # Each waits a little differently, so that not all come back at once.
        self._stop.wait(self._wait * random.uniform(0.5, 1.0))
        self._wait = min(2 * self._wait, _LONGEST_WAIT)

    def _list(self) -> str:
        first = True
        version = ""
        for page in self._link.pages(self._kind.path, msgspec.Raw):
            version = page.metadata.resource_version
            last = not page.metadata.continue_
            things = list(map(self._read, page.items))
            self._tell(Listed(self._kind, things, first, last, version))
            first = False
        return version

    def _follow(self, version: str) -> None:
        """Tell what happens; a watch that is cut off in the middle goes on from there."""
        with self._link.watch(self._kind.path, version, WATCH_SECONDS) as happenings:
            self._trouble("")
            self._wait = _FIRST_WAIT
            for happening in happenings:
                if self._stop.is_set():
                    break
                self._listed_anew = False
                if happening.type == "BOOKMARK":
                    self._version = _mark(happening.object).metadata.resource_version
                    continue
                thing = self._read(happening.object)
                gone = happening.type == "DELETED"
                self._tell(Gone(self._kind, thing) if gone else Changed(self._kind, thing))
                self._version = thing.metadata.resource_version

    def _read(self, data: msgspec.Raw) -> Any:
        try:
            return self._kind.read(data)
        except msgspec.MsgspecError as error:
            raise SlicewiseError(f"one of the {self._kind.name} is not clear: {error}") from None

    def _trouble(self, text: str) -> None:
        if bool(text) != self._troubled:
            self._troubled = bool(text)
            self._tell(Trouble(self._kind, text))

    def _tell(self, news: News) -> None:
        if not self._stop.is_set():
            self._post(news)

"""The ear of a controller: takes in what the watches report, and keeps what is known by it.

Slices become pools of the board, classes, claims and pods become wishes, nodes and pods the estate.
Everything here is called by the controller's own thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from slicewise.control.entries import QuotaRecord
from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import DeviceClass, Namespace, Node, Pod, ResourceClaim
from slicewise.k8s.board import Board
from slicewise.k8s.deciding import Decider
from slicewise.k8s.devices import Library, read_pool
from slicewise.k8s.fitness import Estate
from slicewise.k8s.hand import Hand
from slicewise.k8s.rivals import Rivals, may_want
from slicewise.k8s.shelf import Parcel, Shelf
from slicewise.k8s.tally import Tally
from slicewise.k8s.telling import Teller
from slicewise.k8s.watching import (
    CLAIMS,
    CLASSES,
    KINDS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
    Changed,
    Gone,
    Kind,
    Listed,
    News,
    Trouble,
)
from slicewise.k8s.wishes import Wishes
from slicewise.k8s.writing import FINALIZER

QUOTA = {
    "slicewise.dev/memory-slices": "memory_slices",
    "slicewise.dev/compute-slices": "compute_slices",
    "slicewise.dev/instances": "instances",
}
"""The annotations of a namespace that limit what its pods may have at a time."""

log = logging.getLogger("slicewise.k8s")


class Ear:
    """What one controller has heard of the cluster."""

    def __init__(
        self,
        board: Board,
        wishes: Wishes,
        estate: Estate,
        rivals: Rivals,
        decider: Decider,
        hand: Hand,
        teller: Teller,
        tally: Tally,
        deciding: Callable[[], bool],
    ) -> None:
        """``deciding`` says whether this replica gives out devices now."""
        self._board = board
        self._wishes = wishes
        self._estate = estate
        self._rivals = rivals
        self._decider = decider
        self._hand = hand
        self._teller = teller
        self._tally = tally
        self._deciding = deciding
        self.troubles: dict[str, str] = {}
        """By kind of object: why its watch does not get through."""
        self._unlisted = {kind.name for kind in KINDS}
        self._listing: dict[str, set[str]] = {}
        """By kind that is being listed: what has been named so far."""
        self._shelf = Shelf()
        self._library = Library()
        self._rivals_known: set[str] | None = None
        """The drivers for whose devices rivals are known; None if they have to be found anew."""
        self._watched = 0
        """The version up to which the watch of claims has come."""

    @property
    def trouble(self) -> str:
        """Why what is known may be out of date; empty if all is listed and watches get through."""
        if self.troubles:
            return next(iter(self.troubles.values()))
        return f"still reading {', '.join(sorted(self._unlisted))}" if self._unlisted else ""

    def take(self, news: News) -> None:
        """Take in what a watch reports."""
        match news:
            case Changed(kind, thing):
                self._came(kind, thing.metadata.resource_version)
                self._change(thing)
            case Gone(kind, thing):
                self._came(kind, thing.metadata.resource_version)
                if not (kind is CLAIMS and self._is_another(thing)):
                    self._go(kind, thing.metadata.key)
            case Listed():
                self._list(news)
            case Trouble(kind, ""):
                self.troubles.pop(kind.name, None)
            case Trouble(kind, text):
                self._tally.watches += 1
                log.warning("%s are not followed: %s", kind.name, text)
                self.troubles[kind.name] = text

    def settle(self) -> None:
        """Read the pools that have changed, and see whose claims may be after their devices."""
        for key in list(self._shelf.changed):
            try:
                slices = self._shelf.pool(key)
            except SlicewiseError as error:  # whatever drivers publish, the others' stays usable
                log.warning("nothing is given out of driver %s: %s", key[0], error)
                slices = []
            reading = read_pool(slices, self._library) if slices else None
            homes = {gpu.node_name for gpu in reading.gpus} if reading else set()
            if reading is None or reading.trouble or len(homes) != 1:
                # Gone, incomplete, or not of one node: nothing of it is given out.
                self._board.pools.withdraw(key)
            else:
                self._board.set_pool(key, reading, homes.pop())
        self._shelf.changed.clear()
        drivers = self._board.pools.drivers
        if self._rivals_known != drivers:
            self._rivals_known = drivers
            for claim in self._wishes.claims.values():
                self._note_rival(claim)

    # What is there

    def _list(self, page: Listed) -> None:
        kind = page.kind
        if page.first:
            self._listing[kind.name] = set()
        named = self._listing[kind.name]
        for thing in page.objects:
            named.add(thing.metadata.key)
            self._change(thing)
        if not page.last:
            return
        for key in sorted(self._known(kind) - named):
            if kind is CLAIMS and _after(self._wishes.claims[key], page.version):
                continue  # made since; the watch brings it
            self._go(kind, key)
        del self._listing[kind.name]
        self._unlisted.discard(kind.name)
        self._came(kind, page.version)
        if kind is CLAIMS:
            for claim in list(self._wishes.claims.values()):
                self._come_back(claim)  # what was written since the watch was cut off

    def _came(self, kind: Kind, version: str) -> None:
        """Note how far the watch of claims has come."""
        if kind is CLAIMS and version.isdecimal():
            self._watched = max(self._watched, int(version))

    def _is_another(self, claim: ResourceClaim) -> bool:
        """Whether there is another claim of that name by now."""
        known = self._wishes.claims.get(claim.metadata.key)
        return known is not None and known.metadata.uid != claim.metadata.uid

    def _known(self, kind: Kind) -> set[str]:
        match kind.name:
            case SLICES.name:
                return set(self._shelf.names)
            case CLASSES.name:
                return set(self._wishes.classes)
            case NAMESPACES.name:
                return set(self._board.state.tenants)
            case NODES.name:
                return set(self._estate.nodes)
            case CLAIMS.name:
                return set(self._wishes.claims)
        return set(self._estate.pods) | set(self._wishes.pods)

    def _change(self, thing: Any) -> None:
        match thing:
            case Parcel():
                self._shelf.put(thing)
            case DeviceClass():
                self._wishes.classes[thing.metadata.name] = thing
                self._classes_changed()
            case Namespace():
                self._board.set_tenant(thing.metadata.name, quota_of(thing))
            case Node():
                self._estate.node_changed(thing)
                self._board.pools.set_open(thing.metadata.name, not thing.spec.unschedulable)
            case ResourceClaim():
                self._claim(thing)
            case Pod():
                self._pod(thing)

    def _go(self, kind: Kind, key: str) -> None:
        match kind.name:
            case SLICES.name:
                self._shelf.drop(key)
            case CLASSES.name:
                self._wishes.classes.pop(key, None)
                self._classes_changed()
            case NAMESPACES.name:
                self._board.drop_tenant(key)
            case NODES.name:
                self._estate.node_gone(key)
                self._board.pools.set_open(key, False)
            case CLAIMS.name:
                self._claim_gone(key)
            case PODS.name:
                self._pod_gone(key)

    def _classes_changed(self) -> None:
        names = (one.spec.extended_resource_name for one in self._wishes.classes.values())
        self._estate.set_by_devices(frozenset(filter(None, names)))
        self._decider.look_at_all()
        self._decider.follows = True  # what was not ours may have been passed over
        self._rivals_known = None

    # Claims

    def found(self, claim: ResourceClaim) -> None:
        """A claim was like this when it was written or read, past the watch; it may be gone."""
        known = self._wishes.claims.get(claim.metadata.key)
        same = known is not None and known.metadata.uid == claim.metadata.uid
        if same or _after(claim, str(self._watched)):  # else the watch has come past its end
            self._claim(claim)

    def _claim(self, claim: ResourceClaim) -> None:
        """A claim is like this now, unless that is older than what is known."""
        uid, key = claim.metadata.uid, claim.metadata.key
        before = self._wishes.claims.get(key)
        if before is not None and _after(before, claim.metadata.resource_version):
            return
        if before is not None and before.metadata.uid != uid:
            self._claim_gone(key)
            before = None
        self._wishes.claims[key] = claim
        if self._decider.stale.get(uid) != claim.metadata.resource_version:
            self._decider.stale.pop(uid, None)
        ours = self._note_rival(claim)
        given = claim.status.allocation is not None
        if not given and uid not in self._decider.writing:
            self._hand.lost(uid)  # also if it is not ours any more
        if given or uid not in self._decider.writing:  # its finalizer comes before its allocation
            self._board.settle(claim)
        if ours:
            self._look_at_ours(claim, before)
        for pod in self._wishes.users(key):
            self._decider.look_at(pod)

    def _note_rival(self, claim: ResourceClaim) -> bool:
        """Note whether a claim of others may want our devices; returns whether it is ours."""
        if self._wishes.is_ours(claim):
            if claim.metadata.uid in self._rivals.waiting:  # its class was not sealed before
                self._rivals.drop(claim.metadata.uid)
            return True
        rival = may_want(claim, self._wishes.classes, self._board.pools.drivers)
        self._rivals.note(claim, rival, self._decider.clock())
        for key in self._wishes.users(claim.metadata.key):  # its pod may have been heard of first
            self._note_nomination(self._wishes.pods[key])
        return False

    def _look_at_ours(self, claim: ResourceClaim, before: ResourceClaim | None) -> None:
        uid = claim.metadata.uid
        if claim.status.allocation is not None:
            self._see_to(claim)
            self._come_back(claim)
            return
        if (
            before is not None
            and before.status.allocation is not None
            and not self._hand.is_undoing(uid)
        ):
            # The stock scheduler could not use it: something on that node does not fit the pod.
            self._decider.avoid(before)

    def _see_to(self, claim: ResourceClaim) -> None:
        """Go on with an allocation of ours; later, if this replica does not decide now."""
        if self._deciding():
            self._hand.see_to(claim)
        else:  # be it in the same batch of news
            self._decider.follows = True

    def _come_back(self, claim: ResourceClaim) -> None:
        """Let an allocation count as seen once all claims that are older than it are known."""
        if claim.status.allocation is not None and not _after(claim, str(self._watched)):
            self._hand.came_back(claim)

    def _claim_gone(self, key: str) -> None:
        claim = self._wishes.claims.pop(key, None)
        if claim is None:
            return
        uid = claim.metadata.uid
        self._hand.gone(uid)
        self._rivals.drop(uid)
        self._board.forget(uid)
        self._decider.drop_claim(uid)
        for pod in self._wishes.users(key):
            self._decider.look_at(pod)

    # Pods

    def _pod(self, pod: Pod) -> None:
        key = pod.metadata.key
        before = self._wishes.pods.get(key)
        if before is not None and before.metadata.uid != pod.metadata.uid:
            self._pod_gone(key)
        self._estate.pod_changed(pod)
        self._wishes.set_pod(pod)
        self._note_nomination(pod)
        if pod.over:
            self._decider.gone(key)
            self._teller.forget(key)  # another of its name is told anew
            self._free_claims(pod)
        else:
            self._decider.look_at(key)

    def _note_nomination(self, pod: Pod) -> None:
        """Note of a pod's claims that their devices are being written by the stock scheduler."""
        claims = list(self._wishes.claims_of(pod))
        nominated = bool(pod.status.nominated_node_name) and not pod.spec.node_name
        given = any(claim.status.allocation is not None for claim in claims)
        for claim in claims:
            uid = claim.metadata.uid
            waits = uid in self._rivals.waiting
            begun = given or FINALIZER in claim.metadata.finalizers
            for noted, holds in ((self._rivals.nominated, nominated), (self._rivals.begun, begun)):
                (noted.add if waits and holds else noted.discard)(uid)

    def _pod_gone(self, key: str) -> None:
        self._estate.pod_gone(key)
        pod = self._wishes.drop_pod(key)
        self._decider.gone(key)
        self._teller.forget(key)
        if pod is not None:
            self._free_claims(pod)

    def _free_claims(self, pod: Pod) -> None:
        """A pod needs its claims no longer: others may have them, or nobody does."""
        for claim in self._wishes.claims_of(pod):
            if claim.status.allocation is not None and self._wishes.is_ours(claim):
                self._see_to(claim)
            for user in self._wishes.users(claim.metadata.key):
                self._decider.look_at(user)


def quota_of(namespace: Namespace) -> QuotaRecord:
    """What the annotations of a namespace limit; what is no number limits nothing."""
    limits: dict[str, int] = {}
    for annotation, name in QUOTA.items():
        text = namespace.metadata.annotations.get(annotation, "")
        if text.isdecimal():
            limits[name] = int(text)
    return QuotaRecord(**limits)


def _after(claim: ResourceClaim, version: str) -> bool:
    """Whether a claim is newer than a version; versions are numbers since 1.35."""
    mine = claim.metadata.resource_version
    return mine.isdecimal() and version.isdecimal() and int(mine) > int(version)

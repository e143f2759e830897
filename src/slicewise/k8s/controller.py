"""The controller: follows the API, keeps the board, and gives devices to the claims of pods.

One thread decides. Watches bring it news, other threads write for it and report back; both come
through one queue. Whatever it knows it has from the API, so it may be killed at any step: the next
one, or another replica, finds the same and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from slicewise.control.entries import QuotaRecord, Seconds
from slicewise.engine.queue import Discipline
from slicewise.k8s.api import DeviceClass, Namespace, Node, Pod, ResourceClaim
from slicewise.k8s.board import Board
from slicewise.k8s.deciding import Decider
from slicewise.k8s.devices import Library, read_pool
from slicewise.k8s.fitness import Estate
from slicewise.k8s.hand import Done, Hand
from slicewise.k8s.leading import Leadership
from slicewise.k8s.link import Link
from slicewise.k8s.rivals import Rivals, When, may_want
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
    Watch,
)
from slicewise.k8s.wishes import Wishes, claim_keys
from slicewise.k8s.writing import FINALIZER, Pen

log = logging.getLogger("slicewise.k8s")

_BATCH = 1000
_FENCE_SECONDS = 0.5
"""How long until shutting out a former leader is tried again."""
QUOTA = {
    "slicewise.dev/memory-slices": "memory_slices",
    "slicewise.dev/compute-slices": "compute_slices",
    "slicewise.dev/instances": "instances",
}
"""The annotations of a namespace that limit what its pods may have at a time."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a controller decides."""

    policy: str = "default"
    namespace: str = "slicewise"
    """Where its lease is."""
    lease: str = "slicewise"
    identity: str = "slicewise-0"
    lease_seconds: float = 15.0
    discipline: Discipline = field(default_factory=lambda: Discipline(256, 1024))
    settle_seconds: float = 5.0
    """How long a pod is held back where claims of other classes compete for the same GPUs."""
    hold_back: When = "always"
    """When pods are held back until it is certain that nobody else has their slices."""


@dataclass(frozen=True, slots=True)
class Leads:
    """This replica begins or ceases to lead."""

    leads: bool


class Controller:
    """One replica."""

    def __init__(
        self,
        link: Link,
        options: Options,
        clock: Callable[[], Seconds] = time.time,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.server = link.server
        self.tally = Tally()
        self.wishes = Wishes()
        self.estate = Estate()
        self.board = Board(options.policy, clock, address)
        self.rivals = Rivals(options.settle_seconds, options.hold_back)
        self.troubles: dict[str, str] = {}
        """By kind of object: why its watch does not get through."""
        self._inbox: SimpleQueue[News | Done | Leads | None] = SimpleQueue()
        self.leadership = Leadership(
            link,
            options.namespace,
            options.lease,
            options.identity,
            lambda leads: self._inbox.put(Leads(leads)),
            options.lease_seconds,
        )
        self._teller = Teller(link, options.identity, self.tally)
        self._decider = Decider(
            self.board, self.wishes, self.estate, self.rivals, self.tally, options.discipline
        )
        self._hand = Hand(
            Pen(link, self.leadership.valid),
            self.board,
            self.wishes,
            self._decider,
            self.rivals,
            self.tally,
            self._inbox.put,
            self._claim,
        )
        self._watches = [Watch(link, kind, self._inbox.put) for kind in KINDS]
        self._shelf = Shelf()
        self._library = Library()
        self._listing: dict[str, set[str]] = {}
        """By kind that is being listed: what has been named so far."""
        self._unlisted = {kind.name for kind in KINDS}
        self._rivals_known: set[str] | None = None
        """The drivers for whose devices rivals are known; None if they have to be found anew."""
        self._watched = 0
        """The version up to which the watch of claims has come."""
        self._term = 0
        self._fenced = False
        """Whether whoever led before can do no harm any more."""
        self._stopping = False
        self.board.journal.trouble = self._problem()

    # Life

    @property
    def ready(self) -> bool:
        """Whether everything has been listed and all watches get through."""
        return not self._unlisted and not self.troubles

    def _problem(self) -> str:
        """Why what is known here may be out of date, if so."""
        trouble = next(iter(self.troubles.values()), "")
        if self._unlisted and not trouble:
            return f"still reading {', '.join(sorted(self._unlisted))}"
        return trouble

    @property
    def deciding(self) -> bool:
        """Whether this replica gives out devices now."""
        return self.ready and self._fenced and self.leadership.leads

    # For those who look, from other threads

    @property
    def leads(self) -> bool:
        """Whether this replica is the one that decides."""
        return self.leadership.leads

    @property
    def problem(self) -> str:
        """Why this replica does not know the cluster, or could not lead; empty if it does."""
        return self.board.journal.trouble or self.leadership.trouble

    @property
    def waiting(self) -> int:
        """How many pods wait for devices."""
        return self._decider.waiting

    def run(self) -> None:
        """Decide until stopped."""
        for watch in self._watches:
            watch.start()
        self.leadership.start()
        try:
            while not self._stopping:
                self.step(self._patience())
        finally:
            for watch in self._watches:
                watch.stop()
            self._hand.stop()
            self._teller.stop()
            self.leadership.stop()
            self.board.journal.close()

    def stop(self) -> None:
        """Finish what is being written and give up the lease; from any thread."""
        self._stopping = True
        self._inbox.put(None)

    def _patience(self) -> float | None:
        """How long nothing has to be done unless there is news."""
        if not self.deciding:  # then nothing falls due here
            return _FENCE_SECONDS if self.leadership.leads else None
        due = [t for t in (self.rivals.next_time, self._decider.next_time) if t is not None]
        return max(0.0, min(due) - self._decider.clock()) if due else None

    def step(self, seconds: float | None) -> None:
        """Take in what is there, wait for it so long, and then decide what can be decided."""
        try:
            news = self._inbox.get(timeout=seconds)
            for _ in range(_BATCH):
                self._take(news)
                news = self._inbox.get_nowait()
            self._take(news)
        except Empty:
            pass
        self._read_pools()
        self._note_rivals()
        self._decider.follows = not self.deciding
        self._decider.look()
        self.board.journal.trouble = self._problem()
        if self.leadership.leads and self.ready and not (self._fenced or self._hand.fencing):
            self._hand.fence(self.options.identity, partial(self._fenced_now, self._term))
        if self.deciding:
            self._hand.give_way()
            self._hand.confirm()
            for decision in self._decider.decide():
                self._hand.write(decision)
            for claim in (*self._decider.take_given_up(), *self._decider.take_stuck()):
                self._hand.take_back(claim)
            for key, told in self._decider.take_told():
                if key in self.wishes.pods:
                    self._teller.say(self.wishes.pods[key], told)

    # News

    def _take(self, news: News | Done | Leads | None) -> None:
        match news:
            case Changed(kind, thing):
                self._came(kind, thing.metadata.resource_version)
                self._change(kind, thing)
            case Gone(kind, thing):
                self._came(kind, thing.metadata.resource_version)
                if kind is CLAIMS and self._is_another(thing):
                    return
                self._go(kind, self._key(kind, thing))
            case Listed(kind, things, first, last, version):
                if first:
                    self._listing[kind.name] = set()
                named = self._listing[kind.name]
                for thing in things:
                    named.add(self._key(kind, thing))
                    self._change(kind, thing)
                if last:
                    for key in self._known(kind) - named:
                        if kind is CLAIMS and _after(self.wishes.claims[key], version):
                            continue  # made since; the watch brings it
                        self._go(kind, key)
                    self._came(kind, version)
                    del self._listing[kind.name]
                    self._unlisted.discard(kind.name)
            case Trouble(kind, text):
                self.tally.watches += bool(text)
                if text:
                    log.warning("%s are not followed: %s", kind.name, text)
                    self.troubles[kind.name] = text
                else:
                    self.troubles.pop(kind.name, None)
            case Done(call, result, error):
                call(result, error)
            case Leads(leads):
                self._lead(leads)

    def _came(self, kind: Kind, version: str) -> None:
        """Note how far the watch of claims has come."""
        if kind is CLAIMS and version.isdecimal():
            self._watched = max(self._watched, int(version))

    def _is_another(self, claim: ResourceClaim) -> bool:
        """Whether there is another claim of that name by now."""
        known = self.wishes.claims.get(claim.metadata.key)
        return known is not None and known.metadata.uid != claim.metadata.uid

    def _key(self, kind: Kind, thing: Any) -> str:
        key: str = thing.metadata.key
        return key

    def _known(self, kind: Kind) -> set[str]:
        match kind.name:
            case SLICES.name:
                return set(self._shelf.names)
            case CLASSES.name:
                return set(self.wishes.classes)
            case NAMESPACES.name:
                return set(self.board.state.tenants)
            case NODES.name:
                return set(self.estate.nodes)
            case CLAIMS.name:
                return set(self.wishes.claims)
        return set(self.estate.pods) | set(self.wishes.pods)

    def _change(self, kind: Kind, thing: Any) -> None:
        match thing:
            case Parcel():
                self._shelf.put(thing)
            case DeviceClass():
                self.wishes.classes[thing.metadata.name] = thing
                self._decider.look_at_all()
                self._rivals_known = None
            case Namespace():
                self.board.set_tenant(thing.metadata.name, quota_of(thing))
            case Node():
                self.estate.node_changed(thing)
                self.board.pools.set_open(thing.metadata.name, not thing.spec.unschedulable)
            case ResourceClaim():
                self._claim(thing)
            case Pod():
                self._pod(thing)

    def _go(self, kind: Kind, key: str) -> None:
        match kind.name:
            case SLICES.name:
                self._shelf.drop(key)
            case CLASSES.name:
                self.wishes.classes.pop(key, None)
                self._decider.look_at_all()
                self._rivals_known = None
            case NAMESPACES.name:
                self.board.drop_tenant(key)
            case NODES.name:
                self.estate.node_gone(key)
                self.board.pools.set_open(key, False)
            case CLAIMS.name:
                self._claim_gone(key)
            case PODS.name:
                self._pod_gone(key)

    def _read_pools(self) -> None:
        for key in list(self._shelf.changed):
            slices = self._shelf.pool(key)
            if not slices:
                self.board.pools.withdraw(key)
                continue
            reading = read_pool(slices, self._library)
            homes = {gpu.node_name for gpu in reading.gpus}
            if reading.trouble or len(homes) != 1:
                # Incomplete, or not of one node: nothing of it is given out.
                self.board.pools.withdraw(key)
            else:
                self.board.set_pool(key, reading, homes.pop())
        self._shelf.changed.clear()

    # Claims and pods

    def _claim(self, claim: ResourceClaim) -> None:
        uid, key = claim.metadata.uid, claim.metadata.key
        before = self.wishes.claims.get(key)
        if before is not None and _after(before, claim.metadata.resource_version):
            return
        if before is not None and before.metadata.uid != uid:
            self._claim_gone(key)
            before = None
        self.wishes.claims[key] = claim
        if self._decider.stale.get(uid) != claim.metadata.resource_version:
            self._decider.stale.pop(uid, None)
        ours = self._note_rival(claim)
        if claim.status.allocation is not None or uid not in self._decider.writing:
            self.board.settle(claim)
        if ours:
            self._look_at_ours(claim, before)
        for pod in self.wishes.users(key):
            self._decider.look_at(pod)

    def _note_rival(self, claim: ResourceClaim) -> bool:
        """Note whether a claim of others may want our devices; returns whether it is ours."""
        if self.wishes.is_ours(claim):
            return True
        rival = may_want(claim, self.wishes.classes, self.board.pools.drivers)
        self.rivals.note(claim, rival, self._decider.clock())
        for key in self.wishes.users(claim.metadata.key):  # its pod may have been heard of first
            self._note_nomination(self.wishes.pods[key])
        return False

    def _note_rivals(self) -> None:
        """Look at all claims again: classes have changed, or whose devices are known."""
        drivers = self.board.pools.drivers
        if self._rivals_known != drivers:
            self._rivals_known = drivers
            for claim in self.wishes.claims.values():
                self._note_rival(claim)

    def _look_at_ours(self, claim: ResourceClaim, before: ResourceClaim | None) -> None:
        uid = claim.metadata.uid
        if claim.status.allocation is not None:
            if not _after(claim, str(self._watched)):
                # All claims that are older than this allocation are known by now.
                self._hand.came_back(claim)
            if self.deciding:
                self._hand.take_back_if_abandoned(claim)
            return
        if uid not in self._decider.writing:  # its finalizer comes before its allocation
            self.rivals.tentative.pop(uid, None)
        if (
            before is not None
            and before.status.allocation is not None
            and not self._hand.is_undoing(uid)
        ):
            # The stock scheduler could not use it: something on that node does not fit the pod.
            self._decider.avoid(before)

    def _claim_gone(self, key: str) -> None:
        claim = self.wishes.claims.pop(key, None)
        if claim is None:
            return
        uid = claim.metadata.uid
        self._hand.gone(uid)
        self.rivals.drop(uid)
        self.rivals.tentative.pop(uid, None)
        self.board.forget(uid)
        self._decider.drop_claim(uid)
        for pod in self.wishes.users(key):
            self._decider.look_at(pod)

    def _pod(self, pod: Pod) -> None:
        key = pod.metadata.key
        before = self.wishes.pods.get(key)
        if before is not None and before.metadata.uid != pod.metadata.uid:
            self._pod_gone(key)
        self.estate.pod_changed(pod)
        self.wishes.set_pod(pod)
        self._note_nomination(pod)
        self._decider.look_at(key)
        if pod.over:
            self._free_claims(pod)

    def _note_nomination(self, pod: Pod) -> None:
        """Note of a pod's claims that their devices are being written by the stock scheduler."""
        claims = list(self.wishes.claims_of(pod))
        nominated = bool(pod.status.nominated_node_name) and not pod.spec.node_name
        given = any(claim.status.allocation is not None for claim in claims)
        for claim in claims:
            uid = claim.metadata.uid
            waits = uid in self.rivals.waiting
            begun = given or FINALIZER in claim.metadata.finalizers
            for noted, holds in ((self.rivals.nominated, nominated), (self.rivals.begun, begun)):
                (noted.add if waits and holds else noted.discard)(uid)

    def _pod_gone(self, key: str) -> None:
        self.estate.pod_gone(key)
        pod = self.wishes.drop_pod(key)
        self._decider.look_at(key)
        self._teller.forget(key)
        if pod is not None:
            self._free_claims(pod)

    def _free_claims(self, pod: Pod) -> None:
        for name in claim_keys(pod):
            claim = None if name is None else self.wishes.claims.get(name)
            if claim is not None:
                if self.deciding:
                    self._hand.take_back_if_abandoned(claim)
                for user in self.wishes.users(claim.metadata.key):
                    self._decider.look_at(user)

    # Leading

    def _lead(self, leads: bool) -> None:
        self._fenced = False
        self._term += 1
        self.tally.elections += leads
        if not leads:
            log.info("not leading any more")

    def _fenced_now(self, term: int, done: bool) -> None:
        if done and term == self._term and self.leadership.valid():
            self._fenced = True
            self.rivals.last_seen = self._decider.clock()  # who knows who came before
            log.info("leading as %s", self.options.identity)
            self._hand.resume()


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

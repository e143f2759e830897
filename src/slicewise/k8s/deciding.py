"""Deciding: which pod is served next, and which devices its claims get.

Pods wait in order of priority and age. A pass goes through them when something has changed that
may help one: room appeared, a pod arrived, a node became fit. What was refused is remembered until
then, so a pass over a long queue costs little.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slicewise.control.quota import excess, has_limits
from slicewise.core.cluster import Instance
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.offers import Unfit
from slicewise.engine.queue import Discipline, Ticket, WaitingRoom
from slicewise.k8s.api import Pod, ResourceClaim
from slicewise.k8s.avoiding import EVERYWHERE, Avoided
from slicewise.k8s.board import Board
from slicewise.k8s.fitness import Estate
from slicewise.k8s.pools import home_of
from slicewise.k8s.rivals import Rivals
from slicewise.k8s.showing import Window
from slicewise.k8s.tally import Tally
from slicewise.k8s.telling import INVALID, NO_NODE, PLACED, WORDS, Told
from slicewise.k8s.terms import matches
from slicewise.k8s.times import moment
from slicewise.k8s.wishes import Wish, Wishes, single_node
from slicewise.k8s.writing import Decision, Grant

STUCK_SECONDS = 15.0
"""How long a pod keeps devices after the stock scheduler has said that it cannot bind it."""

_NO_REQUEST = Request("none")


class Decider:
    """The pods that wait, and what to do about them."""

    def __init__(
        self,
        board: Board,
        wishes: Wishes,
        estate: Estate,
        rivals: Rivals,
        tally: Tally,
        discipline: Discipline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.writing: set[str] = set()
        """The claims whose allocation is being written."""
        self.stale: dict[str, str] = {}
        """By claim: a version that turned out to be old; the next one has yet to arrive."""
        self._given_up: dict[str, ResourceClaim] = {}
        self._board = board
        self._wishes = wishes
        self._estate = estate
        self._rivals = rivals
        self._tally = tally
        self._room = WaitingRoom(discipline)
        self._numbers: dict[str, int] = {}
        """By pod that waits, or for which something is being written: its number."""
        self._waits: dict[int, str] = {}
        self._window = Window(board)
        self.follows = True
        """Whether another replica decides, and tells pods why they wait."""
        self._last = 0
        self._look: dict[str, None] = {}
        self._busy: dict[str, Decision] = {}
        """By pod: what is being written for it."""
        self._avoided = Avoided(clock)
        self._said: dict[str, str] = {}
        """By pod that was given devices: what the stock scheduler had said of it before."""
        self._stuck: dict[str, float] = {}
        """By pod that has devices and cannot be bound: when they are taken back."""
        self._refused: dict[tuple[Request, ...], Rejection] = {}
        """By what is wanted: why no GPU has room for it."""
        self._unfit: dict[str, tuple[object, Rejection]] = {}
        """By pod: what was found when it was last tried, and why it fits no node."""
        self._told: dict[str, Told] = {}
        self._seen: object = None
        """How far room and nodes had changed when pods were last tried."""
        self._arrived = False

    # Who waits

    def look_at(self, pod: str) -> None:
        """Something about a pod has changed."""
        self._look[pod] = None

    def gone(self, pod: str) -> None:
        """A pod is gone, or over; another of its name would begin anew."""
        self._cease(pod)

    def look_at_all(self) -> None:
        """Something has changed that may concern every pod."""
        self._look.update(dict.fromkeys(self._wishes.pods))

    def look(self) -> None:
        """Let pods begin or cease to wait, the oldest first."""
        pods = self._wishes.pods

        def age(key: str) -> float:
            """Whole seconds only: within one, the order in which they were heard of stands."""
            pod = pods.get(key)
            return 0.0 if pod is None else moment(pod.metadata.creation_timestamp, 0.0)

        changed, self._look = self._look, {}
        for key in sorted(changed, key=age) if len(changed) > 1 else changed:
            if key not in self._busy:
                self._look_at(key)

    def _look_at(self, key: str) -> None:
        wish = self._wishes.wish(key)
        pod = self._wishes.pods.get(key)
        if wish is None:
            self._cease(key)
            if pod is not None and not pod.spec.node_name:
                node = self._wishes.node(key)
                if node is None:
                    self._estate.forget(pod.metadata.uid)
                else:
                    self._estate.assume(pod, node)
                    self._note_stuck(key, pod)
            return
        assert pod is not None
        self._estate.forget(pod.metadata.uid)
        self._stuck.pop(key, None)
        number = self._numbers.get(key)
        if number is None:
            self._last += 1
            number = self._numbers[key] = self._last
            self._waits[number] = key
        if number not in self._room:  # also when what was decided could not be written
            self._room.enter(
                Ticket(
                    number,
                    _NO_REQUEST,
                    tenant=pod.metadata.uid,  # pods do not wait for others of their namespace
                    priority=pod.spec.priority,
                )
            )
        self._arrived = True  # new, or different from what was tried
        if self.follows:
            self._window.show_as_told(key, wish)

    def _note_stuck(self, key: str, pod: Pod) -> None:
        """Note whether the stock scheduler has tried a pod with its devices, in vain."""
        said = unschedulable(pod)
        if said and said != self._said.setdefault(key, said):
            self._stuck.setdefault(key, self.clock() + STUCK_SECONDS)

    def take_stuck(self) -> list[ResourceClaim]:
        """Claims whose devices are of no use: their pod is not bound, and it is not known why."""
        now = self.clock()
        claims: list[ResourceClaim] = []
        for key in [key for key, until in self._stuck.items() if until <= now]:
            del self._stuck[key]
            pod = self._wishes.pods[key]
            mine = [
                claim
                for claim in self._wishes.claims_of(pod)
                if claim.status.allocation is not None
                and not claim.status.reserved_for
                and self._wishes.is_ours(claim)
            ]
            for claim in mine:
                self.avoid(claim)
            claims += mine
        return claims

    def _cease(self, key: str) -> None:
        number = self._numbers.pop(key, None)
        if number is not None:
            del self._waits[number]
            if number in self._room:
                self._room.withdraw(number)
        self._window.hide(key)
        self._unfit.pop(key, None)
        self._told.pop(key, None)
        pod = self._wishes.pods.get(key)
        if pod is None or pod.spec.node_name:
            self._said.pop(key, None)
            self._stuck.pop(key, None)
            self._avoided.forget(key)

    def avoid(self, claim: ResourceClaim) -> None:
        """The stock scheduler could not use an allocation: another node is tried first."""
        allocation = claim.status.allocation
        node = None if allocation is None else single_node(allocation.node_selector)
        if node is None:
            return
        reserved = {consumer.uid for consumer in claim.status.reserved_for}
        for key in self._wishes.users(claim.metadata.key):
            pod = self._wishes.pods[key]
            if reserved and pod.metadata.uid not in reserved:
                continue  # another pod had it, and is done with it
            self._tally.returned += 1
            self._avoided.add(key, node)

    def put_off(self, decision: Decision, why: str) -> None:
        """The API refuses what was decided for a pod: it is tried again later."""
        if decision.pod in self._numbers:
            self._avoided.add(decision.pod, EVERYWHERE)
            self._told[decision.pod] = Told(False, INVALID, f"its devices cannot be written: {why}")

    @property
    def next_time(self) -> float | None:
        """When something falls due: a node is worth another try, or devices are taken back."""
        times = [self._avoided.next_time, *self._stuck.values()]
        return min((time for time in times if time is not None), default=None)

    def drop_claim(self, uid: str) -> None:
        """A claim is gone."""
        self.stale.pop(uid, None)

    @property
    def waiting(self) -> int:
        """How many pods wait."""
        return len(self._room)

    # Who is served

    def decide(self) -> list[Decision]:
        """Serve those who can be served, in order."""
        expired = self._avoided.expire()
        seen = self._board.freed, self._estate.version
        if seen == self._seen and not self._arrived and not expired:
            return []
        if seen != self._seen:
            self._refused.clear()
        if expired:
            self._unfit.clear()
        self._seen, self._arrived = seen, False
        began = time.perf_counter()
        decisions = [decision for _, decision in self._room.serve(self._place)]
        self._tally.deciding_seconds += time.perf_counter() - began
        for decision in decisions:
            self._window.hide(decision.pod)
        self._tally.decided += len(decisions)
        for key, told in self._told.items():
            wish = self._wishes.wish(key)
            if wish is not None:
                self._window.show(key, wish, told)
        return decisions

    def finished(self, decision: Decision) -> None:
        """What was decided has been written, or has not."""
        del self._busy[decision.pod]
        self.writing.difference_update(grant.claim.metadata.uid for grant in decision.grants)
        self.look_at(decision.pod)

    def _place(self, ticket: Ticket) -> Decision | Rejection:
        key = self._waits[ticket.number]
        wish = self._wishes.wish(key)
        if wish is None:  # seen in a moment, by `look`
            return _aside("it wants nothing any more")
        if any(
            self.stale.get(claim.metadata.uid) == claim.metadata.resource_version
            or claim.metadata.uid in self.writing
            for claim, _ in wish.claims
        ):
            return _aside("what is known of its claim is old")
        if wish.problem:
            return self._refuse(key, INVALID, wish.problem, _aside(wish.problem))
        if self._avoided.holds(key, EVERYWHERE):
            return _aside("what was decided for it was refused")
        requests = tuple(wish.requests)
        refused = self._refused.get(requests)
        if refused is None:
            found = self._seen, requests, wish.pinned, wish.pod.spec
            known = self._unfit.get(key)
            if known is not None and known[0] == found:
                return known[1]
            got = self._board.offers.place(requests, lambda node: self._fits(key, wish, node))
            if isinstance(got, tuple):
                over = self._over_quota(wish, got)
                if over is None:
                    return self._grant(key, wish, got)
                for instance in reversed(got):
                    self._board.state.cluster.undo_place(instance)
                return self._refuse(key, WORDS[Reason.QUOTA], over, _aside(over))
            if isinstance(got, Unfit):
                text = self._why_unfit(key, wish, got)
                rejection = _aside(text)
                self._unfit[key] = found, rejection
                self._give_up_rest(wish)
                return self._refuse(key, NO_NODE, text, rejection)
            refused = self._refused[requests] = got
        self._give_up_rest(wish)
        if refused.reason is Reason.UNKNOWN_PROFILE:  # nobody else is to wait for that
            return self._refuse(key, WORDS[refused.reason], refused.detail, _aside(refused.detail))
        return self._refuse(key, WORDS[refused.reason], refused.detail, refused)

    def _fits(self, key: str, wish: Wish, node: str) -> bool:
        home = home_of(node)
        there = self._estate.nodes.get(home)
        return (
            there is not None
            and not self._avoided.holds(key, home)
            and all(matches(selector, there) for selector in wish.pinned)
            and self._estate.misfit(wish.pod, home) is None
        )

    def _over_quota(self, wish: Wish, instances: tuple[Instance, ...]) -> str | None:
        tenant = self._board.tenant(wish.pod.metadata.namespace)
        if not has_limits(tenant):
            return None
        said = excess(tenant, self._board.parts(instances))
        return None if said is None else said.replace("tenant", "namespace", 1)

    def _grant(self, key: str, wish: Wish, instances: tuple[Instance, ...]) -> Decision:
        node = home_of(self._board.state.cluster.node_of(instances[0].gpu).name)
        grants = []
        rest = list(instances)
        for claim, ask in wish.claims:
            mine, rest = tuple(rest[: len(ask.devices)]), rest[len(ask.devices) :]
            labels = {"pod": wish.pod.metadata.name}
            seats = self._board.decided(claim, mine, labels)
            grants.append(Grant(claim, tuple(one.request for one in ask.devices), seats))
            self.writing.add(claim.metadata.uid)
        decision = Decision(
            key,
            node,
            tuple(grants),
            self._rivals.expected(self.clock()),
            dict(self._wishes.classes),
        )
        self._busy[key] = decision
        self._said[key] = unschedulable(wish.pod)
        self._estate.assume(wish.pod, node)
        self._told[key] = Told(True, PLACED, f"given {_named(decision)} of node {node}")
        return decision

    def _refuse(self, key: str, reason: str, text: str, rejection: Rejection) -> Rejection:
        self._told[key] = Told(False, reason, text)
        return rejection

    def _why_unfit(self, key: str, wish: Wish, unfit: Unfit) -> str:
        many = len(unfit.nodes)
        first = home_of(unfit.nodes[0])
        why = self._estate.misfit(wish.pod, first)
        if why is None:
            said = unschedulable(wish.pod)
            why = (
                "did not take the pod when it was tried" + (f" ({said})" if said else "")
                if self._avoided.holds(key, first)
                else "is not where the pod's other claims are"
            )
        nodes = "1 node has" if many == 1 else f"{many} nodes have"
        return f"{nodes} room on its GPUs, but none can run the pod: {first} {why}"

    def _give_up_rest(self, wish: Wish) -> None:
        """A pod that has some of its devices and cannot get the others there starts anew."""
        if not wish.pinned:
            return
        for claim in self._wishes.claims_of(wish.pod):
            if (
                claim.status.allocation is not None
                and not claim.status.reserved_for
                and self._wishes.is_ours(claim)
                and len(self._wishes.users(claim.metadata.key)) == 1
            ):
                self._given_up[claim.metadata.uid] = claim

    def take_given_up(self) -> list[ResourceClaim]:
        """Claims to be taken back: the rest of what their pod needs is not to be had there."""
        given_up, self._given_up = self._given_up, {}
        return list(given_up.values())

    # What is said

    def take_told(self) -> list[tuple[str, Told]]:
        """What pods should be told since this was last asked."""
        told, self._told = self._told, {}
        return list(told.items())


def unschedulable(pod: Pod) -> str:
    """What the stock scheduler says of a pod that it cannot bind; empty if it says nothing."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.reason == "Unschedulable":
            return condition.message
    return ""


def _aside(text: str) -> Rejection:
    """A refusal that is the pod's own affair: nobody behind it has to wait."""
    return Rejection(_NO_REQUEST, Reason.QUOTA, text)


def _named(decision: Decision) -> str:
    return ", ".join(seat.device for grant in decision.grants for seat in grant.seats)

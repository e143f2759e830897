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
from slicewise.k8s.board import Board, moment
from slicewise.k8s.fitness import Estate, matches
from slicewise.k8s.pools import home_of
from slicewise.k8s.rivals import Rivals
from slicewise.k8s.tally import Tally
from slicewise.k8s.telling import CONDITION, INVALID, NO_NODE, PLACED, WORDS, Told
from slicewise.k8s.wishes import Wish, Wishes, single_node
from slicewise.k8s.writing import Decision, Grant

STUCK_SECONDS = 15.0
"""How long a pod keeps devices after the stock scheduler has said that it cannot bind it."""
AVOID_SECONDS, AVOID_MOST = 10.0, 300.0
"""How long a node is left out for a pod that it did not take, at first and at most."""

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
        self._shown: dict[str, tuple[str, tuple[str, ...]]] = {}
        """By pod that waits: the reason and the claims that are shown as waiting."""
        self.follows = True
        """Whether another replica decides, and tells pods why they wait."""
        self._last = 0
        self._look: dict[str, None] = {}
        self._busy: dict[str, Decision] = {}
        """By pod: what is being written for it."""
        self._avoided: dict[str, dict[str, tuple[float, float]]] = {}
        """By pod's uid and node: until when it is left out, and for how long that was."""
        self._said: dict[str, str] = {}
        """By pod that was given devices: what the stock scheduler had said of it before."""
        self._stuck: dict[str, float] = {}
        """By pod that has devices and cannot be bound: when they are taken back."""
        self._refused: dict[tuple[Request, ...], Rejection] = {}
        self._unfit: dict[str, tuple[object, Rejection]] = {}
        self._told: dict[str, Told] = {}
        self._seen: object = None
        self._arrived = False

    # Who waits

    def look_at(self, pod: str) -> None:
        """Something about a pod has changed."""
        self._look[pod] = None

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
                if node is not None:
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
            self._show_as_told(key, wish)

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
        self._hide(key)
        self._unfit.pop(key, None)
        self._told.pop(key, None)
        pod = self._wishes.pods.get(key)
        if pod is None or pod.spec.node_name:
            self._said.pop(key, None)
            self._stuck.pop(key, None)
            self._avoided.pop("" if pod is None else pod.metadata.uid, None)

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
            nodes = self._avoided.setdefault(pod.metadata.uid, {})
            before = nodes.get(node)
            span = AVOID_SECONDS if before is None else min(2 * before[1], AVOID_MOST)
            nodes[node] = self.clock() + span, span

    @property
    def next_time(self) -> float | None:
        """When a node that was left out is worth a try again."""
        now = self.clock()
        times = [
            until
            for uid, nodes in self._avoided.items()
            for until, _ in nodes.values()
            if until > now
        ]
        return min([*times, *self._stuck.values()], default=None)

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
        now = self.clock()
        expired = any(
            0 < until <= now for nodes in self._avoided.values() for until, _ in nodes.values()
        )
        seen = self._board.freed, self._estate.version
        if seen == self._seen and not self._arrived and not expired:
            return []
        if seen != self._seen:
            self._refused.clear()
        if expired:
            for nodes in self._avoided.values():
                for node, (until, span) in nodes.items():
                    if until <= now:
                        nodes[node] = 0.0, span  # worth a try; the span is remembered
            self._unfit.clear()
        self._seen, self._arrived = seen, False
        began = time.perf_counter()
        decisions = [decision for _, decision in self._room.serve(self._place)]
        self._tally.deciding_seconds += time.perf_counter() - began
        for decision in decisions:
            self._shown.pop(decision.pod, None)
        self._tally.decided += len(decisions)
        for key, told in self._told.items():
            wish = self._wishes.wish(key)
            if wish is not None:
                self._show(key, wish, told)
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
        requests = tuple(wish.requests)
        refused = self._refused.get(requests)
        if refused is None:
            known = self._unfit.get(key)
            if known is not None and known[0] == self._seen:
                return known[1]
            got = self._board.offers.place(requests, lambda node: self._fits(wish, node))
            if isinstance(got, tuple):
                over = self._over_quota(wish, got)
                if over is None:
                    return self._grant(key, wish, got)
                for instance in reversed(got):
                    self._board.state.cluster.undo_place(instance)
                return self._refuse(key, WORDS[Reason.QUOTA], over, _aside(over))
            if isinstance(got, Unfit):
                text = self._why_unfit(wish, got)
                rejection = _aside(text)
                self._unfit[key] = self._seen, rejection
                self._give_up_rest(wish)
                return self._refuse(key, NO_NODE, text, rejection)
            refused = self._refused[requests] = got
        self._give_up_rest(wish)
        if refused.reason is Reason.UNKNOWN_PROFILE:  # nobody else is to wait for that
            return self._refuse(key, WORDS[refused.reason], refused.detail, _aside(refused.detail))
        return self._refuse(key, WORDS[refused.reason], refused.detail, refused)

    def _fits(self, wish: Wish, node: str) -> bool:
        home = home_of(node)
        until = self._avoided.get(wish.pod.metadata.uid, {}).get(home, (0.0, 0.0))[0]
        if until > self.clock():
            return False
        there = self._estate.nodes.get(home)
        if there is None or not all(matches(selector, there) for selector in wish.pinned):
            return False
        return self._estate.misfit(wish.pod, home) is None

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
            wish.pod.metadata.uid,
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

    def _why_unfit(self, wish: Wish, unfit: Unfit) -> str:
        many = len(unfit.nodes)
        first = home_of(unfit.nodes[0])
        left = self._avoided.get(wish.pod.metadata.uid, {}).get(first, (0.0, 0.0))[0]
        why = self._estate.misfit(wish.pod, first)
        if why is None:
            said = unschedulable(wish.pod)
            why = (
                "did not take the pod when it was tried" + (f" ({said})" if said else "")
                if left > self.clock()
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

    def _show_as_told(self, key: str, wish: Wish) -> None:
        """Let those who look see what the replica that decides has told a pod."""
        for condition in wish.pod.status.conditions:
            if condition.type == CONDITION and condition.status == "False":
                self._show(key, wish, Told(False, condition.reason, condition.message))

    def _show(self, key: str, wish: Wish, told: Told) -> None:
        """Let those who look see that a pod waits, and why."""
        if told.placed or wish.problem or self._shown.get(key, ("",))[0] == told.reason:
            return
        self._hide(key)
        pod = wish.pod
        for claim, ask in wish.claims:
            self._board.wait(
                claim,
                [asked.want for asked in ask.devices],
                pod.spec.priority,
                {"pod": pod.metadata.name},
                told.reason.lower(),
                told.text,
            )
        claims = tuple(claim.metadata.uid for claim, _ in wish.claims)
        self._shown[key] = told.reason, claims

    def _hide(self, key: str) -> None:
        for uid in self._shown.pop(key, ("", ()))[1]:
            self._board.stop_waiting(uid)


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

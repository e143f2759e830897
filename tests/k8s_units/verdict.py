"""What must hold in a simulation when all is at rest: nothing is lost, and nothing is left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tests.k8s_units.actors import (
    DEVICES,
    NODE_NAMES,
    Seats,
    claim_names,
    fits,
    is_open,
    is_over,
    is_stock,
    node_of,
    profile_of,
    seats_of,
)
from tests.k8s_units.fake_api import FakeApi, Json
from tests.k8s_units.simulated import Replica

from slicewise.k8s.controller import Controller
from slicewise.k8s.watching import CLAIMS, PODS


class Verdict:
    """Looks at the API and at the replicas."""

    def __init__(self, api: FakeApi, replicas: Sequence[Replica]) -> None:
        self._api = api
        self._replicas = replicas
        self._claims = api.there[CLAIMS.name]
        self._pods = api.there[PODS.name]

    def check(self) -> None:
        """All of it."""
        leaders = [one for one in self._replicas if one.controller.deciding]
        assert len(leaders) == 1
        for replica in self._replicas:
            self._knows_all(replica.controller)
            self._has_nothing_in_hand(replica.controller)
        self._nothing_is_wasted()
        for key, pod in self._pods.items():
            if not is_over(pod) and not pod["spec"].get("nodeName"):
                self._waits_for_a_reason(key, pod)

    def _knows_all(self, one: Controller) -> None:
        """The board says what the API says."""
        known = {key: claim.metadata.resource_version for key, claim in one.wishes.claims.items()}
        there = {key: claim["metadata"]["resourceVersion"] for key, claim in self._claims.items()}
        assert known == there
        given = {
            claim["metadata"]["uid"]: seats_of(claim)
            for claim in self._claims.values()
            if seats_of(claim)
        }
        assert set(one.board._allocated) == set(given)
        pools = {pool for _, pool in one.board.pools._pools}
        entered = {
            uid: [(seat.pool, seat.device) for seat in entered.seats]
            for uid, entered in one.board._claims.items()
        }
        clashes = set(one.board.clashes)
        assert entered == {
            uid: seats
            for uid, seats in given.items()
            if seats[0][0] in pools and uid not in clashes
        }
        assert bool(clashes) == (not fits(seat for seats in given.values() for seat in seats))
        placed = set(one.board.state.allocations) - set(one.board.state.tickets)
        assert placed == set(entered), "slices are held by nobody"
        waiting = {c["metadata"]["uid"] for c in self._claims.values() if not seats_of(c)}
        assert set(one.board.state.tickets) <= waiting, "what has no need any more is shown"

    def _has_nothing_in_hand(self, one: Controller) -> None:
        hand, decider = one._hand, one._decider
        left = {
            "undoing": hand._undoing,
            "judging": hand._judging,
            "final": hand._final,
            "fencing": hand.fencing,
            "tentative": self._unsettled(one) if one.deciding else (),
            "writing": decider.writing,
            "busy": decider._busy,
            "stale": decider.stale,
            "given up": decider._given_up,
        }
        left = {name: what for name, what in left.items() if what}
        assert not left, left
        uids = {pod["metadata"]["uid"] for pod in self._pods.values()}
        assert set(one.estate._seats) <= uids
        assert set(one.rivals.waiting) == {
            claim["metadata"]["uid"]
            for claim in self._claims.values()
            if is_stock(claim) and not seats_of(claim) and one.board.pools.drivers
        }

    def _unsettled(self, one: Controller) -> list[str]:
        """What should be confirmed by now: it is reserved, or has no rivals."""
        return [
            uid
            for uid, tentative in one.rivals.tentative.items()
            if not tentative.rivals
            or tentative.claim not in self._claims
            or self._claims[tentative.claim]["metadata"]["uid"] != uid
            or self._claims[tentative.claim]["status"].get("reservedFor")
        ]

    def _nothing_is_wasted(self) -> None:
        """What was given is wanted by a pod."""
        wanted = {
            name for pod in self._pods.values() if not is_over(pod) for name in claim_names(pod)
        }
        idle = [key for key, one in self._claims.items() if seats_of(one) and key not in wanted]
        assert not idle, f"nobody wants {idle}"

    def _waits_for_a_reason(self, key: str, pod: Json) -> None:
        """A pod that is not bound could not be."""
        claims = [self._claims.get(name or "") for name in claim_names(pod)]
        there = [claim for claim in claims if claim is not None]
        if (
            len(there) < len(claims)
            or any(claim["metadata"].get("deletionTimestamp") for claim in there)
            or pod["metadata"].get("deletionTimestamp")
        ):
            return
        pinned = {node_of(claim) for claim in there if seats_of(claim)}
        taken = [seat for claim in self._claims.values() for seat in seats_of(claim)]
        wanted = [profile_of(claim) for claim in there if not seats_of(claim)]
        for node in NODE_NAMES:
            if is_open(self._api, node) and pinned <= {node}:
                for devices in _ways(node, wanted):
                    assert not fits([*taken, *devices]), f"{key} waits, and could be on {node}"


def _ways(node: str, wanted: list[str]) -> Iterator[Seats]:
    for devices in product(*(DEVICES[profile] for profile in wanted)):
        yield [(node, device) for device in devices]

"""Checks the end of a simulation: caches agree with the API, and no pod waits without a reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tests.kubernetes.actors import (
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
from tests.kubernetes.fake_api import FakeApi, Json
from tests.kubernetes.simulated import Replica

from slicewise.kubernetes.claim_states import IN_FLIGHT, WAITS_FOR_NEWER, ClaimState
from slicewise.kubernetes.controller import Controller
from slicewise.kubernetes.informer import CLAIMS, PODS


class Verdict:
    """Checks the API and the replicas."""

    def __init__(self, api: FakeApi, replicas: Sequence[Replica]) -> None:
        self._api = api
        self._replicas = replicas
        self._claims = api.there[CLAIMS.name]
        self._pods = api.there[PODS.name]

    def check(self) -> None:
        """Run all checks."""
        leaders = [one for one in self._replicas if one.controller.deciding]
        assert len(leaders) == 1
        for replica in self._replicas:
            self._check_cache(replica.controller)
            self._check_nothing_pending(replica.controller)
        reserved = self._windows(leaders[0].controller)
        self._check_nothing_wasted()
        for key, pod in self._pods.items():
            if not is_over(pod) and not pod["spec"].get("nodeName"):
                self._check_no_room(key, pod, reserved)

    def _check_cache(self, one: Controller) -> None:
        """Check that the cache agrees with the API."""
        known = {key: claim.metadata.resource_version for key, claim in one.pending.claims.items()}
        there = {key: claim["metadata"]["resourceVersion"] for key, claim in self._claims.items()}
        assert known == there
        given = {
            claim["metadata"]["uid"]: seats_of(claim)
            for claim in self._claims.values()
            if seats_of(claim)
        }
        records = one.cache.records.all()
        assert {one.claim.metadata.uid for one in records if one.allocated} == set(given)
        assert {one.claim.metadata.key for one in records} == set(self._claims)
        pools = {pool for _, pool in one.cache.pools._pools}
        entered = {
            uid: [(seat.pool, seat.device) for seat in entered.devices]
            for uid, entered in one.cache._claims.items()
        }
        clashes = set(one.cache.clashes)
        assert entered == {
            uid: seats
            for uid, seats in given.items()
            if seats[0][0] in pools and uid not in clashes
        }
        assert bool(clashes) == (not fits(seat for seats in given.values() for seat in seats))
        placed = set(one.cache.state.allocations) - set(one.cache.state.tickets)
        assert placed == set(entered), "slices are taken without a claim"
        for uid in entered:
            ends = one._cycle._lifetimes.ends(one.cache.records[uid].claim)
            for instance in one.cache.state.instances[uid]:
                assert one.cache.state.cluster.end_of(instance) == ends, "an old end is known"
        waiting = {c["metadata"]["uid"] for c in self._claims.values() if not seats_of(c)}
        assert set(one.cache.state.tickets) <= waiting, "a claim is shown as waiting that is not"

    def _check_nothing_pending(self, one: Controller) -> None:
        writer, cycle = one._writer, one._cycle
        left = {
            "fencing": writer.fencing.running,
            "tentative": self._unsettled(one) if one.deciding else (),
            **{
                state.value: [r for r in one.cache.records.all() if r.state is state]
                for state in (*IN_FLIGHT, *WAITS_FOR_NEWER, ClaimState.COOLING, ClaimState.WRITTEN)
            },
            "busy": cycle._writing,
            "given up": cycle._given_up,
        }
        left = {name: what for name, what in left.items() if what}
        assert not left, left
        uids = {pod["metadata"]["uid"] for pod in self._pods.values()}
        assert set(one.node_resources._counted) <= uids
        assert set(one.conflicts.rivals) == {
            claim["metadata"]["uid"]
            for claim in self._claims.values()
            if is_stock(claim) and not seats_of(claim) and one.cache.pools.drivers
        }

    def _unsettled(self, one: Controller) -> list[str]:
        """Tentative claims that should be confirmed: reserved, or without rivals."""
        return [
            uid
            for uid, tentative in one.conflicts.tentative.items()
            if not tentative.rivals or one.cache.records[uid].claim.status.reserved_for
        ]

    def _check_nothing_wasted(self) -> None:
        """Check that every allocated claim belongs to a pod."""
        wanted = {
            name for pod in self._pods.values() if not is_over(pod) for name in claim_names(pod)
        }
        idle = [key for key, one in self._claims.items() if seats_of(one) and key not in wanted]
        assert not idle, f"no pod needs {idle}"

    def _windows(self, leader: Controller) -> Seats:
        """The reserved windows, as devices. Only lines with waiting pods may have any."""
        windows: Seats = []
        cycle, cluster = leader._cycle, leader.cache.state.cluster
        for line, pool in cycle.reservations:
            waiting = cycle._queue.line(line)
            assert waiting is not None, "a window is reserved for a pod that does not wait"
            assert len(pool) <= len(list(waiting))
            for window in pool:
                gpu = leader.cache.pools.gpu(window.gpu)
                placement = cluster.state(window.gpu).geometry.placements[window.placement]
                windows.append((gpu.pool, gpu.devices[placement.profile.name, placement.start]))
        return windows

    def _check_no_room(self, key: str, pod: Json, reserved: Seats) -> None:
        """Check that no node has room for a waiting pod outside reserved windows."""
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
                windows = [seat for seat in reserved if seat[0] == node]
                outside = [seat for seat in taken if fits([*windows, seat])]
                for devices in _ways(node, wanted):
                    kept = windows and not fits([*outside, *windows, *devices])
                    room = not kept and fits([*taken, *devices])
                    assert not room, f"{key} waits, but {node} has room"


def _ways(node: str, wanted: list[str]) -> Iterator[Seats]:
    for devices in product(*(DEVICES[profile] for profile in wanted)):
        yield [(node, device) for device in devices]

"""The controller without an API: what it makes of news, and when it does what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.k8s.nvidia import devices_at
from tests.k8s_units.objects import OURS, claim, device_class, node, pod, wants
from tests.k8s_units.publishing import nvidia

from slicewise.k8s.api import DeviceClass, Namespace, Pod, ResourceClaim
from slicewise.k8s.controller import Controller, Options
from slicewise.k8s.leading import running_clock
from slicewise.k8s.link import ApiError, UnreachableError
from slicewise.k8s.shelf import read_parcel
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
    Listed,
    Trouble,
)
from slicewise.k8s.writing import Decision


class Closed:
    """An API that answers nothing."""

    server = "https://nowhere"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pages(self, path: str, kind: type[Any]) -> Any:
        self.asked.append(path)
        raise UnreachableError("nobody is there")

    def get(self, path: str, kind: type[Any]) -> Any:
        raise UnreachableError("nobody is there")

    def write(self, *arguments: Any) -> bytes:
        raise ApiError(403, "Forbidden", "no")


class Now:
    """Writers that are done at once."""

    def submit(self, work: Callable[[], Any]) -> None:
        work()


def controller(listed: bool = True) -> Controller:
    made = Controller(Closed(), Options())  # type: ignore[arg-type]
    made._hand._writers = Now()  # type: ignore[assignment]
    made._hand._pen._pause = lambda _: None
    if listed:
        for kind in KINDS:
            made._inbox.put(Listed(kind, [], True, True, "1"))
        made.step(0)
        assert made.ready
    return made


def tell(one: Controller, *news: Any) -> None:
    for item in news:
        one._inbox.put(item)
    one.step(0)


def slices(name: str = "n1") -> list[Any]:
    return [read_parcel(msgspec.json.encode(one)) for one in nvidia("A100-80GB", 1, name)]


def with_node(one: Controller) -> None:
    tell(one, Changed(NODES, node("n1")), *(Changed(SLICES, s) for s in slices()))
    assert list(one.board.state.nodes) == ["n1"]


def lead(one: Controller) -> None:
    one.leadership._hold(running_clock())
    tell(one)


SEAT = ("n1", devices_at("A100-80GB", 0, "1g.10gb")[6])


def held(version: int, **more: Any) -> ResourceClaim:
    return claim("a", seats=[SEAT], version=version, tentative=True, reserved=["p"], **more)


def test_a_slice_that_cannot_be_read_costs_its_pool_only() -> None:
    one = controller()
    with_node(one)
    odd = nvidia("A100-80GB", 1, "n2")
    odd[-1]["spec"]["devices"][0]["taints"] = "none"  # a list, as far as we know
    parcels = [read_parcel(msgspec.json.encode(item)) for item in odd]
    tell(one, Changed(NODES, node("n2")), *(Changed(SLICES, parcel) for parcel in parcels))
    assert list(one.board.state.nodes) == ["n1"]
    tell(one, *(Changed(SLICES, parcel) for parcel in slices("n2")))
    assert list(one.board.state.nodes) == ["n1", "n2"]


def test_it_is_ready_once_everything_was_listed_and_while_nothing_is_wrong() -> None:
    one = controller(listed=False)
    assert "still reading" in one.problem
    for kind in KINDS:
        assert not one.ready
        tell(one, Listed(kind, [], True, True, "1"))
    assert one.ready
    assert one.problem == ""
    tell(one, Trouble(PODS, "cut off"))
    assert one.watches_down == one.tally.watches == 1
    assert not one.ready
    assert one.problem == "cut off"
    tell(one, Trouble(PODS, ""))
    assert one.ready


def test_what_a_list_does_not_say_is_gone() -> None:
    one = controller()
    with_node(one)
    tell(
        one,
        Changed(CLASSES, device_class()),
        Changed(NAMESPACES, msgspec.convert({"metadata": {"name": "team"}}, Namespace)),
        Changed(CLAIMS, claim("a", version=3)),
        Changed(PODS, pod("p", ["a"])),
    )
    assert one.waiting == 1
    for kind in (PODS, CLAIMS, NAMESPACES, CLASSES, SLICES, NODES):
        tell(one, Listed(kind, [], True, True, "9"))
    assert one.waiting == 0
    assert not one.wishes.pods
    assert not one.wishes.claims
    assert not one.wishes.classes
    assert not one.estate.nodes
    assert not one.board.state.nodes
    assert not one.board.state.tenants


def test_a_list_in_pages_counts_as_a_whole_and_from_the_start_if_it_is_begun_again() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("old", version=2)))
    tell(one, Listed(CLAIMS, [claim("a", version=3)], True, False, "9"))
    assert set(one.wishes.claims) == {"team/old", "team/a"}
    tell(one, Listed(CLAIMS, [claim("b", version=4)], True, False, "9"))
    tell(one, Listed(CLAIMS, [claim("c", version=5)], False, True, "9"))
    assert set(one.wishes.claims) == {"team/b", "team/c"}


def test_older_news_of_a_claim_changes_nothing() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=7)))
    tell(one, Changed(CLAIMS, claim("a", version=6)), Gone(CLAIMS, claim("a", uid="before")))
    assert one.wishes.claims["team/a"].metadata.resource_version == "7"
    tell(one, Listed(CLAIMS, [], True, True, "6"))
    assert "team/a" in one.wishes.claims  # written since, and the watch has yet to bring it
    assert one.board.state.cluster.occupied_slices == 1


def test_a_write_that_comes_back_in_a_list_has_come_back() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", version=5)))
    one.rivals.begin("uid-a", "team/a")
    tell(one, Listed(CLAIMS, [held(7)], True, True, "9"))
    assert one.rivals.tentative["uid-a"].rivals == set()
    assert one.rivals.tentative["uid-a"].until is not None


def test_a_rival_whose_class_becomes_ours_is_none_any_more() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLASSES, device_class(sealed=False)), Changed(CLAIMS, claim("a", version=3)))
    assert set(one.rivals.waiting) == {"uid-a"}
    tell(one, Changed(CLASSES, device_class()))
    assert not one.rivals.waiting


def test_resources_that_classes_stand_for_rule_no_node_out() -> None:
    one = controller()
    tell(one, Changed(NODES, node("n1")))
    asks = {"name": "main", "resources": {"requests": {"nvidia.com/gpu": "1"}}}
    wanted = pod("p", containers=[asks])
    assert one.estate.misfit(wanted, "n1") is not None
    spec = {"extendedResourceName": "nvidia.com/gpu"}
    gpus = msgspec.convert({"metadata": {"name": "gpu"}, "spec": spec}, DeviceClass)
    tell(one, Changed(CLASSES, gpus))
    assert one.estate.misfit(wanted, "n1") is None
    tell(one, Gone(CLASSES, gpus))
    assert one.estate.misfit(wanted, "n1") is not None


def test_a_pod_of_the_same_name_begins_anew() -> None:
    one = controller()
    first = pod("p", ["a"], priority=10)
    tell(one, Changed(CLAIMS, claim("a", config=[wants(profile="1g.10gb")])), Changed(PODS, first))
    assert one.waiting == 1
    meta = msgspec.structs.replace(first.metadata, uid="another")
    spec = msgspec.structs.replace(first.spec, priority=1)
    tell(one, Changed(PODS, Pod(meta, spec)))
    (ticket,) = one._decider._room
    assert ticket.priority == 1


def test_shutting_out_a_former_leader_is_not_tried_without_a_pause() -> None:
    one = controller()
    link = one._hand._pen._link
    assert isinstance(link, Closed)
    lead(one)
    for _ in range(20):
        one.step(0)
    assert link.asked == [CLAIMS.path]
    patience = one._patience()
    assert patience is not None
    assert 0 < patience <= 0.5


def test_nothing_is_decided_while_the_lease_does_not_run() -> None:
    one = controller()
    lead(one)
    one._fenced = one.leadership.term
    assert one.deciding
    one.leadership._until = 0.0
    assert not one.deciding
    assert one._patience() is not None


def test_nothing_is_decided_in_a_new_term_before_the_last_leader_is_shut_out() -> None:
    one = controller()
    lead(one)
    one._fenced = one.leadership.term
    one.leadership._turn(False)  # somebody else led for a moment
    one.leadership._hold(running_clock())
    assert one.leadership.valid()
    assert not one.deciding  # before that is even heard of
    tell(one)
    assert not one.deciding


def test_what_is_due_and_cannot_be_done_yet_does_not_keep_a_processor_busy() -> None:
    one = controller()
    lead(one)
    one._fenced = one.leadership.term
    one.rivals.begin("uid-a", "team/a")
    one.rivals.came_back("uid-a")
    one.rivals.reserved("uid-a", -100.0)
    patience = one._patience()
    assert patience is not None
    assert patience > 0


def test_ours_are_those_of_classes_that_are_ours() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("a")), Changed(CLASSES, device_class(OURS)))
    assert one.wishes.is_ours(one.wishes.claims["team/a"])
    assert not one.rivals.waiting


def test_what_is_abandoned_while_nothing_is_decided_is_taken_back_afterwards() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.leadership.term
    tell(one)
    tell(one, Trouble(CLAIMS, "cut off"))
    tell(one, Gone(PODS, pod("p", ["a"])))
    assert one.tally.taken_back == 0
    tell(one, Trouble(CLAIMS, ""))
    assert one.tally.taken_back == 1


def test_what_is_abandoned_while_nothing_is_decided_for_a_moment_is_taken_back() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, claim("a", seats=[SEAT], version=3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.leadership.term
    tell(one)
    gone = Gone(PODS, pod("p", ["a"]))
    tell(one, Trouble(CLAIMS, "cut off"), gone, Trouble(CLAIMS, ""))  # all in one batch
    assert one.tally.taken_back == 1


def test_what_was_found_and_is_gone_by_now_does_not_come_back() -> None:
    one = controller()
    tell(one, Changed(CLAIMS, claim("b", version=9)))
    for version in (5, 12):  # the watch has come past the first, not past the second
        one._ear.found(claim("a", version=version))
        assert ("team/a" in one.wishes.claims) == (version == 12)


def test_what_is_no_longer_ours_and_has_lost_its_devices_is_not_confirmed() -> None:
    one = controller()
    with_node(one)
    tell(one, Changed(CLAIMS, held(3)), Changed(PODS, pod("p", ["a"])))
    lead(one)
    one._fenced = one.leadership.term
    rival = claim("r", {"name": "r", "exactly": {"deviceClassName": "gpu"}}, version=2)
    gpus = device_class("gpu", sealed=False)
    tell(one, Changed(CLASSES, gpus), Changed(CLAIMS, rival))
    assert set(one.rivals.tentative) == {"uid-a"}
    one._hand._final.add("uid-a")  # as if it had been written for good
    tell(one, Changed(CLASSES, device_class(sealed=False)), Changed(CLAIMS, claim("a", version=9)))
    assert not one.rivals.tentative
    assert not one._hand._final


def test_a_claim_that_was_made_anew_waits_in_place_of_the_old_one() -> None:
    one = controller()
    with_node(one)
    lead(one)
    one._fenced = one.leadership.term
    large = [wants(profile="7g.80gb")]
    for name in "ab":
        tell(one, Changed(CLAIMS, claim(name, config=large, version=3)))
    tell(one, Changed(PODS, pod("p", ["a", "b"])))
    assert set(one.board.state.tickets) == {"uid-a", "uid-b"}
    old, new = claim("a", version=4), claim("a", config=large, version=5, uid="new")
    tell(one, Gone(CLAIMS, old), Changed(CLAIMS, new))
    assert set(one.board.state.tickets) == {"new", "uid-b"}


class Loses:
    """A pen: while it writes the second claim, the first one is taken away from the pod."""

    def __init__(self, one: Controller) -> None:
        self._one = one
        self.judged: list[str] = []
        self.decisions = 0

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        self.decisions += 1
        first, second = (
            claim(
                grant.claim.metadata.name,
                seats=[(seat.pool, seat.device) for seat in grant.seats],
                tentative=True,
                version=10 + i,
            )
            for i, grant in enumerate(decision.grants)
        )
        for news in (first, claim("a", *ONE, version=20)):
            self._one._inbox.put(Changed(CLAIMS, news))
        return [first, second]

    def confirm(self, claim: ResourceClaim, confirmed: bool, why: str) -> None:
        self.judged.append(claim.metadata.name)

    def deallocate(self, claim: ResourceClaim) -> None:
        """The second one: nobody uses it."""


ONE = ({"name": "r", "exactly": {"deviceClassName": OURS, "count": 1}},)


def test_what_is_taken_away_while_the_rest_is_written_is_neither_held_nor_confirmed() -> None:
    one = controller()
    with_node(one)
    lead(one)
    one._fenced = one.leadership.term
    pen = Loses(one)
    one._hand._pen = pen  # type: ignore[assignment]
    tell(
        one,
        Changed(CLASSES, device_class(OURS, profile="1g.10gb")),
        Changed(CLAIMS, claim("a", *ONE)),
        Changed(CLAIMS, claim("b", *ONE)),
        Changed(PODS, pod("p", ["a", "b"])),
    )
    assert pen.decisions == 1
    tell(one, Gone(PODS, pod("p", ["a", "b"])))
    assert pen.judged == ["b"]
    assert not one.rivals.tentative
    assert one.board.claim("uid-a") is None

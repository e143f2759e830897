"""The hand: what comes of what is written, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.k8s_units.objects import claim
from tests.k8s_units.test_deciding import Scene, device

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import ResourceClaim
from slicewise.k8s.hand import Done, Hand
from slicewise.k8s.link import ApiError
from slicewise.k8s.writing import Decision, NotLeadingError, NotWrittenError


class Draft:
    """A pen whose writes come to what the test says."""

    def __init__(self) -> None:
        self.undone: list[ResourceClaim] = []
        self.judged: list[tuple[ResourceClaim, bool]] = []
        self.after: Callable[[ResourceClaim], ResourceClaim | None] = lambda _: None
        self.refusal: SlicewiseError | None = None

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        assert self.refusal is not None
        raise self.refusal

    def deallocate(self, one: ResourceClaim) -> ResourceClaim | None:
        self.undone.append(one)
        return self.after(one)

    def confirm(self, one: ResourceClaim, confirmed: bool, why: str) -> ResourceClaim | None:
        self.judged.append((one, confirmed))
        return self.after(one)


class Now:
    """Writers that are done at once; what came of it waits until it is taken in."""

    def submit(self, work: Callable[[], Any]) -> None:
        work()


class Desk:
    """A scene with a hand."""

    def __init__(self, *nodes: str) -> None:
        self.scene = Scene(*nodes)
        self.pen, self.inbox = Draft(), list[Done]()
        self.hand = Hand(
            self.pen,  # type: ignore[arg-type]
            self.scene.board,
            self.scene.wishes,
            self.scene.decider,
            self.scene.rivals,
            self.scene.tally,
            self.inbox.append,
            self.hear,
        )
        self.hand._writers = Now()  # type: ignore[assignment]

    def take_in(self) -> None:
        done, self.inbox = self.inbox, []
        self.hand._post = self.inbox.append
        for one in done:
            one.call(one.result, one.error)

    def hear(self, made: ResourceClaim) -> None:
        """As a controller that decides would."""
        self.scene.change(made)
        if made.status.allocation is not None:
            self.hand.see_to(made)

    def know(self, made: ResourceClaim) -> ResourceClaim:
        self.scene.wishes.claims[made.metadata.key] = made
        self.scene.board.settle(made)
        return made


SEAT = ("n1", device("1g.10gb", 6).removeprefix("n1/"))


def test_what_changed_while_it_was_taken_back_is_taken_back_as_it_is_then() -> None:
    desk = Desk("n1")
    desk.hand.see_to(desk.know(claim("a", seats=[SEAT], version=5)))
    newer = desk.know(claim("a", seats=[SEAT], version=6))  # so the first was refused
    desk.hand.see_to(newer)
    desk.take_in()
    assert [one.metadata.resource_version for one in desk.pen.undone] == ["5", "6"]
    desk.take_in()
    assert len(desk.pen.undone) == 2  # nothing has changed since


def test_of_two_of_ours_on_the_same_slices_one_gives_way() -> None:
    desk = Desk("n1")
    for name in "ab":
        desk.know(claim(name, seats=[SEAT]))
    desk.hand.give_way()
    desk.hand.give_way()
    assert [one.metadata.name for one in desk.pen.undone] == ["b"]


def test_to_give_way_is_not_tried_twice_where_nothing_has_changed() -> None:
    desk = Desk("n1")
    for name in "ab":
        desk.know(claim(name, seats=[SEAT], reserved=["p"], tentative=True))
    for _ in range(5):
        desk.hand.give_way()
        desk.take_in()  # the API refused
    assert [one.metadata.name for one, _ in desk.pen.judged] == ["b", "a"]
    desk.know(claim("b", seats=[SEAT], reserved=["p"], tentative=True, version=2))
    desk.hand.give_way()
    assert [one.metadata.name for one, _ in desk.pen.judged] == ["b", "a", "b"]


def test_a_pod_whose_devices_the_api_refuses_is_put_off() -> None:
    desk = Desk("n1")
    desk.pen.refusal = ApiError(403, "Forbidden", "not yours")
    desk.scene.ask("a", "1g.10gb")
    desk.scene.decider.look()
    (decision,) = desk.scene.decider.decide()
    desk.hand.write(decision)
    desk.take_in()
    assert desk.scene.decide() == {}
    assert "not yours" in desk.scene.told()["a"][1]
    assert desk.scene.board.state.cluster.occupied_slices == 0
    assert desk.scene.decider.next_time is not None
    desk.scene.now = desk.scene.decider.next_time
    assert list(desk.scene.decide()) == ["a"]


def test_what_was_not_confirmed_because_the_lease_did_not_run_is_still_to_be() -> None:
    desk = Desk("n1")
    waiting = desk.know(claim("a", seats=[SEAT], reserved=["p"], tentative=True))

    def too_late(_: ResourceClaim) -> ResourceClaim | None:
        raise NotLeadingError("the lease is over")

    desk.pen.after = too_late
    desk.scene.rivals.begin("uid-a", "team/a")
    desk.hand.came_back(waiting)
    desk.hand.confirm()
    assert desk.pen.judged == [(waiting, True)]
    assert not desk.scene.rivals.tentative
    desk.take_in()
    assert set(desk.scene.rivals.tentative) == {"uid-a"}


def test_what_could_not_be_taken_back_is_tried_again() -> None:
    desk = Desk("n1")
    desk.pen.after = lambda one: one  # the API refuses
    desk.hand.see_to(desk.know(claim("a", seats=[SEAT], version=5)))
    desk.pen.after = lambda _: claim("a", version=6)
    desk.take_in()
    desk.take_in()
    assert len(desk.pen.undone) == 2
    assert desk.scene.board.state.cluster.occupied_slices == 0


def test_what_stays_of_a_decision_that_failed_is_confirmed_all_the_same() -> None:
    desk = Desk("n1")
    desk.scene.ask("p", "1g.10gb", "1g.10gb")
    desk.scene.decider.look()
    (decision,) = desk.scene.decider.decide()
    seats = [(seat.pool, seat.device) for seat in decision.grants[0].seats]
    there = claim("p-0", seats=seats, reserved=["q"], tentative=True, version=7)
    desk.pen.refusal = NotWrittenError("refused", [there, claim("p-1", version=8)], True)
    desk.hand.write(decision)
    desk.take_in()
    assert set(desk.scene.rivals.tentative) == {"uid-p-0"}


def test_a_claim_that_is_gone_when_its_devices_are_not_written_leaves_nothing_behind() -> None:
    desk = Desk("n1")
    desk.scene.ask("p", "1g.10gb")
    desk.scene.decider.look()
    (decision,) = desk.scene.decider.decide()
    desk.pen.refusal = NotWrittenError("changed", [], False)
    desk.hand.write(decision)
    desk.scene.end("p")
    desk.take_in()
    assert not desk.scene.decider.stale
    assert not desk.scene.rivals.tentative


def test_what_is_abandoned_while_it_is_confirmed_is_taken_back() -> None:
    desk = Desk("n1")
    waiting = desk.know(claim("a", seats=[SEAT], reserved=["p"], tentative=True, version=5))
    desk.scene.rivals.begin("uid-a", "team/a")
    desk.hand.came_back(waiting)
    desk.pen.after = lambda _: claim("a", seats=[SEAT], tentative=True, version=6)
    desk.hand.confirm()
    newer = claim("a", seats=[SEAT], tentative=True, version=7)  # its pod went meanwhile
    desk.hear(newer)
    assert not desk.pen.undone
    desk.scene.wishes.claims["team/a"] = newer
    desk.hand._know = lambda one: desk.hear(newer)  # older news change nothing
    desk.take_in()
    assert [one.metadata.resource_version for one in desk.pen.undone] == ["7"]

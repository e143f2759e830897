"""The allocation writer: outcomes of writes, with changes that arrive during them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.objects import claim
from tests.kubernetes.test_cycle import Scene, device

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.allocation_writer import AllocationWriter, Done
from slicewise.kubernetes.api import ResourceClaim
from slicewise.kubernetes.api_client import KubernetesApiError
from slicewise.kubernetes.claim_client import Decision, NotLeadingError, NotWrittenError
from slicewise.kubernetes.claim_states import ClaimState
from slicewise.kubernetes.conflicts import When


class Draft:
    """A claim client whose writes have the outcomes that the test sets."""

    def __init__(self) -> None:
        self.undone: list[ResourceClaim] = []
        self.judged: list[tuple[ResourceClaim, bool]] = []
        self.after: Callable[[ResourceClaim], ResourceClaim | None] = lambda _: None
        self.refusal: SlicewiseError | None = None
        self.refused: SlicewiseError | None = None

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        assert self.refusal is not None
        raise self.refusal

    def refresh(self, one: ResourceClaim) -> ResourceClaim | None:
        if self.refused is not None:
            raise self.refused
        return one

    def deallocate(self, one: ResourceClaim) -> ResourceClaim | None:
        self.undone.append(one)
        return self.after(one)

    def confirm(self, one: ResourceClaim, confirmed: bool, why: str) -> ResourceClaim | None:
        self.judged.append((one, confirmed))
        return self.after(one)


class Now:
    """Writers that finish immediately; their results are queued until they are processed."""

    def submit(self, work: Callable[[], Any]) -> None:
        work()


class Desk:
    """A scene with a hand."""

    def __init__(self, *nodes: str) -> None:
        self.scene = Scene(*nodes)
        self.claim_client, self.inbox = Draft(), list[Done]()
        self.writer = AllocationWriter(
            self.claim_client,  # type: ignore[arg-type]
            self.scene.cache,
            self.scene.pending,
            self.scene.cycle,
            self.scene.conflicts,
            self.scene.quarantine,
            self.scene.stats,
            self.inbox.append,
            self.hear,
        )
        self.writer._writers = Now()  # type: ignore[assignment]

    def take_in(self) -> None:
        done, self.inbox = self.inbox, []
        self.writer._post = self.inbox.append
        for one in done:
            one.call(one.result, one.error)

    def hear(self, made: ResourceClaim) -> None:
        """Act as the controller does when it decides."""
        self.scene.change(made)
        if made.status.allocation is not None:
            self.writer.reconcile(made)

    def know(self, made: ResourceClaim) -> ResourceClaim:
        self.scene.pending.claims[made.metadata.key] = made
        self.scene.cache.update(made)
        return made


SEAT = ("n1", device("1g.10gb", 6).removeprefix("n1/"))


def test_a_claim_that_changed_during_a_revocation_is_revoked_again() -> None:
    desk = Desk("n1")
    desk.writer.reconcile(desk.know(claim("a", seats=[SEAT], version=5)))
    newer = desk.know(claim("a", seats=[SEAT], version=6))  # so the first was refused
    desk.writer.reconcile(newer)
    desk.take_in()
    assert [one.metadata.resource_version for one in desk.claim_client.undone] == ["5", "6"]
    desk.take_in()
    assert len(desk.claim_client.undone) == 2  # nothing has changed since


def test_one_of_two_own_claims_on_the_same_slices_gives_way() -> None:
    desk = Desk("n1")
    for name in "ab":
        desk.know(claim(name, seats=[SEAT]))
    desk.writer.resolve_conflicts()
    desk.writer.resolve_conflicts()
    assert [one.metadata.name for one in desk.claim_client.undone] == ["b"]


def test_giving_way_is_not_repeated_without_a_change() -> None:
    desk = Desk("n1")
    for name in "ab":
        desk.know(claim(name, seats=[SEAT], reserved=["p"], tentative=True))
    for _ in range(5):
        desk.writer.resolve_conflicts()
        desk.take_in()  # the API refused
    assert [one.metadata.name for one, _ in desk.claim_client.judged] == ["b", "a"]
    desk.know(claim("b", seats=[SEAT], reserved=["p"], tentative=True, version=2))
    desk.writer.resolve_conflicts()
    assert [one.metadata.name for one, _ in desk.claim_client.judged] == ["b", "a", "b"]


@pytest.mark.parametrize(("when", "revoked"), [("never", 0), ("auto", 1)])
def test_a_rival_during_the_write_matters_only_if_pods_are_held_back(
    when: When, revoked: int
) -> None:
    desk = Desk("n1")
    desk.scene.conflicts.when = when
    written = desk.know(claim("a", seats=[SEAT]))
    record = desk.scene.conflicts.records[written.metadata.uid]
    desk.scene.conflicts.records.move(record, ClaimState.WRITTEN)
    stock = {"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}
    desk.scene.conflicts.update(claim("rival", stock), True, 0.0)
    desk.writer.seen(written)
    assert len(desk.claim_client.undone) == revoked


def test_a_claim_is_quarantined_when_the_api_refuses_its_allocation() -> None:
    desk = Desk("n1")
    desk.claim_client.refusal = NotWrittenError("no", refused={"uid-a-0": "not yours"})
    desk.scene.ask("a", "1g.10gb")
    desk.scene.cycle.update_queue()
    (decision,) = desk.scene.cycle.schedule()
    desk.writer.write(decision)
    desk.take_in()
    assert desk.scene.cache.records["uid-a-0"].state is ClaimState.QUARANTINED
    assert desk.scene.decide() == {}
    assert "not yours" in desk.scene.told()["a"][1]
    assert desk.scene.cache.state.cluster.occupied_slices == 0
    assert desk.scene.quarantine.next_time is not None
    desk.scene.now = desk.scene.quarantine.next_time
    desk.claim_client.refused = KubernetesApiError(422, "Invalid", "still not")
    desk.writer.fencing.retry()
    desk.take_in()
    assert "still not" in desk.scene.quarantine.why("uid-a-0")
    desk.scene.now = desk.scene.quarantine.next_time
    desk.claim_client.refused = None
    desk.writer.fencing.retry()
    desk.take_in()
    assert list(desk.scene.decide()) == ["a"]


def test_only_the_refused_claim_of_a_pod_is_quarantined() -> None:
    desk = Desk("n1")
    desk.scene.ask("a", "1g.10gb", "1g.10gb", "1g.10gb")
    desk.scene.cycle.update_queue()
    (decision,) = desk.scene.cycle.schedule()
    desk.claim_client.refusal = NotWrittenError(
        "no", [claim("a-0", version=2)], {"uid-a-1": "not yours"}
    )
    desk.writer.write(decision)
    desk.take_in()
    states = [desk.scene.cache.records[f"uid-a-{number}"].state for number in range(3)]
    assert states == [ClaimState.PENDING, ClaimState.QUARANTINED, ClaimState.PENDING]


def test_a_confirmation_skipped_without_the_lease_is_repeated() -> None:
    desk = Desk("n1")
    waiting = desk.know(claim("a", seats=[SEAT], reserved=["p"], tentative=True))

    def too_late(_: ResourceClaim) -> ResourceClaim | None:
        raise NotLeadingError("the lease has expired")

    desk.claim_client.after = too_late
    records = desk.scene.cache.records
    records.move(records["uid-a"], ClaimState.TENTATIVE)
    desk.writer.seen(waiting)
    desk.writer.confirm_settled()
    assert desk.claim_client.judged == [(waiting, True)]
    assert not desk.scene.conflicts.tentative
    desk.take_in()
    assert set(desk.scene.conflicts.tentative) == {"uid-a"}


def test_a_refused_revocation_is_repeated_after_growing_pauses() -> None:
    desk = Desk("n1")

    def refuse(_: ResourceClaim) -> ResourceClaim | None:
        raise KubernetesApiError(422, "Invalid", "a policy protects it")

    desk.claim_client.after = refuse
    desk.writer.reconcile(desk.know(claim("a", seats=[SEAT], version=5)))
    for count, pause in enumerate((10, 20, 40), 1):
        desk.take_in()
        desk.writer.retry()
        assert len(desk.claim_client.undone) == count  # not at once
        assert desk.writer.next_time == desk.scene.now + pause
        desk.scene.now += pause
        if count == 3:
            desk.claim_client.after = lambda _: claim("a", version=6)
        desk.writer.retry()
    desk.take_in()
    assert len(desk.claim_client.undone) == 4
    assert desk.scene.cache.state.cluster.occupied_slices == 0
    assert desk.writer.next_time is None


def test_the_remaining_claims_of_a_failed_decision_are_confirmed() -> None:
    desk = Desk("n1")
    desk.scene.ask("p", "1g.10gb", "1g.10gb")
    desk.scene.cycle.update_queue()
    (decision,) = desk.scene.cycle.schedule()
    seats = [(seat.pool, seat.device) for seat in decision.grants[0].devices]
    there = claim("p-0", seats=seats, reserved=["q"], tentative=True, version=7)
    desk.claim_client.refusal = NotWrittenError("changed", [there, claim("p-1", version=8)])
    desk.writer.write(decision)
    desk.take_in()
    assert set(desk.scene.conflicts.tentative) == {"uid-p-0"}


def test_a_claim_deleted_during_a_failed_write_leaves_nothing_behind() -> None:
    desk = Desk("n1")
    desk.scene.ask("p", "1g.10gb")
    desk.scene.cycle.update_queue()
    (decision,) = desk.scene.cycle.schedule()
    desk.claim_client.refusal = NotWrittenError("changed")
    desk.writer.write(decision)
    desk.scene.end("p")
    desk.take_in()
    assert not desk.scene.cache.records.all()


def test_a_claim_abandoned_during_its_confirmation_is_revoked() -> None:
    desk = Desk("n1")
    waiting = desk.know(claim("a", seats=[SEAT], reserved=["p"], tentative=True, version=5))
    records = desk.scene.cache.records
    records.move(records["uid-a"], ClaimState.TENTATIVE)
    desk.writer.seen(waiting)
    desk.claim_client.after = lambda _: claim("a", seats=[SEAT], tentative=True, version=6)
    desk.writer.confirm_settled()
    newer = claim("a", seats=[SEAT], tentative=True, version=7)  # its pod was deleted meanwhile
    desk.hear(newer)
    assert not desk.claim_client.undone
    desk.scene.pending.claims["team/a"] = newer
    desk.writer._claim_read = lambda one: desk.hear(newer)  # older notifications change nothing
    desk.take_in()
    assert [one.metadata.resource_version for one in desk.claim_client.undone] == ["7"]

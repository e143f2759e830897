"""The states of claims: only listed transitions are possible."""

from __future__ import annotations

from itertools import product

import pytest
from tests.kubernetes.objects import claim

from slicewise.kubernetes.claim_states import (
    IN_FLIGHT,
    TRANSITIONS,
    ClaimRecords,
    ClaimState,
    IllegalTransitionError,
)


@pytest.mark.parametrize(("before", "after"), list(product(ClaimState, repeat=2)))
def test_move_accepts_only_listed_transitions(before: ClaimState, after: ClaimState) -> None:
    records = ClaimRecords()
    record = records.add(claim("a"))
    record.state = before
    if after in TRANSITIONS[before]:
        records.move(record, after)
        assert record.state is after
        assert ("uid-a" in records.tentative) == (after is ClaimState.TENTATIVE)
    else:
        with pytest.raises(IllegalTransitionError, match=r"team/a: \w+ to \w+"):
            records.move(record, after)
        assert record.state is before


def test_every_state_can_be_entered_and_left() -> None:
    reached = {ClaimState.PENDING}.union(*TRANSITIONS.values())
    assert reached == set(ClaimState) == set(TRANSITIONS)
    assert all(TRANSITIONS.values())


@pytest.mark.parametrize("state", sorted(IN_FLIGHT, key=str))
def test_a_write_in_flight_keeps_its_state_until_it_returns(state: ClaimState) -> None:
    records = ClaimRecords()
    given = claim("a", seats=[("n1", "d")])
    record = records.update(claim("a") if state is ClaimState.WRITING else given)
    records.move(record, state)
    for newer in (given, claim("a", version=2)):
        records.update(newer)
        assert record.state is state
    records.conclude(record)
    assert record.state is ClaimState.PENDING


def test_a_stale_claim_waits_for_a_newer_version() -> None:
    records = ClaimRecords()
    record = records.update(claim("a", version=1))
    records.move(record, ClaimState.STALE)
    assert records.update(claim("a", version=1)).state is ClaimState.STALE
    assert records.update(claim("a", version=2)).state is ClaimState.PENDING
    records.drop("uid-a")
    records.drop("uid-a")
    assert not records.all()


def test_a_dropped_claim_is_no_longer_tentative() -> None:
    records = ClaimRecords()
    record = records.update(claim("a", seats=[("n1", "d")]))
    records.move(record, ClaimState.TENTATIVE)
    records.drop("uid-a")
    assert not records.tentative

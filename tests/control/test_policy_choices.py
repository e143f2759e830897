"""The table in force: chosen by rehearsals, given up at once, the same after any replay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.control.control_plane import A30, ControlPlane

from slicewise.control.commands import ChoosePolicy, Create, KeepLeastLost, SetTenant, Terms
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State
from slicewise.engine.rehearsal import Finding, Interval, Rehearsal, Standing
from slicewise.journal.entries import QuotaRecord, Want, decode, encode
from slicewise.journal.policy_entries import PolicyChosen
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice

MODEL = "A100-80GB"
NONE = Interval(0.0, 0.0, 0.0)
LEAD = Interval(0.01, 0.005, 0.015)


def choice(*asked_for: str, form: str = "time") -> Choice:
    """A choice for some profiles."""
    return Choice(form, asked_for)


def rehearsal(plane: ControlPlane, winner: Choice, **changes: Any) -> Rehearsal:
    """A rehearsal that a choice won, as of now."""
    estimate = plane.state.demand.estimate
    standing = Standing(winner, estimate.requests, estimate.changes, rehearsed=True)
    findings = [Finding(DEFAULT_CHOICE, 12, LEAD, LEAD, NONE, NONE, NONE)]
    if winner != DEFAULT_CHOICE:
        findings.append(Finding(winner, 12, NONE, NONE, LEAD, LEAD, LEAD))
    return replace(Rehearsal(standing, "it won", 0.85, tuple(findings)), **changes)


def scene(policy: str = "rehearsed", gpus: int = 4) -> ControlPlane:
    """A cluster on which two profiles were asked for."""
    plane = ControlPlane(policy)
    plane.node(gpus=gpus)
    plane.tenant()
    for profile in ("1g.10gb", "2g.20gb"):
        plane.release(plane.create(profile)[1]["id"])
    return plane


def chosen(plane: ControlPlane) -> list[PolicyChosen]:
    """The entries about the table, oldest first."""
    return [row.entry for row in plane.rows if isinstance(row.entry, PolicyChosen)]


def used(plane: ControlPlane) -> str:
    """The table in force."""
    return plane.state.policy.standing.choice.name


def test_the_winner_of_a_rehearsal_decides_from_then_on() -> None:
    plane = scene()
    won = choice("1g.10gb", "2g.20gb")
    plane.now += 5
    assert plane.ask(ChoosePolicy(rehearsal(plane, won))) == (
        200,
        {"table": "time", "why": "it won"},
    )
    policy = plane.state.policy
    assert policy.standing.choice == won
    assert (policy.since, policy.rehearsed_at, policy.switches) == (plane.now, plane.now, 1)
    assert plane.state.scheduler.policy.choice == won  # type: ignore[attr-defined]


def test_a_rehearsal_that_confirms_the_table_leaves_its_beginning() -> None:
    plane = scene()
    won = choice("1g.10gb", "2g.20gb")
    plane.ask(ChoosePolicy(rehearsal(plane, won)))
    since, seen = plane.now, plane.create("1g.10gb")
    plane.now += 100
    assert plane.ask(ChoosePolicy(rehearsal(plane, won)))[0] == 200
    policy = plane.state.policy
    assert seen[0] == 201
    assert (policy.since, policy.rehearsed_at, policy.switches) == (since, plane.now, 1)
    assert plane.state.demand.seen == 1


def test_a_profile_that_was_thought_absent_switches_back_before_it_is_decided() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    assert plane.create("1g.10gb")[0] == 201
    assert used(plane) == "time"
    assert plane.create("7g.80gb")[0] == 201
    kinds = [type(row.entry).__name__ for row in plane.rows[-2:]]
    assert kinds == ["PolicyChosen", "Allocated"]
    assert chosen(plane)[-1].why == "7g.80gb was not asked for when it was rehearsed"
    assert used(plane) == "least-lost"


@pytest.mark.parametrize(
    "want",
    [
        Want(compute=3, memory_gb=40),
        Want(profile="3g.40gb", models=(MODEL, "made-up")),
        Want(profile="3g.40gb"),
    ],
)
def test_every_way_to_ask_for_an_absent_profile_switches_back(want: Want) -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    plane.ask(Create("acme", Terms(want)))
    assert used(plane) == "least-lost"


def test_a_need_that_an_expected_profile_serves_does_not_switch_back() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    plane.ask(Create("acme", Terms(Want(compute=2, memory_gb=12))))
    assert used(plane) == "time"


def test_a_variant_of_an_expected_profile_does_not_switch_back() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    assert plane.create("1g.10gb+me")[0] == 201
    assert used(plane) == "time"


def test_a_request_beyond_its_quota_does_not_switch_back() -> None:
    plane = scene()
    plane.ask(SetTenant("acme", QuotaRecord(memory_slices=4), new=False))
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    for profile in ("7g.80gb", "1g.6gb"):
        assert plane.create(profile)[0] == 409
    assert used(plane) == "time"


def test_a_tenant_cannot_keep_up_switching_back_with_requests_that_do_not_count() -> None:
    plane = scene(gpus=1)
    plane.tenant("flood")
    plane.create("1g.10gb")
    for _ in range(100):
        plane.create("2g.20gb", tenant="flood", count=50)
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    requests = plane.state.demand.estimate.requests
    plane.create("7g.80gb", tenant="flood")
    assert plane.state.demand.estimate.requests == requests
    assert used(plane) == "least-lost"
    # It is known nevertheless: a rehearsal without it is out of date, the next one has it.
    assert plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))[0] == 409
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb", "7g.80gb"))))
    plane.create("7g.80gb", tenant="flood")
    assert used(plane) == "time"


def test_a_new_gpu_model_switches_back_when_it_is_asked_for() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    plane.node("n9", geometry=A30)
    assert plane.create("1g.10gb")[0] == 201
    assert used(plane) == "time"
    assert plane.create("1g.6gb")[0] == 201
    assert used(plane) == "least-lost"


def test_a_result_from_before_a_switch_back_is_refused() -> None:
    plane = scene()
    late = rehearsal(plane, choice("1g.10gb", "2g.20gb", "7g.80gb"))
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    plane.create("1g.10gb")
    plane.create("7g.80gb")
    status, body = plane.ask(ChoosePolicy(late))
    assert (status, body["reason"]) == (409, "stale")
    assert used(plane) == "least-lost"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"findings": ()}, "the first finding is not that of least-lost"),
        ({"load": float("nan")}, "the load is not a number"),
        ({"winner": choice("1g.10gb", form="magic")}, "no form of table is named 'magic'"),
        ({"winner": choice("9g.90gb")}, "no GPU of the cluster has 9g.90gb"),
        (
            {"winner": Choice("time", ("1g.10gb",), (("9g", 1.0),))},
            "no GPU of the cluster has 9g",
        ),
        (
            {"winner": Choice("time", ("1g.10gb",), (("1g.10gb", -1.0),))},
            "a weight of time is no factor",
        ),
        (
            {"winner": replace(choice("1g.10gb"), mean_lifetime=float("inf"))},
            "a mean lifetime of inf seconds",
        ),
        ({"standing": Standing(choice("4g.40gb"))}, "the winner is not among the candidates"),
    ],
)
def test_garbage_from_a_rehearsal_is_refused(changes: dict[str, Any], problem: str) -> None:
    plane = scene()
    made = rehearsal(plane, changes.pop("winner", choice("1g.10gb", "2g.20gb")), **changes)
    status, body = plane.ask(ChoosePolicy(made))
    assert (status, body["reason"]) == (409, "unusable")
    assert body["detail"] == f"the rehearsal is not usable: {problem}"
    assert not chosen(plane)


def test_figures_that_are_no_numbers_are_refused() -> None:
    plane = scene()
    made = rehearsal(plane, choice("1g.10gb", "2g.20gb"))
    odd = replace(made.findings[1], slices=Interval(0.0, float("-inf"), 1.0))
    status, body = plane.ask(ChoosePolicy(replace(made, findings=(made.findings[0], odd))))
    assert (status, body["detail"]) == (
        409,
        "the rehearsal is not usable: a figure of time is not a number",
    )


def test_another_policy_takes_no_choice() -> None:
    plane = scene("mfi")
    status, body = plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    assert (status, body["detail"]) == (409, "policy 'mfi' does not change by rehearsals")
    plane.create("7g.80gb")
    assert not chosen(plane)


def test_without_rehearsals_least_lost_decides_again() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    assert plane.ask(KeepLeastLost("rehearsal.enabled is false"))[0] == 200
    assert used(plane) == "least-lost"
    assert chosen(plane)[-1].rehearsal is None
    assert not plane.state.policy.standing.rehearsed


def test_what_a_rehearsal_found_outlives_a_switch_back() -> None:
    plane = scene()
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb"))))
    at = plane.now
    plane.now += 10
    plane.create("7g.80gb")
    policy = plane.state.policy
    assert policy.rehearsal is not None
    assert len(policy.rehearsal.findings) == 2
    assert (policy.rehearsed_at, policy.since) == (at, plane.now)


def test_seen_rejections_are_counted_since_the_table_changed() -> None:
    plane = scene(gpus=1)
    plane.create("7g.80gb")
    plane.create("1g.10gb")
    plane.ask(ChoosePolicy(rehearsal(plane, choice("1g.10gb", "2g.20gb", "7g.80gb"))))
    plane.create("1g.10gb")
    plane.create("2g.20gb", wait=5)
    plane.create("7g.80gb")
    plane.wait(10)
    assert (plane.state.demand.seen, plane.state.demand.seen_rejected) == (3, 3)


PLAIN = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
FORMS = ("time", "time-stranding-0", "least-lost-asked-for", "time-shares")


@pytest.mark.parametrize("seed", range(8))
def test_replaying_the_journal_makes_the_same_choices_and_decisions(seed: int) -> None:
    """A restart from a snapshot, a replay from the beginning and a follower stay the same."""
    rng = random.Random(seed)
    plane = ControlPlane("rehearsed")
    follower = State("rehearsed")
    plane.node(gpus=3)
    plane.tenant()
    plane.tenant("beta")
    restart = rng.randrange(100, 250)
    for step in range(350):
        profile = rng.choice(["1g.10gb", "2g.20gb", "3g.40gb", "1g.10gb+me"])
        profile = {130: "7g.80gb", 250: "4g.40gb"}.get(step, profile)
        tenant = rng.choice(["acme", "beta"])
        wait, lease = rng.choice([0, 9]), rng.choice([3.0, 20.5])
        plane.create(profile, tenant=tenant, lease=lease, wait=wait)
        plane.wait(rng.random())
        if step % 40 == 39:
            asked = {str(request.want) for request in plane.state.demand.estimate.asked_for}
            plain = tuple(profile for profile in PLAIN if profile in asked)
            late = rehearsal(plane, choice(*plain, form=rng.choice(FORMS)))
            plane.create("2g.20gb")
            plane.ask(ChoosePolicy(late))
        if step == restart:
            data = encode_snapshot(snapshot_of(plane.state))
            again = ControlPlane(
                "rehearsed",
                state=restore_snapshot(decode_snapshot(data), State("rehearsed")),
                first_id=10_000,
            )
            again.actor, again.now, again.rows = plane.actor, plane.now, plane.rows
            plane = again
        for row in plane.rows[follower.seq :]:
            follower.apply(row)
        assert follower.policy.standing == plane.state.policy.standing
    assert sum(entry.rehearsal is not None for entry in chosen(plane)) > 3
    assert sum(entry.rehearsal is None for entry in chosen(plane)) == 2
    replayed = State("rehearsed")
    for row in plane.rows:
        replayed.apply(type(row)(row.seq, row.at, row.actor, decode(encode(row.entry))))
    want = encode_snapshot(snapshot_of(plane.state))
    assert encode_snapshot(snapshot_of(replayed)) == want
    assert encode_snapshot(snapshot_of(follower)) == want

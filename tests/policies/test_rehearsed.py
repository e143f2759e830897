"""The choices that rehearsals compare, and the policy that carries one out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise import (
    Catalog,
    Cluster,
    Geometry,
    Instance,
    Need,
    Rejection,
    Request,
    Scheduler,
)
from slicewise.core.geometry import Profile
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost import LeastLost
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.rehearsed import (
    DEFAULT_CHOICE,
    FORMS,
    Choice,
    Rehearsed,
    asked_profile,
    forms_for,
    is_scarce,
    table_for,
)

A100 = Catalog.builtin().find("A100-80GB").require()
A30 = Catalog.builtin().find("A30-24GB").require()


def shares(**parts: float) -> dict[Request, float]:
    """Return shares by names such as ``g2`` for 2g.20gb."""
    names = {"g1": "1g.10gb", "g1x2": "1g.20gb", "g2": "2g.20gb", "g3": "3g.40gb"}
    names |= {"g4": "4g.40gb", "g7": "7g.80gb"}
    return {Request(names[part]): share for part, share in parts.items()}


def forms(of: dict[Request, float]) -> dict[str, Choice]:
    return {choice.form: choice for choice in forms_for(of, [A100])}


def test_a_new_one_decides_like_least_lost() -> None:
    rng = [Request(p.name) for p in A100.plain_profiles] * 4
    rehearsed, least = (
        Scheduler(Cluster.of(A100, gpus=3), policy) for policy in (Rehearsed(), "least-lost")
    )
    for request in rng:
        made, expected = rehearsed.submit(request), least.submit(request)
        if isinstance(expected, Rejection):
            assert isinstance(made, Rejection)
            assert made.reason == expected.reason
        else:
            assert made == expected


def test_every_form_has_words_and_a_table_of_its_own() -> None:
    found = forms(shares(g1=0.3, g4=0.6, g2=0.1))
    assert list(found) == list(FORMS)
    tables = [table_for(choice) for choice in found.values()]
    assert len(set(tables)) == len(tables)
    asked = frozenset({"1g.10gb", "2g.20gb", "4g.40gb"})
    assert tables[:5] == [
        LeastLost(),
        LeastLost(asked),
        LeastLostTime(asked, 4, spares=True),
        LeastLostTime(asked, 1, spares=True),
        LeastLostTime(asked, 0, spares=True),
    ]
    assert found["least-lost"] == DEFAULT_CHOICE
    assert table_for(found["time-all-profiles"]) == LeastLostTime()
    assert table_for(found["time-scarce"]) == LeastLostTime(
        asked, 4, (("4g.40gb", 8.0),), spares=True
    )
    assert table_for(found["time-scarce-stranding-1"]) == LeastLostTime(
        asked, 1, (("4g.40gb", 8.0),), spares=True
    )
    # 0.1 is two thirds of 0.15, to the next quarter; above that a profile counts fully.
    assert dict(found["time-shares"].weights) == {"2g.20gb": 0.75}
    assert dict(found["time-roots"].weights) == {
        "2g.20gb": pytest.approx(0.5**0.5, abs=0.02),
        "4g.40gb": 0.5,
    }


def test_forms_that_make_no_difference_are_not_rehearsed() -> None:
    everything = dict.fromkeys((Request(p.name) for p in A100.plain_profiles), 1 / 6)
    assert set(FORMS) - set(forms(everything)) == {
        "least-lost-asked-for",
        "time-all-profiles",
        "time-shares",
    }
    assert "time-scarce" not in forms(shares(g1=0.5, g3=0.5))
    assert forms_for({Request("9g"): 1.0}, [A100]) == (DEFAULT_CHOICE,)
    assert forms_for({}, [A100]) == (DEFAULT_CHOICE,)


def test_a_request_without_a_share_counts_as_asked_for() -> None:
    found = forms(shares(g1=0.0, g7=0.0))
    assert found["time"].asked_for == ("1g.10gb", "7g.80gb")
    rare = forms(shares(g1=1.0, g7=0.0001))["time-shares"]
    assert dict(rare.weights) == {"7g.80gb": 0.25}


def test_what_a_request_asks_for() -> None:
    assert asked_profile(Request("9g"), A100) is None
    assert asked_profile(Request("1g.10gb", ("H100-80GB",)), A100) is None
    for want, name in (
        ("1g.10gb+me", "1g.10gb"),  # a variant takes the same places
        ("3g.40gb", "3g.40gb"),
        (Need(1, 15), "1g.20gb"),
        (Need(3, 10), "3g.40gb"),
    ):
        profile = asked_profile(Request(want), A100)
        assert profile is not None
        assert profile.name == name


def test_scarce_profiles(geometry: Geometry) -> None:
    assert not any(is_scarce(p, geometry) for p in geometry.profiles if p.size == geometry.slices)
    if geometry is A100:
        assert [p.name for p in A100.plain_profiles if is_scarce(p, A100)] == ["4g.40gb"]


def test_a_choice_covers_what_it_was_rehearsed_with() -> None:
    time = forms(shares(g1=0.5, g3=0.5))["time"]
    assert time.covers(Request("1g.10gb"), [A100])
    assert time.covers(Request("1g.10gb+me"), [A100])
    assert time.covers(Request("no such profile"), [A100])  # it is rejected in any case
    assert not time.covers(Request("2g.20gb"), [A100])
    assert not time.covers(Request("1g.6gb"), [A100, A30])  # a model that it does not know
    assert time.covers(Request("1g.6gb", ("A100-80GB",)), [A100, A30])
    assert DEFAULT_CHOICE.covers(Request("2g.20gb"), [A100])
    assert DEFAULT_CHOICE.covers(Request("1g.6gb"), [A30])


def test_several_models() -> None:
    requests = {Request("1g.10gb"): 0.5, Request("1g.6gb"): 0.25, Request("7g.80gb"): 0.25}
    found = {choice.form: choice for choice in forms_for(requests, [A100, A30])}
    assert found["time"].asked_for == ("1g.10gb", "7g.80gb", "1g.6gb")
    both = {Request(Need(1, 6)): 1.0, Request("no such profile"): 1.0}
    wanted = {choice.form: choice for choice in forms_for(both, [A100, A30])}["time"].asked_for
    assert wanted == ("1g.10gb", "1g.6gb")
    # Nothing is asked of an A30 here: what it has is no difference.
    some = {choice.form for choice in forms_for({Request("1g.10gb"): 1.0}, [A100, A30])}
    assert some == {choice.form for choice in forms_for({Request("1g.10gb"): 1.0}, [A100])}


def test_tables_are_kept_while_their_choice_is_the_same() -> None:
    one, same = (forms(shares(g1=0.5, g3=0.5))["time"] for _ in range(2))
    assert table_for(one) is table_for(same)
    policy, cluster = Rehearsed(), Cluster.of(A100, gpus=1)
    before = policy.table(cluster)
    policy.use(one)
    assert policy.choice == one
    assert policy.table(cluster) is table_for(one)
    policy.use(DEFAULT_CHOICE)
    assert policy.table(cluster) is before


def test_a_choice_decides_from_the_next_request_on() -> None:
    """Only 1g and 7g are asked for: `time` has no regard for the places of others."""
    policy = Rehearsed()
    scheduler = Scheduler(Cluster.of(A100, gpus=2), policy)
    choice = forms(shares(g2=0.5, g3=0.5))["time"]
    first = scheduler.submit("2g.20gb")
    policy.use(choice)
    second = scheduler.submit("2g.20gb")
    table = LeastLostTime(frozenset({"2g.20gb", "3g.40gb"}), spares=True)
    expected = Scheduler(Cluster.of(A100, gpus=2), table)
    expected.cluster.place(first.gpu, "2g.20gb", first.start)  # type: ignore[union-attr]
    assert second == expected.submit("2g.20gb")


def test_every_form_leaves_empty_gpus_for_a_whole_one_that_was_never_asked_for() -> None:
    scheduler = Scheduler(Cluster.of(A100, gpus=3), policy := Rehearsed())
    for choice in forms(shares(g1=0.3, g4=0.6, g2=0.1)).values():
        policy.use(choice)
        placed = [scheduler.submit(profile) for profile in ("2g.20gb", "4g.40gb", "1g.10gb")]
        assert {one.gpu for one in placed if isinstance(one, Instance)} == {0}, choice.form
        for one in placed:
            assert isinstance(one, Instance)
            scheduler.release(one)


def test_it_speaks_in_the_words_of_the_table_in_force() -> None:
    policy = Rehearsed()
    assert "placements lost" in policy.in_words((False, 8), A100)
    policy.use(forms(shares(g1=0.5, g3=0.5))["time"])
    assert "shut" in policy.in_words((False, 1.5), A100)


def test_with_leases() -> None:
    time = forms(shares(g1=0.5, g3=0.5))["time-stranding-1"]
    base = table_for(time)
    assert isinstance(base, LeastLostTime)
    assert table_for(replace(time, leases=True, mean_lifetime=90.0)) == LeaseAware(base, 90.0)
    assert table_for(Choice("least-lost", leases=True, mean_lifetime=90.0)) == LeastLost()


def test_a_choice_with_leases_decides_by_when_instances_end() -> None:
    choice = replace(forms(shares(g1=0.5, g3=0.5))["time"], leases=True, mean_lifetime=100.0)
    placed = []
    base = LeastLostTime(frozenset(choice.asked_for), spares=True)
    for policy in (Rehearsed(choice), LeaseAware(base, 100)):
        scheduler = Scheduler(Cluster.of(A100, gpus=3), policy)
        ends = (10.0, 300.0, 20.0, 280.0, 15.0, 310.0)
        placed.append([scheduler.submit("1g.10gb", now=0, ends=end) for end in ends])
    assert placed[0] == placed[1]


def test_names() -> None:
    assert Choice("time", leases=True).name == "time+leases"
    assert Choice("time").name == "time"


@given(st.dictionaries(st.sampled_from(A100.plain_profiles), st.floats(0, 1), min_size=1))
def test_any_mix_has_candidates_that_know_all_of_it(mix: dict[Profile, float]) -> None:
    requests = {Request(profile.name): share for profile, share in mix.items()}
    found = forms_for(requests, [A100])
    assert found[0] == DEFAULT_CHOICE
    for choice in found:
        assert all(choice.covers(request, [A100]) for request in requests)
        assert all(weight > 0 for _, weight in choice.weights)

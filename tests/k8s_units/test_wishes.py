"""Which pods want something from slicewise, and when."""

from __future__ import annotations

import msgspec
from tests.k8s_units.objects import OURS, claim, device_class, pod, wants

from slicewise.core.request import Request
from slicewise.k8s.api import Pod
from slicewise.k8s.wishes import Wishes, claim_keys, single_node

SMALL = [wants(profile="1g.10gb")]


def known(*claims: str) -> Wishes:
    wishes = Wishes()
    wishes.classes[OURS] = device_class()
    for name in claims:
        wishes.claims[f"team/{name}"] = claim(name, config=SMALL)
    return wishes


def test_a_pod_wishes_for_all_its_claims_at_once() -> None:
    wishes = known("a", "b")
    wishes.set_pod(pod("p", ["a", "b"]))
    wish = wishes.wish("team/p")
    assert wish is not None
    assert [one.metadata.name for one, _ in wish.claims] == ["a", "b"]
    assert wish.requests == [Request("1g.10gb")] * 2
    assert wish.problem == ""
    assert wish.pinned == ()


def test_a_claim_that_has_its_devices_pins_the_others_to_its_node() -> None:
    wishes = known("a", "b")
    wishes.claims["team/a"] = claim("a", config=SMALL, seats=[("n7", "d")], node="n7")
    wishes.set_pod(pod("p", ["a", "b"]))
    wish = wishes.wish("team/p")
    assert wish is not None
    assert [one.metadata.name for one, _ in wish.claims] == ["b"]
    assert [single_node(selector) for selector in wish.pinned] == ["n7"]
    assert wishes.node("team/p") == "n7"


def test_who_wishes_nothing() -> None:
    wishes = known("a")
    for name, made in {
        "bound": pod("bound", ["a"], nodeName="n1"),
        "gated": pod("gated", ["a"], schedulingGates=[{"name": "later"}]),
        "early": pod("early", ["a", "not-made-yet"]),
        "plain": pod("plain"),
    }.items():
        wishes.set_pod(made)
        assert wishes.wish(f"team/{name}") is None, name
    over = msgspec.convert(
        {"metadata": {"name": "over", "namespace": "team"}, "status": {"phase": "Succeeded"},
         "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": "a"}]}}, Pod,
    )  # fmt: skip
    wishes.set_pod(over)
    assert "team/over" not in wishes.pods
    wishes.claims["team/a"] = claim("a", config=SMALL, seats=[("n1", "d")])
    wishes.set_pod(pod("served", ["a"]))
    assert wishes.wish("team/served") is None


def test_a_claim_that_is_going_or_belongs_to_another_pod_is_not_given_devices() -> None:
    wishes = known()
    wishes.claims["team/a"] = claim("a", config=SMALL, deletionTimestamp="2026-01-01T00:00:00Z")
    wishes.claims["team/b"] = claim(
        "b",
        config=SMALL,
        ownerReferences=[{"kind": "Pod", "name": "p", "uid": "uid-before", "controller": True}],
    )
    wishes.set_pod(pod("p", ["a"]))
    assert wishes.wish("team/p") is None
    wishes.set_pod(pod("p", ["b"]))
    assert wishes.wish("team/p") is None


def test_users_of_a_claim() -> None:
    wishes = known("a")
    wishes.set_pod(pod("p", ["a"]))
    wishes.set_pod(pod("q", ["a"]))
    assert set(wishes.users("team/a")) == {"team/p", "team/q"}
    wishes.drop_pod("team/p")
    wishes.drop_pod("team/p")
    assert wishes.users("team/a") == ("team/q",)
    wishes.drop_pod("team/q")
    assert wishes.users("team/a") == ()


def test_claims_from_templates_are_those_the_status_names() -> None:
    def made(*statuses: dict[str, str | None]) -> list[str | None]:
        return claim_keys(
            msgspec.convert(
                {
                    "metadata": {"name": "p", "namespace": "team"},
                    "spec": {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}]},
                    "status": {"resourceClaimStatuses": list(statuses)},
                },
                Pod,
            )
        )

    assert made() == [None]
    assert made({"name": "c", "resourceClaimName": "p-c-x"}) == ["team/p-c-x"]
    assert made({"name": "c", "resourceClaimName": None}) == []


def test_what_is_wrong_with_a_claim_is_said_with_its_name() -> None:
    wishes = known()
    wishes.claims["team/a"] = claim("a")
    wishes.set_pod(pod("p", ["a"]))
    wish = wishes.wish("team/p")
    assert wish is not None
    assert wish.problem.startswith("claim 'a': request 'r' does not say what it wants")

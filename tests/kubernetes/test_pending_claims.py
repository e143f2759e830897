"""Which pods are pending, and with which claims."""

from __future__ import annotations

import msgspec
from tests.kubernetes.objects import OURS, claim, device_class, pod, wants

from slicewise.core.request import Request
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.pending_claims import (
    POD_CLAIM_NAME,
    PendingClaims,
    claim_keys,
    single_node,
)

SMALL = [wants(profile="1g.10gb")]


def known(*claims: str) -> PendingClaims:
    pending = PendingClaims()
    pending.classes[OURS] = device_class()
    for name in claims:
        pending.claims[f"team/{name}"] = claim(name, config=SMALL)
    return pending


def test_a_pending_pod_has_all_its_claims() -> None:
    pending = known("a", "b")
    pending.set_pod(pod("p", ["a", "b"]))
    pending_pod = pending.pending_pod("team/p")
    assert pending_pod is not None
    assert [one.metadata.name for one, _ in pending_pod.claims] == ["a", "b"]
    assert pending_pod.requests == [Request("1g.10gb")] * 2
    assert pending_pod.problem == ""
    assert pending_pod.pinned == ()


def test_an_allocated_claim_pins_the_others_to_its_node() -> None:
    pending = known("a", "b")
    pending.claims["team/a"] = claim("a", config=SMALL, seats=[("n7", "d")], node="n7")
    pending.set_pod(pod("p", ["a", "b"]))
    pending_pod = pending.pending_pod("team/p")
    assert pending_pod is not None
    assert [one.metadata.name for one, _ in pending_pod.claims] == ["b"]
    assert [single_node(selector) for selector in pending_pod.pinned] == ["n7"]
    assert pending.node("team/p") == "n7"


def test_which_pods_are_not_pending() -> None:
    pending = known("a")
    for name, made in {
        "bound": pod("bound", ["a"], nodeName="n1"),
        "gated": pod("gated", ["a"], schedulingGates=[{"name": "later"}]),
        "early": pod("early", ["a", "not-made-yet"]),
        "plain": pod("plain"),
    }.items():
        pending.set_pod(made)
        assert pending.pending_pod(f"team/{name}") is None, name
    over = msgspec.convert(
        {"metadata": {"name": "over", "namespace": "team"}, "status": {"phase": "Succeeded"},
         "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": "a"}]}}, Pod,
    )  # fmt: skip
    pending.set_pod(over)
    assert "team/over" not in pending.pods
    pending.claims["team/a"] = claim("a", config=SMALL, seats=[("n1", "d")])
    pending.set_pod(pod("served", ["a"]))
    assert pending.pending_pod("team/served") is None


def test_a_claim_being_deleted_or_of_another_pod_is_not_pending() -> None:
    pending = known()
    pending.claims["team/a"] = claim("a", config=SMALL, deletionTimestamp="2026-01-01T00:00:00Z")
    pending.claims["team/b"] = claim(
        "b",
        config=SMALL,
        ownerReferences=[{"kind": "Pod", "name": "p", "uid": "uid-before", "controller": True}],
    )
    pending.set_pod(pod("p", ["a"]))
    assert pending.pending_pod("team/p") is None
    pending.set_pod(pod("p", ["b"]))
    assert pending.pending_pod("team/p") is None


def test_users_of_a_claim() -> None:
    pending = known("a")
    pending.set_pod(pod("p", ["a"]))
    pending.set_pod(pod("q", ["a"]))
    assert set(pending.users("team/a")) == {"team/p", "team/q"}
    pending.drop_pod("team/p")
    pending.drop_pod("team/p")
    assert pending.users("team/a") == ("team/q",)
    pending.drop_pod("team/q")
    assert pending.users("team/a") == ()


def test_template_claims_are_named_by_the_status() -> None:
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


def test_the_problem_of_a_claim_names_the_claim() -> None:
    pending = known()
    pending.claims["team/a"] = claim("a")
    pending.set_pod(pod("p", ["a"]))
    pending_pod = pending.pending_pod("team/p")
    assert pending_pod is not None
    assert pending_pod.problem.startswith("claim 'a': request 'r' does not say what it wants")


def template_claim(name: str, reference: str, owner: str) -> ResourceClaim:
    owners = [{"kind": "Pod", "name": "p", "uid": owner, "controller": True}]
    return claim(name, ownerReferences=owners, annotations={POD_CLAIM_NAME: reference})


def template_pod(**recorded: str) -> Pod:
    references = [{"name": name} for name in ("a", "b")]
    statuses = [{"name": name, "resourceClaimName": made} for name, made in recorded.items()]
    made = {
        "metadata": {"name": "p", "namespace": "team", "uid": "uid-p"},
        "spec": {"resourceClaims": references},
        "status": {"resourceClaimStatuses": statuses},
    }
    return msgspec.convert(made, Pod)


def test_template_claims_that_the_status_of_a_pod_has_lost() -> None:
    pending = PendingClaims()
    pending.claims["team/p-a"] = template_claim("p-a", "a", "uid-p")
    assert not pending.unrecorded_claims(template_pod(a="p-a"))  # b is not created yet
    pending.claims["team/other"] = template_claim("other", "b", "uid-q")
    assert not pending.unrecorded_claims(template_pod(a="p-a"))
    pending.claims["team/p-b"] = template_claim("p-b", "b", "uid-p")
    assert pending.unrecorded_claims(template_pod(a="p-a")) == {"a": "p-a", "b": "p-b"}
    assert pending.unrecorded_claims(template_pod(b="p-b")) == {"b": "p-b", "a": "p-a"}
    assert not pending.unrecorded_claims(template_pod(a="p-a", b="p-b"))
    assert not pending.unrecorded_claims(template_pod())  # Kubernetes records all at once

"""Device taints, DeviceTaintRules and the tolerations of claims."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import OURS, claim, pod, wants
from tests.kubernetes.publishing import decoded, nvidia
from tests.kubernetes.test_cycle import A100, DRIVER, LIBRARY, Scene, names

from slicewise.kubernetes.api import DeviceTaint, DeviceTaintRule, DeviceToleration
from slicewise.kubernetes.claim_client import Decision, Grant, allocation
from slicewise.kubernetes.devices.device_taints import tolerated
from slicewise.kubernetes.devices.pool_reading import read_pool

SICK = {"key": "sick", "value": "yes", "effect": "NoSchedule"}


def rule(
    selector: dict[str, str] | None = None, taint: dict[str, str] | None = None
) -> DeviceTaintRule:
    spec = {"taint": taint or SICK, "deviceSelector": selector or {}}
    return msgspec.convert({"metadata": {"name": "r"}, "spec": spec}, DeviceTaintRule)


def ask(scene: Scene, name: str, *tolerations: dict[str, Any], count: int = 1) -> None:
    """A pod with a claim; each toleration is of a request of its own, {} stands for none."""
    requests = [
        {
            "name": f"r{number}",
            "exactly": {
                "deviceClassName": OURS,
                "count": count,
                "tolerations": [one] if one else [],
            },
        }
        for number, one in enumerate(tolerations)
    ]
    made = claim(name, *requests, config=[wants(profile="1g.10gb")])
    scene.pending.claims[f"team/{name}"] = made
    a_pod = pod(name, [name])
    scene.node_resources.pod_changed(a_pod)
    scene.pending.set_pod(a_pod)
    scene.cycle.requeue(a_pod.metadata.key)


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "sick", "operator": "Equal", "value": "yes"}, True),
        ({"key": "sick", "value": "yes"}, True),  # Equal is the default
        ({"key": "sick", "operator": "Equal", "value": "no"}, False),
        ({"key": "sick", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "Equal", "value": "yes"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"key": "sick", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "sick", "operator": "Exists", "effect": "NoExecute"}, False),
    ],
)
def test_a_toleration_tolerates_a_taint_by_the_rules_of_kubernetes(
    toleration: dict[str, str], fits: bool
) -> None:
    one = msgspec.convert(toleration, DeviceToleration)
    assert tolerated([msgspec.convert(SICK, DeviceTaint)], [(one,)]) == fits
    assert not tolerated([msgspec.convert(SICK, DeviceTaint)], [(one,), ()])


def test_a_claim_that_tolerates_the_taints_gets_a_tainted_gpu() -> None:
    scene = Scene()
    scene.node_resources.node_changed(Scene("n1").node_resources.nodes["n1"])
    scene.cache.pools.set_open("n1", True)
    published = nvidia(A100, 1, "n1")
    for one in published[1]["spec"]["devices"]:
        one["taints"] = [SICK]
    scene.cache.set_pool((DRIVER, "n1"), read_pool(decoded(published), LIBRARY), "n1")
    ask(scene, "plain", {})
    ask(scene, "half", {"key": "sick", "operator": "Exists"}, {})
    assert scene.decide() == {}
    ask(scene, "bears", {"key": "sick", "operator": "Exists"})
    assert names(scene.decide()) == ["bears"]
    assert scene.cache.state.cluster.is_held(0)
    scene.cache.set_pool((DRIVER, "n1"), read_pool(decoded(nvidia(A100, 1, "n1")), LIBRARY), "n1")
    assert sorted(scene.decide()) == ["half", "plain"]


def test_rules_taint_the_devices_that_they_select() -> None:
    scene = Scene("n1", "n2")
    some = next(iter(scene.cache.pools.gpu(0).places))
    held = scene.cache.state.cluster.is_held
    for chosen, expected in (
        ({}, [True, True]),
        ({"driver": DRIVER}, [True, True]),
        ({"driver": "other.example.com"}, [False, False]),
        ({"pool": "n2"}, [False, True]),
        ({"pool": "n1", "device": some}, [True, False]),
        ({"device": "no-such-device"}, [False, False]),
    ):
        scene.cache.pools.set_rule(rule(chosen))
        assert [held(0), held(1)] == expected, chosen
    scene.cache.pools.set_rule(rule(taint={"key": "seen", "effect": "None"}))
    assert not held(0)
    nothing = {"metadata": {"name": "r"}, "spec": {"taint": SICK}}
    scene.cache.pools.set_rule(msgspec.convert(nothing, DeviceTaintRule))
    assert not held(0)


def test_a_rule_that_ends_or_changes_lets_waiting_pods_in() -> None:
    scene = Scene("n1")
    scene.cache.pools.set_rule(rule())
    ask(scene, "plain", {})
    ask(scene, "bears", {"key": "ill", "operator": "Exists"})
    assert scene.decide() == {}
    scene.cache.pools.set_rule(rule(taint={"key": "ill", "effect": "NoExecute"}))
    assert names(scene.decide()) == ["bears"]
    scene.cache.pools.drop_rule("r")
    scene.cache.pools.drop_rule("r")
    assert names(scene.decide()) == ["plain"]


def test_a_gpu_that_is_held_for_another_reason_too_stays_closed() -> None:
    scene = Scene("n1")
    scene.cache.pools.set_rule(rule())
    scene.cache.pools.hold(0, "a clash", True)
    ask(scene, "bears", {"operator": "Exists"})
    assert scene.decide() == {}
    scene.cache.pools.hold(0, "a clash", False)
    scene.cache.pools.freed += 1
    assert names(scene.decide()) == ["bears"]


def test_the_tolerations_of_a_request_are_copied_into_the_allocation() -> None:
    scene = Scene("n1")
    ask(scene, "a", {"key": "sick", "operator": "Exists", "tolerationSeconds": 30}, {})
    scene.cycle.update_queue()
    [decision] = scene.cycle.schedule()
    assert isinstance(decision, Decision)
    [grant] = decision.grants
    assert isinstance(grant, Grant)
    first, second = allocation(grant, decision)["devices"]["results"]
    assert first["tolerations"] == [{"key": "sick", "operator": "Exists", "tolerationSeconds": 30}]
    assert "tolerations" not in second

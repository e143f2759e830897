"""DeviceTaintRules, on a control plane that serves them, and tolerations of claims."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import RESOURCE, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claims_in,
    claims_of,
    device_request,
    make_classes,
    namespace,
    node,
    pod,
    pods_in,
    publish,
    template,
    templates_in,
    until_running,
)
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, running, wants
from tests.kubernetes_e2e.scene import condition

RULES = "/apis/resource.k8s.io/v1beta2/devicetaintrules"
GATE = "--feature-gates=DRADeviceTaintRules=true"


@pytest.fixture(scope="module")
def serving() -> Iterator[Plane]:
    """A separate control plane with the rules, which are off by default in 1.36."""
    flags = {"apiserver": [GATE, "--runtime-config=resource.k8s.io/v1beta2=true"]}
    try:
        plane = Plane(flags=flags)
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with plane:
        make_classes(plane.api)
        yield plane


def test_a_rule_keeps_claims_away_that_do_not_tolerate_it(serving: Plane, tmp_path: Path) -> None:
    api = serving.api
    publish(api, [node("t-1"), node("t-2")], "A100-80GB", 1)
    rule = {
        "metadata": {"name": "sick"},
        "spec": {
            "deviceSelector": {"pool": "t-1"},
            "taint": {"key": "sick", "value": "yes", "effect": "NoSchedule"},
        },
    }
    api.create(RULES, rule)
    with namespace(api) as space, running(serving.kubeconfig, tmp_path, "--lease-seconds", "2"):
        plain, bears = device_request(OUR_CLASS), device_request(OUR_CLASS)
        bears["exactly"]["tolerations"] = [{"key": "sick", "operator": "Exists"}]
        config = [wants(profile="7g.80gb")]
        api.create(templates_in(space), template("plain", plain, config=config))
        api.create(templates_in(space), template("bears", bears, config=config))
        for name in ("a", "b"):
            api.create(pods_in(space), pod(name, templates=["plain"]))
        until("one of them waits", lambda: condition(api, space, "b") or condition(api, space, "a"))
        [first] = {"a", "b"} - {name for name in "ab" if condition(api, space, name)}
        [waiting] = {"a", "b"} - {first}
        until_running(api, space, first)
        assert allocated(api, space, first)[0][0] == "t-2"
        api.create(pods_in(space), pod("c", templates=["bears"]))
        until_running(api, space, "c")
        assert allocated(api, space, "c")[0][0] == "t-1"
        [name] = claims_of(api, space, "c")
        given = api.get(f"{claims_in(space)}/{name}")["status"]["allocation"]["devices"]
        assert given["results"][0]["tolerations"] == [{"key": "sick", "operator": "Exists"}]
        api.delete(f"{pods_in(space)}/c?gracePeriodSeconds=0")
        api.delete(f"{RULES}/sick")
        until_running(api, space, waiting)
        assert allocated(api, space, waiting)[0][0] == "t-1"
        assert api.items(f"{RESOURCE}/resourceslices")

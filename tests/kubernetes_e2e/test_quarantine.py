"""Claims that the API refuses to change stop nothing but themselves, also for a new leader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes_e2e.api import Api, Json, until
from tests.kubernetes_e2e.cluster import FINALIZER, claim, claims_in, device_request, make_classes
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, SEALED, running, wants
from tests.kubernetes_e2e.scene import (
    MODEL,
    condition,
    make_pod,
    make_templates,
    until_run,
    witnessed,
)
from tests.kubernetes_e2e.test_metrics import FLAGS, Seen

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
NAME = "locked.slicewise.dev"
LARGEST = 262_104
"""The bytes of annotations that a claim may have, with a short key."""


@contextmanager
def locking_policy(api: Api) -> Iterator[None]:
    """An admission policy: claims with the label ``locked`` cannot be changed."""
    rule: Json = {
        "apiGroups": ["resource.k8s.io"],
        "apiVersions": ["*"],
        "operations": ["UPDATE"],
        "resources": ["resourceclaims", "resourceclaims/status"],
    }
    policy = {
        "metadata": {"name": NAME},
        "spec": {
            "matchConstraints": {
                "resourceRules": [rule],
                "objectSelector": {"matchLabels": {"locked": "yes"}},
            },
            "validations": [{"expression": "false", "message": "it is locked"}],
        },
    }
    binding = {
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME, "validationActions": ["Deny"]},
    }
    api.create(f"{ADMISSION}/validatingadmissionpolicies", policy)
    api.create(f"{ADMISSION}/validatingadmissionpolicybindings", binding)
    try:
        yield
    finally:
        unlock(api)
        api.delete(f"{ADMISSION}/validatingadmissionpolicies/{NAME}")


def unlock(api: Api) -> None:
    """End the policy."""
    if api.find(f"{ADMISSION}/validatingadmissionpolicybindings/{NAME}"):
        api.delete(f"{ADMISSION}/validatingadmissionpolicybindings/{NAME}")


def make_odd_claim(api: Api, space: str, name: str, **metadata: object) -> None:
    """A claim with other metadata, and a pod for it."""
    made = claim(name, device_request(OUR_CLASS), config=[wants(profile="1g.10gb")])
    made["metadata"].update(metadata)
    api.create(claims_in(space), made)
    make_pod(api, space, name, shared=[name])


def test_claims_that_cannot_be_changed_stop_no_other(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), locking_policy(api):
        make_odd_claim(api, space, "locked", labels={"locked": "yes"}, finalizers=[FINALIZER])
        make_odd_claim(
            api, space, "bulky", annotations={"a": "x" * (LARGEST - 1)}, finalizers=[FINALIZER]
        )
        with running(plane.kubeconfig, tmp_path, *FLAGS, name="a") as first:
            seen = Seen(first)
            make_pod(api, space, "x", "one")
            until_run(api, space, "x", "bulky")
            told = until("the other is told", lambda: condition(api, space, "locked"))
            assert told["reason"] == "Quarantined"
            assert "it is locked" in told["message"]
            first.kill()
        with running(plane.kubeconfig, tmp_path, *FLAGS, name="b") as second:
            seen = Seen(second)
            make_pod(api, space, "y", "three")
            until_run(api, space, "y")
            answer = seen.ask("/readyz")
            assert answer.status_code == 200
            [warning] = answer.json()["warnings"]
            assert f"{space}/locked" in warning
            assert "it is locked" in warning
            assert seen.metrics()["slicewise_k8s_claims_quarantined"] == 1
            unlock(api)
            until_run(api, space, "locked")
            assert seen.metrics()["slicewise_k8s_claims_quarantined"] == 0

"""A short run of the churn through the whole chain; ``churn.py`` does longer ones."""

from __future__ import annotations

from pathlib import Path

from tests.kubernetes_e2e.chain import chain
from tests.kubernetes_e2e.churn import Churn
from tests.kubernetes_e2e.cluster import namespace
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica


def test_no_pod_is_stuck_and_nothing_is_left(
    plane: Plane, real_library: Path, real_folder: Path
) -> None:
    replica = Replica(plane.kubeconfig, real_folder, "--lease-seconds", "2", "--cool-down", "3s")
    with chain(plane, real_library, real_folder) as there, namespace(plane.api) as space:
        there.make_templates(space)
        replica.start()
        try:
            outcome = Churn(there, space, replica, seed=1, every=8).run(32)
        finally:
            replica.kill()
        left = there.places()
    plane.api.delete(f"/apis/resource.k8s.io/v1/deviceclasses/{OUR_CLASS}")
    print(outcome.table())
    assert outcome.killed == {"kubelet": 1, "driver": 2, "slicewise": 1}
    assert outcome.made == 32 == outcome.ran + outcome.early + len(outcome.broken)
    assert outcome.forced >= 3
    assert not outcome.stuck
    assert not outcome.overlaps
    # The driver is away for a moment when it is killed, and may then not be called.
    refused = [said for said in outcome.refused if "Unavailable" not in said]
    assert not refused or outcome.broken, refused
    assert not left

"""A real node: kubelet, containerd, runc, and NVIDIA's driver on the fake NVML.

``make test-k8s-node`` builds what is started here, and names this file; otherwise pytest finds only
files named ``test_*``.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import CORE, Json, until
from tests.kubernetes_e2e.chain import Chain, Place, chain, places_of
from tests.kubernetes_e2e.cluster import (
    claims_in,
    claims_of,
    namespace,
    pods_in,
    until_running,
)
from tests.kubernetes_e2e.nvidia_driver import CAPABILITIES_MAJOR, capability_minor
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.programs import require_node
from tests.kubernetes_e2e.replica import OUR_CLASS, running
from tests.kubernetes_e2e.scene import remove_pod

USED = "no such device or address"
REFUSED = "operation not permitted"


@pytest.fixture(scope="module")
def there(plane: Plane, real_library: Path, real_folder: Path) -> Iterator[Chain]:
    if shutil.which("runc") is None:
        problem = "runc is not installed: containerd runs containers with it (Debian: runc)"
        if os.environ.get("CI"):
            raise MissingServiceError(problem)
        pytest.skip(problem)
    require_node()
    with chain(plane, real_library, real_folder, real=True) as one:
        yield one
    plane.api.delete(f"/apis/resource.k8s.io/v1/deviceclasses/{OUR_CLASS}")


@pytest.fixture
def space(there: Chain, real_folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that slicewise serves; its parameter are flags."""
    flags = ("--lease-seconds", "2", *getattr(request, "param", ()))
    with running(there.plane.kubeconfig, real_folder, *flags), namespace(there.api) as name:
        there.make_templates(name)
        yield name
    there.until_places()


def places(there: Chain, space: str, name: str) -> list[Place]:
    """What is allocated for a pod."""
    names = claims_of(there.api, space, name)
    return [
        place for one in names for place in places_of(there.api.get(f"{claims_in(space)}/{one}"))
    ]


def report(there: Chain, space: str, name: str) -> Json:
    """What the container of a pod has printed."""
    uid = there.api.get(f"{pods_in(space)}/{name}")["metadata"]["uid"]
    node = there.node
    assert node is not None
    said = until(f"{name} has printed", lambda: node.output(space, name, uid) or None)
    found: Json = json.loads(said)
    return found


def numbers(there: Chain, place: Place) -> set[str]:
    """The numbers of the device files of an instance."""
    [instance] = [
        one for one in there.machine.instances() if (one.gpu, one.start) == (place.gpu, place.start)
    ]
    minors = [
        capability_minor(place.gpu, instance.id),
        capability_minor(place.gpu, instance.id, 0),
    ]
    return {f"{CAPABILITIES_MAJOR}:{minor}" for minor in minors}


def test_a_container_has_the_devices_of_its_instance_and_no_others(
    there: Chain, space: str
) -> None:
    everything = ["195:0", "195:1"]
    everything += [
        f"{CAPABILITIES_MAJOR}:{capability_minor(gpu, instance, compute)}"
        for gpu in range(2)
        for instance in range(15)
        for compute in (None, 0)
    ]
    tried = [{"name": "TRY", "value": ",".join(everything)}]
    titles = {"a": "three", "b": "three", "c": "two", "d": "one", "e": "one"}
    for name, title in titles.items():
        there.make_pod(space, name, title, args=["devices"], env=tried)
    for name in titles:
        until_running(there.api, space, name)
    where = {name: places(there, space, name) for name in titles}
    assert there.places() == {place for found in where.values() for place in found}
    given: set[str] = set()
    for name in titles:
        [place] = where[name]
        own = numbers(there, place)
        assert not given & own
        given |= own
        told = report(there, space, name)
        caps = {
            what for path, what in told["devices"].items() if path.startswith("/dev/nvidia-caps/")
        }
        assert caps == own
        gpus = {path for path in told["devices"] if path[len("/dev/nvidia") :].isdigit()}
        assert gpus == {f"/dev/nvidia{place.gpu}"}
        # And the kernel refuses all others, also to a container that makes the file itself.
        usable = {what for what, said in told["opened"].items() if said == USED}
        assert usable == own | {f"195:{place.gpu}"}
        assert {told["opened"][what] for what in set(everything) - usable} == {REFUSED}


@pytest.mark.parametrize("at_once", [False, True])
def test_a_deleted_pod_gives_its_instance_back(there: Chain, space: str, at_once: bool) -> None:
    there.make_pod(space, "a", "three", grace=1)
    until_running(there.api, space, "a")
    there.until_places(*places(there, space, "a"))
    if at_once:
        remove_pod(there.api, space, "a")
    else:
        there.api.delete(f"{pods_in(space)}/a")
    there.until_places()


def test_pods_outlive_the_kubelet_and_the_driver(there: Chain, space: str) -> None:
    there.make_pod(space, "a", "three")
    until_running(there.api, space, "a")
    before = there.machine.instances()
    there.restart_kubelet()
    there.restart_driver()
    there.make_pod(space, "b", "one")
    until_running(there.api, space, "b")
    assert set(before) <= set(there.machine.instances())
    assert there.places() == {*places(there, space, "a"), *places(there, space, "b")}
    until("a still runs", lambda: until_running(there.api, space, "a"))


def test_a_pod_that_is_deleted_while_the_kubelet_is_away_is_cleaned_up(
    there: Chain, space: str
) -> None:
    there.make_pod(space, "a", "two")
    until_running(there.api, space, "a")
    assert there.node is not None
    there.node.stop_kubelet()
    there.api.delete(f"{pods_in(space)}/a?gracePeriodSeconds=5")
    assert len(there.places()) == 1
    there.node.start_kubelet()
    there.until_places()


@pytest.mark.parametrize("space", [("--cool-down", "70s")], indirect=True)
def test_slices_are_given_out_when_a_kubelet_that_was_started_has_cleaned_up(
    there: Chain, space: str
) -> None:
    """It does so a minute after its start, which may be long after the pod has vanished."""
    for name in ("a", "b", "c", "d"):
        there.make_pod(space, name, "three")
        until_running(there.api, space, name)
    there.make_pod(space, "e", "three")  # there is no room for it
    [left] = places(there, space, "a")
    assert there.node is not None
    there.node.stop_kubelet()
    remove_pod(there.api, space, "a")
    time.sleep(30)
    there.node.start_kubelet()
    until_running(there.api, space, "e")
    assert places(there, space, "e") == [left]
    path = f"{CORE}/namespaces/{space}/events?fieldSelector=reason=FailedPrepareDynamicResources"
    assert there.api.items(path) == []

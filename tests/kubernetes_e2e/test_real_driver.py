"""NVIDIA's own driver on the fake NVML: from its slices to an instance and back.

Kubernetes and the driver are the real ones. A stand-in plays the part of the kubelet that deals
with claims; ``test_real_node.py`` has a real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from tests.kubernetes_e2e.api import CORE, RESOURCE, Json, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claim,
    claims_in,
    claims_of,
    device_request,
    make_classes,
    namespace,
    node,
    pods_in,
    template,
    templates_in,
    withdraw,
)
from tests.kubernetes_e2e.fake_kubelet import FakeKubelet
from tests.kubernetes_e2e.nvidia_driver import (
    CAPABILITIES_MAJOR,
    NAME,
    KubeletClient,
    NvidiaDriver,
    PrepareError,
    capability_minor,
)
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, SEALED, running, wants
from tests.kubernetes_e2e.scene import make_pod, remove_pod, until_run

from slicewise.fakedriver import Machine

MODEL = "H200-141GB"
NODE = "real-node"
_DEVICE = re.compile(r"gpu-(\d+)-mig-.*-(\d+)-(\d+)")


class Rig(NamedTuple):
    """A node with NVIDIA's driver on simulated GPUs, and a kubelet that calls it."""

    plane: Plane
    machine: Machine
    driver: NvidiaDriver
    client: KubeletClient
    kubelet: FakeKubelet

    def instances(self) -> set[tuple[int, int, int]]:
        """The instances on the GPUs: GPU, id of the profile, start."""
        return {(one.gpu, one.profile_id, one.start) for one in self.machine.instances()}

    def until_instances(self, *expected: tuple[int, int, int]) -> None:
        """Wait until there are these instances and no others."""
        until(f"the instances are {expected}", lambda: self.instances() == set(expected))


def place(device: str) -> tuple[int, int, int]:
    """GPU, id of the profile and start of a device, from its name."""
    found = _DEVICE.fullmatch(device)
    assert found is not None, device
    gpu, profile, start = map(int, found.groups())
    return gpu, profile, start


def places(rig: Rig, space: str, *pods: str) -> set[tuple[int, int, int]]:
    """What is allocated for pods."""
    found = [device for pod in pods for _, device in allocated(rig.plane.api, space, pod)]
    assert len(set(found)) == len(found)
    return {place(device) for device in found}


@pytest.fixture(scope="module")
def rig(plane: Plane, real_library: Path, real_folder: Path) -> Iterator[Rig]:
    machine = Machine.create(real_folder / "machine", MODEL, 2)
    # Not a node of kwok: there, pods would run without being prepared.
    real = node(NODE)
    del real["metadata"]["annotations"]
    made = plane.api.create(f"{CORE}/nodes", real)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    made["status"] |= {"conditions": [ready]}
    plane.api.put(f"{CORE}/nodes/{NODE}/status", made)
    make_classes(plane.api, [SEALED])
    with (
        NvidiaDriver(plane, NODE, machine, real_library, real_folder) as driver,
        KubeletClient(driver) as client,
    ):
        kubelet = FakeKubelet(plane.api, driver, client)
        kubelet.start()
        with running(plane.kubeconfig, real_folder):
            yield Rig(plane, machine, driver, client, kubelet)
        kubelet.stop()
    withdraw(plane.api, [NODE])
    plane.api.delete(f"{RESOURCE}/deviceclasses/{OUR_CLASS}")


@pytest.fixture
def space(rig: Rig) -> Iterator[str]:
    """A namespace with templates; when it is cleared, no instances are left."""
    with namespace(rig.plane.api) as name:
        for title, profile in (("three", "3g.71gb"), ("two", "2g.35gb"), ("one", "1g.18gb")):
            made = template(title, device_request(OUR_CLASS), config=[wants(profile=profile)])
            rig.plane.api.create(templates_in(name), made)
        yield name
    rig.until_instances()
    rig.machine.clear_faults()


def test_a_pod_gets_the_instance_that_was_chosen_and_gives_it_back(rig: Rig, space: str) -> None:
    api = rig.plane.api
    make_pod(api, space, "a", "three", "one")
    make_pod(api, space, "b", "two")
    until_run(api, space, "a", "b")
    chosen = places(rig, space, "a", "b")
    assert {profile for _, profile, _ in chosen} == {9, 19, 14}
    assert rig.instances() == chosen
    assert all(len(one.computes) == 1 for one in rig.machine.instances())
    api.delete(f"{pods_in(space)}/b")
    rig.until_instances(*places(rig, space, "a"))
    remove_pod(api, space, "a")  # at once, so that the kubelet only finds it gone
    rig.until_instances()
    assert not rig.kubelet.refusals


def test_the_container_is_given_the_devices_of_its_instance_only(rig: Rig, space: str) -> None:
    api = rig.plane.api
    make_pod(api, space, "a", "one")
    make_pod(api, space, "b", "one")
    until_run(api, space, "a", "b")
    seen: dict[str, set[str]] = {}
    for name in ("a", "b"):
        [title] = claims_of(api, space, name)
        uid = api.get(f"{claims_in(space)}/{title}")["metadata"]["uid"]
        [given] = [path for path in rig.driver.cdi.iterdir() if uid in path.name]
        [device] = yaml.safe_load(given.read_text())["devices"]
        [where] = places(rig, space, name)
        [instance] = [one for one in rig.machine.instances() if (one.gpu, one.start) == where[::2]]
        numbers = {
            (one["major"], one["minor"])
            for one in device["containerEdits"]["deviceNodes"]
            if "nvidia-cap" in one["path"]
        }
        assert numbers == {
            (CAPABILITIES_MAJOR, capability_minor(instance.gpu, instance.id)),
            (CAPABILITIES_MAJOR, capability_minor(instance.gpu, instance.id, 0)),
        }
        paths = {one["path"] for one in device["containerEdits"]["deviceNodes"]}
        assert f"/dev/nvidia{instance.gpu}" in paths
        seen[name] = {path for path in paths if "nvidia-cap" in path}
    assert not seen["a"] & seen["b"]


def test_a_shared_claim_is_one_instance_until_its_last_pod_is_gone(rig: Rig, space: str) -> None:
    api = rig.plane.api
    shared = claim("both", device_request(OUR_CLASS), config=[wants(profile="2g.35gb")])
    api.create(claims_in(space), shared)
    make_pod(api, space, "a", shared=["both"])
    make_pod(api, space, "b", shared=["both"])
    until_run(api, space, "a", "b")
    [only] = places(rig, space, "a")
    assert rig.instances() == {only}
    api.delete(f"{pods_in(space)}/a")
    until("a is gone", lambda: api.find(f"{pods_in(space)}/a") is None)
    assert rig.instances() == {only}
    api.delete(f"{pods_in(space)}/b")
    rig.until_instances()


def test_instances_of_running_pods_outlive_a_driver_that_is_killed(rig: Rig, space: str) -> None:
    api = rig.plane.api
    make_pod(api, space, "a", "three")
    until_run(api, space, "a")
    [instance] = rig.machine.instances()
    # One that the driver does not know, on the other half.
    rig.machine.create_instance(instance.gpu, "1g.18gb", (instance.start + 4) % 8)
    rig.driver.restart()
    rig.client.register()
    [only] = places(rig, space, "a")
    rig.until_instances(only)  # and it destroyed the other
    assert rig.machine.instances() == (instance,)
    make_pod(api, space, "b", "two")
    until_run(api, space, "b")
    assert rig.instances() == places(rig, space, "a", "b")


def test_slices_that_the_driver_published_again_are_the_same(rig: Rig, space: str) -> None:
    def devices() -> list[Json]:
        return [device for one in rig.driver.slices() for device in one["spec"].get("devices", [])]

    before = devices()
    assert len(before) == 2 * 26
    rig.driver.restart()
    rig.client.register()
    assert devices() == before


def test_after_a_failed_prepare_the_driver_refuses_until_it_forgets(rig: Rig, space: str) -> None:
    """A defect of the driver (upstream 1452), and what cures it.

    The claim stays in its checkpoint as begun. A retry, or the end of the pod, then looks for what
    to clean up by the bus address of the GPU, which the checkpoint does not have.
    """
    api = rig.plane.api
    rig.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", 999, times=1)
    made = claim("c", device_request(OUR_CLASS), config=[wants(profile="1g.18gb")])
    api.create(claims_in(space), made)
    make_pod(api, space, "a", shared=["c"])
    until("a prepare is refused", lambda: rig.kubelet.refusals or None)
    found = api.get(f"{claims_in(space)}/c")
    rig.driver.restart()
    rig.client.register()
    for call in (rig.client.prepare, rig.client.unprepare):
        with pytest.raises(PrepareError, match="could not get device handle by UUID"):
            call(found)
    remove_pod(api, space, "a")
    # On a node, this is done after all pods with claims have left it.
    rig.driver.kill()
    (rig.driver.plugins / NAME / "checkpoint.json").unlink()
    rig.driver.start()
    rig.client.register()
    rig.client.unprepare(found)
    rig.kubelet.refusals.clear()
    make_pod(api, space, "b", "one")
    until_run(api, space, "b")
    assert rig.instances() == places(rig, space, "b")
    assert not rig.kubelet.refusals

"""The whole chain on one node: from a claim to an instance that NVIDIA's driver creates.

The kubelet is a stand-in without containers, or, with ``real``, a real one with containerd.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.kubernetes_e2e.api import CORE, Api, Json, until
from tests.kubernetes_e2e.cluster import (
    device_request,
    make_classes,
    node,
    pod,
    pods_in,
    template,
    templates_in,
    withdraw,
)
from tests.kubernetes_e2e.fake_kubelet import FakeKubelet
from tests.kubernetes_e2e.nvidia import MIG_CLASS
from tests.kubernetes_e2e.nvidia_driver import KubeletClient, NvidiaDriver
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.real_node import IMAGE, RealNode
from tests.kubernetes_e2e.replica import OUR_CLASS, SEALED, wants

from slicewise.fakedriver import Machine

MODEL = "H200-141GB"
PROFILES = {"one": "1g.18gb", "two": "2g.35gb", "three": "3g.71gb"}
"""The profiles of the templates; those of the stock class begin with ``stock-``."""
_STOP_SECONDS = 0.5
"""What the stand-in takes to end the containers of a pod; a real kubelet takes longer."""
_DEVICE = re.compile(r"gpu-(\d+)-mig-.*-(\d+)-(\d+)")


class Place(NamedTuple):
    """Where an instance is, and which profile it has."""

    gpu: int
    profile: int
    start: int


def place_of(device: str) -> Place:
    """Where the instance of a device is, which its name says."""
    found = _DEVICE.fullmatch(device)
    assert found is not None, device
    return Place(*map(int, found.groups()))


def places_of(claim: Json) -> list[Place]:
    """Where the instances of a claim are; none before it is allocated."""
    allocation = claim.get("status", {}).get("allocation", {})
    return [place_of(one["device"]) for one in allocation.get("devices", {}).get("results", [])]


class Chain:
    """One node. ``kubelet`` is there without, and ``node`` with a real kubelet."""

    def __init__(
        self,
        plane: Plane,
        machine: Machine,
        driver: NvidiaDriver,
        kubelet: FakeKubelet | None = None,
        client: KubeletClient | None = None,
        node: RealNode | None = None,
    ) -> None:
        self.plane, self.machine, self.driver = plane, machine, driver
        self.kubelet, self.client, self.node = kubelet, client, node

    @property
    def api(self) -> Api:
        """The API as an admin."""
        return self.plane.api

    def places(self) -> set[Place]:
        """Where there are instances on the GPUs."""
        found = self.machine.instances()
        return {Place(one.gpu, one.profile_id, one.start) for one in found}

    def until_places(self, *expected: Place) -> None:
        """Wait until there are these instances and no others."""
        until(f"the instances are {expected}", lambda: self.places() == set(expected))

    def make_templates(self, space: str) -> None:
        """The templates of ``PROFILES``."""
        for name, profile in PROFILES.items():
            ours = template(name, device_request(OUR_CLASS), config=[wants(profile=profile)])
            self.api.create(templates_in(space), ours)
            stock = template(f"stock-{name}", device_request(MIG_CLASS, profile=profile))
            self.api.create(templates_in(space), stock)

    def make_pod(
        self, space: str, name: str, *templates: str, grace: int = 0, **container: object
    ) -> Json:
        """A pod that runs until it is deleted."""
        made = pod(
            name,
            templates,
            terminationGracePeriodSeconds=grace,
            hostNetwork=True,
            enableServiceLinks=False,
        )
        [main] = made["spec"]["containers"]
        # A kubelet that is killed after it started a container takes its requests for a change of
        # size, and without control groups for pods it ends in an error then.
        del main["resources"]["requests"]
        main |= {"image": IMAGE, "imagePullPolicy": "Never", **container}
        return self.api.create(pods_in(space), made)

    def restart_driver(self) -> None:
        """Kill NVIDIA's driver, and start it again."""
        self.driver.restart()
        if self.client is not None:
            self.client.register()

    def restart_kubelet(self, pause: float = 0.0) -> None:
        """Kill the kubelet, and start it again after a pause."""
        if self.kubelet is not None:
            self.kubelet.restart(pause)
        if self.node is not None:
            self.node.restart_kubelet(pause)


@contextmanager
def chain(
    plane: Plane, library: Path, folder: Path, real: bool = False, gpus: int = 2
) -> Iterator[Chain]:
    """A node that is there meanwhile; ``folder`` must have a short name."""
    name = f"{'real' if real else 'half'}-{folder.name.lower().replace('_', 'x')}"
    machine = Machine.create(folder / "machine", MODEL, gpus)
    make_classes(plane.api)
    make_classes(plane.api, [SEALED])
    with ExitStack() as stack:
        stack.callback(withdraw, plane.api, [name])
        if real:
            one = stack.enter_context(RealNode(plane, name, machine, library, folder))
            yield Chain(plane, machine, one.driver, node=one)
            return
        _make_node(plane.api, name)
        driver = stack.enter_context(NvidiaDriver(plane, name, machine, library, folder))
        client = stack.enter_context(KubeletClient(driver))
        kubelet = FakeKubelet(plane.api, driver, client, _STOP_SECONDS)
        kubelet.start()
        stack.callback(kubelet.stop)
        yield Chain(plane, machine, driver, kubelet=kubelet, client=client)


def _make_node(api: Api, name: str) -> None:
    """A node that is ready, and not one of kwok: there, pods would run without being prepared."""
    wanted = node(name)
    del wanted["metadata"]["annotations"]
    made = api.create(f"{CORE}/nodes", wanted)
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    made["status"] |= {"conditions": [ready]}
    api.put(f"{CORE}/nodes/{name}/status", made)

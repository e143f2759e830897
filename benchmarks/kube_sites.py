"""Control planes for the benchmarks: real components, nodes with published GPUs, an allocator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kube_plan import GIB_PER_CPU, NODE_CPUS
from benchmarks.kube_pods import PodTracker, memory_mib
from tests.kubernetes_e2e.api import CORE
from tests.kubernetes_e2e.cluster import make_classes, node, publish, suppress_conflict
from tests.kubernetes_e2e.nvidia import MIG_CLASS
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, SEALED

from slicewise.core.geometry import Geometry
from slicewise.kubernetes.api_client import ApiClient

SPACE = "stream"
CONTROLLERS = (
    "resourceclaim-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
)
"""The controllers that pods with claims need; others would only use CPU."""


@dataclass
class Site:
    """An empty cluster."""

    plane: Plane
    tracker: PodTracker
    names: list[str]
    publish_seconds: float

    def __post_init__(self) -> None:
        self.opened = set(self.names)

    def open_only(self, names: Sequence[str]) -> None:
        """Cordon all nodes except these."""
        wanted = set(names)
        turning = [name for name in self.names if (name in wanted) != (name in self.opened)]
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(lambda name: self._turn(name, name in wanted), turning):
                pass
        self.opened = wanted

    def _turn(self, name: str, opened: bool) -> None:
        self.plane.api.patch(f"{CORE}/nodes/{name}", {"spec": {"unschedulable": not opened}})

    def memory(self) -> dict[str, float]:
        """Return the memory of the control plane's components."""
        return {part: memory_mib(self.plane.process_id(part)) for part in self.plane.parts}


@contextmanager
def site(
    geometry: Geometry,
    nodes: int,
    gpus: int,
    flags: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Site]:
    """Start a control plane with nodes and their devices."""
    with Plane(flags=flags, controllers=CONTROLLERS) as plane:
        api = plane.api
        make_classes(api)
        with suppress_conflict():
            api.create(
                f"{CORE}/namespaces",
                {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}},
            )
        began = time.monotonic()
        names = publish(
            api,
            [
                node(f"node-{n:04}", f"{NODE_CPUS}", f"{NODE_CPUS * GIB_PER_CPU}Gi")
                for n in range(nodes)
            ],
            geometry.model,
            gpus,
        )
        took = time.monotonic() - began
        tracker = PodTracker(ApiClient.open(plane.kubeconfig), SPACE, geometry, names, gpus)
        try:
            yield Site(plane, tracker, names, took)
        finally:
            tracker.close()


class Allocator:
    """The component that allocates devices to claims.

    ``stock`` is kube-scheduler alone, ``slicewise`` is slicewise with a class that has no object,
    ``sealed`` is slicewise with a class that has a false selector.
    """

    def __init__(self, name: str, plane: Plane, profile: Path | None = None) -> None:
        self.name = name
        self.device_class = MIG_CLASS if name == "stock" else OUR_CLASS
        if name == "sealed":
            make_classes(plane.api, [SEALED])
        self._report = plane.folder / "report.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._plane = plane
        self._profile = profile

    def start(self) -> None:
        """Start allocating."""
        if self.name == "stock":
            return
        command = [
            sys.executable, "-m", "benchmarks.kube_controller",
            str(self._plane.kubeconfig), str(self._report),
        ]  # fmt: skip
        if self._profile is not None:
            command += ["--profile", str(self._profile)]
        with (self._plane.folder / "slicewise.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def memory(self) -> float:
        """Return its memory in MiB."""
        return 0.0 if self._process is None else memory_mib(self._process.pid)

    def report(self) -> dict[str, Any]:
        """Return its statistics so far."""
        if self._process is None:
            return {}
        self._report.unlink(missing_ok=True)
        os.kill(self._process.pid, signal.SIGUSR1)
        while not self._report.exists():
            if self._process.poll() is not None:
                raise SystemExit(f"the controller has ended: {self.log()[-2000:]}")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(self._report.read_text())
        return found

    def log(self) -> str:
        """Return its log."""
        return (self._plane.folder / "slicewise.log").read_text()

    def stop(self) -> None:
        """Stop the process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

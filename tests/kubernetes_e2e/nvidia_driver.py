"""NVIDIA's own DRA driver as a process, on the simulated GPUs of the fake NVML.

    with NvidiaDriver(plane, "node-1", machine, library, folder) as driver:
        ...

It runs as on a node, with DynamicMIG: it publishes ResourceSlices, and creates and destroys the
instances of claims when a kubelet asks it to. What it expects of a node is made in ``folder``: a
driver root with the fake library, device nodes, and the capabilities of MIG devices. It reads those
in /proc/driver/nvidia, so it has a mount namespace of its own, which takes root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kubernetes_e2e.api import PATIENCE_SECONDS, Json, until
from tests.kubernetes_e2e.plane import TIED, Plane
from tests.kubernetes_e2e.programs import require_dra_driver

from slicewise.fakedriver import Machine

NAME = "gpu.nvidia.com"
FAKE_VERSION = "580.65.06"
_MAJOR = 195
CAPABILITIES_MAJOR = 510
_GPU_INSTANCES = 15
_COMPUTE_INSTANCES = 8
_FIRST_MINOR = 3
_NAMESPACE = 'mount --bind "$1" /proc/driver && shift && exec "$@"'


def why_not() -> str | None:
    """Why the driver cannot run here, or None."""
    if sys.platform != "linux":
        return "NVIDIA's DRA driver runs on Linux only"
    if os.geteuid() != 0:
        return "NVIDIA's DRA driver needs a mount namespace of its own: run as root"
    for program in ("unshare", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed: NVIDIA's DRA driver needs its own mount namespace"
    return None


def capability_minor(gpu: int, instance: int, compute: int | None = None) -> int:
    """The minor number of a capability, in the order of /proc/driver/nvidia-caps/mig-minors."""
    first = _FIRST_MINOR + (gpu * _GPU_INSTANCES + instance) * (_COMPUTE_INSTANCES + 1)
    return first if compute is None else first + 1 + compute


class NvidiaDriver:
    """One driver, for one node. The node must exist before it starts."""

    def __init__(
        self, plane: Plane, node: str, machine: Machine, library: Path, folder: Path
    ) -> None:
        self.node = node
        self.machine = machine
        self.folder = folder
        self.log_file = folder / "dra-driver.log"
        self.cdi = folder / "cdi"
        self.kubelet = folder / "kubelet"
        """The kubelet's folder."""
        self.plugins = self.kubelet / "plugins"
        self.registry = self.kubelet / "plugins_registry"
        self._plane = plane
        self._program = require_dra_driver() / "dra-driver"
        self._environment = machine.environment(library)
        self._make_node(library)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NvidiaDriver:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    @property
    def registration_socket(self) -> Path:
        """Where the kubelet finds it."""
        return self.registry / f"{NAME}-reg.sock"

    @property
    def log(self) -> str:
        """Everything that it wrote."""
        return self.log_file.read_text(errors="replace")

    @property
    def runs(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, and wait until it can be called and has published its slices."""
        assert not self.runs
        self.registration_socket.unlink(missing_ok=True)
        command = [
            str(self._program),
            f"--node-name={self.node}",
            f"--kubeconfig={self._plane.kubeconfig}",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            "--feature-gates=DynamicMIG=true",
            "--image-name=none",
            f"--cdi-root={self.cdi}",
            f"--nvidia-driver-root={self.folder / 'root'}",
            f"--container-driver-root={self.folder / 'root'}",
            f"--nvidia-cdi-hook-path={self.folder / 'nvidia-cdi-hook'}",
            f"--kubelet-registrar-directory-path={self.registry}",
            f"--kubelet-plugins-directory-path={self.plugins}",
            "-v=6",
        ]
        namespace = ["unshare", "--mount", "sh", "-c", _NAMESPACE, "sh", str(self.folder / "proc")]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-c", TIED, str(os.getpid()),
                 str(shutil.which(namespace[0])), *namespace[1:], *command],
                env={
                    **os.environ,
                    **self._environment,
                    "ALT_PROC_DEVICES_PATH": str(self.folder / "devices"),
                    "HOME": str(self.folder),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )  # fmt: skip

        def ready() -> bool:
            assert self.runs, f"NVIDIA's driver has ended: {self.log[-4000:]}"
            return self.registration_socket.exists()

        until("NVIDIA's driver can be called", ready)
        until("NVIDIA's driver has published its slices", lambda: self.slices() or None)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self, sign: int = signal.SIGKILL) -> None:
        """End it, by default without a warning, and start it again."""
        assert self._process is not None
        self._process.send_signal(sign)
        self._process.wait(PATIENCE_SECONDS)
        self.start()

    def slices(self) -> list[Json]:
        """The slices of its node, in the order of the scheduler; none while some are missing."""
        path = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName={self.node}"
        found = sorted(self._plane.api.items(path), key=lambda one: str(one["metadata"]["name"]))
        count = found[0]["spec"]["pool"]["resourceSliceCount"] if found else 0
        return found if len(found) == count else []

    def _make_node(self, library: Path) -> None:
        """Make the files that the driver expects on a node."""
        root = self.folder / "root"
        libraries, programs, devices = root / "usr/lib64", root / "usr/bin", root / "dev"
        for made in (libraries, programs, devices, self.cdi, self.plugins, self.registry):
            made.mkdir(parents=True, exist_ok=True)
        for name in ("libnvidia-ml.so", "libcuda.so"):  # which libcuda does not matter, that it is
            shutil.copy(library, libraries / f"{name}.{FAKE_VERSION}")
            (libraries / f"{name}.1").unlink(missing_ok=True)
            (libraries / f"{name}.1").symlink_to(f"{name}.{FAKE_VERSION}")
        for stub in (programs / "nvidia-smi", self.folder / "nvidia-cdi-hook"):
            stub.write_text("#!/bin/sh\nexit 0\n")
            stub.chmod(0o755)
        gpus = range(len(self.machine.gpus))
        for name, minor in [(f"nvidia{gpu}", gpu) for gpu in gpus] + [("nvidiactl", 255)]:
            if not (devices / name).exists():
                os.mknod(devices / name, 0o666 | stat.S_IFCHR, os.makedev(_MAJOR, minor))
        (self.folder / "devices").write_text(
            f"Character devices:\n{_MAJOR} nvidia\n{CAPABILITIES_MAJOR} nvidia-caps\n\n"
            "Block devices:\n  8 sd\n"
        )
        for gpu in gpus:
            for instance in range(_GPU_INSTANCES):
                there = self.folder / f"proc/nvidia/capabilities/gpu{gpu}/mig/gi{instance}"
                _make_capability(there, capability_minor(gpu, instance))
                for compute in range(_COMPUTE_INSTANCES):
                    minor = capability_minor(gpu, instance, compute)
                    _make_capability(there / f"ci{compute}", minor)


def _make_capability(folder: Path, minor: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "access").write_text(
        f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    )


class PrepareError(Exception):
    """Raised when the driver refuses to prepare or to unprepare a claim."""


class KubeletClient:
    """Calls the driver as a kubelet does; may be shared by threads."""

    def __init__(self, driver: NvidiaDriver) -> None:
        program = require_dra_driver() / "kubelet-client"
        self._process = subprocess.Popen(
            [program, driver.registration_socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Condition()
        self._calls = 0
        self._answers: dict[int, Json] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> KubeletClient:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def register(self) -> Json:
        """Ask the driver who it is and confirm the registration."""
        return self._call("register")

    def prepare(self, *claims: Json) -> dict[str, list[Json]]:
        """Have claims prepared; returns the devices of each by uid, or raises PrepareError."""
        told = self._call("prepare", claims)["claims"]
        return {uid: one.get("devices", []) for uid, one in told.items()}

    def unprepare(self, *claims: Json) -> None:
        """Have claims unprepared, or raise PrepareError."""
        self._call("unprepare", claims)

    def _call(self, name: str, claims: Sequence[Json] = ()) -> Json:
        wanted = [
            {key: one["metadata"][key] for key in ("namespace", "uid", "name")} for one in claims
        ]
        with self._lock:
            self._calls += 1
            number = self._calls
            assert self._process.stdin is not None
            asked = {"id": number, "call": name, "claims": wanted}
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answered = self._lock.wait_for(lambda: number in self._answers, PATIENCE_SECONDS)
            assert answered, f"no answer to {name}"
            told = self._answers.pop(number)
        errors: list[Any] = [told.get("error")]
        errors += [one.get("error") for one in (told.get("claims") or {}).values()]
        if any(errors):
            raise PrepareError("; ".join(filter(None, errors)))
        return told

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._lock:
                self._answers[told["id"]] = told
                self._lock.notify_all()

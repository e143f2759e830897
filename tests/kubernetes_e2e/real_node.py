"""A real node on this machine: kubelet, containerd and runc, and NVIDIA's driver on the fake NVML.

    with RealNode(plane, "node-1", machine, library, folder) as node:
        ...

All of them have namespaces of their own for mounts and processes, so nothing outlives them, and
several nodes can be on one machine. Pods use the network of the host, and an image with one static
program (``dra_driver/container``). Needs root.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from tests.kubernetes_e2e.api import CORE, PATIENCE_SECONDS, Json, until
from tests.kubernetes_e2e.nvidia_driver import NvidiaDriver
from tests.kubernetes_e2e.plane import TIED, Plane, free_ports
from tests.kubernetes_e2e.programs import require_dra_driver, require_node

from slicewise.fakedriver import Machine

IMAGE = "slicewise.test/container:1"
_PRIVATE = ("/run/containerd", "/var/lib/kubelet", "/var/log/containers")
"""Folders that containerd and the kubelet use whatever their settings: sockets of containers and of
device plugins, and links to logs."""
_NAMESPACES = (
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-ec"),
    'for one; do mkdir -p "$one"; mount -t tmpfs none "$one"; done; exec sleep inf',
    *("sh", *_PRIVATE),
)
_SETTINGS = """
version = 3
root = "{folder}/containerd/root"
state = "{folder}/containerd/state"
disabled_plugins = ["io.containerd.nri.v1.nri"]

[grpc]
address = "{folder}/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{image}"

[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["{cdi}"]
restrict_oom_score_adj = true
tolerate_missing_hugetlb_controller = true
disable_apparmor = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{folder}/cni"]
conf_dir = "{folder}/cni"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
sandboxer = "podsandbox"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""


class RealNode:
    """One node. Each part writes NAME.log in ``folder``."""

    def __init__(
        self, plane: Plane, name: str, machine: Machine, library: Path, folder: Path
    ) -> None:
        self.name = name
        self.folder = folder
        self.driver = NvidiaDriver(plane, name, machine, library, folder)
        self._plane = plane
        self._programs = require_node()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._inside: list[str] = []
        self._first = ""
        """The first process in the namespaces; it ends when all others there have ended."""

    def __enter__(self) -> RealNode:
        try:
            self._make_files()
            self._make_namespaces()
            self._start_containerd()
            self.start_kubelet()
            until(f"{self.name} is ready", self._ready)
            self.driver.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.driver.kill()
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        if self._first:
            there = Path("/proc", self._first)
            until("everything in the namespaces has ended", lambda: not there.exists())
        self._remove_control_groups()

    def log(self, part: str) -> str:
        """The log of kubelet or containerd."""
        path = self.folder / f"{part}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start_kubelet(self) -> None:
        """Start the kubelet."""
        self._launch(
            "kubelet",
            str(self._programs / "kubelet"),
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={self._plane.kubeconfig}",
            f"--hostname-override={self.name}",
            f"--root-dir={self.driver.kubelet}",
            f"--cert-dir={self.folder / 'certificates'}",
            "-v=2",
        )

    def stop_kubelet(self) -> None:
        """Kill the kubelet; pods go on."""
        # Its process is a child of nsenter, which would leave it behind.
        self._signal("kubelet", "KILL")
        self._processes["kubelet"].wait()

    def restart_kubelet(self, pause: float = 0.0) -> None:
        """Kill the kubelet, and start it again after a pause."""
        self.stop_kubelet()
        time.sleep(pause)
        self.start_kubelet()

    def output(self, space: str, pod: str, uid: str) -> str:
        """What the container of a pod has written."""
        [log] = (self.folder / "pods" / f"{space}_{pod}_{uid}" / "main").glob("*.log")
        lines = log.read_text().splitlines()
        return "\n".join(line.split(" ", 3)[3] for line in lines)

    def _ready(self) -> bool:
        for part, process in self._processes.items():
            assert process.poll() is None, f"{part} has ended: {self.log(part)[-4000:]}"
        found = self._plane.api.find(f"{CORE}/nodes/{self.name}")
        conditions = found["status"].get("conditions", []) if found else []
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

    def _launch(self, part: str, *command: str) -> None:
        with (self.folder / f"{part}.log").open("ab") as log:
            self._processes[part] = subprocess.Popen(
                [sys.executable, "-S", "-c", TIED, str(os.getpid()), *self._inside, *command],
                cwd=self.folder,
                env={**os.environ, "PATH": f"{self._programs}:{os.environ['PATH']}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _signal(self, part: str, signal: str) -> None:
        """Send a signal to the child of nsenter."""
        parent = self._processes[part].pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        subprocess.run(["kill", f"-{signal}", *children], check=True)

    def _make_namespaces(self) -> None:
        for name in ("unshare", "nsenter"):
            assert shutil.which(name), f"{name} is not installed"
        program = shutil.which(_NAMESPACES[0])
        self._launch("namespaces", str(program), *_NAMESPACES[1:])
        parent = self._processes["namespaces"].pid

        def first() -> str:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            # Not before the last program runs: then the namespaces are complete.
            last = Path(f"/proc/{children[0]}/cmdline").read_text() if children else ""
            return children[0] if last.startswith("sleep") else ""

        self._first = until("the namespaces are made", first)
        target = f"--target={self._first}"
        self._inside = [str(shutil.which("nsenter")), target, "--mount", "--pid"]

    def _start_containerd(self) -> None:
        settings = self.folder / "containerd.toml"
        self._launch("containerd", str(self._programs / "containerd"), "--config", str(settings))
        control = [*self._inside, str(self._programs / "ctr")]
        control += ["--address", str(self.folder / "containerd.sock"), "--namespace", "k8s.io"]

        def load() -> bool:
            assert self._processes["containerd"].poll() is None, self.log("containerd")[-4000:]
            done = subprocess.run(
                [*control, "images", "import", str(self.folder / "image.tar")],
                capture_output=True,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
            return done.returncode == 0

        until("containerd has the image", load)

    def _make_files(self) -> None:
        for name in ("cni", "containerd", "pods"):
            (self.folder / name).mkdir(exist_ok=True)
        # Pods use the network of the host; containerd only wants to see a configuration.
        network = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "loopback"}]}
        (self.folder / "cni" / "none.conflist").write_text(json.dumps(network))
        (self.folder / "containerd.toml").write_text(
            _SETTINGS.format(
                folder=self.folder,
                image=IMAGE,
                cdi=self.driver.cdi,
                runc=shutil.which("runc"),
            )
        )
        port, health = free_ports(2)
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "readOnlyPort": 0,
            "healthzPort": health,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self.folder}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            # The machine is not the node's alone, and may have the first version of control groups.
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(self.folder / "pods"),
            "resolvConf": "",
            "registerNode": True,
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "maxPods": 250,
        }
        (self.folder / "kubelet.json").write_text(json.dumps(settings))
        _make_image(self.folder / "image.tar", require_dra_driver() / "container")

    def _remove_control_groups(self) -> None:
        """Remove the empty control groups that containers leave."""
        root = Path("/sys/fs/cgroup")
        for top in [*root.glob("*/k8s.io"), *root.glob("k8s.io")]:  # of version 1, of version 2
            for one in [*top.iterdir(), top]:
                if one.is_dir():
                    try:
                        one.rmdir()
                    except OSError:
                        continue  # another node's


def _make_image(path: Path, program: Path) -> None:
    """An image with one program, as an archive in the layout of OCI."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(program, "container")
    blobs: dict[str, bytes] = {}

    def add(content: bytes, kind: str) -> Json:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    kind = "application/vnd.oci.image"
    data = add(layer.getvalue(), f"{kind}.layer.v1.tar")
    settings = {
        "architecture": "arm64" if os.uname().machine == "aarch64" else "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/container"], "Cmd": ["pause"]},
        "rootfs": {"type": "layers", "diff_ids": [data["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.manifest.v1+json",
        "config": add(json.dumps(settings).encode(), f"{kind}.config.v1+json"),
        "layers": [data],
    }
    top = add(json.dumps(manifest).encode(), f"{kind}.manifest.v1+json")
    top["annotations"] = {"io.containerd.image.name": IMAGE}
    index = {"schemaVersion": 2, "manifests": [top]}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps(index).encode(),
        **blobs,
    }
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))

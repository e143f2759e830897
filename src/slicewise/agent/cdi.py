"""CDI (Container Device Interface) files: one per instance, for container runtimes.

A runtime with CDI support (podman, docker, containerd, CRI-O) resolves ``slicewise.dev/mig=UUID``
to the device files of this instance and the libraries of the driver. The files need no hooks:
libraries are mounted under the names by which programs load them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from slicewise.agent.driver import GpuReading, InstanceReading
from slicewise.agent.record import RecordError, write_file

KIND = "slicewise.dev/mig"
_PREFIX = "slicewise.dev-mig-"
_LIBRARIES = (
    ("libcuda.so", "1"),
    ("libcudadebugger.so", "1"),
    ("libnvidia-ml.so", "1"),
    ("libnvidia-ptxjitcompiler.so", "1"),
    ("libnvidia-nvvm.so", "4"),
    ("libnvidia-opencl.so", "1"),
    ("libnvidia-gpucomp.so", ""),
    ("libnvcuvid.so", "1"),
    ("libnvidia-encode.so", "1"),
)
"""Driver libraries and the version in their soname; empty if that is the driver version."""
_LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
)
_DEVICES = ("/dev/nvidiactl",)
_OPTIONAL_DEVICES = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@dataclass
class Cdi:
    """The folder with the CDI files of this node's instances."""

    folder: Path
    driver: str
    """The driver version, which is the suffix of its library files."""
    root: Path = field(default=Path("/"))

    def write(self, gpu: GpuReading, instance: InstanceReading, uuid: str) -> None:
        """Write the file of an instance, unless it exists with the same content."""
        text = json.dumps(self.document(gpu, instance, uuid), indent=2) + "\n"
        path = self._path(uuid)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == text:
                return
        with contextlib.suppress(OSError):  # write_file reports the cause.
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text, 0o644)

    def remove(self, uuid: str) -> None:
        """Remove the file of an instance, which keeps new containers from using it."""
        path = self._path(uuid)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if path.exists():  # A read-only folder raises for missing files as well.
                raise RecordError(f"{str(path)!r} cannot be removed: {error.strerror}") from None

    def remove_all_except(self, uuids: Collection[str]) -> None:
        """Remove the agent's files of all other instances; files of other programs stay."""
        kept = {self._path(uuid).name for uuid in uuids}
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{_PREFIX}*.json"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)

    def document(self, gpu: GpuReading, instance: InstanceReading, uuid: str) -> dict[str, object]:
        """The CDI specification of an instance."""
        devices = [*_DEVICES, f"/dev/nvidia{gpu.index if gpu.minor is None else gpu.minor}"]
        devices += self._capability_devices(gpu, instance)
        devices += [path for path in _OPTIONAL_DEVICES if self._on_host(path).exists()]
        edits: dict[str, object] = {
            "deviceNodes": [{"path": path} for path in devices],
            # Keeps the legacy hook of NVIDIA's toolkit from adding devices.
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        }
        mounts = self._mounts()
        if mounts:
            edits["mounts"] = mounts
        return {
            "cdiVersion": "0.5.0",
            "kind": KIND,
            "devices": [{"name": uuid, "containerEdits": edits}],
        }

    def _path(self, uuid: str) -> Path:
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in uuid)
        return self.folder / f"{_PREFIX}{safe}.json"

    def _on_host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _capability_devices(self, gpu: GpuReading, instance: InstanceReading) -> list[str]:
        """The device files that grant access to the GPU instance and its compute instance."""
        try:
            text = self._on_host("/proc/driver/nvidia-caps/mig-minors").read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return []
        minors = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line.strip())
        number = gpu.index if gpu.minor is None else gpu.minor
        names = [f"gpu{number}/gi{instance.id}/access"]
        names += [f"gpu{number}/gi{instance.id}/ci{c.id}/access" for c in instance.compute]
        found = [minors[name].strip() for name in names if name in minors]
        return [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in found]

    def _mounts(self) -> list[dict[str, object]]:
        """Mounts of the driver libraries under the names by which programs load them."""
        mounts: list[dict[str, object]] = []
        for stem, number in _LIBRARIES:
            file = f"{stem}.{self.driver}"
            host = next((f for f in _LIBRARY_FOLDERS if (self.root / f / file).is_file()), None)
            if host is None:
                continue
            # The loaders of Debian and Red Hat search different folders; support both.
            for target in dict.fromkeys((f"/{host}", "/usr/lib64")):
                mounts.append(_mount(f"/{host}/{file}", f"{target}/{stem}.{number or self.driver}"))
        if self._on_host("/usr/bin/nvidia-smi").is_file():
            mounts.append(_mount("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"))
        return mounts


def _mount(host: str, container: str) -> dict[str, object]:
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    return {"hostPath": host, "containerPath": container, "options": options}

"""CDI specifications: one file an instance, by which a container runtime finds its devices.

A runtime that knows CDI (podman, docker, containerd, CRI-O) is asked for ``slicewise.dev/mig=UUID``
and gets the device files of exactly that instance and the driver's libraries. No hooks: libraries
are mounted under the names by which programs load them.
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
"""Libraries of the driver, and the number programs ask for; none where it is the driver's own."""
_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "run/opengl-driver/lib",
)
_ALWAYS = ("/dev/nvidiactl",)
_IF_THERE = ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


def device_name(uuid: str) -> str:
    """What a container runtime is asked for."""
    return f"{KIND}={uuid}"


@dataclass
class Cdi:
    """The folder of specifications, and the machine they speak of."""

    folder: Path
    driver: str
    """The driver's version, which its libraries end in."""
    root: Path = field(default=Path("/"))

    def offer(self, gpu: GpuReading, instance: InstanceReading, uuid: str) -> None:
        """See that the instance's file is there and right."""
        text = json.dumps(self.document(gpu, instance, uuid), indent=2) + "\n"
        path = self._path(uuid)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == text:
                return
        with contextlib.suppress(OSError):  # Writing says what is wrong.
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text, 0o644)

    def withdraw(self, uuid: str) -> None:
        """Take the instance's file away, so that no container is started with it any more."""
        path = self._path(uuid)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if path.exists():  # A folder that is read-only refuses what is not there as well.
                raise RecordError(f"{str(path)!r} cannot be removed: {error.strerror}") from None

    def keep(self, uuids: Collection[str]) -> None:
        """Take away the files of all other instances; files of others are not ours to touch."""
        wanted = {self._path(uuid).name for uuid in uuids}
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{_PREFIX}*.json"):
                if path.name not in wanted:
                    path.unlink(missing_ok=True)

    def document(self, gpu: GpuReading, instance: InstanceReading, uuid: str) -> dict[str, object]:
        """The specification of one instance."""
        nodes = [*_ALWAYS, f"/dev/nvidia{gpu.index if gpu.minor is None else gpu.minor}"]
        nodes += self._capabilities(gpu, instance)
        nodes += [path for path in _IF_THERE if self._here(path).exists()]
        edits: dict[str, object] = {
            "deviceNodes": [{"path": path} for path in nodes],
            # The older hook of NVIDIA's toolkit is to leave the container alone.
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

    def _here(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _capabilities(self, gpu: GpuReading, instance: InstanceReading) -> list[str]:
        """The device files that grant access to the GPU instance and its compute instance."""
        try:
            text = self._here("/proc/driver/nvidia-caps/mig-minors").read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return []
        minors = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line.strip())
        number = gpu.index if gpu.minor is None else gpu.minor
        names = [f"gpu{number}/gi{instance.id}/access"]
        names += [f"gpu{number}/gi{instance.id}/ci{c.id}/access" for c in instance.compute]
        found = [minors[name].strip() for name in names if name in minors]
        return [f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in found]

    def _mounts(self) -> list[dict[str, object]]:
        """The driver's libraries, under the names by which they are loaded."""
        mounts: list[dict[str, object]] = []
        for stem, number in _LIBRARIES:
            file = f"{stem}.{self.driver}"
            host = next((f for f in _FOLDERS if (self.root / f / file).is_file()), None)
            if host is None:
                continue
            # Debian's and Red Hat's loaders look in different folders; a container has either.
            for target in dict.fromkeys((f"/{host}", "/usr/lib64")):
                mounts.append(_mount(f"/{host}/{file}", f"{target}/{stem}.{number or self.driver}"))
        if self._here("/usr/bin/nvidia-smi").is_file():
            mounts.append(_mount("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"))
        return mounts


def _mount(host: str, container: str) -> dict[str, object]:
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    return {"hostPath": host, "containerPath": container, "options": options}

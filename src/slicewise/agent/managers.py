"""Other programs that make MIG instances: two of them on one node would undo each other's work."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

MANAGERS = {
    "nvidia-mig-manager": "NVIDIA's MIG manager",
    "nvidia-mig-parted": "NVIDIA's mig-parted",
    "nvidia-device-plugin": "NVIDIA's device plugin for Kubernetes",
    "gpu-kubelet-plugin": "NVIDIA's DRA driver for Kubernetes",
    "instaslice-daemonset": "InstaSlice",
}
"""By the names of their programs."""
_SOCKETS = {
    "var/lib/kubelet/device-plugins/nvidia-gpu.sock": "nvidia-device-plugin",
    "var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock": "gpu-kubelet-plugin",
    "var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock": "gpu-kubelet-plugin",
}
_UNITS = {"etc/systemd/system/multi-user.target.wants/nvidia-mig-manager.service":
          "nvidia-mig-manager"}  # fmt: skip
_COMM = 15
"""The kernel keeps so many characters of a program's name."""


def managers(ignored: Collection[str] = (), root: Path = Path("/")) -> list[str]:
    """The MIG managers at work here, each with how it was noticed."""
    found: dict[str, str] = {}
    for name, how in (*_processes(root), *_listening(root), *_enabled(root)):
        if name not in ignored:
            found.setdefault(name, f"{name} ({MANAGERS[name]}: {how})")
    return list(found.values())


def _processes(root: Path) -> Iterator[tuple[str, str]]:
    folders = []
    with contextlib.suppress(OSError):
        folders = [path for path in (root / "proc").iterdir() if path.name.isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name)):
        comm, words = "", list[str]()
        with contextlib.suppress(OSError):
            comm = (folder / "comm").read_bytes().decode(errors="replace").strip()
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        # A script is run by an interpreter, which then comes first.
        programs = {os.path.basename(word) for word in words[:2]}  # noqa: PTH119
        for name in MANAGERS:
            if comm == name[:_COMM] or name in programs:
                yield name, f"process {folder.name}"


def _listening(root: Path) -> Iterator[tuple[str, str]]:
    for path, name in _SOCKETS.items():
        # What a user may not look at is not there for them; the agent itself is root.
        if os.path.exists(root / path) and _answers(root / path):  # noqa: PTH110
            yield name, f"it listens on /{path}"


def _answers(path: Path) -> bool:
    """Whether somebody is behind a socket; the file alone may be left over."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def _enabled(root: Path) -> Iterator[tuple[str, str]]:
    for path, name in _UNITS.items():
        # The link may lead nowhere from here, and still be followed when the node starts.
        if os.path.lexists(root / path):
            yield name, f"its unit is enabled, /{path}"

"""Ensures that nothing else manages the GPUs of this node.

`NodeLock` keeps a second agent from starting. `other_managers` finds other programs that create
MIG instances: they and the agent would undo each other's work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import FileLock, InUseError, held

_log = logging.getLogger("slicewise.agent")

MANAGERS = {
    "nvidia-mig-manager": "NVIDIA's MIG manager",
    "nvidia-mig-parted": "NVIDIA's mig-parted",
    "nvidia-device-plugin": "NVIDIA's device plugin for Kubernetes",
    "gpu-kubelet-plugin": "NVIDIA's DRA driver for Kubernetes",
    "instaslice-daemonset": "InstaSlice",
}
"""Other MIG managers by program name."""
_SOCKETS = {
    "var/lib/kubelet/device-plugins/nvidia-gpu.sock": "nvidia-device-plugin",
    "var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock": "gpu-kubelet-plugin",
    "var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock": "gpu-kubelet-plugin",
}
_UNITS = {"etc/systemd/system/multi-user.target.wants/nvidia-mig-manager.service":
          "nvidia-mig-manager"}  # fmt: skip
_COMM_LENGTH = 15
"""The kernel truncates program names to this length."""


class NodeLock:
    """Locks the agent's folder and the node, until released or until the process ends.

    ``node_file`` is a file that every agent of the node shares, whatever its folder: the boot id.
    """

    def __init__(self, folder: Path, node_file: Path) -> None:
        try:
            self._folder = _lock_folder(folder)
            try:
                self._node = _lock_node(node_file)
            except SlicewiseError:
                self._folder.release()
                raise
        except InUseError as error:
            raise SlicewiseError(f"an agent is already running on this node: {error}") from None

    def release(self) -> None:
        """Release both locks."""
        self._folder.release()
        if self._node is not None:
            self._node.release()


def _lock_folder(folder: Path) -> FileLock:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return FileLock(folder / "agent.lock")
    except OSError as error:
        raise SlicewiseError(
            f"{str(folder)!r} cannot be used: {error.strerror} (choose another folder with --state)"
        ) from None


def _lock_node(path: Path) -> FileLock | None:
    """Lock the node's file; None if a process that cannot be an agent holds the lock."""
    try:
        return FileLock(path, create=False)
    except OSError as error:
        raise SlicewiseError(f"{str(path)!r} cannot be locked: {error.strerror}") from None
    except InUseError:
        holders = _lock_holders(path)
        # Any user can lock a readable file, but an agent runs as root or as this user.
        agents = [pid for pid in holders if _process_owner(pid) in (0, os.geteuid())]
        if agents or not holders:
            raise held(path, agents[0] if agents else "") from None
        _log.warning("process %d holds %s and is not an agent of this node", holders[0], path)
        return None


def _lock_holders(path: Path) -> list[int]:
    """The processes that hold a lock on a file, as listed by the kernel."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    stat = path.stat()
    inode = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    rows = [line.split() for line in lines]
    return [int(row[4]) for row in rows if row[1] == "FLOCK" and row[5] == inode]


def _process_owner(pid: int) -> int:
    """The user id of a process; root if unknown."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0


def other_managers(ignored: Collection[str] = (), root: Path = Path("/")) -> list[str]:
    """Describe the MIG managers that run on this node, and how each was detected."""
    found: dict[str, str] = {}
    for name, evidence in (*_running(root), *_listening(root), *_enabled(root)):
        if name not in ignored:
            found.setdefault(name, f"{name} ({MANAGERS[name]}: {evidence})")
    return list(found.values())


def _running(root: Path) -> Iterator[tuple[str, str]]:
    folders = []
    with contextlib.suppress(OSError):
        folders = [path for path in (root / "proc").iterdir() if path.name.isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name)):
        comm, arguments = "", list[str]()
        with contextlib.suppress(OSError):
            comm = (folder / "comm").read_bytes().decode(errors="replace").strip()
        with contextlib.suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        # The command line of a script starts with its interpreter.
        programs = {os.path.basename(argument) for argument in arguments[:2]}  # noqa: PTH119
        for name in MANAGERS:
            if comm == name[:_COMM_LENGTH] or name in programs:
                yield name, f"process {folder.name}"


def _listening(root: Path) -> Iterator[tuple[str, str]]:
    for path, name in _SOCKETS.items():
        # os.path.exists is False where access is denied; the agent itself runs as root.
        if os.path.exists(root / path) and _accepts_connections(root / path):  # noqa: PTH110
            yield name, f"it listens on /{path}"


def _accepts_connections(path: Path) -> bool:
    """Whether a process listens on a socket; the file alone may be a leftover."""
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
        # The link may be dangling here and still be followed when the node starts.
        if os.path.lexists(root / path):
            yield name, f"its unit is enabled, /{path}"

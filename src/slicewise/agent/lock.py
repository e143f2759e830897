"""One agent a node: a lock on the agent's folder, and one on a file that all agents find."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import FileLock, InUseError, held

_log = logging.getLogger("slicewise.agent")


class NodeLock:
    """Holds the agent's folder and its node until they are released, or the process ends.

    ``node`` is a file that every agent of the node finds, whatever its folder: that of the boot
    id.
    """

    def __init__(self, folder: Path, node: Path) -> None:
        try:
            self._folder = _lock_folder(folder)
            try:
                self._node = _lock_node(node)
            except SlicewiseError:
                self._folder.release()
                raise
        except InUseError as error:
            raise SlicewiseError(f"an agent is already at work on this node: {error}") from None

    def release(self) -> None:
        """Let another agent have the node."""
        self._folder.release()
        if self._node is not None:
            self._node.release()


def _lock_folder(folder: Path) -> FileLock:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return FileLock(folder / "agent.lock")
    except OSError as error:
        raise SlicewiseError(
            f"{str(folder)!r} cannot be used: {error.strerror} (--state names another folder)"
        ) from None


def _lock_node(path: Path) -> FileLock | None:
    """The lock; None where a process has it that cannot be an agent, and so keeps none out."""
    try:
        return FileLock(path, create=False)
    except OSError as error:
        raise SlicewiseError(f"{str(path)!r} cannot be locked: {error.strerror}") from None
    except InUseError:
        holders = _holders(path)
        # Any user may lock a file they can read; only root, or we, could be another agent here.
        agents = [pid for pid in holders if _owner(pid) in (0, os.geteuid())]
        if agents or not holders:
            raise held(path, agents[0] if agents else "") from None
        _log.warning("process %d holds %s and is no agent of this node", holders[0], path)
        return None


def _holders(path: Path) -> list[int]:
    """The processes that have locked a file, as far as the kernel lists them."""
    rows: list[str] = []
    with contextlib.suppress(OSError):
        rows = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    about = path.stat()
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    found = [row.split() for row in rows]
    return [int(words[4]) for words in found if words[1] == "FLOCK" and words[5] == place]


def _owner(pid: int) -> int:
    """The user whose process that is; root where it cannot be told."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0

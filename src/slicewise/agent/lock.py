"""One agent a node: locks of the operating system, gone when the process is that holds them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")


class NodeLock:
    """Holds the agent's folder and its node until it is let go, or the process ends in any way.

    ``node`` is a file that every agent of the node finds, whatever its folder: that of the boot
    id. It is locked, never written.
    """

    def __init__(self, folder: Path, node: Path) -> None:
        self._files = [_lock_folder(folder)]
        try:
            self._files.append(_lock_node(node))
        except SlicewiseError:
            self.release()
            raise

    def release(self) -> None:
        """Let the node go."""
        for file in self._files:
            os.close(file)


def _lock_folder(folder: Path) -> int:
    path = folder / "agent.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SlicewiseError(
            f"{str(folder)!r} cannot be used: {error.strerror} (--state names another folder)"
        ) from None
    if not _lock(file, path):
        holder = os.read(file, 32).decode("ascii", "replace").strip()
        os.close(file)
        raise _taken(holder, path)
    # For people only: the lock is what counts, so an old number, or none, is no harm.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _lock_node(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SlicewiseError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if not _lock(file, path):
        holders = _holders(file)
        # Anybody may lock a file they can read; only root, or we, could be another agent here.
        agents = [pid for pid in holders if _owner(pid) in (0, os.geteuid())]
        if agents or not holders:
            os.close(file)
            raise _taken(str(agents[0]) if agents else "", path)
        _log.warning("process %d holds %s and is no agent of this node", holders[0], path)
    return file


def _lock(file: int, path: Path) -> bool:
    """Lock an open file; False where somebody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        os.close(file)
        raise SlicewiseError(f"{str(path)!r} cannot be locked: {error.strerror}") from None
    return True


def _taken(holder: str, path: Path) -> SlicewiseError:
    who = f"process {holder}" if holder else "another process"
    return SlicewiseError(f"an agent is already at work on this node: {who} holds {str(path)!r}")


def _holders(file: int) -> list[int]:
    """The processes that have locked a file, as far as the kernel lists them."""
    about = os.fstat(file)
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    rows: list[str] = []
    with contextlib.suppress(OSError):
        rows = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    found = [row.split() for row in rows]
    return [
        int(words[4])
        for words in found
        if words[1] == "FLOCK" and words[5] == f"{device}:{about.st_ino}"
    ]


def _owner(pid: int) -> int:
    """Whose process that is; root's where it cannot be told."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return 0

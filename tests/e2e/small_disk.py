"""A small disk of the tests' own, which they may fill."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.server import Server

_FILL = 1 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A disk of 48 MiB that one process keeps: it is there for those who join that process.

    The process lives for as long as this one holds its input, so that nothing stays behind
    whatever happens.
    """

    keeper: int
    folder: Path

    @property
    def view(self) -> Path:
        """Where it is for everybody else."""
        return Path(f"/proc/{self.keeper}/root{self.folder}")

    def put(self, server: Server) -> None:
        """Let a server have its data on it."""
        server.prefix = ["nsenter", "--target", str(self.keeper), "--mount", "--"]
        server.there, server.data = self.folder / "data", self.view / "data"


def fill(disk: SmallDisk) -> None:
    """Leave no room on a disk."""
    with (disk.view / "ballast").open("ab", buffering=0) as ballast:
        size = _FILL
        while size:
            try:
                ballast.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2

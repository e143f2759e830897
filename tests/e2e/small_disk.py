"""A small disk that tests may fill."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.server import Server

_FILL = 1 << 20


@dataclass(frozen=True)
class SmallDisk:
    """A tmpfs of 48 MiB in the mount namespace of one process.

    The process ends when its standard input closes, so the mount never outlives the test run.
    """

    keeper: int
    folder: Path

    @property
    def view(self) -> Path:
        """The disk's path for processes outside the namespace."""
        return Path(f"/proc/{self.keeper}/root{self.folder}")

    def put(self, server: Server) -> None:
        """Put the data folder of a server on the disk."""
        server.prefix = ["nsenter", "--target", str(self.keeper), "--mount", "--"]
        server.there, server.data = self.folder / "data", self.view / "data"


def fill(disk: SmallDisk) -> None:
    """Fill a disk completely."""
    with (disk.view / "ballast").open("ab", buffering=0) as ballast:
        size = _FILL
        while size:
            try:
                ballast.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2

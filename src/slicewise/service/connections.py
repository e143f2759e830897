"""A limit of open connections, at the cost of the client that has most of them."""

from __future__ import annotations

import resource
from typing import Protocol

from slicewise.service.addresses import block_of

SPARE_FILES = 128
"""File descriptors for everything that is no connection: the database, logs, listeners."""


class Connection(Protocol):
    """What is known of an open connection."""

    @property
    def idle(self) -> bool:
        """Whether no request on it is being answered."""

    def cut(self) -> None:
        """Close it at once."""


class Connections:
    """Keeps the connections by client, so that one client cannot take them all.

    When there are too many, the client with the most loses one: its oldest that is idle, or else
    its newest. A client that opens thousands of connections so closes its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_client: dict[str, dict[Connection, None]] = {}
        """In the order in which they were opened."""
        self.open = 0
        self.cut = 0
        """How many had to be closed."""

    def enter(self, connection: Connection, address: str) -> None:
        """A connection was opened."""
        self._by_client.setdefault(block_of(address), {})[connection] = None
        self.open += 1
        if self.open > self._most:
            self._cut_one()

    def leave(self, connection: Connection, address: str) -> None:
        """A connection was closed."""
        client = block_of(address)
        own = self._by_client[client]
        del own[connection]
        self.open -= 1
        if not own:
            del self._by_client[client]

    def _cut_one(self) -> None:
        own = max(self._by_client.values(), key=len)
        idle = (connection for connection in own if connection.idle)
        self.cut += 1
        next(idle, next(reversed(own))).cut()


def room_for(connections: int) -> int:
    """How many connections there can be, once as many files may be open as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft - SPARE_FILES)

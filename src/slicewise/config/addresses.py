"""Client addresses: the peer of a connection, or the address that a trusted proxy forwards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

Network = IPv4Network | IPv6Network
_Address = IPv4Address | IPv6Address
_Scope = Mapping[str, Any]
"""The scope of an ASGI request."""

X_FORWARDED_FOR, FORWARDED = "x-forwarded-for", "forwarded"
_MAX_HOPS = 16
"""No chain of proxies is longer than this."""
_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*("[^"]*"|[^;\s]+)\s*(?=;|$)', re.IGNORECASE)
_PORT = re.compile(r"^(?:\[([0-9A-Fa-f:.%\w]+)\]|([0-9.]+))(?::[0-9]{1,5})?$")


class Addresses:
    """Finds the client addresses of requests.

    Every proxy appends the address of its peer to the forwarding header. The header is therefore
    read from right to left, and the first address that is not a trusted proxy is the client. What
    is left of it was written by the client and proves nothing.
    """

    def __init__(self, trusted: Iterable[Network], header: str = X_FORWARDED_FOR) -> None:
        self._trusted = tuple(trusted)
        self._header = header.encode()

    def of(self, scope: _Scope) -> str:
        """The client's address; empty if there is none, as on a Unix socket."""
        client = scope.get("client")
        peer: str = client[0] if client else ""
        if not self._trusted:
            return _plain(peer)
        address = parsed(peer)
        for hop in self._hops(scope):
            if address is None or not self._trusts(address):
                break
            before = parsed(hop)
            if before is None:
                break  # not an address: count the proxy that forwarded it as the client
            address = before
        return "" if address is None else str(address)

    def _trusts(self, address: _Address) -> bool:
        return any(address in network for network in self._trusted)

    def _hops(self, scope: _Scope) -> Iterator[str]:
        lines = [value for name, value in scope["headers"] if name == self._header]
        text = b",".join(lines).decode("latin-1")
        # Only a client writes a comma in quotes, and that is left of what the proxies wrote.
        hops = text.rsplit(",", _MAX_HOPS)[-_MAX_HOPS:] if text else []
        for hop in reversed(hops):
            yield _for(hop) if self._header == FORWARDED.encode() else hop


def _for(element: str) -> str:
    found = _FOR.search(element)
    return found[1].strip('"') if found else ""


@lru_cache(maxsize=4096)
def _plain(peer: str) -> str:
    address = parsed(peer)
    return "" if address is None else str(address)


def parsed(text: str) -> _Address | None:
    """Parse an address with or without a port; an IPv4-mapped address becomes IPv4."""
    text = text.strip()
    found = _PORT.fullmatch(text)
    if found:
        text = found[1] or found[2]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.scope_id is not None:
            return IPv6Address(int(address))
    return address


@lru_cache(maxsize=4096)
def block_of(address: str) -> str:
    """The block that counts as one client: an IPv4 address, or the /64 of an IPv6 address."""
    known = parsed(address)
    if isinstance(known, IPv6Address):
        return str(ip_network((int(known) >> 64 << 64, 64)))
    return address


def network(text: str) -> Network:
    """Parse a network such as 10.0.0.0/8, or a single address."""
    try:
        return ip_network(text.strip())
    except ValueError:
        raise ValueError("must be networks such as 10.0.0.0/8 or ::1") from None

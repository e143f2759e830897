"""Client addresses: the peer, or the address from a trusted proxy; never from the client."""

from __future__ import annotations

import pytest

from slicewise.config.addresses import FORWARDED, X_FORWARDED_FOR, Addresses, block_of, network

TRUSTED = [network("10.0.0.0/8"), network("::1")]


def seen(peer: str | None, *lines: str, header: str = X_FORWARDED_FOR, trusted: bool = True) -> str:
    """The client address of a request."""
    scope = {
        "client": None if peer is None else (peer, 1234),
        "headers": [(header.encode(), line.encode("latin-1")) for line in lines],
    }
    return Addresses(TRUSTED if trusted else [], header).of(scope)


def test_a_header_from_an_untrusted_peer_is_ignored() -> None:
    assert seen("192.0.2.1", "198.51.100.1") == "192.0.2.1"
    assert seen("10.0.0.1", "198.51.100.1", trusted=False) == "10.0.0.1"
    assert seen(None, "198.51.100.1") == seen(None, trusted=False) == ""


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        ((), "10.0.0.1"),
        (("",), "10.0.0.1"),
        (("192.0.2.7",), "192.0.2.7"),
        (("8.8.8.8, 192.0.2.7",), "192.0.2.7"),
        (("8.8.8.8, 192.0.2.7, 10.9.9.9",), "192.0.2.7"),
        (("8.8.8.8", "192.0.2.7"), "192.0.2.7"),  # a second line continues the first
        (("10.1.1.1, 10.2.2.2",), "10.1.1.1"),
        (("192.0.2.7, nonsense",), "10.0.0.1"),
        (("192.0.2.7:4711",), "192.0.2.7"),
        (("[2001:db8::7]:4711",), "2001:db8::7"),
        (("2001:db8::7",), "2001:db8::7"),
        (("::ffff:192.0.2.7",), "192.0.2.7"),
        (("fe80::7%eth0",), "fe80::7"),
        (("192.0.2.7," + "10.0.0.2," * 400 + "10.0.0.3",), "10.0.0.2"),
    ],
)
def test_the_rightmost_untrusted_address_is_the_client(lines: tuple[str, ...], client: str) -> None:
    assert seen("10.0.0.1", *lines) == client


@pytest.mark.parametrize(
    ("line", "client"),
    [
        ("for=192.0.2.7", "192.0.2.7"),
        ('For="[2001:db8::7]:4711";proto=https', "2001:db8::7"),
        ("proto=https;for=192.0.2.7;by=10.0.0.1", "192.0.2.7"),
        ('for="8.8.8.8, for=10.0.0.9, for=192.0.2.7', "192.0.2.7"),
        ("for=unknown", "10.0.0.1"),
        ("for=_hidden, for=10.0.0.5", "10.0.0.5"),
        ("proto=https", "10.0.0.1"),
    ],
)
def test_the_forwarded_header_of_rfc_7239(line: str, client: str) -> None:
    assert seen("10.0.0.1", line, header=FORWARDED) == client


def test_only_the_configured_header_counts() -> None:
    scope = {"client": ("10.0.0.1", 1), "headers": [(b"forwarded", b"for=8.8.8.8")]}
    assert Addresses(TRUSTED).of(scope) == "10.0.0.1"


def test_a_client_is_one_ipv4_address_or_one_ipv6_64() -> None:
    assert block_of("192.0.2.7") == "192.0.2.7"
    assert block_of("2001:db8::7") == block_of("2001:db8::ffff:7") == "2001:db8::/64"
    assert block_of("2001:db8:0:1::7") != block_of("2001:db8::7")
    assert block_of("") == ""

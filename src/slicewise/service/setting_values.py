"""What a setting is, and how a value given for one is read.

Every reader takes a value as it stands in a TOML file, or as text from the environment or a flag,
and raises ValueError with what the value must be. msgspec's constraints would check the same, but
their messages name one bound and a Python type where an operator wants the range and the value.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from slicewise.policies.registry import policy_class
from slicewise.service.addresses import Network, network

ENVIRONMENT = "SLICEWISE_"
"""How the names of variables begin."""


class Key(NamedTuple):
    """A key of the settings."""

    name: str
    """As in the file, with dots for its tables."""
    parse: Callable[[object], Any]
    doc: str
    secret: bool = False
    """Whether its value must not be repeated."""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENVIRONMENT + self.name.replace(".", "_").upper()


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def as_text(value: object) -> str:
    """Text in one line."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("must be text in one line")
    return value


def as_path(value: object) -> Path:
    """The path of a file or a folder."""
    return value if isinstance(value, Path) else Path(as_text(value))


def as_paths(value: object) -> tuple[Path, ...]:
    """Paths: a list, or text with commas between them."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        raise ValueError("must be a list of paths")
    return tuple(map(as_path, value))


def as_networks(value: object) -> tuple[Network, ...]:
    """Networks: a list, or text with commas between them."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        raise ValueError("must be a list of networks such as 10.0.0.0/8")
    return tuple(network(as_text(one)) for one in value)


def as_flag(value: object) -> bool:
    """True or false, in a usual way of writing it."""
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.casefold() in known:
        return known[value.casefold()]
    raise ValueError("must be true or false")


def whole_number(least: int, most: int) -> Callable[[object], int]:
    """A reader of whole numbers in a range; digits may be grouped by underscores."""

    def parse(value: object) -> int:
        text = value.replace("_", "") if isinstance(value, str) else value
        if isinstance(text, str) and text.removeprefix("-").isdecimal():
            text = int(text)
        if isinstance(text, bool) or not isinstance(text, int) or not least <= text <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return text

    return parse


def number_between(least: float, most: float) -> Callable[[object], float]:
    """A reader of numbers in a range."""

    def parse(value: object) -> float:
        problem = ValueError(f"must be a number from {least:g} to {most:g}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise problem
        try:
            number = float(value)
        except ValueError:
            raise problem from None
        if not least <= number <= most:
            raise problem
        return number

    return parse


def as_retention(value: object) -> float:
    """Days that something is kept: none, which means for ever, or at least one."""
    days = number_between(0, 36_500)(value)
    if 0 < days < 1:
        raise ValueError("must be 0 or a number from 1 to 36500")
    return days


def one_of(*known: str) -> Callable[[object], str]:
    """A reader of words that are known."""

    def parse(value: object) -> str:
        if value not in known:
            raise ValueError(f"must be {' or '.join(known)}")
        return str(value)

    return parse


def as_address(value: object) -> Address:
    """A host and a port."""
    host, colon, port = as_text(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8080")
    return Address(host, int(port))


def as_url(value: object) -> str:
    """The URL of a service."""
    text = as_text(value)
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be a URL, such as https://slicewise-1.example:8443")
    return text


def as_policy(value: object) -> str:
    """The name of a policy; an unknown one is refused, with the near ones."""
    name = as_text(value)
    policy_class(name)
    return name

"""Reading the values of settings: TOML values from a file, text from the environment or a flag.

`reader` returns the function that reads values of an annotated type. Numbers, booleans and choices
are converted by msgspec, with messages for operators in place of its own. Other types are annotated
with a function of this module. All of them raise ValueError with the values that are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec.inspect import BoolType, FloatType, IntType, type_info

from slicewise.config.addresses import Network, network
from slicewise.policies.registry import policy_class

_BOOLEANS = {"yes": True, "no": False}
"""Text for booleans that msgspec does not know."""
ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""The signature algorithms that a provider may use: all with public keys."""
_RETENTION = Annotated[float, msgspec.Meta(ge=0, le=36_500)]


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def reader(kind: Any) -> Callable[[object], Any]:
    """The function a type is annotated with, or the conversion to a number, boolean or choice."""
    functions = (note for note in getattr(kind, "__metadata__", ()) if callable(note))
    return next(functions, partial(_convert, kind))


def _convert(kind: Any, value: object) -> Any:
    try:
        if not isinstance(value, str):
            return msgspec.convert(value, kind)
        text = _BOOLEANS.get(value.casefold(), value) if kind is bool else value
        if isinstance(type_info(kind), IntType | FloatType):
            text = value.replace("_", "")
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise ValueError(f"must be {_allowed(kind)}") from None


def _allowed(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    match type_info(kind):
        case IntType(ge=least, le=most):
            return f"a whole number from {least} to {most}"
        case FloatType(ge=least, le=most):
            return f"a number from {least:g} to {most:g}"
        case BoolType():
            return "true or false"
    raise TypeError(f"no reader for {kind}")


def as_text(value: object) -> str:
    """Text in one line."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("must be text in one line")
    return value


def as_path(value: object) -> Path:
    """The path of a file or a folder."""
    return value if isinstance(value, Path) else Path(as_text(value))


def as_paths(value: object) -> tuple[Path, ...]:
    """A list of paths, or text with commas between them."""
    return tuple(map(as_path, _items(value, "paths")))


def as_texts(value: object) -> tuple[str, ...]:
    """A list of texts, or text with commas between them."""
    found = tuple(as_text(one).strip() for one in _items(value, "texts"))
    if not found or not all(found):
        raise ValueError("must be a list of texts")
    return found


def as_algorithms(value: object) -> tuple[str, ...]:
    """A list of signature algorithms with public keys."""
    found = as_texts(value)
    if not set(found) <= set(ALGORITHMS):
        raise ValueError(f"must be some of {', '.join(ALGORITHMS)}")
    return found


def as_networks(value: object) -> tuple[Network, ...]:
    """A list of networks, or text with commas between them."""
    return tuple(network(as_text(one)) for one in _items(value, "networks such as 10.0.0.0/8"))


def _items(value: object, what: str) -> list[object]:
    if isinstance(value, str):
        return [*value.split(",")]
    if not isinstance(value, list):
        raise ValueError(f"must be a list of {what}")
    return value


def as_retention(value: object) -> float:
    """A number of days: 0 for no limit, or at least one."""
    days: float = _convert(_RETENTION, value)
    if 0 < days < 1:
        raise ValueError("must be 0 or a number from 1 to 36500")
    return days


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


def as_provider_url(value: object) -> str:
    """The URL of an identity provider: https, or on this machine."""
    text = as_text(value)
    url = urlsplit(text)
    if not url.hostname or url.fragment or url.query or url.username is not None:
        raise ValueError("must be a URL such as https://login.example")
    if url.scheme != "https" and not (url.scheme == "http" and Address(url.hostname, 0).loopback):
        raise ValueError("must be an https URL: keys that arrive in the clear prove nothing")
    return text


def as_policy(value: object) -> str:
    """The name of a policy; UnknownNameError with similar names if it is not known."""
    name = as_text(value)
    policy_class(name)
    return name

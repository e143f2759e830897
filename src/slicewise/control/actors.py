"""The actor of a command: the bearer of a token, or a part of the service.

A token may be revoked or expire while its request is read from a slow client, or waits for the
commit loop. A command therefore carries the token, and the handler checks it again when it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slicewise.control.answers import RefusedError
from slicewise.journal.entries import Seconds, TokenIssued

Failure = Literal["missing", "malformed", "unknown", "expired"]
"""Why a request is not authenticated."""


class UnauthenticatedError(RefusedError):
    """Raised for a request without a valid token."""

    def __init__(self, why: Failure, detail: str) -> None:
        super().__init__(401, detail)
        self.why: Failure = why


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor of a command; made by ``bearer`` and ``internal``."""

    name: str
    """The name in the journal: a token's id, or a part of the service."""
    token: TokenIssued | None
    """The token that gives its rights; None for the service itself, which is trusted."""
    origin: str = ""
    """The client's network address."""


def bearer(token: TokenIssued, origin: str = "") -> Actor:
    """Return the bearer of a token, which is checked again when the command is decided."""
    return Actor(token.token, token, origin)


def internal(name: str, origin: str = "") -> Actor:
    """Return a part of the service, or a peer that was authenticated without a token."""
    return Actor(name, None, origin)


def expired(token: TokenIssued, now: Seconds) -> bool:
    """Return whether a token has expired."""
    return token.expires is not None and token.expires <= now


def check(tokens: Mapping[str, TokenIssued], token: TokenIssued, now: Seconds) -> TokenIssued:
    """Return the current version of a token; refuse it unless it is valid with the same rights."""
    current = tokens.get(token.token)
    if current is not token and (current is None or _rights(current) != _rights(token)):
        raise unknown_token()
    if expired(current, now):
        raise UnauthenticatedError("expired", "this token has expired")
    return current


def _rights(token: TokenIssued) -> tuple[object, ...]:
    return token.digest, token.role, token.tenant, token.node


def unknown_token() -> UnauthenticatedError:
    """Return the refusal of a token that does not exist, or was revoked."""
    return UnauthenticatedError("unknown", "unknown token; it may have been revoked")

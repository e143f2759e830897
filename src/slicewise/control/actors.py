"""The actor of a command: the bearer of a token, another identity, or a part of the service.

A token may be revoked or expire while its request is read from a slow client, or waits for the
commit loop. A command therefore carries the token, and the handler checks it again when it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slicewise.control.answers import RefusedError
from slicewise.journal.entries import Seconds, TokenIssued

if TYPE_CHECKING:
    from slicewise.control.identities import Identity
    from slicewise.control.state import State

Failure = Literal[
    "missing", "malformed", "unknown", "expired", "untrusted", "unmapped", "unavailable"
]
"""Why a request is not authenticated."""


class UnauthenticatedError(RefusedError):
    """Raised for a request without a valid token, or with an identity that has no rights."""

    def __init__(
        self, why: Failure, detail: str, status: int = 401, retry_after: Seconds | None = None
    ) -> None:
        super().__init__(status, detail, retry_after=retry_after)
        self.why: Failure = why


@dataclass(frozen=True, slots=True)
class Actor:
    """The actor of a command; made by ``bearer``, ``identified`` and ``internal``."""

    name: str
    """The name in the journal: a token's id, or a part of the service."""
    token: TokenIssued | None
    """The token that gives its rights; None for the service itself, which is trusted."""
    origin: str = ""
    """The client's network address."""
    identity: Identity | None = None
    """What the token stands for, if it is not one of ours."""

    def check(self, state: State, now: Seconds) -> None:
        """Refuse an actor that is no longer valid, or has other rights."""
        if self.token is None:
            return
        if self.identity is None:
            check(state.tokens, self.token, now)
        else:
            self.identity.check(state, self.token, now)


def bearer(token: TokenIssued, origin: str = "") -> Actor:
    """Return the bearer of a token, which is checked again when the command is decided."""
    return Actor(token.token, token, origin)


def identified(token: TokenIssued, identity: Identity, origin: str = "") -> Actor:
    """Return an identity with the rights in ``token``, which are checked again like a token."""
    return Actor(token.token, token, origin, identity)


def internal(name: str, origin: str = "") -> Actor:
    """Return a part of the service, or a peer that was authenticated without a token."""
    return Actor(name, None, origin)


def expired(token: TokenIssued, now: Seconds) -> bool:
    """Return whether a token has expired."""
    return token.expires is not None and token.expires <= now


def check(tokens: Mapping[str, TokenIssued], token: TokenIssued, now: Seconds) -> TokenIssued:
    """Return the current version of a token; refuse it unless it is valid with the same rights."""
    current = tokens.get(token.token)
    if current is not token and (current is None or not same_rights(current, token)):
        raise unknown_token()
    if expired(current, now):
        raise UnauthenticatedError("expired", "this token has expired")
    return current


def same_rights(one: TokenIssued, other: TokenIssued) -> bool:
    """Return whether two tokens have the same secret and give the same rights."""
    return _rights(one) == _rights(other)


def _rights(token: TokenIssued) -> tuple[object, ...]:
    return token.digest, token.role, token.tenant, token.node


def unknown_token() -> UnauthenticatedError:
    """Return the refusal of a token that does not exist, or was revoked."""
    return UnauthenticatedError("unknown", "unknown token; it may have been revoked")

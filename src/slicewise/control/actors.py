"""Who has something decided: the bearer of a token, or a part of the service itself.

A request is read for as long as its client takes to send it, and waits for the writer after that.
Its token may be revoked or expire meanwhile. So a command brings the token along, and the desk
checks it once more, in the state in which it decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slicewise.control.answers import RefusedError
from slicewise.control.entries import Seconds, TokenIssued

Failure = Literal["missing", "malformed", "unknown", "expired"]
"""Why a request is not authenticated."""


class UnauthenticatedError(RefusedError):
    """A request without a token that is valid now."""

    def __init__(self, why: Failure, detail: str) -> None:
        super().__init__(401, detail)
        self.why: Failure = why


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks: ``bearer`` and ``internal`` make one."""

    name: str
    """What the journal calls them: a token's id, or the part of the service."""
    token: TokenIssued | None
    """What they may do is what this token says; None is the service itself, which is trusted."""
    origin: str = ""
    """The network address from which they ask."""


def bearer(token: TokenIssued, origin: str = "") -> Actor:
    """The bearer of a token, who is checked again when the command is decided."""
    return Actor(token.token, token, origin)


def internal(name: str, origin: str = "") -> Actor:
    """A part of the service, or a peer that has proved who it is without a token."""
    return Actor(name, None, origin)


def expired(token: TokenIssued, now: Seconds) -> bool:
    """Whether a token is not valid any more at this moment."""
    return token.expires is not None and token.expires <= now


def check(tokens: Mapping[str, TokenIssued], token: TokenIssued, now: Seconds) -> TokenIssued:
    """The token as it stands now; refused unless it is valid and still means the same."""
    now_known = tokens.get(token.token)
    if now_known is not token and (now_known is None or _rights(now_known) != _rights(token)):
        raise unknown_token()
    if expired(now_known, now):
        raise UnauthenticatedError("expired", "this token has expired")
    return now_known


def _rights(token: TokenIssued) -> tuple[object, ...]:
    return token.digest, token.role, token.tenant, token.node


def unknown_token() -> UnauthenticatedError:
    """The refusal of a token that does not exist, or not any more."""
    return UnauthenticatedError("unknown", "this token is not known; it may have been revoked")

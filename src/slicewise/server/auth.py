"""Authentication: tokens, roles, what a caller may see, and failed attempts."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from slicewise.config.addresses import block_of
from slicewise.config.logs import logger
from slicewise.control.actors import (
    Actor,
    Failure,
    UnauthenticatedError,
    bearer,
    check,
    expired,
    identified,
    internal,
    unknown_token,
)
from slicewise.control.answers import RefusedError
from slicewise.control.identities import Identity
from slicewise.control.state import State
from slicewise.journal.entries import Role, Seconds, TenantRef, TokenIssued
from slicewise.server.certificates import Certificate
from slicewise.server.limits import RateLimits

log = logger("slicewise.authentication")

DEFAULT_TENANT = "default"
"""The tenant of a request that names none, from a token without a tenant."""

EVERYONE = frozenset(Role)
STAFF = frozenset({Role.ADMIN, Role.OPERATOR})
ADMIN = frozenset({Role.ADMIN})
AGENT = frozenset({Role.AGENT})
USERS = STAFF | {Role.TENANT}
LOOKERS = USERS | {Role.READ_ONLY}
WATCHERS = STAFF | {Role.READ_ONLY}

DELAY_SECONDS = 1.0
"""Delay of the answer to a failed authentication beyond the rate limit."""
_MAX_DELAYED = 512
"""Answers delayed at the same time; further ones are sent immediately."""
_MAX_ADDRESSES = 1000
"""Clients counted separately between two summaries; the others are counted together."""
_MAX_LINES = 20
"""Log lines of a summary, for the clients with the most failures."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated sender of a request: the bearer of a token or of a certificate."""

    token: TokenIssued
    origin: str = ""
    """The network address of the client."""
    certified: bool = False
    """Whether a certificate authenticated the caller: it has no token that could be revoked."""
    identity: Identity | None = None
    """What ``token`` stands for, if it is not one of ours."""

    @property
    def actor(self) -> Actor:
        """The actor of the caller's commands."""
        if self.identity is not None:
            return identified(self.token, self.identity, self.origin)
        if self.certified:
            return internal(self.token.token, self.origin)
        return bearer(self.token, self.origin)

    def check(self, state: State, now: Seconds) -> TokenIssued:
        """Return the current token; refuse it if it was revoked or has expired."""
        if self.identity is not None:
            return self.identity.check(state, self.token, now)
        return self.token if self.certified else check(state.tokens, self.token, now)

    @property
    def id(self) -> str:
        """The token's id, which is the actor in the journal."""
        return self.token.token

    @property
    def role(self) -> Role:
        """The role of the token."""
        return self.token.role

    @property
    def tenant(self) -> TenantRef | None:
        """The tenant that the token belongs to; None if it belongs to none."""
        return self.token.tenant

    @property
    def share(self) -> tuple[str, str]:
        """Key of turns and limits: the tenant, or the token of a caller without one."""
        tenant = self.token.tenant
        return ("token", self.token.token) if tenant is None else ("tenant", tenant.id)

    def sees(self, tenant: TenantRef) -> bool:
        """Whether the caller may see the resources of this tenant."""
        return self.token.tenant is None or self.token.tenant == tenant

    @property
    def sees_all(self) -> bool:
        """Whether the caller may see the resources of all tenants."""
        return self.token.tenant is None

    def must_see_all(self) -> None:
        """Refuse a caller that sees a single tenant only."""
        if self.token.tenant is not None:
            raise RefusedError(403, "this needs a token that is not limited to one tenant")

    def acts_for(self, named: str | None) -> str:
        """Return the name of the tenant that a request is for, given the one it names."""
        own = self.token.tenant
        if own is None:
            return named or DEFAULT_TENANT
        if named not in (None, own.name):
            raise RefusedError(403, f"this token acts for tenant {own.name!r} only", field="tenant")
        return own.name


ANONYMOUS = Caller(TokenIssued("", "", Role.READ_ONLY, TenantRef("", "")))
"""The caller of routes without a token. It belongs to a tenant without a name, and sees nothing."""

PEER = "slicewise.peer"
"""Key of the ASGI scope: the client's certificate, if there is a trusted one."""


def certified(peer: Certificate | None, name: str, origin: str = "") -> Caller | None:
    """The caller with a certificate of this common name, with the role of an operator."""
    if peer is None or peer.common_name != name:
        return None
    return Caller(TokenIssued("extender", "", Role.OPERATOR, note=name), origin, certified=True)


def digest_of(secret: str) -> str:
    """The stored digest of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    """A random secret of 256 bits."""
    return f"sw_{secrets.token_urlsafe(32)}"


def authenticate(state: State, header: bytes | None, now: Seconds, origin: str = "") -> Caller:
    """Return the bearer of the token in an Authorization header.

    Only digests are compared, so the time this takes reveals nothing about secrets.
    """
    if header is None:
        raise UnauthenticatedError(
            "missing", "a token is required: send Authorization: Bearer TOKEN"
        )
    if header[:7].lower() != b"bearer ":
        raise UnauthenticatedError(
            "malformed", "the Authorization header must have the form Bearer TOKEN"
        )
    token = state.tokens_by_digest.get(hashlib.sha256(header[7:].strip()).hexdigest())
    if token is None:
        raise unknown_token()
    if expired(token, now):
        raise UnauthenticatedError("expired", "this token has expired")
    return Caller(token, origin)


class AuthFailures:
    """Counts failed authentications, logs summaries, and delays answers beyond the rate limit.

    A valid token is never delayed, whatever other clients at the same address send.
    """

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self.on_failure: Callable[[Failure], None] = lambda reason: None
        self._by_address: dict[str, Counter[Failure]] = {}
        self._others = 0
        self._delayed = 0

    async def count(self, address: str, failure: UnauthenticatedError) -> RefusedError:
        """Count a failure; return the refusal to send, after a delay beyond the rate limit."""
        self.on_failure(failure.why)
        block = block_of(address)
        counts = self._by_address.get(block)
        if counts is None and len(self._by_address) < _MAX_ADDRESSES:
            counts = self._by_address[block] = Counter()
        if counts is None:
            self._others += 1
        else:
            counts[failure.why] += 1
        wait = self._limits.count_stranger(block)
        if not wait:
            return failure
        if self._delayed < _MAX_DELAYED:
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_SECONDS)
            finally:
                self._delayed -= 1
        return RefusedError(
            429, "too many requests without a valid token from this address", retry_after=wait
        )

    def summarize(self) -> None:
        """Log the failures since the last summary, by client."""
        counted, self._by_address = self._by_address, {}
        others, self._others = self._others, 0
        clients = sorted(counted.items(), key=lambda item: -item[1].total())
        for address, reasons in clients[:_MAX_LINES]:
            log.warning(
                "authentication failed",
                address=address or "unknown",
                count=reasons.total(),
                **{str(why): number for why, number in reasons.items()},
            )
        others += sum(reasons.total() for _, reasons in clients[_MAX_LINES:])
        if others:
            log.warning("authentication failed", address="others", count=others)

"""Who is asking: tokens, roles, and what they may see."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from slicewise.control.actors import (
    Actor,
    UnauthenticatedError,
    bearer,
    check,
    expired,
    internal,
    unknown_token,
)
from slicewise.control.answers import RefusedError
from slicewise.control.entries import Role, Seconds, TokenIssued
from slicewise.control.state import State

DEFAULT_TENANT = "default"
"""For whom those act who belong to no tenant and name none."""

EVERYONE = frozenset(Role)
STAFF = frozenset({Role.ADMIN, Role.OPERATOR})
ADMIN = frozenset({Role.ADMIN})
AGENT = frozenset({Role.AGENT})
USERS = STAFF | {Role.TENANT}
LOOKERS = USERS | {Role.READ_ONLY}
WATCHERS = STAFF | {Role.READ_ONLY}


@dataclass(frozen=True, slots=True)
class Caller:
    """The bearer of a token, or of a certificate that stands for one."""

    token: TokenIssued
    origin: str = ""
    """The network address from which they ask."""
    certified: bool = False
    """Whether a certificate says who they are: then there is no token that could be revoked."""

    @property
    def actor(self) -> Actor:
        """Who has it decided when they have something changed."""
        if self.certified:
            return internal(self.token.token, self.origin)
        return bearer(self.token, self.origin)

    def check(self, state: State, now: Seconds) -> TokenIssued:
        """The token as it stands now; refused unless it is still valid."""
        return self.token if self.certified else check(state.tokens, self.token, now)

    @property
    def id(self) -> str:
        """The token's id: what the journal calls whoever asked."""
        return self.token.token

    @property
    def role(self) -> Role:
        """What they are."""
        return self.token.role

    @property
    def tenant(self) -> str | None:
        """The one tenant they belong to, if so."""
        return self.token.tenant

    @property
    def share(self) -> tuple[str, str]:
        """With whom they share turns and limits: all of one tenant, or all who bear a token."""
        tenant = self.token.tenant
        return ("token", self.token.token) if tenant is None else ("tenant", tenant)

    def sees(self, tenant: str) -> bool:
        """Whether a tenant's things exist for them."""
        return self.token.tenant is None or self.token.tenant == tenant

    @property
    def sees_all(self) -> bool:
        """Whether every tenant's things exist for them."""
        return self.token.tenant is None

    def must_see_all(self) -> None:
        """Refuse those to whom other tenants' things do not exist."""
        if self.token.tenant is not None:
            raise RefusedError(403, "this is for those who may see everything")

    def acts_for(self, named: str | None) -> str:
        """For whom a request is, given the tenant it names."""
        own = self.token.tenant
        if own is None:
            return named or DEFAULT_TENANT
        if named not in (None, own):
            raise RefusedError(403, f"this token speaks for tenant {own!r} only", field="tenant")
        return own


NOBODY = Caller(TokenIssued("", "", Role.READ_ONLY, ""))
"""Who asks where no token is needed: sees nobody's things."""


PEER = "slicewise.peer"
"""Where a request's scope has the name in the client's certificate."""


def certified(peer: object, name: str, origin: str = "") -> Caller | None:
    """A client that showed a certificate in this name; it may do what operators do."""
    if peer is None or peer != name:
        return None
    return Caller(TokenIssued("extender", "", Role.OPERATOR, note=name), origin, certified=True)


def digest_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_secret() -> str:
    """A secret nobody can guess."""
    return f"sw_{secrets.token_urlsafe(32)}"


def authenticate(state: State, header: bytes | None, now: Seconds, origin: str = "") -> Caller:
    """The bearer of the token in an Authorization header; refused unless it is a valid one.

    A secret is never compared, only the digest of it is looked up, so that the time this takes
    tells nothing about secrets.
    """
    if header is None:
        raise UnauthenticatedError(
            "missing", "this needs a token: send Authorization: Bearer TOKEN"
        )
    if header[:7].lower() != b"bearer ":
        raise UnauthenticatedError(
            "malformed", "the Authorization header must be Bearer and a token"
        )
    token = state.tokens_by_digest.get(hashlib.sha256(header[7:].strip()).hexdigest())
    if token is None:
        raise unknown_token()
    if expired(token, now):
        raise UnauthenticatedError("expired", "this token has expired")
    return Caller(token, origin)

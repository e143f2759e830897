"""Callers without a token of ours, known by claims of an identity provider or a certificate.

Rules map the claims to rights. They may change while a request waits, so an identity is checked
again when its command is decided, against the rules and tenants of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from slicewise.control.actors import UnauthenticatedError, expired, same_rights
from slicewise.control.state import State
from slicewise.journal.entries import Role, Seconds, TokenIssued

KINDS = ("oidc", "cert")
"""What identities are proven by: a token of the provider, or a certificate."""
Claims = Mapping[str, object]
Value = str | bool | int
"""What a condition compares a claim with. Text may contain one ``*``."""

ANY = "*"
"""In a condition: any text. In the tenant or node of a rule: what it stood for."""


def role_of(actor: str) -> Role | None:
    """The role in which an identity acted, according to its name in the journal."""
    kind, _, rest = actor.partition(":")
    with suppress(ValueError):
        return Role(rest.partition(":")[0]) if kind in KINDS else None
    return None


class Match(NamedTuple):
    """The rights that a rule gives to certain claims."""

    role: Role
    tenant: str | None
    node: str | None


@dataclass(frozen=True, slots=True)
class Rule:
    """Gives rights to claims that meet all conditions, or refuses them."""

    where: tuple[tuple[str, Value], ...]
    """Claims and the values that they must have or, if they are lists, contain."""
    role: Role | None
    """None refuses the caller."""
    tenant: str | None = None
    node: str | None = None

    def matches(self, claims: Claims) -> bool:
        """Whether the claims meet all conditions."""
        return all(
            any(_meets(one, value) for one in _values(claims, name)) for name, value in self.where
        )

    def match(self, claims: Claims) -> Match | None:
        """The rights for claims that meet the conditions; None if they are refused."""
        if self.role is None:
            return None
        if ANY not in f"{self.tenant}{self.node}":
            return Match(self.role, self.tenant, self.node)
        found = {
            one[len(before) : len(one) - len(after)]
            for name, value in self.where
            if isinstance(value, str) and ANY in value
            for before, _, after in [value.partition(ANY)]
            for one in _values(claims, name)
            if isinstance(one, str) and _meets(one, value)
        }
        if len(found) != 1:
            return None  # several, such as two groups with tenants: none is preferred
        (text,) = found
        fill = (None if one is None else one.replace(ANY, text) for one in (self.tenant, self.node))
        return Match(self.role, *fill)


def _meets(claim: object, wanted: Value) -> bool:
    if not isinstance(wanted, str) or not isinstance(claim, str) or ANY not in wanted:
        return type(claim) is type(wanted) and claim == wanted
    before, _, after = wanted.partition(ANY)
    enough = len(claim) > len(before) + len(after)
    return enough and claim.startswith(before) and claim.endswith(after)


def _values(claims: Claims, name: str) -> Iterator[object]:
    """The values of a claim; a dot leads into a nested one (``realm_access.roles``)."""
    if name == "email" and claims.get("email_verified", True) is not True:
        return
    found: object = claims.get(name)
    if found is None and "." in name:
        found = claims
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, list | tuple):
        yield from found
    elif found is not None:
        yield found


class Rules:
    """The current rules. The first that matches decides; claims that none matches are refused."""

    def __init__(self, rules: tuple[Rule, ...] = ()) -> None:
        self.current = rules
        """Replaced as a whole when the rules change."""

    def match(self, claims: Claims) -> Match | None:
        """The rights of these claims; None if they have none."""
        rule = next((rule for rule in self.current if rule.matches(claims)), None)
        return None if rule is None else rule.match(claims)


class Identity:
    """A caller known by claims that a provider or a certificate proves, until a time."""

    def __init__(
        self,
        kind: str,
        subject: str,
        claims: Claims,
        rules: Rules,
        expires: Seconds,
        note: str = "",
        trusted: Callable[[], bool] = lambda: True,
    ) -> None:
        """``kind`` is one of KINDS. ``trusted`` says whether the proof still holds."""
        self.kind = kind
        self.subject = subject
        self.note = note
        self.expires = expires
        self._claims = claims
        self._rules = rules
        self._trusted = trusted
        self._matched: tuple[tuple[Rule, ...], Match | None] | None = None
        """The result of the rules that were last asked."""

    def token(self, state: State, now: Seconds) -> TokenIssued:
        """The present rights, in the form of a token; refused if there are none."""
        rules = self._rules.current
        if self._matched is None or self._matched[0] is not rules:
            self._matched = rules, self._rules.match(self._claims)
        match = self._matched[1]
        if match is None:
            raise UnauthenticatedError(
                "unmapped", f"{self._who} is known, but no rule gives it any rights", status=403
            )
        tenant = None
        if match.tenant is not None:
            known = state.tenants_by_name.get(match.tenant)
            if known is None:
                raise UnauthenticatedError(
                    "unmapped",
                    f"{self._who} belongs to tenant {match.tenant!r}, which does not exist",
                    status=403,
                )
            tenant = known.ref
        # The role is part of the name, because the rules may be others when the journal is read.
        name = f"{self.kind}:{match.role}:{self.subject}"
        token = TokenIssued(name, "", match.role, tenant, match.node, self.note, self.expires)
        if expired(token, now):
            what = "token" if self.kind == "oidc" else "certificate"
            raise UnauthenticatedError("expired", f"this {what} has expired")
        if not self._trusted():
            raise UnauthenticatedError(
                "untrusted", "the key that signed this token is no longer trusted"
            )
        return token

    def check(self, state: State, token: TokenIssued, now: Seconds) -> TokenIssued:
        """Return the present rights; refuse the caller unless they are those of ``token``."""
        current = self.token(state, now)
        if not same_rights(current, token):
            raise UnauthenticatedError("unmapped", f"the rights of {self._who} have changed")
        return current

    @property
    def _who(self) -> str:
        name = f"{self.kind}:{self.subject}"
        return f"{name} ({self.note})" if self.note else name

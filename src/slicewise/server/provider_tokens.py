"""Bearer tokens of the OpenID Connect provider: verified once, and remembered until they expire."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jwt
from jwt.exceptions import InvalidAudienceError, InvalidIssuerError, PyJWTError

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.control.actors import UnauthenticatedError, unknown_token
from slicewise.control.identities import Identity, Rules
from slicewise.control.state import State
from slicewise.journal.entries import Seconds
from slicewise.server.auth import Caller
from slicewise.server.provider_keys import Key, ProviderKeys

MAX_SUBJECT = 255
LEEWAY_SECONDS = 60.0
"""How far the provider's clock may be ahead. A token still ends at its expiry, to the second."""
MAX_TIME = 1e12
_MAX_REMEMBERED = 2000
_TYPES = (None, "jwt", "at+jwt", "application/at+jwt")
"""The types of identity and access tokens, in lower case."""
_KINDS = (None, "Bearer", "ID")
"""The same in the claim ``typ``, where Keycloak writes it."""
_NAMES = ("email", "preferred_username", "name", "client_id", "azp")
"""Claims with a name for people, in order of preference."""

log = logger("slicewise.sign_in")


class ProviderTokens:
    """Verifies tokens of the provider, and finds their rights by the rules."""

    def __init__(self, settings: Settings, keys: ProviderKeys, rules: Rules) -> None:
        self._algorithms = settings.oidc_algorithms
        self._audience = settings.audience
        self._keys = keys
        self._rules = rules
        self._known: OrderedDict[str, Identity] = OrderedDict()
        """Identities by token. An entry is not proof: each identity is checked at every use."""

    async def authenticate(
        self, state: State, header: bytes, now: Seconds, origin: str = ""
    ) -> Caller:
        """Return the bearer of a token in an Authorization header that is not one of ours."""
        try:
            text = header[7:].strip().decode("ascii")
        except UnicodeDecodeError:
            raise unknown_token() from None
        if text.count(".") != 2:
            raise unknown_token()
        identity = self._known.get(text)
        if identity is not None:
            return Caller(identity.token(state, now), origin, identity=identity)
        identity = await self._verify(text, now)
        token = identity.token(state, now)
        log.info(
            "signed in",
            subject=identity.subject,
            name=identity.note or None,
            role=str(token.role),
            tenant=None if token.tenant is None else token.tenant.name,
            address=origin or None,
        )
        self._known[text] = identity
        if len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return Caller(token, origin, identity=identity)

    async def _verify(self, text: str, now: Seconds) -> Identity:
        head = self._read_head(text)
        kid = head["kid"]
        key = await self._keys.find(kid)
        if key is None:
            if self._keys.problem is not None:
                raise UnauthenticatedError(
                    "unavailable",
                    f"the keys of {self._keys.issuer} cannot be fetched, and the key of this token "
                    "is not known yet: try again, or use a token of slicewise",
                    status=503,
                    retry_after=5,
                )
            raise _untrusted("no key of the provider has the id that this token names")
        if head["alg"] not in key.algorithms:
            raise _untrusted("the algorithm of this token does not fit its key")
        claims = self._decode(text, key)
        return self._identity(claims, kid, key, now)

    def _read_head(self, text: str) -> dict[str, Any]:
        """The header of a token, of which nothing is proven yet."""
        try:
            head = jwt.get_unverified_header(text)
        except (PyJWTError, ValueError, RecursionError):
            raise unknown_token() from None
        if head.get("alg") not in self._algorithms:
            raise _untrusted("the algorithm of this token is not accepted (oidc.algorithms)")
        if _lower(head.get("typ")) not in _TYPES or "crit" in head or "cty" in head:
            raise _untrusted("this is not an access or identity token: its type is another")
        if not isinstance(head.get("kid"), str):
            raise _untrusted("this token names no key")
        return head

    def _decode(self, text: str, key: Key) -> dict[str, Any]:
        """The claims of a token, whose signature, issuer and audience are right."""
        try:
            return jwt.decode(
                text,
                key.key,
                algorithms=list(key.algorithms),
                audience=list(self._audience),
                issuer=self._keys.issuer,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    # By service time, below.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except InvalidIssuerError:
            raise _untrusted("this token is of another issuer") from None
        except InvalidAudienceError:
            raise _untrusted("this token is for another audience") from None
        except (PyJWTError, ValueError, RecursionError):
            raise _untrusted("the signature or a required claim of this token is wrong") from None

    def _identity(self, claims: dict[str, Any], kid: str, key: Key, now: Seconds) -> Identity:
        if claims.get("typ") not in _KINDS or "events" in claims:
            raise _untrusted("this is not an access or identity token: its type is another")
        if "cnf" in claims:
            raise _untrusted("this token is bound to a key that its bearer did not prove to have")
        expires = _time(claims, "exp")
        if max(_time(claims, "nbf", 0.0), _time(claims, "iat", 0.0)) > now + LEEWAY_SECONDS:
            raise _untrusted("this token is not valid yet")
        subject = claims["sub"]
        if not (0 < len(subject) <= MAX_SUBJECT and subject.isprintable()):
            raise _untrusted("the subject of this token is not a name")
        names = (claims.get(one) for one in _NAMES)
        note = next((one for one in names if isinstance(one, str) and one.isprintable()), "")

        def trusted() -> bool:
            now = self._keys.keys.get(kid)
            return now is not None and (now is key or now.key == key.key)

        return Identity("oidc", subject, claims, self._rules, expires, note[:MAX_SUBJECT], trusted)


def _time(claims: dict[str, Any], name: str, default: float | None = None) -> Seconds:
    value = claims.get(name, default)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_TIME:
        return value
    raise _untrusted(f"the claim {name} of this token is not a time")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _untrusted(detail: str) -> UnauthenticatedError:
    return UnauthenticatedError("untrusted", detail)

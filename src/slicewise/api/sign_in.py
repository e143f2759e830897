"""Sign-in with an identity provider: where it is, and exchanging a code for a token."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slicewise.api.base import Body, View

Url = Annotated[str, Meta(min_length=1, max_length=2048)]


class SignInView(View, frozen=True):
    """How people sign in; without an issuer, with tokens of slicewise only."""

    issuer: str | None
    client: str | None
    """The client id of slicewise at the provider."""
    scopes: tuple[str, ...]
    authorization_endpoint: str | None
    token_endpoint: str | None
    device_authorization_endpoint: str | None


class CodeBody(Body, frozen=True):
    """An authorization code, and the proof that the bearer asked for it (PKCE, RFC 7636)."""

    code: Annotated[str, Meta(min_length=1, max_length=4096)]
    verifier: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._~-]{43,128}$(?!\n)")]
    redirect_uri: Url


class SignedInView(View, frozen=True):
    """A token of the provider."""

    token: str

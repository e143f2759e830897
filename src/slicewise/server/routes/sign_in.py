"""Sign-in of the dashboard and the command: where the provider is, and its tokens for codes."""

from __future__ import annotations

from slicewise.api.sign_in import CodeBody, SignedInView, SignInView
from slicewise.control.answers import RefusedError, json_answer
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply, reply

MAX_EXCHANGES = 8
"""Codes exchanged at the same time: anyone may ask, and each is a request to the provider."""


async def show(context: AppContext, request: HttpRequest) -> Reply:
    """How people sign in; needs no token."""
    settings, keys = context.settings, context.sign_in.keys
    offered = keys is not None and settings.oidc_client is not None
    endpoints = keys.endpoints if keys is not None and offered else {}
    return reply(
        json_answer(
            200,
            SignInView(
                issuer=settings.oidc_issuer if offered else None,
                client=settings.oidc_client if offered else None,
                scopes=settings.oidc_scopes if offered else (),
                authorization_endpoint=endpoints.get("authorization_endpoint"),
                token_endpoint=endpoints.get("token_endpoint"),
                device_authorization_endpoint=endpoints.get("device_authorization_endpoint"),
            ),
        )
    )


async def exchange(context: AppContext, request: HttpRequest) -> Reply:
    """Exchange an authorization code at the provider.

    The page could ask the provider itself, but then it would connect to another host, and the
    provider would have to allow that.
    """
    body = await request.body(CodeBody)
    settings, sign_in = context.settings, context.sign_in
    keys = sign_in.keys
    if keys is None or settings.oidc_client is None:
        raise RefusedError(404, "people do not sign in with a provider here (oidc.client)")
    endpoint = keys.endpoints.get("token_endpoint")
    if endpoint is None:
        raise RefusedError(503, "the identity provider does not answer yet", retry_after=5)
    if sign_in.exchanges >= MAX_EXCHANGES:
        raise RefusedError(503, "too many people are signing in: try again", retry_after=1)
    sign_in.exchanges += 1
    try:
        form = {
            "grant_type": "authorization_code",
            "client_id": settings.oidc_client,
            "code": body.code,
            "code_verifier": body.verifier,
            "redirect_uri": body.redirect_uri,
        }
        token = await keys.exchange(endpoint, form)
    finally:
        sign_in.exchanges -= 1
    return reply(json_answer(200, SignedInView(token=token)))

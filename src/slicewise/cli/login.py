"""`slicewise login` and `logout`: sign-in with the provider of a service (RFC 8628)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import typer

from slicewise.cli import logins
from slicewise.cli.connection import DEFAULT_SERVER, PATIENCE, Server, with_advice
from slicewise.cli.formatting import short
from slicewise.core.errors import SlicewiseError

GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_SECONDS = 15.0
"""Time for an answer."""
_POLL_SECONDS = 5.0
"""Between two questions whether the person has signed in, unless the provider says otherwise."""


def login(server: Server = DEFAULT_SERVER) -> None:
    """Sign in with the identity provider of a service; later commands use the token."""
    with with_advice(server, None):
        offer = _offer(server)
        signed_in = _device_flow(offer)
        from slicewise.client import Client

        with Client(server, signed_in["token"], patience=PATIENCE) as client:
            who = client.whoami()
    logins.keep(server, signed_in)
    role = f"{who.role} of {who.tenant}" if who.tenant else str(who.role)
    name = who.note or who.id
    typer.echo(f"signed in to {server} as {name}, {role}, until {short(who.expires_at)}")


def logout(server: Server = DEFAULT_SERVER) -> None:
    """Forget the token that `slicewise login` keeps for a service."""
    forgotten = logins.keep(server, None)
    typer.echo(f"{server}: {'signed out' if forgotten else 'there was no sign-in'}")


def _offer(server: str) -> dict[str, Any]:
    """How people sign in to the service, according to the first address that answers."""
    problem: SlicewiseError | None = None
    for address in server.split(","):
        url = f"{address.strip().rstrip('/')}/v1/sign-in"
        try:
            status, offer = _ask(url)
        except SlicewiseError as error:
            problem = problem or error
            continue
        if status != 200:
            raise SlicewiseError(f"{url}: {offer.get('detail') or f'status {status}'}")
        if not offer.get("issuer"):
            raise SlicewiseError(f"{server} has no identity provider (oidc.client): use a token")
        return offer
    assert problem is not None
    raise problem


def refreshed(login: logins.Login) -> logins.Login | None:
    """A sign-in with a new token of the provider; None if it refuses."""
    form = {
        "grant_type": "refresh_token",
        "refresh_token": login["refresh_token"] or "",
        "client_id": login["client"],
    }
    status, answer = _ask(login["endpoint"], form)
    if status != 200 or not answer.get("id_token"):
        return None
    following = _login(answer, login["endpoint"], login["client"])
    return {**following, "refresh_token": following["refresh_token"] or login["refresh_token"]}


def _login(answer: Mapping[str, Any], endpoint: str, client: str) -> logins.Login:
    """The sign-in in an answer of the provider's token endpoint."""
    token, refresh = answer.get("id_token"), answer.get("refresh_token")
    if not isinstance(token, str) or not token:
        raise SlicewiseError(f"{endpoint} sent no identity token: is openid in oidc.scopes?")
    return {
        "token": token,
        "expires_at": logins.expiry(token),
        "refresh_token": refresh if isinstance(refresh, str) else None,
        "endpoint": endpoint,
        "client": client,
    }


def _device_flow(offer: Mapping[str, Any]) -> logins.Login:
    """Show where to sign in, and wait until that has happened."""
    begin, end = offer.get("device_authorization_endpoint"), offer.get("token_endpoint")
    if not begin or not end:
        raise SlicewiseError(
            f"{offer['issuer']} does not offer the device flow, or does not answer: use a token"
        )
    client = str(offer["client"])
    scope = " ".join(map(str, offer["scopes"]))
    status, begun = _ask(begin, {"client_id": client, "scope": scope})
    where = begun.get("verification_uri_complete") or begun.get("verification_uri")
    code, device = begun.get("user_code"), begun.get("device_code")
    if status != 200 or not where or not code or not device:
        raise SlicewiseError(f"{begin}: {_refusal(status, begun)}")
    typer.echo(f"Open {_shown(where)}\nand check that it shows the code {_shown(code)}.", err=True)
    interval = _seconds(begun.get("interval"), _POLL_SECONDS)
    give_up = time.monotonic() + _seconds(begun.get("expires_in"), 300.0)
    form = {"grant_type": GRANT, "device_code": str(device), "client_id": client}
    while time.monotonic() < give_up:
        time.sleep(interval)
        status, answer = _ask(end, form)
        if status == 200:
            return _login(answer, end, client)
        match answer.get("error"):
            case "authorization_pending":
                pass
            case "slow_down":
                interval += 5
            case _:
                raise SlicewiseError(f"not signed in: {_refusal(status, answer)}")
    raise SlicewiseError("not signed in: the code has expired")


def _ask(url: str, form: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Get a URL or post a form to it; return the status and the JSON object in the answer."""
    import httpx

    parts = urlsplit(url)
    if form is not None and parts.scheme != "https" and parts.hostname not in _LOCAL:
        raise SlicewiseError(f"{url} is not an https address: a token would cross in the clear")
    try:
        if form is None:
            response = httpx.get(url, timeout=_SECONDS)
        else:
            response = httpx.post(
                url, data=dict(form), timeout=_SECONDS, headers={"accept": "application/json"}
            )
        answer = json.loads(response.content)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise SlicewiseError(f"no answer from {url}: {error}") from None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SlicewiseError(f"{url}: the answer is no JSON object (status {response.status_code})")
    return response.status_code, answer


_LOCAL = ("127.0.0.1", "::1", "localhost")


def _refusal(status: int, answer: Mapping[str, Any]) -> str:
    return _shown(answer.get("error_description") or answer.get("error") or f"status {status}")


def _shown(text: object) -> str:
    """Text of the provider, which may hold anything."""
    return "".join(one for one in str(text)[:500] if one.isprintable())


def _seconds(value: object, default: float) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 86400
    return float(value) if usable else default  # type: ignore[arg-type]  # a number

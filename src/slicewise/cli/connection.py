"""How commands connect to a service: address, token, and advice on errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    import ssl

    from slicewise.client import Client
    from slicewise.client.transport import Token

DEFAULT_SERVER = "http://127.0.0.1:8080"
PATIENCE = 3.0
"""Seconds to retry: long enough for a restart, short enough for a person at a terminal."""

Server = Annotated[
    str,
    typer.Option(
        envvar="SLICEWISE_SERVER",
        metavar="URL",
        help="The service; separate several addresses with commas.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SLICEWISE_TOKEN_FILE",
        metavar="FILE",
        help="File with the token; or the token itself in SLICEWISE_TOKEN.",
    ),
]


@contextmanager
def service_packages(what: str) -> Iterator[None]:
    """Report missing packages of an extra as one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"{what} needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None


def _without_httpx_command() -> None:
    """Keep httpx from importing its command line with click and Rich: a third of a start.

    A module that is None cannot be imported, and httpx copes, as it does where click is missing.
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


@contextmanager
def with_advice(server: str, token_file: Path | None) -> Iterator[None]:
    """Add advice to errors: service unreachable, or token refused."""
    with service_packages("talking to a service"):
        _without_httpx_command()
        from slicewise.client import ApiError, UnreachableError
    try:
        yield
    except UnreachableError as error:
        advice = "" if "--server" in str(error) else " (--server URL names another)"
        raise SlicewiseError(f"{error}{advice}") from None
    except ApiError as error:
        if error.status != 401:
            raise
        own = "SLICEWISE_TOKEN" if os.environ.get("SLICEWISE_TOKEN") else "slicewise login"
        source = own if token_file is None else repr(str(token_file))
        raise SlicewiseError(f"{error} (token from {source}, server {server})") from None


@contextmanager
def connect(
    server: str, token_file: Path | None, patience: float | None = None
) -> Iterator[Client]:
    """Open a client. Tokens are never arguments: other users could see them in the process list."""
    with with_advice(server, token_file):
        from slicewise.client import Client

        waits = PATIENCE if patience is None else patience
        given, verify = credentials(server, token_file)
        with Client(server, given, patience=waits, verify=verify) as client:
            yield client


def credentials(server: str, token_file: Path | None) -> tuple[Token, bool | ssl.SSLContext]:
    """The token, and a TLS context with the certificate in SLICEWISE_CLIENT_CERT and its key."""
    certificate = os.environ.get("SLICEWISE_CLIENT_CERT")
    if not certificate:
        return lambda: token(token_file, server), True
    import httpx

    context = httpx.create_ssl_context()
    try:
        context.load_cert_chain(certificate, os.environ.get("SLICEWISE_CLIENT_KEY") or None)
    except OSError as error:
        raise SlicewiseError(
            f"SLICEWISE_CLIENT_CERT, SLICEWISE_CLIENT_KEY: cannot be used: {error}"
        ) from None
    if token_file is None and not os.environ.get("SLICEWISE_TOKEN"):
        return None, context
    return lambda: token(token_file, server), context


def token(file: Path | None, server: str) -> str:
    """Return the token from the file, from SLICEWISE_TOKEN, or from the sign-in to this server."""
    if file is None:
        found, where = os.environ.get("SLICEWISE_TOKEN", "").strip(), "SLICEWISE_TOKEN"
        if not found:
            from slicewise.cli.logins import kept_token

            found, where = kept_token(server) or "", "slicewise login"
        if not found:
            raise SlicewiseError(
                "no token: name its file with --token-file (a new service writes one to "
                "DIR/admin-token), set SLICEWISE_TOKEN, or sign in with slicewise login"
            )
    else:
        where = f"the token file {str(file)!r}"
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise SlicewiseError(f"{where} cannot be read: {why}") from None
    if not found or not found.isascii() or not found.isprintable() or " " in found:
        raise SlicewiseError(f"{where} does not hold a token")
    return found

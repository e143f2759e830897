"""How the commands that talk to a service find it, and prove who they are."""

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
    from slicewise.client import Client

DEFAULT_SERVER = "http://127.0.0.1:8080"
PATIENCE = 3.0
"""Seconds to go on trying: long enough for a restart, short enough for somebody who waits."""

Server = Annotated[
    str,
    typer.Option(
        envvar="SLICEWISE_SERVER",
        metavar="URL",
        help="The service; several processes of it with commas between.",
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
    """Say so, if the packages are missing that this needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"{what} needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None


def _without_httpx_command() -> None:
    """Spare httpx its own command line: with it come click, Rich and Pygments, a third of a start.

    A module that is None cannot be imported, and httpx goes on without, as where click is missing.
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]


@contextmanager
def helpful(server: str, token_file: Path | None) -> Iterator[None]:
    """Say what to do, where a service cannot be reached or does not know who asks."""
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
        source = "SLICEWISE_TOKEN" if token_file is None else repr(str(token_file))
        raise SlicewiseError(f"{error} (it came from {source}; asked was {server})") from None


@contextmanager
def connect(
    server: str, token_file: Path | None, patience: float | None = None
) -> Iterator[Client]:
    """A client for the service; no token on the command line, where everybody sees it."""
    with helpful(server, token_file):
        from slicewise.client import Client

        waits = PATIENCE if patience is None else patience
        with Client(server, lambda: token(token_file), patience=waits) as client:
            yield client


def token(file: Path | None) -> str:
    """The token to use: that of the file, or that of the environment."""
    if file is None:
        found, where = os.environ.get("SLICEWISE_TOKEN", "").strip(), "SLICEWISE_TOKEN"
        if not found:
            raise SlicewiseError(
                "no token: name its file with --token-file (a new service writes one to "
                "DIR/admin-token), or set SLICEWISE_TOKEN"
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

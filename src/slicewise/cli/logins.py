"""Where `slicewise login` keeps tokens: one for each service, in a file of the user."""

from __future__ import annotations

import base64
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from slicewise.core.errors import SlicewiseError

_EARLY_SECONDS = 30.0
"""A token is refreshed if it expires within this time."""


class Login(TypedDict):
    """A token, and how to get the next one."""

    token: str
    expires_at: float | None
    refresh_token: str | None
    endpoint: str
    client: str


def file() -> Path:
    """The file, which only its owner can read."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "slicewise" / "logins.json"


def kept_token(server: str) -> str | None:
    """The token for a service; None without a sign-in. It is never used for another service."""
    login = _read().get(_name(server))
    if login is None:
        return None
    expires = login["expires_at"]
    if expires is None or time.time() < expires - _EARLY_SECONDS:
        return login["token"]
    if login["refresh_token"] is not None:
        from slicewise.cli.login import refreshed

        following = refreshed(login)
        if following is not None:
            keep(server, following)
            return following["token"]
        # Another command may have been faster; a refresh token works once.
        now = _read().get(_name(server))
        if now is not None and now["token"] != login["token"]:
            return now["token"]
    if time.time() < expires:
        return login["token"]
    raise SlicewiseError(f"your sign-in has expired: slicewise login --server {server}")


def expiry(token: str) -> float | None:
    """When a token expires according to itself; None if it does not say."""
    try:
        body = token.split(".")[1]
        found = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"]
        return float(found)
    except (ValueError, LookupError, TypeError):
        return None


def keep(server: str, login: Login | None) -> bool:
    """Keep a sign-in to a service, or forget it; return whether there was one before."""
    logins = _read()
    before = logins.pop(_name(server), None)
    if login is not None:
        logins[_name(server)] = login
    elif before is None:
        return False
    path = file()
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            json.dump({"version": 1, "services": logins}, opened, indent=2)
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise SlicewiseError(f"{path}: cannot be written: {error.strerror or error}") from None
    return before is not None


def _read() -> dict[str, Login]:
    path = file()
    try:
        services = json.loads(path.read_text(encoding="utf-8"))["services"]
        return {
            str(name): Login(
                token=str(one["token"]),
                expires_at=None if one["expires_at"] is None else float(one["expires_at"]),
                refresh_token=one["refresh_token"],
                endpoint=str(one["endpoint"]),
                client=str(one["client"]),
            )
            for name, one in services.items()
        }
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SlicewiseError(f"{path}: not a file of slicewise login: remove it") from None


def _name(server: str) -> str:
    return ",".join(sorted(one.strip().rstrip("/") for one in server.split(",")))

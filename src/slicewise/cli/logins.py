"""Where `slicewise login` keeps tokens: one for each service, in a file of the user."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from slicewise.core.errors import SlicewiseError


class Login(TypedDict):
    """A token, and the time at which it expires."""

    token: str
    expires_at: str | None


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
    if expires is not None and datetime.fromisoformat(expires) <= datetime.now(UTC):
        raise SlicewiseError(f"your sign-in has expired: slicewise login --server {server}")
    return login["token"]


def keep(server: str, token: str | None, expires_at: str | None = None) -> bool:
    """Keep a token for a service, or forget it; return whether there was one before."""
    logins = _read()
    before = logins.pop(_name(server), None)
    if token is not None:
        logins[_name(server)] = Login(token=token, expires_at=expires_at)
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
            str(name): Login(token=str(one["token"]), expires_at=one["expires_at"])
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

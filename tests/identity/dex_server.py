"""Dex, a real identity provider, with local users in groups. Built from Go, as in `programs.py`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripts.test_services import MissingServiceError
from tests.e2e.server import PATIENCE_SECONDS, free_port
from tests.kubernetes_e2e.programs import require_dex

CLIENT = "slicewise"
OTHER_CLIENT = "mail"
SECRET = "only-of-the-tests"
PASSWORD = "correct horse"
USERS = {
    "jane": ["tenant-acme"],
    "omar": ["gpu-operators"],
    "root": ["gpu-admins"],
    "eve": ["visitors"],
}
"""Groups by name; everyone has the same password."""


@dataclass
class Dex:
    """A process of Dex. It forgets its keys when it is stopped."""

    folder: Path
    program: Path
    redirects: list[str] = field(default_factory=list)
    """Addresses that the authorization code may be sent to."""
    origins: list[str] = field(default_factory=list)
    token_seconds: int = 3600
    algorithm: str = "RS256"
    port: int = 0
    certificate: Path | None = None
    """With its key, for https."""

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def issuer(self) -> str:
        """The issuer in its tokens."""
        return f"{'http' if self.certificate is None else 'https'}://127.0.0.1:{self.port}/dex"

    def start(self) -> None:
        """Start it, with new keys, and wait until it answers."""
        redirects = [*self.redirects, "/dex/device/callback"]
        config = {
            "Issuer": self.issuer,
            "Listen": f"127.0.0.1:{self.port}",
            "Origins": self.origins,
            "Algorithm": self.algorithm,
            "TokenSeconds": self.token_seconds,
            "Cert": str(self.certificate or ""),
            "Key": str(self.certificate or ""),
            "Clients": [
                # Public clients have no secret: what they prove is the code verifier.
                {"id": CLIENT, "name": "slicewise", "public": True, "redirectURIs": redirects},
                {"id": f"{CLIENT}-ci", "secret": SECRET, "trustedPeers": []},
                {"id": OTHER_CLIENT, "secret": SECRET, "name": "mail"},
            ],
            "Users": [
                {"Email": mail(name), "Name": name, "Password": PASSWORD, "Groups": groups}
                for name, groups in USERS.items()
            ],
        }
        file = self.folder / "dex.json"
        file.write_text(json.dumps(config))
        with (self.folder / "dex.log").open("ab") as log:
            self._process = subprocess.Popen([self.program, file], stdout=log, stderr=log)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                httpx.get(f"{self.issuer}/keys", verify=False).raise_for_status()
            except httpx.HTTPError:
                assert self._process.poll() is None, (self.folder / "dex.log").read_text()
                assert time.monotonic() < give_up, "Dex does not answer"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def sign_in(self, name: str, client: str = f"{CLIENT}-ci") -> dict[str, Any]:
        """The answer to a person who signs in by password."""
        form = {
            "grant_type": "password",
            "username": mail(name),
            "password": PASSWORD,
            "scope": "openid email profile groups",
        }
        url = f"{self.issuer}/token"
        answer = httpx.post(url, data=form, auth=(client, SECRET), verify=False)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def token(self, name: str, client: str = f"{CLIENT}-ci") -> str:
        """The identity token of a person."""
        return str(self.sign_in(name, client)["id_token"])


def mail(name: str) -> str:
    """The address of a user."""
    return f"{name}@example.org"


def require_dex_or_skip() -> Path:
    """The program; a test is skipped without Go, but not in CI."""
    try:
        return require_dex()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))

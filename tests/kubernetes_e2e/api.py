"""Plain calls to a Kubernetes API server, and waiting for conditions."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

Json = dict[str, Any]
T = TypeVar("T")

PATIENCE_SECONDS = 180
"""How long anything may take before it counts as hanging; nothing is expected to take so long."""
_LOOK_SECONDS = 0.05

CORE = "/api/v1"
RESOURCE = "/apis/resource.k8s.io/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


class ApiError(Exception):
    """Raised when the API server refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class Api:
    """An API server as one user sees it; may be shared by threads."""

    def __init__(self, server: str, ca: Path, token: str) -> None:
        self.token = token
        self._client = httpx.Client(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(ca)),
            timeout=PATIENCE_SECONDS,
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=64),
            trust_env=False,
        )

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def call(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """One call; the answer as JSON, or ApiError."""
        answer = self._client.request(method, path, json=body, headers=headers)
        if answer.is_error:
            try:
                message = str(answer.json()["message"])
            except (ValueError, KeyError, TypeError):
                message = answer.text
            raise ApiError(answer.status_code, message)
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text

    def get(self, path: str) -> Json:
        """An object, or a list of them."""
        found: Json = self.call("GET", path)
        return found

    def find(self, path: str) -> Json | None:
        """An object, or None if it does not exist."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str) -> list[Json]:
        """The objects of a list."""
        found: list[Json] = self.get(path)["items"]
        return found

    def create(self, path: str, body: Json) -> Json:
        """Create an object in the collection at ``path``."""
        made: Json = self.call("POST", path, body)
        return made

    def put(self, path: str, body: Json) -> Json:
        """Write an object; with a resourceVersion in it, only if it is unchanged since."""
        written: Json = self.call("PUT", path, body)
        return written

    def patch(self, path: str, body: Json) -> Json:
        """Merge ``body`` into an object."""
        headers = {"Content-Type": "application/merge-patch+json"}
        written: Json = self.call("PATCH", path, body, headers)
        return written

    def delete(self, path: str) -> None:
        """Delete an object; it may be gone already."""
        try:
            self.call("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                raise


def until(what: str, look: Callable[[], T | None]) -> T:
    """Wait until ``look`` finds something, and return it; an error of the API counts as not yet.

    A pause of the whole machine counts as one second: the programs under test were paused as well.
    """
    waited, before = 0.0, time.monotonic()
    trouble: Exception | None = None
    while True:
        try:
            found = look()
            if found:
                return found
            trouble = None
        except (ApiError, httpx.HTTPError) as error:
            trouble = error
        now = time.monotonic()
        waited, before = waited + min(now - before, 1.0), now
        assert waited < PATIENCE_SECONDS, f"never: {what} ({trouble or 'not yet'})"
        time.sleep(_LOOK_SECONDS)

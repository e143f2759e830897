"""The connection to the Kubernetes API: requests, lists and watches, and what can go wrong.

Configuration, credentials and TLS are the official client's. What comes back is left as bytes, so
that it can be decoded straight into the structures of `k8s.api`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
import urllib3
from kubernetes import client, config
from kubernetes.client import rest
from urllib3.connection import HTTPConnection

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import Happening, ListOf, Status

T = TypeVar("T")

PAGE = 500
OLDEST = (1, 36)
"""The first Kubernetes that has all that is relied upon, switched on."""
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
_CONNECTIONS = 32
_SOCKET_OPTIONS = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)  # not every system has them all
    ),
]
"""A watch may be silent for minutes: whether anybody is still there is asked after half of one."""

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON = "application/json"


class ApiError(SlicewiseError):
    """The API refused; ``status`` is HTTP's, ``reason`` the API's word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the Kubernetes API refused ({status} {reason}): {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ConflictError(ApiError):
    """Somebody else has changed the object meanwhile, or made it."""


class MissingError(ApiError):
    """There is no such object."""


class ExpiredError(ApiError):
    """A watch cannot go on from there: everything has to be listed again."""


class UnreachableError(SlicewiseError):
    """The API did not answer, or not in time; what was asked for may have been done."""


class _Version(msgspec.Struct):
    """What a cluster says it is."""

    major: str
    minor: str
    git_version: str = msgspec.field(default="", name="gitVersion")


class Link:
    """The API of one cluster; may be used from several threads."""

    def __init__(self, configuration: client.Configuration) -> None:
        self.server: str = configuration.host
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = False
        configuration.socket_options = _SOCKET_OPTIONS
        self._configuration = configuration
        self._pool: urllib3.PoolManager = rest.RESTClientObject(configuration).pool_manager

    @classmethod
    def open(cls, kubeconfig: Path | None = None, context: str | None = None) -> Link:
        """Connect as a kubeconfig says, or as the pod's service account inside a cluster."""
        configuration = client.Configuration()
        try:
            if kubeconfig is None and context is None:
                with suppress(config.ConfigException):
                    config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
                    return cls(configuration)
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=None if kubeconfig is None else str(kubeconfig),
                context=context,
                client_configuration=configuration,
            )
        except Exception as error:  # the client stumbles in many ways over a file that is none
            raise SlicewiseError(
                f"no way to a Kubernetes cluster: {str(error) or type(error).__name__}; name a "
                "kubeconfig with --kubeconfig, or run inside a cluster"
            ) from None
        return cls(configuration)

    def check(self) -> None:
        """Refuse a cluster that does not answer, or whose Kubernetes is too old."""
        found = self.get("/version", _Version)
        number = tuple(int(re.sub(r"\D.*", "", text) or 0) for text in (found.major, found.minor))
        if number < OLDEST:
            raise SlicewiseError(
                f"{self.server} is Kubernetes {found.git_version}, and this needs "
                f"{'.'.join(map(str, OLDEST))} or later: see docs/kubernetes.md"
            )

    def get(self, path: str, kind: type[T], **query: str) -> T:
        """One object."""
        return _read(self._ask("GET", path, query), kind, path)

    def pages(self, path: str, kind: type[T]) -> Iterator[ListOf[T]]:
        """All objects, page by page; all pages are of one moment."""
        more = ""
        while True:
            query = {"limit": str(PAGE)} | ({"continue": more} if more else {})
            page = _read(self._ask("GET", path, query), ListOf[kind], path)  # type: ignore[valid-type]
            yield page
            more = page.metadata.continue_
            if not more:
                return

    @contextmanager
    def watch(self, path: str, version: str, seconds: int) -> Iterator[Iterator[Happening]]:
        """What happens behind a version, until the API ends the watch after about so long."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        response = self._send("GET", path, query, None, JSON, seconds + _ANSWER_SECONDS)
        try:
            if response.status != 200:
                raise _refusal(response.status, self._body(response))
            yield _happenings(response)
        finally:
            response.close()
            response.release_conn()

    def write(self, method: str, path: str, body: Any, content: str = JSON, **query: str) -> bytes:
        """Create, replace or patch an object; returns it as it is afterwards."""
        return self._ask(method, path, query, msgspec.json.encode(body), content)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        content: str = JSON,
    ) -> bytes:
        response = self._send(method, path, query, body, content, _ANSWER_SECONDS)
        try:
            data = self._body(response)
        finally:
            response.release_conn()
        if response.status >= 300:
            raise _refusal(response.status, data)
        return data

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        content: str,
        seconds: float,
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = self._headers(content)
        try:
            return self._pool.request(
                method,
                url,
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=seconds),
                preload_content=False,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{self.server} does not answer: {error}") from None

    def _body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        try:
            return response.read()
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{self.server} stopped answering: {error}") from None

    def _headers(self, content: str) -> dict[str, str]:
        """With the credentials of this moment: tokens in files are replaced now and then."""
        headers = {"Accept": JSON, "Content-Type": content, "User-Agent": "slicewise"}
        try:
            bearer = self._configuration.auth_settings().get("BearerToken")
        except Exception as error:  # a file that is being replaced, a program that fails
            raise UnreachableError(f"no credentials for {self.server}: {error}") from None
        if bearer and bearer["value"]:
            headers[bearer["key"]] = bearer["value"]
        return headers


def _read(data: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise SlicewiseError(
            f"what the Kubernetes API has at {path} is not clear: {error}"
        ) from None


def _happenings(response: urllib3.BaseHTTPResponse) -> Iterator[Happening]:
    rest = b""
    try:
        for chunk in response.stream(1 << 16):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                happening = msgspec.json.decode(line, type=Happening)
                if happening.type == "ERROR":
                    status = msgspec.json.decode(happening.object, type=Status)
                    raise _refusal(status.code, happening.object)
                yield happening
    except urllib3.exceptions.HTTPError as error:
        raise UnreachableError(f"a watch was cut off: {error}") from None
    except msgspec.MsgspecError as error:
        raise SlicewiseError(f"what a watch says is not clear: {error}") from None


def _refusal(status: int, body: bytes | msgspec.Raw) -> SlicewiseError:
    try:
        said = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        said = Status(message=bytes(body)[:200].decode(errors="replace"))
    if status == 429 or status >= 500:
        return UnreachableError(f"the Kubernetes API cannot answer ({status}): {said.message}")
    kinds = {404: MissingError, 409: ConflictError, 410: ExpiredError}
    return kinds.get(status, ApiError)(status, said.reason, said.message)

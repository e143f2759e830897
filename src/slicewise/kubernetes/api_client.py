"""The client of the Kubernetes API: requests, lists, watches and errors.

The official client supplies configuration, credentials and TLS. Responses are decoded directly into
the structures of `slicewise.kubernetes.api`.
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
from kubernetes.client import rest
from urllib3.connection import HTTPConnection

from kubernetes import client, config
from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import ListOf, Status, WatchEvent
from slicewise.kubernetes.rate_limit import RequestLimits

T = TypeVar("T")

PAGE = 500
OLDEST = (1, 36)
"""The first Kubernetes version that enables all required features by default."""
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
"""A watch may be silent for minutes: TCP keep-alive detects a dead peer after one."""

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
JSON = "application/json"


class KubernetesApiError(SlicewiseError):
    """Raised when the API refuses a request, with the HTTP status and the reason of the API."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"the Kubernetes API refused ({status} {reason}): {message}")
        self.status = status
        self.reason = reason
        self.message = message


class ConflictError(KubernetesApiError):
    """Raised when another client has changed or created the object meanwhile."""


class NotFoundError(KubernetesApiError):
    """Raised when the object does not exist."""


class ExpiredError(KubernetesApiError):
    """Raised when the version of a watch has expired: list again."""


class ApiUnreachableError(SlicewiseError):
    """Raised when the API does not answer in time; the request may have taken effect.

    ``after`` is the number of seconds to wait, if the API has asked for it.
    """

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class _Version(msgspec.Struct):
    """The version of a cluster."""

    major: str
    minor: str
    git_version: str = msgspec.field(default="", name="gitVersion")


class ApiClient:
    """The API of one cluster; thread-safe."""

    def __init__(self, configuration: client.Configuration) -> None:
        self.server: str = configuration.host
        configuration.connection_pool_maxsize = _CONNECTIONS
        configuration.retries = False
        configuration.socket_options = _SOCKET_OPTIONS
        self._configuration = configuration
        self.limits = RequestLimits()
        self._pool: urllib3.PoolManager = rest.RESTClientObject(configuration).pool_manager

    @classmethod
    def open(cls, kubeconfig: Path | None = None, context: str | None = None) -> ApiClient:
        """Connect with a kubeconfig, or with the service account of the pod inside a cluster."""
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
        except Exception as error:  # an invalid file raises many types of errors
            raise SlicewiseError(
                f"cannot connect to a Kubernetes cluster: {str(error) or type(error).__name__}; "
                "name a kubeconfig with --kubeconfig, or run inside a cluster"
            ) from None
        return cls(configuration)

    def check(self) -> None:
        """Raise SlicewiseError if the cluster does not answer or its version is too old."""
        found = self.get("/version", _Version)
        number = tuple(int(re.sub(r"\D.*", "", text) or 0) for text in (found.major, found.minor))
        if number < OLDEST:
            raise SlicewiseError(
                f"{self.server} is Kubernetes {found.git_version}, and this needs "
                f"{'.'.join(map(str, OLDEST))} or later: see docs/kubernetes.md"
            )

    def get(self, path: str, kind: type[T], **query: str) -> T:
        """Read an object."""
        return _read(self._ask("GET", path, query), kind, path)

    def pages(self, path: str, kind: type[T], fields: str = "") -> Iterator[ListOf[T]]:
        """List all objects, page by page; all pages have the same version."""
        more = ""
        while True:
            query = {"limit": str(PAGE)} | ({"continue": more} if more else {})
            query |= {"fieldSelector": fields} if fields else {}
            page = _read(self._ask("GET", path, query), ListOf[kind], path)  # type: ignore[valid-type]
            yield page
            more = page.metadata.continue_
            if not more:
                return

    @contextmanager
    def watch(
        self, path: str, version: str, seconds: int, fields: str = ""
    ) -> Iterator[Iterator[WatchEvent]]:
        """Watch the changes after a version; the API ends the watch after about ``seconds``."""
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        query |= {"fieldSelector": fields} if fields else {}
        response = self._send("GET", path, query, None, JSON, seconds + _ANSWER_SECONDS)
        try:
            if response.status != 200:
                raise _refusal(response.status, self._body(response))
            yield _watch_events(response)
        finally:
            response.close()
            response.release_conn()

    def write(self, method: str, path: str, body: Any, content: str = JSON, **query: str) -> bytes:
        """Create, replace or patch an object; returns its new version."""
        return self._ask(method, path, query, msgspec.json.encode(body), content)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        content: str = JSON,
    ) -> bytes:
        self.limits.wait(method, path)
        response = self._send(method, path, query, body, content, _ANSWER_SECONDS)
        try:
            data = self._body(response)
        finally:
            response.release_conn()
        if response.status >= 300:
            raise _refusal(response.status, data, response.headers.get("Retry-After", ""))
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
            raise ApiUnreachableError(f"{self.server} does not answer: {error}") from None

    def _body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        try:
            return response.read()
        except urllib3.exceptions.HTTPError as error:
            raise ApiUnreachableError(f"{self.server} stopped answering: {error}") from None

    def _headers(self, content: str) -> dict[str, str]:
        """The headers with current credentials: token files are replaced at times."""
        headers = {"Accept": JSON, "Content-Type": content, "User-Agent": "slicewise"}
        try:
            bearer = self._configuration.auth_settings().get("BearerToken")
        except Exception as error:  # the file is being replaced, or a credential plugin fails
            raise ApiUnreachableError(f"no credentials for {self.server}: {error}") from None
        if bearer and bearer["value"]:
            headers[bearer["key"]] = bearer["value"]
        return headers


def namespace_of(kubeconfig: Path | None = None, context: str | None = None) -> str:
    """The namespace of a context in a kubeconfig, as kubectl would use it."""
    try:
        contexts, active = config.list_kube_config_contexts(  # type: ignore[no-untyped-call]
            None if kubeconfig is None else str(kubeconfig)
        )
    except config.ConfigException:
        return "default"
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str((chosen.get("context") or {}).get("namespace") or "default")


def _read(data: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise SlicewiseError(f"invalid response of the Kubernetes API to {path}: {error}") from None


def _watch_events(response: urllib3.BaseHTTPResponse) -> Iterator[WatchEvent]:
    rest = b""
    try:
        for chunk in response.stream(1 << 16):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for line in lines:
                event = msgspec.json.decode(line, type=WatchEvent)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=Status)
                    raise _refusal(status.code, event.object)
                yield event
    except urllib3.exceptions.HTTPError as error:
        raise ApiUnreachableError(f"a watch was interrupted: {error}") from None
    except msgspec.MsgspecError as error:
        raise SlicewiseError(f"invalid event of a watch: {error}") from None


def _refusal(status: int, body: bytes | msgspec.Raw, after: str = "") -> SlicewiseError:
    try:
        said = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        said = Status(message=bytes(body)[:200].decode(errors="replace"))
    if status == 429 or status >= 500:
        seconds = float(after) if re.fullmatch("[0-9]{1,2}", after) else 0.0
        text = f"the Kubernetes API cannot answer ({status}): {said.message}"
        return ApiUnreachableError(text, seconds)
    kinds = {404: NotFoundError, 409: ConflictError, 410: ExpiredError}
    return kinds.get(status, KubernetesApiError)(status, said.reason, said.message)

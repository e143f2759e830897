"""HTTP client for the service, with the standard library only.

A `ServiceClient` keeps one connection open between calls. A replica that does not accept writes
answers 503 and names the leader, and the client follows. Retrying is left to the caller.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from slicewise.core.errors import SlicewiseError

_TIMEOUT = 15.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 4


class UnreachableError(SlicewiseError):
    """Raised when the service cannot be reached or its answer is not usable."""


class RefusedError(SlicewiseError):
    """Raised when the service refuses a request; carries the HTTP status and the reason."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class ServiceAddress:
    """The addresses of the service and the files with the agent's credentials."""

    urls: tuple[str, ...]
    token_file: Path | None
    ca: Path | None = None
    certificate: Path | None = None
    """The client certificate, which takes the place of a token."""
    key: Path | None = None
    """The private key of the certificate, if it is not in the same file."""

    @classmethod
    def parse(
        cls,
        server: str,
        token_file: Path | None,
        ca: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> ServiceAddress:
        """Parse comma-separated URLs; raise SlicewiseError for an invalid URL or file."""
        urls = tuple(url.strip().rstrip("/") for url in server.split(",") if url.strip())
        for url in urls or (server,):
            _split_url(url)
        service = cls(urls, token_file, ca, certificate, key)
        service.headers()
        service.context()
        return service

    def headers(self) -> dict[str, str]:
        """The header with the token, which is read for every request: it may be replaced."""
        return {} if self.token_file is None else {"Authorization": f"Bearer {self._token()}"}

    def _token(self) -> str:
        assert self.token_file is not None
        try:
            found = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "not a text file"
            raise SlicewiseError(
                f"the token file {str(self.token_file)!r} cannot be read: {why}"
            ) from None
        if not found or not found.isascii() or not found.isprintable() or " " in found:
            raise SlicewiseError(f"the token file {str(self.token_file)!r} does not hold a token")
        return found

    def context(self) -> ssl.SSLContext:
        """The TLS context, with the operator's CA certificates if there are any."""
        try:
            made = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        except (OSError, ssl.SSLError) as error:
            raise SlicewiseError(
                f"{str(self.ca)!r} cannot be used as certificates: {error}"
            ) from None
        self.load_certificate(made)
        return made

    def load_certificate(self, context: ssl.SSLContext) -> None:
        """Read the client certificate, which may have been replaced."""
        if self.certificate is None:
            return
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise SlicewiseError(
                f"the client certificate {str(self.certificate)!r} cannot be used: {error}"
            ) from None


class ServiceClient:
    """A connection to the service for one thread; only ``interrupt`` may be called from others."""

    def __init__(self, service: ServiceAddress) -> None:
        self._service = service
        self._context = service.context()
        self._url = service.urls[0]
        self._connection: http.client.HTTPConnection | None = None
        self._closed = False

    def call(
        self, method: str, path: str, body: object = None, timeout: float = _TIMEOUT
    ) -> object:
        """Send a request and return the answer; raise UnreachableError or RefusedError."""
        for _ in range(_MAX_REDIRECTS):
            status, answer = self._exchange(method, path, body, timeout)
            if 200 <= status < 300:
                return answer
            table = answer if isinstance(answer, dict) else {}
            detail = str(table.get("detail") or f"status {status}")
            leader = table.get("leader")
            if status == 503 and isinstance(leader, str) and self._follow(leader):
                continue
            if status >= 500 or status == 429:
                raise self._unreachable(detail)
            raise RefusedError(status, str(table.get("reason") or ""), detail)
        raise self._unreachable("its replicas do not agree on a leader")

    def interrupt(self) -> None:
        """Make the current call and all later ones fail; safe from any thread."""
        self._closed = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection for good."""
        self._closed = True
        self._drop()

    def _exchange(self, method: str, path: str, body: object, timeout: float) -> tuple[int, object]:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._service.headers(), "Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        # The service may have closed a kept connection: retry once on a new one.
        for kept in (True, False) if self._connection is not None else (False,):
            try:
                connection = self._connect(timeout)
                connection.request(method, _split_url(self._url).path + path, data, headers)
                response = connection.getresponse()
                text = response.read(_MAX_ANSWER_BYTES)
                break
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                stale = isinstance(error, ConnectionError | http.client.RemoteDisconnected)
                if kept and stale and not self._closed:
                    continue
                raise self._unreachable(f"it cannot be reached: {_cause(error)}") from None
        if response.will_close:
            self._drop()
        try:
            return response.status, json.loads(text) if text else None
        except ValueError:
            if response.status < 400:
                raise self._unreachable("its answer is not JSON") from None
            self._drop()
            return response.status, None

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._closed:
            raise ConnectionAbortedError("the agent is shutting down")
        if self._connection is None:
            parts = _split_url(self._url)
            assert parts.hostname is not None
            if parts.scheme == "https":
                self._service.load_certificate(self._context)
                self._connection = http.client.HTTPSConnection(
                    parts.hostname, parts.port or 443, timeout=_TIMEOUT, context=self._context
                )
            else:
                self._connection = http.client.HTTPConnection(
                    parts.hostname, parts.port or 80, timeout=_TIMEOUT
                )
            self._connection.connect()
            # Requests are small: send them without delay.
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sock.settimeout(timeout)
        return self._connection

    def _follow(self, leader: str) -> bool:
        """Switch to the leader's address, but never from https to http."""
        url = leader.rstrip("/")
        try:
            parts = _split_url(url)
        except SlicewiseError:
            return False
        secure = urlsplit(self._url).scheme == "https"
        if url == self._url or (secure and parts.scheme != "https"):
            return False
        self._drop()
        self._url = url
        return True

    def _unreachable(self, why: str) -> UnreachableError:
        """Return the error, and switch to the next of the configured addresses."""
        error = UnreachableError(f"{self._url}: {why}")
        urls: Sequence[str] = self._service.urls
        self._drop()
        self._url = urls[(urls.index(self._url) + 1) % len(urls)] if self._url in urls else urls[0]
        return error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _split_url(url: str) -> SplitResult:
    """Split and check the URL of a service."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        (parts.hostname or "").encode("idna")  # As name resolution does.
        valid = valid and parts.path.isascii() and " " not in parts.path
    except ValueError:
        valid = False
    if not valid:
        raise SlicewiseError(f"{url!r} is not the URL of a service, such as https://HOST:PORT")
    if "@" in parts.netloc or "?" in url or "#" in url:  # Not shown: it may contain a password.
        raise SlicewiseError(
            "the URL of a service has no user, password, query or fragment; use https://HOST:PORT"
        )
    with contextlib.suppress(ValueError):
        if parts.port != 0:
            return parts
    raise SlicewiseError(f"{url!r} has no port between 1 and 65535")


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

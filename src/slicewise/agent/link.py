"""Calls to the service: HTTP with the standard library, over TLS, to whoever leads.

One `Link` is one connection, kept open between calls. A process of the service that does not take
writes answers 503 and says who does; the next call goes there. What cannot be reached is tried
again by the caller, who knows how patient to be.
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
_LARGEST = 64 << 20
_MOST_HOPS = 4


class UnreachableError(SlicewiseError):
    """Nobody answered, or not as the service does."""


class RefusedError(SlicewiseError):
    """The service refused; its status, its word for the reason, and its sentence."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Service:
    """Where the service is and how one proves to it who one is."""

    urls: tuple[str, ...]
    token_file: Path
    ca: Path | None = None

    @classmethod
    def named(cls, server: str, token_file: Path, ca: Path | None = None) -> Service:
        """The service at these URLs, with commas between; checked, as the files are."""
        urls = tuple(url.strip().rstrip("/") for url in server.split(",") if url.strip())
        for url in urls or (server,):
            _parts(url)
        service = cls(urls, token_file, ca)
        service.token()
        service.context()
        return service

    def token(self) -> str:
        """The token; read anew each time, since it may be replaced."""
        try:
            found = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise SlicewiseError(
                f"the token file {str(self.token_file)!r} cannot be read: {why}"
            ) from None
        if not found or not found.isascii() or not found.isprintable() or " " in found:
            raise SlicewiseError(f"the token file {str(self.token_file)!r} does not hold a token")
        return found

    def context(self) -> ssl.SSLContext:
        """How certificates are checked."""
        try:
            return ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        except (OSError, ssl.SSLError) as error:
            raise SlicewiseError(
                f"{str(self.ca)!r} cannot be used as certificates: {error}"
            ) from None


class Link:
    """One connection to the service; not for two threads at once, except ``interrupt``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._context = service.context()
        self._at = service.urls[0]
        self._connection: http.client.HTTPConnection | None = None
        self._closed = False

    def call(
        self, method: str, path: str, body: object = None, patience: float = _TIMEOUT
    ) -> object:
        """The answer to a request, or an error: unreachable or refused."""
        for _ in range(_MOST_HOPS):
            status, answer = self._exchange(method, path, body, patience)
            if 200 <= status < 300:
                return answer
            table = answer if isinstance(answer, dict) else {}
            detail = str(table.get("detail") or f"it answered {status}")
            leader = table.get("leader")
            if status == 503 and isinstance(leader, str) and self._go_to(leader):
                continue
            if status >= 500 or status == 429:
                raise self._unreachable(detail)
            raise RefusedError(status, str(table.get("reason") or ""), detail)
        raise self._unreachable("its processes do not agree on who leads")

    def interrupt(self) -> None:
        """Let a call that waits for its answer fail, and all later ones; from any thread."""
        self._closed = True
        connection = self._connection
        sock = None if connection is None else connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection for good."""
        self._closed = True
        self._drop()

    def _exchange(
        self, method: str, path: str, body: object, patience: float
    ) -> tuple[int, object]:
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {self._service.token()}",
            "Accept": "application/json",
        }
        if data is not None:
            headers["Content-Type"] = "application/json"
        # A connection that was kept may have been closed meanwhile: then once more, on a new one.
        for kept in (True, False) if self._connection is not None else (False,):
            try:
                connection = self._connect(patience)
                connection.request(method, _parts(self._at).path + path, data, headers)
                response = connection.getresponse()
                text = response.read(_LARGEST)
                break
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                stale = isinstance(error, ConnectionError | http.client.RemoteDisconnected)
                if kept and stale and not self._closed:
                    continue
                raise self._unreachable(f"it cannot be reached: {_why(error)}") from None
        if response.will_close:
            self._drop()
        try:
            return response.status, json.loads(text) if text else None
        except ValueError:
            if response.status < 400:
                raise self._unreachable("its answer is not JSON") from None
            self._drop()
            return response.status, None

    def _connect(self, patience: float) -> http.client.HTTPConnection:
        if self._closed:
            raise ConnectionAbortedError("the agent is ending")
        if self._connection is None:
            parts = _parts(self._at)
            assert parts.hostname is not None
            if parts.scheme == "https":
                self._connection = http.client.HTTPSConnection(
                    parts.hostname, parts.port or 443, timeout=_TIMEOUT, context=self._context
                )
            else:
                self._connection = http.client.HTTPConnection(
                    parts.hostname, parts.port or 80, timeout=_TIMEOUT
                )
            self._connection.connect()
            # Requests are small and wait for nothing.
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sock.settimeout(patience)
        return self._connection

    def _go_to(self, leader: str) -> bool:
        """Turn to the leader; never from a secure address to one that is not."""
        url = leader.rstrip("/")
        try:
            parts = _parts(url)
        except SlicewiseError:
            return False
        secure = urlsplit(self._at).scheme == "https"
        if url == self._at or (secure and parts.scheme != "https"):
            return False
        self._drop()
        self._at = url
        return True

    def _unreachable(self, why: str) -> UnreachableError:
        """Turn to the next address, beginning with those that were given; why, for people."""
        error = UnreachableError(f"{self._at}: {why}")
        urls: Sequence[str] = self._service.urls
        self._drop()
        self._at = urls[(urls.index(self._at) + 1) % len(urls)] if self._at in urls else urls[0]
        return error

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _parts(url: str) -> SplitResult:
    """The parts of a service's URL; refused where nobody could be reached by it."""
    try:
        parts = urlsplit(url)
        proper = parts.scheme in ("http", "https") and bool(parts.hostname)
        (parts.hostname or "").encode("idna")  # as a name that is looked up will be
        proper = proper and parts.path.isascii() and " " not in parts.path
    except ValueError:
        proper = False
    if not proper:
        raise SlicewiseError(f"{url!r} is not the URL of a service, as https://HOST:PORT")
    if "@" in parts.netloc or "?" in url or "#" in url:  # not shown: a password may be in it
        raise SlicewiseError(
            "the URL of a service has no user, password, query or fragment; write https://HOST:PORT"
        )
    with contextlib.suppress(ValueError):
        if parts.port != 0:
            return parts
    raise SlicewiseError(f"{url!r} has no port between 1 and 65535")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

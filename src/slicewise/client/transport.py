"""Server selection, retries and error handling, shared by both clients.

A call is retried on all servers, with exponential backoff, if it is safe to repeat or certainly
was not carried out.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
import msgspec

from slicewise.api.base import Problem
from slicewise.client.calls import Call
from slicewise.client.errors import ApiError, RejectedError, ResyncError, UnreachableError
from slicewise.core.errors import SlicewiseError

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds to keep retrying: long enough for a standby to take over."""
TIMEOUT = 30.0
"""Seconds to wait for an answer."""
CONNECT_SECONDS = 5.0
FIRST_DELAY = 0.05
MAX_DELAY = 2.0
_KEY = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_UNAVAILABLE = (502, 503, 504)
"""Answers of a server that is not ready, or of a proxy in front of it."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Send the request again after a delay."""

    delay: float


def backoff() -> Iterator[float]:
    """Exponentially growing delays with jitter."""
    delay = FIRST_DELAY
    while True:
        yield delay * random.uniform(0.5, 1)
        delay = min(2 * delay, MAX_DELAY)


def tls_verification(endpoints: Endpoints, verify: bool | ssl.SSLContext) -> bool | ssl.SSLContext:
    """The TLS settings; certificate authorities are loaded only if a server uses https.

    A context without authorities rejects every certificate, so a redirect to https fails.
    """
    if verify is True and all(server.startswith("http:") for server in endpoints.servers):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return verify


def timeouts(seconds: float) -> httpx.Timeout:
    """Timeouts of a request; connecting has a shorter one."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))


Token = str | Callable[[], str] | None
"""A token, or a function that returns the current one; it is called for every request.

None sends no token: the client certificate in ``verify`` takes its place.
"""


@contextmanager
def environment_errors() -> Iterator[None]:
    """Report unusable proxies or certificates in the environment as one line."""
    try:
        yield
    except (ImportError, ValueError, OSError) as error:
        why = " ".join(str(error).split())
        raise SlicewiseError(
            f"the proxies or certificates set in the environment cannot be used: {why}"
        ) from None


class Endpoints:
    """The servers, which of them answered last, and the token."""

    def __init__(
        self,
        servers: str | Sequence[str],
        token: Token,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        given = servers.split(",") if isinstance(servers, str) else servers
        self.servers = tuple(_address(server) for server in given)
        if not self.servers:
            raise SlicewiseError("no server was given")
        self._token = token
        self.authorization()  # fail early on an invalid token
        self.patience = patience
        self.clock = clock
        self.preferred = 0
        """Index of the server to try first."""

    def authorization(self) -> dict[str, str]:
        """The Authorization header."""
        if self._token is None:
            return {}
        token = self._token if isinstance(self._token, str) else self._token()
        if not token.isascii() or not token.isprintable() or token != token.strip() or not token:
            raise SlicewiseError("invalid token: a token is one word, such as sw_...")
        return {"authorization": f"Bearer {token}"}


class RetriedCall(Generic[T]):
    """One call and its retries, from server to server, until there is an answer."""

    def __init__(
        self,
        endpoints: Endpoints,
        call: Call[T],
        key: str | None = None,
        patience: float | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._call = call
        self._current = endpoints.preferred
        self._failures = 0
        self._delays = backoff()
        self._deadline = endpoints.clock() + (endpoints.patience if patience is None else patience)
        self.headers = endpoints.authorization()
        if call.body is not None:
            self.headers["content-type"] = "application/json"
        if call.keyed:
            self.headers["idempotency-key"] = secrets.token_hex(16) if key is None else _key(key)

    @property
    def server(self) -> str:
        """The server to send the request to."""
        return self._endpoints.servers[self._current]

    @property
    def url(self) -> httpx.URL:
        """The URL to send the request to."""
        try:
            return httpx.URL(self.server + self._call.path, params=self._call.query or None)
        except (httpx.InvalidURL, UnicodeError) as error:  # too long, or not valid Unicode
            raise SlicewiseError(f"invalid request: {error}") from None

    def read(self, response: httpx.Response) -> T | Retry:
        """Decode the answer, or say when to retry; raise what the service refuses."""
        call, status = self._call, response.status_code
        if 200 <= status < 300 or (call.path == "/readyz" and status == 503):
            self.answered()
            try:
                return msgspec.json.decode(response.content, type=call.answer)
            except msgspec.MsgspecError as error:
                raise SlicewiseError(
                    f"this client cannot read the answer of {self.server}: {error}"
                ) from None
        problem = problem_of(response, self.server)
        if status == 429:
            return self._rate_limited(problem, response.headers.get("retry-after", ""))
        if status in _UNAVAILABLE and (call.repeatable or problem.leader is not None):
            return self._retry(ApiError(problem), problem.leader)
        raise {409: RejectedError, 410: ResyncError}.get(status, ApiError)(problem)

    def answered(self) -> None:
        """Prefer this server from now on."""
        self._endpoints.preferred = self._current

    def failed(self, error: httpx.RequestError) -> Retry:
        """Say when to retry after a network error, or raise it."""
        words = _describe(error)
        if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
            raise UnreachableError(f"no safe connection to {self.server}: {words}") from None
        if not self._call.repeatable and not isinstance(error, _NEVER_SENT):
            raise UnreachableError(
                f"the answer of {self.server} was lost ({words}); the request may have been "
                "carried out: check before repeating it"
            ) from None
        where = " or ".join(self._endpoints.servers)
        return self._retry(
            UnreachableError(f"no answer from {where}: {words}; is the service running there?")
        )

    def interrupted(self, error: httpx.RequestError) -> UnreachableError:
        """The error for an answer that broke off after it had begun."""
        return UnreachableError(
            f"{self.server} broke off its answer ({_describe(error)}): try again"
        )

    def _retry(self, why: SlicewiseError, leader: str | None = None) -> Retry:
        """Try the leader if it is known, else the next server; wait only after a full round."""
        servers = self._endpoints.servers
        self._current = (self._current + 1) % len(servers)
        if leader is not None and leader.rstrip("/") in servers:
            self._current = servers.index(leader.rstrip("/"))
        self._failures += 1
        if self._failures % len(servers):
            return Retry(0)
        return self._wait(next(self._delays), why)

    def _rate_limited(self, problem: Problem, after: str) -> Retry:
        """The service did nothing, and says when to retry."""
        return self._wait(float(after) if after.isdigit() else MAX_DELAY, ApiError(problem))

    def _wait(self, seconds: float, why: SlicewiseError) -> Retry:
        if self._endpoints.clock() + seconds > self._deadline:
            raise why from None
        return Retry(seconds)


def problem_of(response: httpx.Response, server: str) -> Problem:
    """The problem that the service reports, or one made from the answer of a proxy."""
    try:
        return msgspec.json.decode(response.content, type=Problem)
    except msgspec.MsgspecError:
        status = response.status_code
        text = " ".join(response.content[:200].decode(errors="replace").split())
        return Problem(
            type="about:blank",
            title="Unexpected answer",
            status=status,
            detail=f"{server} answered {status}: {text or 'no details'}",
        )


def _address(text: str) -> str:
    address = text.strip()
    try:
        url = httpx.URL(address)
    except (httpx.InvalidURL, ValueError):
        url = httpx.URL("")
    whole = url.scheme in ("http", "https") and not (url.userinfo or url.query or url.fragment)
    if not whole or not _is_host(url.host) or len(address.split()) > 1:
        raise SlicewiseError(f"{text!r} is not the address of a server (http://HOST:PORT)")
    return str(url).rstrip("/")


def _is_host(name: str) -> bool:
    """Whether a host name is valid."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _key(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise SlicewiseError(
            f"an idempotency key must be 1 to 128 printable ASCII characters, not {key!r}"
        )
    return key


def _describe(error: httpx.RequestError) -> str:
    """Describe a network error, without error numbers."""
    if isinstance(error, httpx.TimeoutException):
        return "timed out"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed ({cause.reason})"
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            known = cause.errno > 0  # name resolution errors are negative
            return (os.strerror(cause.errno) if known else cause.strerror).lower()
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:] if text else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes, outermost first."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):  # one for each address of the host
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__

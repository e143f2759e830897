"""How a call is sent and its answer read, whichever way the bytes travel.

A call is sent again, to every server that was named and with growing pauses, when that cannot do
harm: when it is safe to repeat, or when it is certain that nobody has carried it out.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx
import msgspec

from slicewise.client.calls import Call
from slicewise.client.errors import ApiError, RejectedError, ResyncError, UnreachableError
from slicewise.control.wire import Problem
from slicewise.core.errors import SlicewiseError

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds to go on trying; long enough for a standby to take over."""
TIMEOUT = 30.0
"""Seconds to wait for an answer."""
CONNECT_SECONDS = 5.0
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
_KEY = re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?")
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_GONE = (502, 503, 504)
"""What a server answers that cannot take part now, or what stands in front of it."""


@dataclass(frozen=True, slots=True)
class Again:
    """No answer yet: send it again after a pause."""

    pause: float


def pauses() -> Iterator[float]:
    """Ever longer pauses, none quite like those of somebody else who waits as well."""
    pause = FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1)
        pause = min(2 * pause, LONGEST_PAUSE)


def trusted(exchange: Exchange, verify: bool | ssl.SSLContext) -> bool | ssl.SSLContext:
    """What certificates are held against; nothing is loaded where no server will show one.

    The context without authorities trusts nobody: a connection that turns out to need it fails.
    """
    if verify is True and all(server.startswith("http:") for server in exchange.servers):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return verify


def timeouts(seconds: float) -> httpx.Timeout:
    """How long to wait for an answer; a server that is there at all accepts sooner."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))


Token = str | Callable[[], str]
"""A token, or what is called for it at every request: it may have been rotated since the last."""


class Exchange:
    """The servers that are known, which of them answered last, and whose token it is."""

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
            raise SlicewiseError("no server was named")
        self._token = token
        self.authorization()  # what is no token is refused now
        self.patience = patience
        self.clock = clock
        self.at = 0
        """Which server to ask first."""

    def authorization(self) -> dict[str, str]:
        """The header that says who asks."""
        token = self._token if isinstance(self._token, str) else self._token()
        if not token.isascii() or not token.isprintable() or token != token.strip() or not token:
            raise SlicewiseError("this is no token: a token is one word, such as sw_...")
        return {"authorization": f"Bearer {token}"}


class Trip(Generic[T]):
    """One call on its way, from server to server, until there is an answer."""

    def __init__(
        self,
        exchange: Exchange,
        call: Call[T],
        key: str | None = None,
        patience: float | None = None,
    ) -> None:
        self._exchange = exchange
        self._call = call
        self._at = exchange.at
        self._asked = 0
        self._pauses = pauses()
        self._until = exchange.clock() + (exchange.patience if patience is None else patience)
        self.headers = exchange.authorization()
        if call.body is not None:
            self.headers["content-type"] = "application/json"
        if call.keyed:
            self.headers["idempotency-key"] = secrets.token_hex(16) if key is None else _key(key)

    @property
    def server(self) -> str:
        """The server to send it to now."""
        return self._exchange.servers[self._at]

    @property
    def url(self) -> httpx.URL:
        """Where to send it now, with what stands behind the question mark."""
        try:
            return httpx.URL(self.server + self._call.path, params=self._call.query or None)
        except (httpx.InvalidURL, UnicodeError) as error:  # too long, or no text
            raise SlicewiseError(f"this cannot be asked for: {error}") from None

    def read(self, response: httpx.Response) -> T | Again:
        """The answer; or that it is to be sent again. What the service refuses is raised."""
        call, status = self._call, response.status_code
        if 200 <= status < 300 or (call.path == "/readyz" and status == 503):
            self.arrived()
            try:
                return msgspec.json.decode(response.content, type=call.answer)
            except msgspec.MsgspecError as error:
                raise SlicewiseError(
                    f"{self.server} answered what this client does not understand: {error}"
                ) from None
        problem = problem_of(response, self.server)
        if status == 429:
            return self._wait_as_told(problem, response.headers.get("retry-after", ""))
        if status in _GONE and (call.repeatable or problem.leader is not None):
            return self._again(ApiError(problem), problem.leader)
        raise {409: RejectedError, 410: ResyncError}.get(status, ApiError)(problem)

    def arrived(self) -> None:
        """This server answers: ask it first from here on."""
        self._exchange.at = self._at

    def failed(self, error: httpx.RequestError) -> Again:
        """What to do about an answer that did not come."""
        words = _words(error)
        if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
            raise UnreachableError(f"no safe connection to {self.server}: {words}") from None
        if not self._call.repeatable and not isinstance(error, _NEVER_SENT):
            raise UnreachableError(
                f"the answer of {self.server} was lost ({words}), and it may have been done all "
                "the same: look before asking again"
            ) from None
        where = " or ".join(self._exchange.servers)
        return self._again(
            UnreachableError(f"no answer from {where}: {words}; is the service running there?")
        )

    def _again(self, why: SlicewiseError, leader: str | None = None) -> Again:
        """Try the leader if it is known, or the next server; all of them before any pause."""
        servers = self._exchange.servers
        self._at = (self._at + 1) % len(servers)
        if leader is not None and leader.rstrip("/") in servers:
            self._at = servers.index(leader.rstrip("/"))
        self._asked += 1
        if self._asked % len(servers):
            return Again(0)
        return self._pause(next(self._pauses), why)

    def _wait_as_told(self, problem: Problem, after: str) -> Again:
        """Too fast: nothing was done, and the service says when to come back."""
        return self._pause(float(after) if after.isdigit() else LONGEST_PAUSE, ApiError(problem))

    def _pause(self, seconds: float, why: SlicewiseError) -> Again:
        if self._exchange.clock() + seconds > self._until:
            raise why from None
        return Again(seconds)


def problem_of(response: httpx.Response, server: str) -> Problem:
    """What the service said was wrong, or what somebody else did who stands before it."""
    try:
        return msgspec.json.decode(response.content, type=Problem)
    except msgspec.MsgspecError:
        status = response.status_code
        text = " ".join(response.content[:200].decode(errors="replace").split())
        return Problem(
            type="about:blank",
            title="Unexpected answer",
            status=status,
            detail=f"{server} answered {status}: {text or 'nothing more'}",
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
    """Whether a name can be looked up at all."""
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


def _words(error: httpx.RequestError) -> str:
    """What a failure of the network is called, without numbers of the operating system."""
    if isinstance(error, httpx.TimeoutException):
        return "it took too long"
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return f"it does not speak TLS as it should ({cause.reason})"
        if isinstance(cause, OSError) and cause.errno and cause.strerror:
            known = cause.errno > 0  # those of name resolution are numbered downwards
            return (os.strerror(cause.errno) if known else cause.strerror).lower()
    text = str(error).rstrip(".")
    return text[:1].lower() + text[1:] if text else type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what is behind it, the outermost first."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):  # one for each address of a host
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__

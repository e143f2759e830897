"""Requests and replies: what handlers receive and return, on plain ASGI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from slicewise.api.base import Body
from slicewise.control.answers import Answer, RefusedError
from slicewise.server.auth import ANONYMOUS, Caller

if TYPE_CHECKING:
    from slicewise.server.app import Route

B = TypeVar("B")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Pace = Callable[[], Awaitable[None]]

JSON = b"application/json"
PROBLEM = b"application/problem+json"
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<field>[^`]*)`$")
_PRINTABLE = re.compile(rb"[!-~](?:[ -~]{0,126}[!-~])?")
_MAX_PARAMETERS = 32
_CHALLENGE = (b"www-authenticate", b'Bearer realm="slicewise"')
LARGE = 1 << 16
"""Largest piece of a body that is sent at once; the next waits until the client has read some."""
NO_STORE = b"no-store"
"""Cache-Control of most answers: they describe the present state."""
REVALIDATE = b"private, no-cache"
"""Cache-Control of answers with an ETag: the client may keep them and must revalidate."""

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class DisconnectedError(Exception):
    """Raised when the client disconnects before its request is complete."""


class HttpRequest:
    """One request. Its body is read on demand."""

    __slots__ = (
        "_max_body",
        "address",
        "caller",
        "headers",
        "id",
        "in_flight",
        "method",
        "parts",
        "path",
        "raw",
        "receive",
        "route",
        "scope",
        "share",
    )

    def __init__(self, scope: Scope, receive: Receive, max_body: int) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parts: tuple[str, ...] = ()
        """Values of the parameters in the route's path."""
        self.id = ""
        self.caller: Caller = ANONYMOUS
        self.address = ""
        """The client's network address."""
        self.route: Route | None = None
        self.share: Hashable = None
        """Key of the caller's turns and limits: its tenant, its token, or its address."""
        self.in_flight = False
        """Whether it counts among the caller's requests in flight."""
        self.receive = receive
        self.raw = b""
        """The body, once it has been read."""
        self._max_body = max_body

    def allow(self, body_bytes: int) -> None:
        """Raise the limit of the body's size to at least this."""
        self._max_body = max(self._max_body, body_bytes)

    async def raw_body(self) -> bytes:
        """Read the body; refuse it as soon as it exceeds the limit."""
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 12 or int(declared) > self._max_body:
            raise self._too_large()
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body has a Content-Encoding: send it as plain JSON")
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise DisconnectedError
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self._max_body:
                raise self._too_large()
            more = message.get("more_body", False)
        self.raw = b"".join(pieces)
        return self.raw

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is larger than {self._max_body:,} bytes")

    def decode(self, body: bytes, kind: type[B]) -> B:
        """Decode the body; refuse it with the field that does not match the schema."""
        content = self.headers.get(b"content-type", b"")
        if content != JSON and (content.split(b";")[0].strip().lower() != JSON or b"," in content):
            raise RefusedError(415, "the body must be JSON, with Content-Type: application/json")
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
        try:
            return decoder.decode(body)  # type: ignore[no-any-return]  # typed by its kind
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid("the body", error) from None

    async def body(self, kind: type[B]) -> B:
        """Read and decode the body."""
        return self.decode(await self.raw_body(), kind)

    async def body_if_any(self, kind: type[B]) -> B:
        """Read and decode the body; without one, return the defaults."""
        raw = await self.raw_body()
        return self.decode(raw, kind) if raw else kind()

    def query(self, kind: type[B]) -> B:
        """Decode the query parameters; refuse unknown and repeated ones."""
        raw: bytes = self.scope["query_string"]
        if not raw:
            return kind()
        try:
            pairs = parse_qsl(
                raw.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=_MAX_PARAMETERS,
            )
        except ValueError:  # not ASCII, not UTF-8, too many
            raise RefusedError(400, "the query string cannot be decoded") from None
        known = _parameters(kind)  # type: ignore[arg-type]  # a class can be hashed
        values: dict[str, Any] = {}
        for name, text in pairs:
            parameter = known.get(name, _TEXT)
            value = parameter.value(name, text)
            if parameter.repeated:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise RefusedError(400, f"parameter {name!r} is repeated", field=name)
            else:
                values[name] = value
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise invalid("the query", error) from None

    async def disconnected(self) -> None:
        """Return when the client has disconnected. Unread parts of the body are discarded."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def has_current(self, tag: bytes) -> bool:
        """Whether the client already has the version with this ETag."""
        return matches_tag(self.headers.get(b"if-none-match", b""), tag)

    def key(self) -> str | None:
        """The Idempotency-Key, if there is one."""
        key = self.headers.get(b"idempotency-key")
        if key is None:
            return None
        if not _PRINTABLE.fullmatch(key):
            raise RefusedError(
                400, "Idempotency-Key must be 1 to 128 printable ASCII characters", field="header"
            )
        return key.decode("ascii")


def matches_tag(condition: bytes, tag: bytes) -> bool:
    """Whether an If-None-Match header names this ETag."""
    known = {one.strip().removeprefix(b"W/") for one in condition.split(b",")}
    return tag in known or b"*" in known


def invalid(what: str, error: Exception) -> RefusedError:
    """A refusal that names the invalid field of a document and the reason."""
    text = str(error)
    where = _WHERE.search(text)
    name = where["field"] if where else None
    reason = text[: where.start()] if where else text
    at = f" at {name!r}" if name else ""
    return RefusedError(400, f"{what} is invalid{at}: {reason}", field=name or None)


class _Parameter(NamedTuple):
    """How the text of a parameter becomes its value."""

    json: msgspec.json.Decoder[Any] | None
    """Decodes numbers and booleans; None for text, which is taken literally."""
    must_be: str = ""
    repeated: bool = False

    def value(self, name: str, text: str) -> object:
        """The value of a text."""
        if self.json is None:
            return text
        try:
            return self.json.decode(text)
        except msgspec.DecodeError:
            raise RefusedError(
                400, f"parameter {name!r} must be {self.must_be}", field=name
            ) from None


_TEXT = _Parameter(None)
_BY_TYPE: dict[type[inspect.Type], _Parameter] = {
    inspect.BoolType: _Parameter(msgspec.json.Decoder(bool), "true or false"),
    inspect.IntType: _Parameter(msgspec.json.Decoder(int), "a whole number"),
    inspect.FloatType: _Parameter(msgspec.json.Decoder(float), "a number"),
}


@cache
def _parameters(kind: type) -> dict[str, _Parameter]:
    """The parameters of a query by name.

    ``msgspec.convert(strict=False)`` is no substitute: it accepts ``1`` as true and ``null`` as no
    value, which the OpenAPI document does not allow.
    """
    about = inspect.type_info(kind)
    assert isinstance(about, inspect.StructType)
    return {field.encode_name: _parameter(field.type) for field in about.fields}


def _parameter(about: inspect.Type) -> _Parameter:
    match about:
        case inspect.Metadata():
            return _parameter(about.type)
        case inspect.VarTupleType():
            return _parameter(about.item_type)._replace(repeated=True)
        case inspect.UnionType():  # with None, the default of an optional parameter
            (one,) = (one for one in about.types if not isinstance(one, inspect.NoneType))
            return _parameter(one)
        case _:
            return _BY_TYPE.get(type(about), _TEXT)


class Query(Body, frozen=True):
    """Base class of query parameters."""


async def unpaced() -> None:
    """The pace of a response that never yields the event loop."""


@dataclass(slots=True)
class Reply:
    """A response with a body in memory."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    content: bytes = JSON
    waited: bool = False
    """Whether it was a long poll, the duration of which says nothing about the service."""
    more: Sequence[bytes] = ()
    """Further pieces of the body, possibly shared with other replies."""
    caching: bytes = NO_STORE

    @property
    def size(self) -> int:
        """The length of the body."""
        return len(self.body) + sum(map(len, self.more)) if self.more else len(self.body)

    def discard(self) -> None:
        """Release what the response holds, because it is not sent."""

    async def send(
        self, send: Send, request_id: str, head: bool = False, pace: Pace = unpaced
    ) -> None:
        """Send it, or its headers only; await ``pace`` between pieces of a large body."""
        size = self.size
        headers = [
            (b"content-type", self.content),
            (b"content-length", b"%d" % size),
            (b"cache-control", self.caching),
            (b"x-request-id", request_id.encode()),
            *self.headers,
        ]
        if self.status == 304:
            del headers[:2]  # a 304 has no content to describe
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        body = b"" if head else self.body
        if (self.more or size > LARGE) and not head:
            *pieces, body = self._pieces()
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await pace()
        await send({"type": "http.response.body", "body": body})

    def _pieces(self) -> Iterator[bytes]:
        """The body in pieces of at most LARGE bytes, with small ones joined."""
        joined: list[bytes] = []
        length = 0
        for part in (self.body, *self.more):
            if length + len(part) > LARGE:
                if joined:
                    yield joined[0] if len(joined) == 1 else b"".join(joined)
                joined, length = [], 0
                while len(part) > LARGE:
                    yield part[:LARGE]
                    part = part[LARGE:]
            joined.append(part)
            length += len(part)
        yield joined[0] if len(joined) == 1 else b"".join(joined)


@dataclass(slots=True)
class Stream(Reply):
    """A response that is generated while it is sent."""

    chunks: AsyncGenerator[bytes, None] | None = None
    receive: Receive | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client disconnects; the generator should then end."""
    wake: Callable[[], None] = lambda: None
    """Called when the client disconnects, to end a wait of the generator."""
    ended: Callable[[], None] = lambda: None
    """Called when the stream is closed."""

    def discard(self) -> None:
        """Release what the response holds, because it is not sent."""
        self.ended()

    async def send(
        self, send: Send, request_id: str, head: bool = False, pace: Pace = unpaced
    ) -> None:
        """Send it chunk by chunk, or its headers only."""
        assert self.chunks is not None
        headers = [
            (b"content-type", self.content),
            (b"cache-control", self.caching),
            (b"x-request-id", request_id.encode()),
            *self.headers,
        ]
        watch = asyncio.create_task(self._watch())
        try:
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            if not head:
                async for chunk in self.chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            watch.cancel()
            await self.chunks.aclose()
            self.ended()

    async def _watch(self) -> None:
        assert self.receive is not None
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.gone.set()
        self.wake()


def reply(answer: Answer, *headers: tuple[bytes, bytes]) -> Reply:
    """The reply with an answer's status and body."""
    status, body = answer
    if status == 401:
        headers = (*headers, _CHALLENGE)
    return Reply(status, body, list(headers), JSON if status < 400 else PROBLEM)


def problem(refusal: RefusedError) -> Reply:
    """The reply to a refused request."""
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(refusal.retry_after - 1e-6))))
    return reply(refusal.answer(), *headers)

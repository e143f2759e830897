"""A request as the handlers see it, and the reply they give; nothing of this knows a route.

This is plain ASGI: a request that places an instance passes through here thousands of times a
second, so there is one object for it and no stack of wrappers around it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect
from starlette.types import Receive, Scope, Send

from slicewise.control.answers import Answer, RefusedError
from slicewise.control.wire import Body
from slicewise.service.auth import NOBODY, Caller

if TYPE_CHECKING:
    from slicewise.service.routes import Route

B = TypeVar("B")
Pace = Callable[[], Awaitable[None]]

JSON = b"application/json"
PROBLEM = b"application/problem+json"
_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<field>[^`]*)`$")
_PRINTABLE = re.compile(rb"[!-~](?:[ -~]{0,126}[!-~])?")
_MAX_PARAMETERS = 32
_CHALLENGE = (b"www-authenticate", b'Bearer realm="slicewise"')
LARGE = 1 << 16
"""Bytes of a body that are sent in one piece; the rest waits until the client has read some."""
NOT_KEPT = b"no-store"
"""What the API answers is true now: caches must not keep it."""
ASKED_AGAIN = b"private, no-cache"
"""The caller itself may keep it, and asks each time whether it still holds."""

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Gone(Exception):  # noqa: N818 - not an error: nobody is there to be told
    """The client went away before it had said everything."""


class Request:
    """One request; its body is read when somebody asks for it."""

    __slots__ = (
        "_limit",
        "address",
        "caller",
        "headers",
        "id",
        "method",
        "parts",
        "path",
        "raw",
        "receive",
        "route",
        "scope",
        "share",
        "under_way",
    )

    def __init__(self, scope: Scope, receive: Receive, limit: int) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.parts: list[str] = []
        """What stands in the path where its route has a name in braces."""
        self.id = ""
        self.caller: Caller = NOBODY  # until it is known who asks
        self.address = ""
        """The client's network address."""
        self.route: Route | None = None
        self.share: Hashable = None
        """With whom the caller shares its turns and limits: its tenant, or its token."""
        self.under_way = False
        """Whether it counts among the caller's requests in flight."""
        self.receive = receive
        self.raw = b""
        """Its body, once somebody has read it."""
        self._limit = limit

    def allow(self, body_bytes: int) -> None:
        """Let the body be as large as this, if that is more than it may be otherwise."""
        self._limit = max(self._limit, body_bytes)

    async def raw_body(self) -> bytes:
        """The bytes of the body, counted while they come in."""
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 12 or int(declared) > self._limit:
            raise self._too_large()
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body has a Content-Encoding: send it as plain JSON")
        message = await self.receive()
        if not message.get("more_body"):
            if message["type"] == "http.disconnect":
                raise Gone
            body: bytes = message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large()
            self.raw = body
            return body
        chunks = bytearray(message.get("body", b""))
        while message.get("more_body"):
            if len(chunks) > self._limit:
                raise self._too_large()
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            chunks += message.get("body", b"")
        if len(chunks) > self._limit:
            raise self._too_large()
        self.raw = bytes(chunks)
        return self.raw

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is larger than {self._limit:,} bytes")

    def decode(self, body: bytes, kind: type[B]) -> B:
        """The body as what it should be; refused with the place where it is not."""
        content = self.headers.get(b"content-type", b"")
        if content != JSON and (content.split(b";")[0].strip().lower() != JSON or b"," in content):
            raise RefusedError(415, "the body must be JSON, with Content-Type: application/json")
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.json.Decoder(kind)
        try:
            return decoder.decode(body)  # type: ignore[no-any-return]  # of the kind asked for
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise refused(error, "the body") from None

    async def body(self, kind: type[B]) -> B:
        """Read and decode the body."""
        return self.decode(await self.raw_body(), kind)

    async def body_if_any(self, kind: type[B]) -> B:
        """Read and decode the body; without one, what it is unless said."""
        raw = await self.raw_body()
        return self.decode(raw, kind) if raw else kind()

    def query(self, kind: type[B]) -> B:
        """The parameters behind the question mark, each known and each but once."""
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
            raise RefusedError(400, "the query cannot be read") from None
        known = _parameters(kind)  # type: ignore[arg-type]  # a class can be hashed
        values: dict[str, Any] = {}
        for name, text in pairs:
            parameter = known.get(name, _TEXT)
            value = parameter.value(name, text)
            if parameter.repeated:
                values.setdefault(name, []).append(value)
            elif name in values:
                raise RefusedError(400, f"parameter {name!r} is given twice", field=name)
            else:
                values[name] = value
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise refused(error, "the query") from None

    async def gone(self) -> None:
        """Return when the client has left; its body must have been read, or not matter."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def knows(self, tag: bytes) -> bool:
        """Whether the caller has the version with this tag already."""
        return knows(self.headers.get(b"if-none-match", b""), tag)

    def key(self) -> str | None:
        """The idempotency key, if there is one."""
        key = self.headers.get(b"idempotency-key")
        if key is None:
            return None
        if not _PRINTABLE.fullmatch(key):
            raise RefusedError(
                400, "Idempotency-Key must be 1 to 128 printable ASCII characters", field="header"
            )
        return key.decode("ascii")


def knows(condition: bytes, tag: bytes) -> bool:
    """Whether an If-None-Match header names this tag."""
    known = {one.strip().removeprefix(b"W/") for one in condition.split(b",")}
    return tag in known or b"*" in known


def refused(error: Exception, what: str) -> RefusedError:
    """A refusal that says what is wrong with a document, and where in it."""
    text = str(error)
    where = _WHERE.search(text)
    name = where["field"] if where else None
    sentence = text[: where.start()] if where else text
    at = f" at {name!r}" if name else ""
    return RefusedError(400, f"{what} is not as it should be{at}: {sentence}", field=name or None)


class _Parameter(NamedTuple):
    """How a parameter is written."""

    json: msgspec.json.Decoder[Any] | None
    """Reads its text, unless the text is the value: a number, true and false are as in JSON."""
    must_be: str = ""
    repeated: bool = False

    def value(self, name: str, text: str) -> object:
        """What the text says."""
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

    ``msgspec.convert(strict=False)`` would read them too, but takes ``1`` for true and ``null``
    for no value, which the OpenAPI document does not.
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
        case inspect.UnionType():  # with None, for a parameter that was not given
            (one,) = (one for one in about.types if not isinstance(one, inspect.NoneType))
            return _parameter(one)
        case _:
            return _BY_TYPE.get(type(about), _TEXT)


class Query(Body, frozen=True):
    """The parameters of a request."""


async def unpaced() -> None:
    """The pace of an answer that need not share the event loop."""


@dataclass(slots=True)
class Reply:
    """What is sent back."""

    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    content: bytes = JSON
    waited: bool = False
    """Whether it took as long as it did because there was nothing to tell."""
    more: Sequence[bytes] = ()
    """Further pieces of the body, which may be shared with other replies."""
    caching: bytes = NOT_KEPT

    @property
    def size(self) -> int:
        """How long the body is."""
        return len(self.body) + sum(map(len, self.more)) if self.more else len(self.body)

    async def send(
        self, send: Send, request_id: str, head: bool = False, pace: Pace = unpaced
    ) -> None:
        """Send it, or its head alone; ``pace`` is awaited between the pieces of a large body."""
        size = self.size
        headers = [
            (b"content-type", self.content),
            (b"content-length", b"%d" % size),
            (b"cache-control", self.caching),
            (b"x-request-id", request_id.encode()),
            *self.headers,
        ]
        if self.status == 304:
            del headers[:2]  # they would be taken for those of what is not sent
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        body = b"" if head else self.body
        if (self.more or size > LARGE) and not head:
            *pieces, body = self._pieces()
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await pace()
        await send({"type": "http.response.body", "body": body})

    def _pieces(self) -> Iterator[bytes]:
        """The body, cut so that the client must read before more is handed to the system."""
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
    """A reply that goes on until there is no more, or nobody there any more."""

    chunks: AsyncGenerator[bytes, None] | None = None
    receive: Receive | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client has left; whoever makes the chunks looks at it."""
    wake: Callable[[], None] = lambda: None
    """Called then, in case the maker of chunks waits for something else."""
    ended: Callable[[], None] = lambda: None

    async def send(
        self, send: Send, request_id: str, head: bool = False, pace: Pace = unpaced
    ) -> None:
        """Send it, chunk by chunk, or its head alone."""
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
    """An answer, sent back."""
    status, body = answer
    if status == 401:
        headers = (*headers, _CHALLENGE)
    return Reply(status, body, list(headers), JSON if status < 400 else PROBLEM)


def problem(refusal: RefusedError) -> Reply:
    """A refusal, sent back with the headers that belong to it."""
    headers: list[tuple[bytes, bytes]] = []
    if refusal.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(refusal.retry_after - 1e-6))))
    return reply(refusal.answer(), *headers)

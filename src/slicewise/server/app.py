"""The ASGI application: routes, and the steps of every request from route to response."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from slicewise.api.base import View
from slicewise.config.addresses import Addresses, block_of
from slicewise.config.logs import logger
from slicewise.control.answers import RefusedError
from slicewise.control.ports import StoreError
from slicewise.journal.entries import Role
from slicewise.server.auth import PEER, certified
from slicewise.server.context import AppContext
from slicewise.server.requests import (
    LARGE,
    ASGIApp,
    DisconnectedError,
    HttpRequest,
    Query,
    Receive,
    Reply,
    Scope,
    Send,
    Stream,
    problem,
)

log = logger("slicewise.http")

Handler = Callable[[AppContext, HttpRequest], Awaitable[Reply]]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """An operation of the API: its handler, who may call it, and all of its responses."""

    method: str
    path: str
    """A name in braces matches one segment of the path."""
    name: str
    """The operation id in the OpenAPI document."""
    summary: str
    handler: Handler
    roles: frozenset[Role] | None
    """Roles that may call it; None if no token is needed."""
    answers: dict[int, type[View] | type[list[Any]] | str]
    """Successful responses by status: a schema, or a content type for anything but JSON.

    304 has no content and enables conditional requests.
    """
    problems: tuple[int, ...] = ()
    """Statuses of refusals, beyond those that every route may answer with."""
    body: type | None = None
    optional_body: bool = False
    query: type[Query] | None = None
    key: bool = False
    """Whether it accepts an Idempotency-Key."""
    writes: bool = False
    """Whether only the leader can answer it."""
    tag: str = ""
    certificate: bool = False
    """Whether a client certificate is accepted in place of a token."""
    unlimited: bool = False
    """Whether it is exempt from the rate limit of routes without a token."""

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return _PARAMETER.findall(self.path)


class NoRouteError(RefusedError):
    """Raised for a path without a route."""


class WrongMethodError(RefusedError):
    """Raised for a path whose routes do not accept the method."""

    def __init__(self, detail: str, allowed: str) -> None:
        super().__init__(405, detail)
        self.allowed = allowed


class Router:
    """Finds the route of a request. Literal paths win over paths with parameters."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._literal: dict[str, dict[str, Route]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            table = patterns if route.parameters else self._literal
            methods = table.setdefault(route.path, {})
            methods[route.method] = route
            if route.method == "GET":
                methods["HEAD"] = route
        self._patterns = [
            (re.compile(_PARAMETER.sub("([^/]+)", path)), methods)
            for path, methods in patterns.items()
        ]

    def find(self, method: str, path: str) -> tuple[Route, tuple[str, ...]]:
        """The route, and the values of the parameters in its path."""
        methods, values = self._match(path)
        route = methods.get(method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise WrongMethodError(f"this route takes {allowed}, not {method}", allowed)
        return route, values

    def _match(self, path: str) -> tuple[dict[str, Route], tuple[str, ...]]:
        methods = self._literal.get(path)
        if methods is not None:
            return methods, ()
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, match.groups()
        raise NoRouteError(404, "no such route; GET /openapi.json lists them")


class App:
    """The ASGI application of one service."""

    def __init__(self, context: AppContext, router: Router, pages: ASGIApp | None = None) -> None:
        """``pages`` answers paths outside the API, such as those of the dashboard."""
        self.context = context
        self.router = router
        self._pages = pages
        self._runtime = context.runtime
        self._addresses = Addresses(
            context.settings.trusted_proxies, context.settings.proxies_header
        )
        self._max_body = context.settings.body_bytes
        self._last_sizes: dict[str, int] = {}
        """Size of the last large response by route, the best estimate of the next one."""
        self._log_requests = context.settings.log_requests
        self._ids = map("{}{:x}".format, itertools.repeat(secrets.token_hex(4)), itertools.count())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        started = self._runtime.timer()
        request = HttpRequest(scope, receive, self._max_body)
        given = request.headers.get(b"x-request-id")
        request.id = given.decode() if given and _REQUEST_ID.fullmatch(given) else next(self._ids)
        request.address = self._addresses.of(scope)
        try:
            try:
                answer = await self._answer(request)
            except NoRouteError as refusal:
                if self._pages is not None and not request.path.startswith("/v1"):
                    await self._pages(scope, receive, send)
                    return
                answer = problem(refusal)
            except WrongMethodError as refusal:
                answer = problem(refusal)
                answer.headers.append((b"allow", refusal.allowed.encode()))
            except RefusedError as refusal:
                answer = problem(refusal)
            except StoreError as error:
                log.error("database failed", request=request.id, problem=str(error))
                detail = "the database does not answer; nothing was changed, try again"
                answer = problem(RefusedError(503, detail, retry_after=1))
            except DisconnectedError:
                return
            except Exception:
                log.exception("request failed", request=request.id, path=request.path)
                detail = f"internal error; see the log for request {request.id}"
                answer = problem(RefusedError(500, detail))
            if isinstance(answer, Stream):
                self._end(request)  # open streams have their own limit
            await self._send(answer, send, request)
        finally:
            self._end(request)
        self._record(request, answer, started)

    async def _answer(self, request: HttpRequest) -> Reply:
        """Check the request in this order: token, limits, role, parameters; then handle it.

        No byte of the body is read before the checks have passed.
        """
        route = request.route = self._find(request)
        context, runtime = self.context, self._runtime
        if route.roles is None:
            request.share = ("address", block_of(request.address))
            return self._check_size(request, route, await route.handler(context, request))
        if not runtime.loaded:
            raise RefusedError(503, "the journal is still being read", retry_after=1)
        caller = None
        settings = context.settings
        if (
            route.certificate
            and settings.extender_client_ca is not None
            and b"authorization" not in request.headers
        ):
            name = settings.extender_client_name
            caller = certified(request.scope.get(PEER), name, request.address)
        caller = request.caller = caller or await context.authenticate(request)
        share = request.share = caller.share
        context.in_flight.begin(share)
        request.in_flight = True
        await context.turns.take(share)
        if caller.tenant is not None:
            context.limits.check_tenant(runtime.state, caller.tenant)
        elif caller.token.node is not None:
            context.limits.check_agent(caller.token.node)
        if route.writes and runtime.source is not None:
            raise runtime.not_leading()
        if caller.role not in route.roles:
            raise RefusedError(403, f"a token of role {caller.role} may not do this")
        if route.query is None and request.scope["query_string"]:
            raise RefusedError(400, "this route takes no query parameters")
        if route.name in self._last_sizes:
            context.in_flight.check_unread(share, self._last_sizes[route.name])
        answer = await route.handler(context, request)
        if not route.writes:
            # The token may have been revoked while the body arrived. The command handler has
            # checked it again for routes that write.
            try:
                context.check(caller)
            except RefusedError:
                answer.discard()
                raise
        return self._check_size(request, route, answer)

    def _check_size(self, request: HttpRequest, route: Route, answer: Reply) -> Reply:
        """Refuse a large response to a caller that has not read earlier ones."""
        if answer.size > LARGE:
            self._last_sizes[route.name] = answer.size
            self.context.in_flight.check_unread(request.share, answer.size)
        return answer

    def _find(self, request: HttpRequest) -> Route:
        """The route of a request; the client's address is rate-limited if it needs no token."""
        try:
            route, request.parts = self.router.find(request.method, request.path)
        except RefusedError:
            self.context.limits.check_visitor(block_of(request.address))
            raise
        if route.roles is None and not route.unlimited:
            self.context.limits.check_visitor(block_of(request.address))
        return route

    async def _send(self, answer: Reply, send: Send, request: HttpRequest) -> None:
        """Send a response; a large one counts as unread and takes turns while it is sent."""
        head = request.method == "HEAD"
        size = answer.size
        if size <= LARGE:
            await answer.send(send, request.id, head)
            return
        pace = partial(self.context.turns.take, request.share)
        with self.context.in_flight.sending(request.share, size):
            await answer.send(send, request.id, head, pace)

    def _end(self, request: HttpRequest) -> None:
        """Stop counting a request as in flight."""
        if request.in_flight:
            request.in_flight = False
            self.context.in_flight.end(request.share)

    def _record(self, request: HttpRequest, answer: Reply, started: float) -> None:
        """Count a request in the metrics, and log it."""
        route = request.route
        path = "unknown" if route is None else route.path
        method = "unknown" if route is None else request.method  # clients may invent methods
        seconds = self._runtime.timer() - started
        waited = isinstance(answer, Stream) or answer.waited
        self.context.metrics.count_request(path, method, answer.status, None if waited else seconds)
        if self._log_requests:
            log.info(
                "request",
                request=request.id,
                method=request.method,
                path=request.path,
                status=answer.status,
                token=request.caller.id or None,
                seconds=round(seconds, 6),
            )


async def _answer_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Acknowledge the lifespan protocol; refuse websockets."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await receive()
    await send({"type": "websocket.close", "code": 1000})

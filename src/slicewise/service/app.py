"""The application: every request comes in here, and leaves with an answer whatever happens."""

from __future__ import annotations

import itertools
import re
import secrets
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from slicewise.control.answers import RefusedError
from slicewise.control.ports import StoreError
from slicewise.service.addresses import Addresses, block_of
from slicewise.service.auth import PEER, certified
from slicewise.service.http import LARGE, Gone, Reply, Request, Stream, problem
from slicewise.service.logs import logger
from slicewise.service.routes import NoRouteError, Route, Router, WrongMethodError
from slicewise.service.site import Site

log = logger("slicewise.http")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class App:
    """An ASGI application over one site."""

    def __init__(self, site: Site, router: Router, pages: ASGIApp | None = None) -> None:
        """``pages`` answers what is looked up outside the API, such as a dashboard's files."""
        self.site = site
        self.router = router
        self._pages = pages
        self._plant = site.plant
        self._addresses = Addresses(site.settings.trusted_proxies, site.settings.proxies_header)
        self._limit = site.settings.body_bytes
        self._sizes: dict[str, int] = {}
        """By route with large answers: the size of the last one, which is what to expect."""
        self._logs = site.settings.log_requests
        self._ids = map("{}{:x}".format, itertools.repeat(secrets.token_hex(4)), itertools.count())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await _not_http(scope, receive, send)
            return
        begun = self._plant.timer()
        request = Request(scope, receive, self._limit)
        given = request.headers.get(b"x-request-id")
        request.id = given.decode() if given and _ID.fullmatch(given) else next(self._ids)
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
                sentence = "the database does not answer; nothing was changed, try again"
                answer = problem(RefusedError(503, sentence, retry_after=1))
            except Gone:
                return
            except Exception:
                log.exception("request failed", request=request.id, path=request.path)
                sentence = f"something went wrong; the log tells more about request {request.id}"
                answer = problem(RefusedError(500, sentence))
            if isinstance(answer, Stream):
                self._leave(request)  # streams have a limit of their own
            await self._send(answer, send, request)
        finally:
            self._leave(request)
        self._note(request, answer, begun)

    async def _answer(self, request: Request) -> Reply:
        route = request.route = self._find(request)
        if route.roles is None:
            return await route.handler(self.site, request)
        state, site = self._plant.state, self.site
        if not self._plant.loaded:
            raise RefusedError(503, "the journal is still being read", retry_after=1)
        caller = None
        if route.certificate and b"authorization" not in request.headers:
            name = site.settings.extender_client_name
            caller = certified(request.scope.get(PEER), name, request.address)
        caller = request.caller = caller or await site.authenticate(request)
        share = request.share = caller.share
        site.flights.enter(share)
        request.under_way = True
        if not site.turns.at_once(share):
            await site.turns.take(share)
        if caller.tenant is not None:
            site.limits.tenant(state, caller.tenant)
        elif caller.token.node is not None:
            site.limits.agent(caller.token.node)
        if route.writes and self._plant.source is not None:
            raise self._plant.elsewhere()
        if caller.role not in route.roles:
            raise RefusedError(403, f"a token of role {caller.role} may not do this")
        if route.query is None and request.scope["query_string"]:
            raise RefusedError(400, "this takes no parameters behind a question mark")
        if route.name in self._sizes:
            site.flights.check_unread(share, self._sizes[route.name])
        answer = await route.handler(site, request)
        if not route.writes:
            # The body may have taken its time. What is written was checked as it was decided.
            site.check(caller)
        if answer.size > LARGE:
            self._sizes[route.name] = answer.size
            site.flights.check_unread(share, answer.size)
        return answer

    async def _send(self, answer: Reply, send: Send, request: Request) -> None:
        """Send an answer; a large one counts as unread meanwhile, and takes turns."""
        head = request.method == "HEAD"
        size = answer.size
        if size <= LARGE:
            await answer.send(send, request.id, head)
            return
        pace = partial(self.site.turns.take, request.share)
        with self.site.flights.answer(request.share, size):
            await answer.send(send, request.id, head, pace)

    def _leave(self, request: Request) -> None:
        """A request is not under way any more."""
        if request.under_way:
            request.under_way = False
            self.site.flights.leave(request.share)

    def _find(self, request: Request) -> Route:
        """The route of a request; where that needs no token, the client's address has a limit."""
        try:
            route = self.router.find(request)
        except RefusedError:
            self.site.limits.visitor(block_of(request.address))
            raise
        if route.roles is None and not route.unlimited:
            self.site.limits.visitor(block_of(request.address))
        return route

    def _note(self, request: Request, answer: Reply, begun: float) -> None:
        route = request.route
        name = "unknown" if route is None else route.path
        method = "unknown" if route is None else request.method  # anybody can make up a method
        took = self._plant.timer() - begun
        lasting = isinstance(answer, Stream) or answer.waited
        self.site.metrics.count_request(name, method, answer.status, None if lasting else took)
        if self._logs:
            log.info(
                "request",
                request=request.id,
                method=request.method,
                path=request.path,
                status=answer.status,
                token=request.caller.id or None,
                seconds=round(took, 6),
            )


async def _not_http(scope: Scope, receive: Receive, send: Send) -> None:
    """Whatever is no request: a server that starts or stops, or a websocket, which is refused."""
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await receive()
    await send({"type": "websocket.close", "code": 1000})

"""What a route is, and how a path finds its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from slicewise.control.answers import RefusedError
from slicewise.control.entries import Role
from slicewise.control.wire import View
from slicewise.service.http import Query, Reply, Request
from slicewise.service.site import Site

Handler = Callable[[Site, Request], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One thing that can be asked for, with everything that may be answered."""

    method: str
    path: str
    """Names in braces stand for one part of a path each."""
    name: str
    """The operation's name."""
    summary: str
    handler: Handler
    roles: frozenset[Role] | None
    """Who may ask; None needs no token."""
    answers: dict[int, type[View] | type[list[Any]] | str]
    """By status: what is answered when all is well, or its content type if it is no JSON.

    304 has no content: with it, callers may ask whether what they have still holds.
    """
    problems: tuple[int, ...] = ()
    """What else may be answered, beyond what every route may."""
    body: type | None = None
    optional_body: bool = False
    query: type[Query] | None = None
    key: bool = False
    """Whether it takes an idempotency key."""
    writes: bool = False
    """Whether only the leader can do it."""
    tag: str = ""
    certificate: bool = False
    """Whether one may ask with a client's certificate instead of a token."""
    unlimited: bool = False
    """Whether it has no limit by address although it needs no token, or limits for itself."""

    @property
    def parameters(self) -> list[str]:
        """The names in its path."""
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


@dataclass(slots=True)
class _Fork:
    """A place in the tree of paths."""

    ways: dict[str, _Fork] = field(default_factory=dict)
    anything: _Fork | None = None
    methods: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds routes, in time that does not depend on how many there are."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._root = _Fork()
        for route in self.routes:
            fork = self._root
            for part in route.path.split("/")[1:]:
                if part.startswith("{"):
                    fork.anything = fork = fork.anything or _Fork()
                else:
                    fork = fork.ways.setdefault(part, _Fork())
            fork.methods[route.method] = route
            if route.method == "GET":
                fork.methods["HEAD"] = route  # the same, but that no body is sent

    def find(self, request: Request) -> Route:
        """The route of a request, whose ``parts`` are filled in; refused without one."""
        fork: _Fork | None = self._root
        parts = request.path.split("/")
        for part in parts[1:]:
            assert fork is not None
            way = fork.ways.get(part)
            if way is None and (way := fork.anything) is not None and part:
                request.parts.append(part)
            elif way is fork.anything:
                way = None
            fork = way
            if fork is None:
                break
        if fork is None or not fork.methods or parts[0]:
            raise NoRouteError(404, "no such route; GET /openapi.json lists them")
        route = fork.methods.get(request.method)
        if route is None:
            allowed = ", ".join(sorted(fork.methods))
            raise WrongMethodError(f"this takes {allowed}, not {request.method}", allowed)
        return route


class NoRouteError(RefusedError):
    """A path that leads nowhere."""


class WrongMethodError(RefusedError):
    """A route that does not take this method."""

    def __init__(self, detail: str, allowed: str) -> None:
        super().__init__(405, detail)
        self.allowed = allowed

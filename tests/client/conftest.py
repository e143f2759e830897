"""A service that listens on a port, and both clients for it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.client.running import Running, running

from slicewise.client import AsyncClient, Client


class Awaited:
    """An `AsyncClient` with blocking calls, so one test covers both clients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(*arguments, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        def call(*arguments: Any, **options: Any) -> Any:
            made = method(*arguments, **options)
            if inspect.isawaitable(made):
                return self._loop.run_until_complete(made)
            return self._each(made)

        return call

    def _each(self, made: Any) -> Iterator[Any]:
        try:
            while True:
                yield self._loop.run_until_complete(anext(made))
        except StopAsyncIteration:
            return
        finally:
            self._loop.run_until_complete(made.aclose())

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """A service with only the default tenant."""
    with running(tmp_path / "service") as made:
        yield made


@pytest.fixture(params=[Client, Awaited], ids=["blocking", "awaited"])
def make(request: pytest.FixtureRequest) -> Any:
    """The constructor of a blocking or asynchronous client."""
    return request.param


@pytest.fixture
def admin(service: Running, make: Any) -> Iterator[Any]:
    """A client with the admin token, of either kind."""
    with make(service.url, service.token) as client:
        yield client

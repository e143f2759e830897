"""The load generator of bench_service.py: HTTP/1.1 clients in a separate process.

Each client has one connection and sends its next request when the last is answered. Standard input
has a line of JSON for each measurement; the results go to standard output. It implements just
enough HTTP to add little cost to the measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "1g.10gb", "4g.40gb")
WARM_UP_SECONDS = 0.3
PATHS = {"no-op": "/v1/no-op", "bare": "/v1/bare"}
PERCENTILES = (50, 90, 99)


class Connection(asyncio.Protocol):
    """A client that sends a request, waits for the answer, and repeats."""

    def __init__(self, spec: dict[str, Any], number: int, tally: Tally) -> None:
        self._what: str = spec["what"]
        self._auth = f"authorization: Bearer {spec['token']}\r\nhost: {spec['host']}\r\n"
        self._profiles = itertools.islice(itertools.cycle(PROFILES), number % len(PROFILES), None)
        self._keys = (f"{spec['run']}-{number}-{count}" for count in itertools.count())
        self._tally = tally
        self._buffer = b""
        self._sent = 0.0
        self._holds: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the first request."""
        self._transport = transport
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the server closed the connection, which is an error."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed a connection"))

    def _ask(self) -> None:
        self._transport.write(self._next())
        self._sent = time.perf_counter()

    def _next(self) -> bytes:
        if self._what == "whoami":
            return f"GET /v1/whoami HTTP/1.1\r\n{self._auth}\r\n".encode()
        path = PATHS.get(self._what, "/v1/allocations")
        if self._holds is not None:
            return f"DELETE {path}/{self._holds} HTTP/1.1\r\n{self._auth}\r\n".encode()
        body = f'{{"profile":"{next(self._profiles)}"}}'
        key = (
            ""
            if self._what == "durable without key"
            else f"idempotency-key: {next(self._keys)}\r\n"
        )
        return (
            f"POST {path} HTTP/1.1\r\n{self._auth}{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def data_received(self, data: bytes) -> None:
        """Handle an answer, which may arrive in pieces."""
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = self._buffer.find(b"content-length: ") + 16
        whole = head + 4 + int(self._buffer[length : self._buffer.find(b"\r\n", length)])
        if len(self._buffer) < whole:
            return
        now = time.perf_counter()
        status = int(self._buffer[9:12])
        self._tally.count(self._sent, now, status)
        posted = status == 201 or (self._what == "bare" and self._holds is None)
        self._holds = self._buffer[head + 11 : head + 32].decode() if posted else None
        self._buffer = b""
        if now < self._tally.end or self._holds is not None:  # release the last allocation too
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()


@dataclass
class Tally:
    """Answers within the measured interval, and their latencies."""

    begin: float
    end: float
    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    answered: int = 0
    """All answers, including those outside the interval."""

    def count(self, sent: float, now: float, status: int) -> None:
        """Count an answer."""
        self.answered += 1
        if self.begin <= now <= self.end:
            self.seconds.append(now - sent)
            self.statuses[status] += 1


async def load(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the clients of a specification for its duration."""
    begin = time.perf_counter() + WARM_UP_SECONDS
    tally = Tally(begin, begin + spec["seconds"])
    loop = asyncio.get_running_loop()
    clients = [
        (
            await loop.create_connection(
                lambda number=number: Connection(spec, number, tally),  # type: ignore[misc]
                *spec["address"],
            )
        )[1]
        for number in range(spec["clients"])
    ]
    busy = time.process_time()
    await asyncio.gather(*(client.done for client in clients))
    found = sorted(tally.seconds)
    return {
        "requests": len(found),
        "answered": tally.answered,
        "per_second": len(found) / spec["seconds"],
        "statuses": dict(tally.statuses),
        "ms": {f"p{p}": 1e3 * _percentile(found, p) for p in PERCENTILES}
        | {"max": 1e3 * found[-1] if found else 0.0},
        "generator_seconds": time.process_time() - busy,
    }


def _percentile(found: list[float], percent: int) -> float:
    return found[min(len(found) - 1, len(found) * percent // 100)] if found else 0.0


def generate() -> None:
    """Run the measurements of standard input, and print a result for each."""
    with asyncio.Runner(loop_factory=_loop()) as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(load(json.loads(line)))), flush=True)


def _loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


if __name__ == "__main__":
    generate()

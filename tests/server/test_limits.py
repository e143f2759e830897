"""Limits of bodies, pages and rates; routes, methods and request ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Harness

from slicewise.server.limits import TokenBuckets
from slicewise.server.routes.table import ROUTES


def test_large_bodies_are_refused(busy: Harness) -> None:
    large = b'{"profile": "' + b"x" * 70_000 + b'"}'
    answer = busy.post("/v1/allocations", content=large)
    assert answer.status_code == 413
    assert "65,536" in answer.json()["detail"]

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 1000

    assert busy.post("/v1/allocations", content=chunks(80)).status_code == 413
    assert busy.post("/v1/allocations", content=chunks(5)).status_code == 400

    async def two_pieces() -> AsyncIterator[bytes]:
        yield b'{"profile":'
        yield b'"1g.10gb"}'

    assert busy.post("/v1/allocations", content=two_pieces()).status_code == 201

    async def at_once() -> AsyncIterator[bytes]:
        yield b" " * 70_000

    assert busy.post("/v1/allocations", content=at_once()).status_code == 413
    for length in ("-1", "x", "9" * 20):
        headers = {"content-length": length}
        assert busy.post("/v1/allocations", content=b"{}", headers=headers).status_code == 413


def test_unread_bytes_without_a_token_are_counted_by_address(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"unread_bytes": 1000})
    read = asyncio.Event()

    async def fetch(address: str, waits: bool = False) -> int:
        """GET /openapi.json, which is large; return the status."""
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                if waits:
                    await read.wait()

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/openapi.json",
            "query_string": b"",
            "headers": [],
            "client": (address, 1),
        }
        await harness.service.app(scope, receive, send)
        (status,) = statuses
        return status

    async def crowd() -> tuple[int, int, int]:
        slow = asyncio.create_task(fetch("192.0.2.1", waits=True))
        while not harness.service.context.in_flight.unread:
            await asyncio.sleep(0)
        others = await fetch("192.0.2.1"), await fetch("198.51.100.1")
        read.set()
        return await slow, *others

    try:
        assert harness.run(crowd()) == (200, 429, 200)
    finally:
        harness.close()


def test_bodies_must_be_json(busy: Harness) -> None:
    for content in ("text/plain", "application/xml", ""):
        answer = busy.post("/v1/allocations", content=b"{}", headers={"content-type": content})
        assert answer.status_code == 415, content
    ok = {"content-type": "Application/JSON; charset=utf-8"}
    assert busy.post("/v1/allocations", content=b"{}", headers=ok).status_code == 400
    for body in (
        b"",
        b"{",
        b"nonsense",
        b'{"profile": "\xff"}',
        b"[" * 50_000,
        b'{"profile":"a"}x',
    ):
        answer = busy.post("/v1/allocations", content=body)
        assert answer.status_code == 400, body[:20]
        assert answer.json()["title"] == "Bad request"


def test_routes_and_methods(busy: Harness) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/nodes/", "/v1/nodes//", "/v1//nodes", "/v2/nodes", "//"):
        answer = busy.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json"
    answer = busy.call("PUT", "/v1/nodes")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert answer.json()["detail"] == "this route takes GET, HEAD, POST, not PUT"
    assert busy.call("PUT", "/v1/allocations/x").headers["allow"] == "DELETE, GET, HEAD"
    refused = busy.call("HEAD", "/v1/tokens/x")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "DELETE", b"")
    assert busy.call("OPTIONS", "/healthz", token=None).status_code == 405
    assert busy.call("MADEUP", "/nowhere", token=None).status_code == 404


def test_head_answers_like_get_without_a_body(busy: Harness) -> None:
    names = {"{name}": "n1", "{id}": busy.place()["id"]}
    for route in ROUTES:
        if route.method != "GET" or route.name in ("metrics", "agentDesired"):
            continue  # metrics change between requests, and agentDesired is for agents
        path = route.path
        for name, value in names.items():
            path = path.replace(name, value)
        head = busy.call("HEAD", path)
        assert head.content == b"", path
        if route.name == "followEvents":
            assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in head.headers
            assert busy.service.context.streams.open == 0
            continue
        full = busy.get(path)
        assert head.status_code == full.status_code, path
        for header in ("content-type", "content-length", "cache-control"):
            assert head.headers[header] == full.headers[header], path
    assert busy.call("HEAD", "/metrics").content == b""
    for path, token, status in (
        ("/v1/nodes", None, 401),
        ("/v1/nodes/x", "", 404),
        ("/no", "", 404),
    ):
        refused = busy.call("HEAD", path, token=token)
        assert (refused.status_code, refused.content) == (status, b"")
    assert 'method="HEAD"' in busy.get("/metrics").text


def test_unknown_parameters_are_refused(busy: Harness) -> None:
    for path in ("/v1/whoami?x=1", "/v1/nodes/n1?gpus=true", "/v1/nodes?name=n1"):
        assert busy.get(path).status_code == 400, path
    assert busy.get("/healthz?x=1").status_code == 200


def test_requests_have_ids(harness: Harness) -> None:
    one, two = harness.get("/healthz"), harness.get("/healthz")
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    given = harness.get("/healthz", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = harness.get("/healthz", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_tenants_have_a_rate_limit(busy: Harness) -> None:
    fast, slow = busy.tenant("fast"), busy.tenant("slow", requests_per_second=2)
    for _ in range(2):
        assert busy.get("/v1/whoami", token=slow).status_code == 200
    answer = busy.get("/v1/whoami", token=slow)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "more than 2 requests a second" in answer.json()["detail"]
    assert busy.get("/v1/whoami", token=fast).status_code == 200
    assert busy.get("/v1/whoami").status_code == 200
    busy.ticks += 0.5
    assert busy.get("/v1/whoami", token=slow).status_code == 200
    assert busy.get("/v1/whoami", token=slow).status_code == 429
    busy.ticks += 100
    for _ in range(2):
        assert busy.get("/v1/whoami", token=slow).status_code == 200
    assert busy.get("/v1/whoami", token=slow).status_code == 429
    busy.call("PATCH", "/v1/tenants/slow", {"quota": {"requests_per_second": 0.1}})
    busy.ticks += 1
    assert busy.get("/v1/whoami", token=slow).headers["retry-after"] == "9"


def test_the_default_rate_limit(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"requests_per_second": 0.5})
    try:
        token = harness.tenant("acme")
        assert harness.get("/v1/whoami", token=token).status_code == 200
        assert harness.get("/v1/whoami", token=token).headers["retry-after"] == "2"
    finally:
        harness.close()


def test_the_number_of_buckets_is_bounded() -> None:
    now = 0.0
    buckets = TokenBuckets(lambda: now, keep=100)
    for number in range(200):
        assert buckets.take(f"client-{number}", 1, 2) == 0
    assert len(buckets) == 100
    assert [buckets.take("client-199", 1, 2) for _ in range(2)] == [0, 1]
    now = 0.5
    assert buckets.take("client-199", 1, 2) == 0.5
    now = 10.0
    assert [buckets.take("client-199", 1, 2) for _ in range(3)] == [0, 0, 1]


def test_the_size_of_a_page_is_limited(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"page": 3})
    try:
        for number in range(5):
            harness.node(name=f"n{number}", gpus=1)
        assert len(harness.get("/v1/nodes").json()["nodes"]) == 3
        assert harness.get("/v1/nodes?limit=4").status_code == 400
    finally:
        harness.close()


def test_a_full_commit_queue_answers_503(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_loop = busy.service.runtime.commit_loop
    assert commit_loop is not None
    monkeypatch.setattr(type(commit_loop), "waiting", property(lambda self: 10**9))
    answer = busy.post("/v1/allocations", {"profile": "1g.10gb"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "too many" in answer.json()["detail"]


def test_the_queued_requests_of_a_tenant_are_limited(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"queued_per_tenant": 2})
    try:
        token, other = harness.tenant("acme"), harness.tenant("other")
        body = {"profile": "7g.80gb", "wait_seconds": 60}
        waiting = [harness.post("/v1/allocations", body, token=token) for _ in range(2)]
        assert [one.status_code for one in waiting] == [202, 202]
        run = harness.post("/v1/allocations/dry-run", body, token=token).json()
        assert (run["outcome"], run["reason"]) == ("rejected", "quota")

        def assert_refused() -> None:
            refused = harness.post("/v1/allocations", body, token=token)
            assert (refused.status_code, refused.json()["reason"]) == (409, "quota")
            assert (
                refused.json()["detail"]
                == "tenant 'acme' has 2 queued requests, and the limit is 2"
            )

        assert_refused()
        assert harness.post("/v1/allocations", body, token=other).status_code == 202
        for service in harness.services:
            harness.run(service.stop())
        harness.services.clear()
        harness.service = harness.open("second")  # the count survives a restart
        assert_refused()
        assert harness.get("/v1/tenants/acme").json()["usage"]["waiting"] == 2
        gone = waiting[0].json()["id"]
        assert harness.delete(f"/v1/allocations/{gone}", token=token).status_code == 200
        assert harness.post("/v1/allocations", body, token=token).status_code == 202
        harness.node(gpus=4)  # all are placed, so others may wait
        assert harness.post("/v1/allocations", body, token=token).status_code == 201
        assert harness.get("/v1/tenants/acme").json()["usage"]["waiting"] == 0
    finally:
        harness.close()


def test_the_lines_of_a_tenant_are_limited(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"lines_per_tenant": 2})
    try:
        harness.node(gpus=1)
        harness.place("7g.80gb")
        token, other = harness.tenant("acme"), harness.tenant("other")

        def asked(count: int, token: str) -> httpx.Response:
            body = {"profile": "1g.10gb", "count": count, "wait_seconds": 60}
            run = harness.post("/v1/allocations/dry-run", body, token=token).json()
            answer = harness.post("/v1/allocations", body, token=token)
            assert (run["outcome"] == "queued") == (answer.status_code == 202)
            return answer

        first, *rest = [asked(count, token) for count in (1, 2, 1, 2)]
        assert {one.status_code for one in (first, *rest)} == {202}
        refused = asked(3, token)
        assert (refused.status_code, refused.json()["reason"]) == (409, "quota")
        assert refused.json()["detail"] == (
            "tenant 'acme' has queued requests of 2 kinds, and the limit is 2: "
            "ask for instances as in one of these, or cancel one"
        )
        assert asked(3, other).status_code == 202
        for one in (first, rest[1]):  # the line is gone with the last of its requests
            assert harness.delete(f"/v1/allocations/{one.json()['id']}").status_code == 200
        assert asked(3, token).status_code == 202
    finally:
        harness.close()


def test_internal_errors_are_not_disclosed(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy.service.context, "page", None)
    answer = busy.get("/v1/nodes", headers={"x-request-id": "r1"})
    assert answer.status_code == 500
    assert answer.json()["detail"] == "internal error; see the log for request r1"

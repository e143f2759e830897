"""Limits: bodies, pages, rates, and whatever else a client may send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.service.house import House

from slicewise.service.rates import Buckets
from slicewise.service.table import ROUTES


def test_bodies_are_not_too_large(busy: House) -> None:
    large = b'{"profile": "' + b"x" * 70_000 + b'"}'
    answer = busy.post("/v1/allocations", content=large)
    assert answer.status_code == 413
    assert "65,536" in answer.json()["detail"]

    async def chunks(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 1000

    assert busy.post("/v1/allocations", content=chunks(80)).status_code == 413
    assert busy.post("/v1/allocations", content=chunks(5)).status_code == 400

    async def whole() -> AsyncIterator[bytes]:
        yield b'{"profile":'
        yield b'"1g.10gb"}'

    assert busy.post("/v1/allocations", content=whole()).status_code == 201

    async def at_once() -> AsyncIterator[bytes]:
        yield b" " * 70_000

    assert busy.post("/v1/allocations", content=at_once()).status_code == 413
    for length in ("-1", "x", "9" * 20):
        headers = {"content-length": length}
        assert busy.post("/v1/allocations", content=b"{}", headers=headers).status_code == 413


def test_bodies_are_json(busy: House) -> None:
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


def test_routes_and_methods(busy: House) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/nodes/", "/v1/nodes//", "/v1//nodes", "/v2/nodes", "//"):
        answer = busy.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json"
    answer = busy.call("PUT", "/v1/nodes")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert answer.json()["detail"] == "this takes GET, HEAD, POST, not PUT"
    assert busy.call("PUT", "/v1/allocations/x").headers["allow"] == "DELETE, GET, HEAD"
    refused = busy.call("HEAD", "/v1/tokens/x")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "DELETE", b"")
    assert busy.call("OPTIONS", "/healthz", token=None).status_code == 405
    assert busy.call("MADEUP", "/nowhere", token=None).status_code == 404


def test_head_is_what_get_would_be_without_a_body(busy: House) -> None:
    names = {"{name}": "n1", "{id}": busy.place()["id"]}
    for route in ROUTES:
        if route.method != "GET" or route.name in ("metrics", "agentDesired"):
            continue  # which differ from one time to the next, or are for agents
        path = route.path
        for name, value in names.items():
            path = path.replace(name, value)
        head = busy.call("HEAD", path)
        assert head.content == b"", path
        if route.name == "followEvents":
            assert head.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert "content-length" not in head.headers
            assert busy.service.site.streams.open == 0
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


def test_parameters_nobody_knows_are_refused(busy: House) -> None:
    for path in ("/v1/whoami?x=1", "/v1/nodes/n1?gpus=true", "/v1/nodes?name=n1"):
        assert busy.get(path).status_code == 400, path
    assert busy.get("/healthz?x=1").status_code == 200


def test_requests_have_ids(house: House) -> None:
    one, two = house.get("/healthz"), house.get("/healthz")
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    given = house.get("/healthz", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    odd = house.get("/healthz", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"


def test_tenants_are_held_to_their_rate(busy: House) -> None:
    fast, slow = busy.tenant("fast"), busy.tenant("slow", requests_per_second=2)
    for _ in range(2):
        assert busy.get("/v1/whoami", token=slow).status_code == 200
    answer = busy.get("/v1/whoami", token=slow)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "2 times a second" in answer.json()["detail"]
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


def test_the_default_rate(tmp_path: Path) -> None:
    house = House(tmp_path, {"requests_per_second": 0.5})
    try:
        token = house.tenant("acme")
        assert house.get("/v1/whoami", token=token).status_code == 200
        assert house.get("/v1/whoami", token=token).headers["retry-after"] == "2"
    finally:
        house.close()


def test_buckets_are_bounded_and_the_oldest_is_forgotten() -> None:
    now = 0.0
    buckets = Buckets(lambda: now, keep=100)
    for number in range(200):
        assert buckets.take(f"client-{number}", 1, 2) == 0
    assert len(buckets) == 100
    assert [buckets.take("client-199", 1, 2) for _ in range(2)] == [0, 1]
    now = 0.5
    assert buckets.take("client-199", 1, 2) == 0.5
    now = 10.0
    assert [buckets.take("client-199", 1, 2) for _ in range(3)] == [0, 0, 1]


def test_pages_have_a_limit_of_their_own(tmp_path: Path) -> None:
    house = House(tmp_path, {"page": 3})
    try:
        for number in range(5):
            house.node(name=f"n{number}", gpus=1)
        assert len(house.get("/v1/nodes").json()["nodes"]) == 3
        assert house.get("/v1/nodes?limit=4").status_code == 400
    finally:
        house.close()


def test_too_many_wait_for_the_writer(busy: House, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = busy.service.plant.writer
    assert writer is not None
    monkeypatch.setattr(type(writer), "waiting", property(lambda self: 10**9))
    answer = busy.post("/v1/allocations", {"profile": "1g.10gb"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "too many" in answer.json()["detail"]


def test_a_tenant_may_not_fill_the_queue(tmp_path: Path) -> None:
    house = House(tmp_path, {"queued_per_tenant": 2})
    try:
        token, other = house.tenant("acme"), house.tenant("other")
        wish = {"profile": "7g.80gb", "wait_seconds": 60}
        waiting = [house.post("/v1/allocations", wish, token=token) for _ in range(2)]
        assert [one.status_code for one in waiting] == [202, 202]
        run = house.post("/v1/allocations/dry-run", wish, token=token).json()
        assert (run["outcome"], run["reason"]) == ("rejected", "quota")

        def is_refused() -> None:
            refused = house.post("/v1/allocations", wish, token=token)
            assert (refused.status_code, refused.json()["reason"]) == (409, "quota")
            assert refused.json()["detail"] == "2 requests of tenant 'acme' wait already, and 2 may"

        is_refused()
        assert house.post("/v1/allocations", wish, token=other).status_code == 202
        for service in house.services:
            house.run(service.stop())
        house.services.clear()
        house.service = house.open("second")  # counts the same from the image
        is_refused()
        assert house.get("/v1/tenants/acme").json()["usage"]["waiting"] == 2
        gone = waiting[0].json()["id"]
        assert house.delete(f"/v1/allocations/{gone}", token=token).status_code == 200
        assert house.post("/v1/allocations", wish, token=token).status_code == 202
        house.node(gpus=4)  # all are served, and others may wait
        assert house.post("/v1/allocations", wish, token=token).status_code == 201
        assert house.get("/v1/tenants/acme").json()["usage"]["waiting"] == 0
    finally:
        house.close()


def test_nothing_wrong_inside_is_shown_outside(
    busy: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy.service.site, "page", None)
    answer = busy.get("/v1/nodes", headers={"x-request-id": "r1"})
    assert answer.status_code == 500
    assert answer.json()["detail"] == "something went wrong; the log tells more about request r1"

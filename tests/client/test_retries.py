"""Failing servers: which requests are retried, and the final error."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from slicewise.client import ApiError, AsyncClient, RejectedError, UnreachableError
from slicewise.client import calls as calls_module
from slicewise.client.transport import Endpoints, RetriedCall, Retry
from slicewise.core.errors import SlicewiseError

WHO = {"id": "t1", "role": "admin", "tenant": None, "node": None, "note": "", "expires_at": None}
TENANT = {
    "id": "tenant:3",
    "name": "acme",
    "quota": {},
    "usage": {"memory_slices": 0, "compute_slices": 0, "instances": 0, "waiting": 0},
}
NODE = {
    "name": "n1",
    "model": "A100-80GB",
    "gpus": 1,
    "state": "ready",
    "instances": 0,
    "slices": 8,
    "free_slices": 8,
    "labels": {},
}
Answerer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record pauses instead of waiting."""
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)

    monkeypatch.setattr("slicewise.client.blocking_client.sleep", paused.append)
    monkeypatch.setattr("slicewise.client.async_client.sleep", sleep)
    return paused


class Script:
    """Servers with scripted answers, one per request; the last one repeats."""

    def __init__(self, *steps: Exception | httpx.Response | Answerer) -> None:
        self.steps = list(steps)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self.steps[0] if len(self.steps) == 1 else self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step(request) if callable(step) else step

    @property
    def hosts(self) -> list[str]:
        return [request.url.host for request in self.requests]

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("idempotency-key") for request in self.requests]


def client(make: Any, script: Script, server: Any = "http://a", **options: Any) -> Any:
    return make(server, "sw_x", transport=httpx.MockTransport(script), **options)


def said(status: int, document: object, **headers: str) -> httpx.Response:
    return httpx.Response(status, content=json.dumps(document).encode(), headers=headers)


def problem(status: int, detail: str, **more: Any) -> httpx.Response:
    return said(status, {"type": "urn:x", "title": "t", "status": status, "detail": detail} | more)


REFUSED = httpx.ConnectError("[Errno 111] Connection refused")
DROPPED = httpx.RemoteProtocolError("Server disconnected without sending a response.")


def test_repeatable_requests_are_retried_until_they_succeed(
    make: Any, no_pauses: list[float]
) -> None:
    script = Script(REFUSED, DROPPED, httpx.ReadTimeout(""), problem(503, "busy"), said(200, WHO))
    with client(make, script) as c:
        assert c.whoami().id == "t1"
    assert len(script.requests) == 5
    assert len(no_pauses) == 4
    assert all(0 < pause <= 0.4 for pause in no_pauses)


def test_a_retry_sends_the_same_key(make: Any) -> None:
    script = Script(DROPPED, problem(503, "the outcome is unknown"), DROPPED, said(201, NODE))
    with client(make, script) as c:
        assert c.add_node("n1", "A100-80GB", 1).name == "n1"
        assert len(script.keys) == 4
        assert len(set(script.keys)) == 1
        assert re.fullmatch("[0-9a-f]{32}", str(script.keys[0]))
        c.add_node("n1", "A100-80GB", 1)
        assert script.keys[4] != script.keys[0]
        c.add_node("n1", "A100-80GB", 1, idempotency_key="mine")
        assert script.keys[5] == "mine"


@pytest.mark.parametrize("key", ["", " x", "a\nb", "é", "x" * 129])
def test_a_key_that_is_no_header_value_is_refused(make: Any, key: str) -> None:
    script = Script(said(201, NODE))
    with client(make, script) as c, pytest.raises(SlicewiseError, match="idempotency key must be"):
        c.add_node("n1", "A100-80GB", 1, idempotency_key=key)
    assert script.requests == []


@pytest.mark.parametrize("failure", [DROPPED, httpx.ReadTimeout(""), httpx.ReadError("")])
def test_unrepeatable_requests_are_sent_once(make: Any, failure: Exception) -> None:
    script = Script(failure, said(201, TENANT))
    with (
        client(make, script, "http://a,http://b") as c,
        pytest.raises(UnreachableError, match="may have been carried out: check before"),
    ):
        c.add_tenant("acme")
    assert script.hosts == ["a"]
    assert script.keys == [None]


def test_an_unrepeatable_request_with_an_unknown_outcome_is_not_retried(make: Any) -> None:
    script = Script(problem(503, "the outcome is unknown"), said(201, TENANT))
    with client(make, script) as c, pytest.raises(ApiError, match="the outcome is unknown") as told:
        c.add_tenant("acme")
    assert told.value.status == 503
    assert len(script.requests) == 1


def test_a_request_that_was_never_sent_is_retried(make: Any) -> None:
    script = Script(REFUSED, said(201, TENANT))
    with client(make, script, ["http://a", "http://b"]) as c:
        assert c.add_tenant("acme").name == "acme"
    assert script.hosts == ["a", "b"]


@pytest.mark.parametrize("call", ["cordon", "uncordon", "drain"])
def test_idempotent_calls_are_retried(make: Any, call: str) -> None:
    script = Script(DROPPED, said(200, NODE))
    with client(make, script) as c:
        assert getattr(c, call)("n1").name == "n1"
    assert len(script.requests) == 2


def test_the_named_leader_is_tried_next_and_preferred_afterwards(make: Any) -> None:
    standby = problem(503, "c does", leader="http://c/")
    script = Script(standby, said(201, TENANT), said(200, WHO))
    with client(make, script, "http://a,http://b,http://c") as c:
        c.add_tenant("acme")
        c.whoami()
    assert script.hosts == ["a", "c", "c"]


def test_an_unlisted_leader_is_not_contacted(make: Any) -> None:
    """The token is sent to the listed servers only."""
    script = Script(problem(503, "x does", leader="http://x"), said(200, NODE))
    with client(make, script, "http://a,http://b") as c:
        c.cordon("n1")
    assert script.hosts == ["a", "b"]


def test_every_server_is_tried_before_a_pause(make: Any, no_pauses: list[float]) -> None:
    script = Script(REFUSED, REFUSED, REFUSED, said(200, WHO))
    with client(make, script, "http://a,http://b,http://c") as c:
        c.whoami()
    assert script.hosts == ["a", "b", "c", "a"]
    assert no_pauses[:2] == [0, 0]
    assert no_pauses[2] > 0


def test_no_server_answers(make: Any) -> None:
    script = Script(REFUSED)
    with (
        client(make, script, "http://a:1/,http://b:2", patience=0) as c,
        pytest.raises(UnreachableError) as unknown,
    ):
        c.whoami()
    assert str(unknown.value) == (
        "no answer from http://a:1 or http://b:2: [Errno 111] Connection refused; "
        "is the service running there?"
    )
    assert script.hosts == ["a", "b"]  # each of them once, even without patience


def test_no_leader_until_the_deadline(make: Any) -> None:
    with (
        client(make, Script(problem(503, "no process leads at the moment")), patience=0) as c,
        pytest.raises(ApiError, match=r"^no process leads at the moment$"),
    ):
        c.whoami()


def test_a_closed_port(make: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            make(url, "sw_x", patience=0) as c,
            pytest.raises(UnreachableError, match=f"{url}: connection refused; is the"),
        ):
            c.whoami()


def test_a_server_without_tls(make: Any, service: Any) -> None:
    with (
        make(service.url.replace("http", "https"), "sw_x") as c,
        pytest.raises(UnreachableError, match=r"no safe connection to https.*TLS"),
    ):
        c.whoami()


def test_an_untrusted_certificate_is_not_retried(make: Any) -> None:
    bad = httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    inner = ssl.SSLCertVerificationError(1, "certificate verify failed")
    inner.verify_message = "self-signed certificate"
    bad.__cause__ = inner
    script = Script(bad)
    with (
        client(make, script, "https://a") as c,
        pytest.raises(
            UnreachableError, match=r"its certificate is not trusted \(self-signed certificate\)"
        ),
    ):
        c.whoami()
    assert len(script.requests) == 1


def test_a_host_with_several_addresses(make: Any) -> None:
    bad = httpx.ConnectError("All connection attempts failed")
    errors = [ConnectionRefusedError(111, "Connection refused"), OSError(101, "No route")]
    bad.__cause__ = OSError("All connection attempts failed")
    bad.__cause__.__cause__ = ExceptionGroup("several", errors)
    with (
        client(make, Script(bad), patience=0) as c,
        pytest.raises(UnreachableError, match="http://a: connection refused; is"),
    ):
        c.whoami()


def test_a_rate_limit_is_waited_out(make: Any, no_pauses: list[float]) -> None:
    slow = problem(429, "too fast")
    slow.headers["retry-after"] = "7"
    script = Script(slow, problem(429, "too fast"), said(201, TENANT))
    with client(make, script, "http://a,http://b") as c:
        c.add_tenant("acme")
    assert no_pauses == [7, 2]
    assert script.hosts == ["a", "a", "a"]
    with client(make, Script(slow), patience=5) as c, pytest.raises(ApiError, match="too fast"):
        c.add_tenant("acme")


@pytest.mark.parametrize("status", [502, 504])
def test_a_gateway_without_a_server(make: Any, status: int) -> None:
    gateway = httpx.Response(status, content=b"<html>\n bad gateway</html>")
    script = Script(gateway, said(200, WHO))
    with client(make, script) as c:
        assert c.whoami().id == "t1"
    once = Script(gateway)
    with client(make, once) as c, pytest.raises(ApiError) as told:
        c.add_tenant("acme")
    assert str(told.value) == f"http://a answered {status}: <html> bad gateway</html>"
    assert len(once.requests) == 1


def test_answers_of_another_program(make: Any) -> None:
    with (
        client(make, Script(httpx.Response(200, content=b"<html>"))) as c,
        pytest.raises(SlicewiseError, match="this client cannot read the answer of http://a"),
    ):
        c.whoami()
    with (
        client(make, Script(httpx.Response(404))) as c,
        pytest.raises(ApiError, match="http://a answered 404: no details"),
    ):
        c.whoami()


def test_rejections_have_their_own_error(make: Any) -> None:
    script = Script(problem(409, "no room", reason="capacity"))
    with client(make, script) as c, pytest.raises(RejectedError, match="no room") as told:
        c.allocate("1g.10gb")
    assert told.value.reason == "capacity"
    assert len(script.requests) == 1
    with client(make, Script(problem(409, "no"))) as c, pytest.raises(RejectedError) as plain:
        c.allocate("1g.10gb")
    assert plain.value.reason == ""


def test_readiness_of_a_server_that_is_not_ready(make: Any) -> None:
    standing = {"ready": False, "role": "starting", "leader": None, "seq": 0, "problems": ["x"]}
    with client(make, Script(said(503, standing))) as c:
        assert c.readiness().role == "starting"


def test_patience_is_measured_by_the_clock() -> None:
    now = [100.0]
    endpoints = Endpoints("http://a,http://b", "sw_x", patience=10, clock=lambda: now[0])
    request = RetriedCall(endpoints, calls_module.whoami())
    assert request.failed(REFUSED) == Retry(0)
    now[0] = 109.0
    assert request.failed(REFUSED).delay > 0
    assert request.failed(REFUSED) == Retry(0)
    now[0] = 110.0
    with pytest.raises(UnreachableError):
        request.failed(REFUSED)


def test_concurrent_calls_do_not_change_the_server_of_each_other() -> None:
    """Both find the first server down; neither makes the other try it again."""
    gone = {"a"}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host in gone:
            raise REFUSED
        return said(200, WHO)

    async def ask() -> None:
        transport = httpx.MockTransport(answer)
        async with AsyncClient("http://a,http://b", "sw_x", transport=transport) as c:
            await asyncio.gather(*(c.whoami() for _ in range(10)))
            assert c._endpoints.preferred == 1

    asyncio.run(ask())

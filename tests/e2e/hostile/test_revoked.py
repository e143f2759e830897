"""A token that is revoked or expires during a request has no further effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.e2e.hostile.halfway import Halfway
from tests.e2e.server import Server, wait_until

from slicewise import load_geometry
from slicewise.control.geometries import record_of

HELLO = {
    "boot": "boot-1",
    "agent": "0.1.0",
    "driver": "580.65.06",
    "model": "H200-141GB",
    "geometry": msgspec.to_builtins(record_of(load_geometry("H200-141GB"))),
    "gpus": [{"uuid": "GPU-0", "mig": True}],
}
ONE = {"profile": "1g.10gb"}


def seq(server: Server) -> int:
    """Return the number of the last journal entry."""
    readiness = server.readiness()
    assert readiness is not None
    return int(readiness["seq"])


WRITES = [
    ({"role": "admin"}, "POST", "/v1/tokens", {"role": "admin"}),
    ({"role": "admin"}, "POST", "/v1/tenants", {"name": "late"}),
    ({"role": "operator"}, "POST", "/v1/nodes", {"name": "late", "model": "A30-24GB", "gpus": 1}),
    ({"role": "operator"}, "POST", "/v1/nodes/n1/drain", {"evict": True}),
    ({"role": "operator"}, "POST", "/v1/allocations", ONE | {"tenant": "acme"}),
    ({"role": "tenant", "tenant": "acme"}, "POST", "/v1/allocations", ONE),
    ({"role": "tenant", "tenant": "acme"}, "POST", "/v1/allocations/batch", {"allocations": [ONE]}),
    ({"role": "agent", "node": "late"}, "POST", "/v1/agent/hello", HELLO),
]


@pytest.mark.parametrize("ends", ["revoked", "expired"])
@pytest.mark.parametrize(
    ("rights", "method", "path", "body"), WRITES, ids=[f"{w[0]['role']} {w[2]}" for w in WRITES]
)
def test_nothing_is_written_after_the_token_is_invalid(
    server: Server, ends: str, rights: dict[str, str], method: str, path: str, body: object
) -> None:
    short = {"expires_in_seconds": 1} if ends == "expired" else {}
    token = server.issue_token(**rights, **short)
    identity, secret = token["id"], token["token"]
    request = Halfway(server, method, path, secret, body)
    if ends == "expired":
        wait_until(lambda: not server.accepts(secret))
    else:
        assert server.ask("DELETE", f"/v1/tokens/{identity}")[0] == 200
    before = seq(server)
    status, headers, content = request.finish()
    assert status == 401, content
    assert headers["www-authenticate"].startswith("bearer")
    assert ends in content["detail"]
    assert seq(server) == before


def test_a_report_of_a_revoked_agent_changes_nothing(server: Server) -> None:
    token = server.issue_token(role="agent", node="gpu-1")
    identity, secret = token["id"], token["token"]
    status, content = server.ask("POST", "/v1/agent/hello", HELLO, token=secret)
    assert status == 200, content
    report = {
        "session": content["session"],
        "gpus": [{"uuid": "GPU-0", "mig": True}],
        "instances": [],
        "foreign": [],
    }
    request = Halfway(server, "POST", "/v1/agent/report", secret, report)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    before = seq(server)
    assert request.finish()[0] == 401
    assert seq(server) == before


def test_a_replayed_answer_requires_a_valid_token(server: Server) -> None:
    token = server.issue_token(role="tenant", tenant="acme")
    identity, secret = token["id"], token["token"]
    key = {"idempotency-key": "once"}
    first = Halfway(server, "POST", "/v1/allocations", secret, ONE, key).finish()
    assert first[0] == 201
    again = Halfway(server, "POST", "/v1/allocations", secret, ONE, key)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert again.finish()[0] == 401


def test_a_dry_run_requires_a_valid_token(server: Server) -> None:
    token = server.issue_token(role="tenant", tenant="acme")
    identity, secret = token["id"], token["token"]
    request = Halfway(server, "POST", "/v1/allocations/dry-run", secret, ONE)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert request.finish()[0] == 401


@pytest.fixture
def poll(server: Server) -> Callable[..., tuple[str, Halfway]]:
    """Starts a long poll of an up-to-date agent; returns the id of its token.

    The service would answer after 60 seconds anyway; the test times out earlier.
    """

    def begin(node: str, **options: Any) -> tuple[str, Halfway]:
        token = server.issue_token(role="agent", node=node, **options)
        identity, secret = token["id"], token["token"]
        status, content = server.ask("POST", "/v1/agent/hello", HELLO, token=secret)
        assert status == 200, content
        path = f"/v1/agent/desired?session={content['session']}&after={seq(server)}&wait=60"
        return identity, Halfway(server, "GET", path, secret, patience=45)

    return begin


def test_a_long_poll_ends_when_its_token_is_revoked(
    server: Server, poll: Callable[..., tuple[str, Halfway]]
) -> None:
    identity, revoked = poll("gpu-2")
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert revoked.finish()[0] == 401
    _, expiring = poll("gpu-3", expires_in_seconds=1)
    status, _, content = expiring.finish()
    assert (status, content["detail"]) == (401, "this token has expired")

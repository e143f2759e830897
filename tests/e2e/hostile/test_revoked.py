"""A token that is revoked, or expires, while a request is under way has nothing done any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.e2e.hostile.halfway import Halfway
from tests.e2e.server import Server

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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("revoked"))
    try:
        made.start()
        made.ask("POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 4})
        made.ask("POST", "/v1/tenants", {"name": "acme"})
        yield made
    finally:
        made.kill()


def issued(server: Server, **options: Any) -> tuple[str, str]:
    """A new token: its id and its secret."""
    status, made = server.ask("POST", "/v1/tokens", options)
    assert status == 201, made
    return made["id"], made["token"]


def seq(server: Server) -> int:
    """The last entry of the journal."""
    said = server.readiness()
    assert said is not None
    return int(said["seq"])


def expire(server: Server, secret: str) -> None:
    """Wait until a token is refused."""
    give_up = time.monotonic() + 60
    while server.ask("GET", "/v1/whoami", token=secret)[0] != 401:
        assert time.monotonic() < give_up
        time.sleep(0.05)


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
def test_nothing_is_written_once_the_token_is_void(
    server: Server, ends: str, rights: dict[str, str], method: str, path: str, body: object
) -> None:
    short = {"expires_in_seconds": 1} if ends == "expired" else {}
    identity, secret = issued(server, **rights, **short)
    request = Halfway(server, method, path, secret, body)
    if ends == "expired":
        expire(server, secret)
    else:
        assert server.ask("DELETE", f"/v1/tokens/{identity}")[0] == 200
    before = seq(server)
    status, headers, said = request.finish()
    assert status == 401, said
    assert headers["www-authenticate"].startswith("bearer")
    assert ends in said["detail"]
    assert seq(server) == before


def test_a_report_of_a_revoked_agent_changes_nothing(server: Server) -> None:
    identity, secret = issued(server, role="agent", node="gpu-1")
    status, said = server.ask("POST", "/v1/agent/hello", HELLO, token=secret)
    assert status == 200, said
    report = {
        "session": said["session"],
        "gpus": [{"uuid": "GPU-0", "mig": True}],
        "instances": [],
        "foreign": [],
    }
    request = Halfway(server, "POST", "/v1/agent/report", secret, report)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    before = seq(server)
    assert request.finish()[0] == 401
    assert seq(server) == before


def test_a_replay_is_for_callers_who_are_valid(server: Server) -> None:
    identity, secret = issued(server, role="tenant", tenant="acme")
    key = {"idempotency-key": "once"}
    first = Halfway(server, "POST", "/v1/allocations", secret, ONE, key).finish()
    assert first[0] == 201
    again = Halfway(server, "POST", "/v1/allocations", secret, ONE, key)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert again.finish()[0] == 401


def test_a_dry_run_is_for_callers_who_are_valid(server: Server) -> None:
    identity, secret = issued(server, role="tenant", tenant="acme")
    request = Halfway(server, "POST", "/v1/allocations/dry-run", secret, ONE)
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert request.finish()[0] == 401


@pytest.fixture
def poll(server: Server) -> Callable[..., tuple[str, Halfway]]:
    """Begins a long poll of an agent that knows everything already; returns its token's id.

    The service would answer after 60 seconds anyway, and the test loses patience before that.
    """

    def begin(node: str, **options: Any) -> tuple[str, Halfway]:
        identity, secret = issued(server, role="agent", node=node, **options)
        status, said = server.ask("POST", "/v1/agent/hello", HELLO, token=secret)
        assert status == 200, said
        path = f"/v1/agent/desired?session={said['session']}&after={seq(server)}&wait=60"
        return identity, Halfway(server, "GET", path, secret, patience=45)

    return begin


def test_a_long_poll_ends_with_its_token(
    server: Server, poll: Callable[..., tuple[str, Halfway]]
) -> None:
    identity, revoked = poll("gpu-2")
    server.ask("DELETE", f"/v1/tokens/{identity}")
    assert revoked.finish()[0] == 401
    _, expiring = poll("gpu-3", expires_in_seconds=1)
    status, _, said = expiring.finish()
    assert (status, said["detail"]) == (401, "this token has expired")

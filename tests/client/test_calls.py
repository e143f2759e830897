"""Every call of both clients, to a real service."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import msgspec
import pytest
from tests.client.running import Running, running

from slicewise.client import (
    AllocationBody,
    AllocationView,
    ApiError,
    AsyncClient,
    Client,
    Need,
    NeedBody,
    Quota,
    RejectedError,
    Role,
)
from slicewise.core.errors import SlicewiseError
from slicewise.server.routes.table import ROUTES
from slicewise.store.memory import MemoryStore

NOT_CALLED = {
    "metrics",
    "openapi",
    "healthz",
    "agentHello",
    "agentDesired",
    "agentReport",
    "getSignIn",
    "exchangeCode",  # of the page and the command, which have no token yet
}
"""Routes without a method: for Prometheus, code generators, health checks and agents."""


def public(cls: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    blocking, awaited = public(Client), public(AsyncClient)
    assert list(blocking) == list(awaited)
    for name, method in {**blocking, "__init__": Client.__init__}.items():
        other = {**awaited, "__init__": AsyncClient.__init__}[name]
        assert inspect.getdoc(method) == inspect.getdoc(other), name
        mine, theirs = inspect.signature(method), inspect.signature(other)
        assert list(mine.parameters) == list(theirs.parameters), name
        for parameter in mine.parameters.values():
            if parameter.name != "transport":
                assert parameter == theirs.parameters[parameter.name], name
        returned = str(get_type_hints(other)["return"]).replace("Async", "")
        assert returned.replace("]", ", None]" if "Generator" in returned else "]") == str(
            get_type_hints(method)["return"]
        ), name
        lists = "Iterator" in returned or "Generator" in returned
        assert inspect.iscoroutinefunction(other) is not (lists or name == "__init__"), name


def test_every_method_has_a_docstring() -> None:
    for name, method in public(Client).items():
        assert method.__doc__, name


def test_every_route_is_called(service: Running) -> None:
    seen: set[str] = set()

    def look(request: httpx.Request) -> None:
        for route in ROUTES:
            pattern = re.sub(r"\{\w+\}", "[^/]+", route.path)
            if request.method == route.method and re.fullmatch(pattern, request.url.path):
                seen.add(route.name)
                break

    with Client(service.url, service.token) as client:
        client._http.event_hooks["request"].append(look)
        called = walk(client)
    assert seen == {route.name for route in ROUTES} - NOT_CALLED
    assert called == set(public(Client)) - {"close"}


def test_every_method_works(admin: Any) -> None:
    walk(admin)


def walk(client: Any) -> set[str]:
    """Call every method in a realistic order; return their names."""
    called: set[str] = set()

    def do(name: str, *arguments: Any, **options: Any) -> Any:
        called.add(name)
        return getattr(client, name)(*arguments, **options)

    def refused(name: str, *arguments: Any) -> None:
        with pytest.raises(ApiError):
            do(name, *arguments)

    # Nodes
    node = do("add_node", "n1", "A100-80GB", 2, labels={"rack": "r1"}, idempotency_key="n1")
    assert (node.name, node.gpus, node.state, node.labels) == ("n1", 2, "ready", {"rack": "r1"})
    do("add_node", "n2", "A30-24GB", 1)
    assert [one.name for one in do("nodes")] == ["n1", "n2"]
    assert do("cordon", "n2").state == "cordoned"
    assert do("uncordon", "n2").state == "ready"

    # Allocations
    first = do(
        "allocate",
        "3g.40gb",
        models=["A100-80GB"],
        lease_seconds=600,
        preemptible=True,
        expected_seconds=300,
        labels={"app": "web", "a/b": "x:y"},
        idempotency_key="one",
    )
    assert (first.preemptible, first.expected_seconds, first.lease_seconds) == (True, 300, 600)
    assert (first.state, first.node, first.profile) == ("placed", "n1", "3g.40gb")
    assert first.ends_at is not None
    assert do("allocate", "3g.40gb", models="A100-80GB", lease_seconds=600,
              preemptible=True, expected_seconds=300,
              labels={"app": "web", "a/b": "x:y"}, idempotency_key="one") == first  # fmt: skip
    longer = do("extend", first.id, 900, idempotency_key="more")
    assert (longer.id, longer.lease_seconds) == (first.id, 900)
    assert do("extend", first.id, 900, idempotency_key="more") == longer
    pair = do("allocate", Need(compute=1, memory_gb=8), count=2, tenant="default", models="a100")
    assert len(pair.instances) == 2
    assert pair.wanted.need == NeedBody(compute=1, memory_gb=8)
    batch = do(
        "allocate_all",
        [AllocationBody(profile="1g.10gb"), AllocationBody(profile="2g.20gb", priority=3)],
        idempotency_key="batch",
    )
    assert [one.profile for one in batch] == ["1g.10gb", "2g.20gb"]
    assert do("allocation", first.id) == longer
    every = {first.id, pair.id, *(one.id for one in batch)}
    assert {one.id for one in do("allocations")} == every
    assert {one.id for one in do("allocations", page_size=1)} == every
    assert [one.id for one in do("allocations", labels={"app": "web", "a/b": "x:y"})] == [first.id]
    found = do("allocations", state="placed", profile="3g.40gb", node="n1", model="A100-80GB",
               tenant="default")  # fmt: skip
    assert [one.id for one in found] == [first.id]

    # Dry runs
    run = do("dry_run", "2g.20gb", policies=["mfi", "first-fit"], alternatives=1, models=(),
             count=1, priority=1, wait_seconds=5, tenant="default")  # fmt: skip
    assert run.outcome == "placed"
    assert [choice.policy for choice in run.policies] == ["mfi", "first-fit"]
    assert len(run.alternatives) == 1
    assert do("dry_run", "1g.6gb", policies="mfi", alternatives=0).alternatives == ()

    # The queue
    waits = do("allocate", "7g.80gb", count=2, wait_seconds=600, priority=5)
    assert waits.state == "queued"
    assert waits.waiting.position == 1
    assert [one.id for one in do("queue")] == [waits.id]
    (line,) = do("queue_lines")
    assert (line.first, line.waiting, line.count) == (waits.id, 1, 2)
    assert do("allocation", waits.id).waiting.repack is None
    assert "moving all" in do("allocation", waits.id, plan=True).waiting.repack.detail
    assert do("dry_run", "7g.80gb", count=64, plan=True).repack.moves is None
    for identity in every:
        assert do("release", identity).state == "released"
    served = do("wait_until_placed", waits.id)
    assert (served.state, len(served.instances)) == ("placed", 2)
    assert do("wait_until_placed", waits.id) == served
    assert do("release", waits.id, idempotency_key="gone") == do("release", waits.id)
    with closing(do("allocations", state="released")) as ended:
        assert next(ended).id == waits.id

    # Tenants and tokens
    tenant = do("add_tenant", "acme", Quota(instances=2, requests_per_second=50.5, guarantee=3))
    assert tenant.quota == Quota(instances=2, requests_per_second=50.5, guarantee=3)
    changed = do("change_quota", "acme", instances=None, memory_slices=8, max_priority=1,
                 weight=2.5, default_lease_seconds=60, max_lease_seconds=90)  # fmt: skip
    assert changed.quota == Quota(
        memory_slices=8,
        requests_per_second=50.5,
        max_priority=1,
        weight=2.5,
        guarantee=3,
        default_lease_seconds=60,
        max_lease_seconds=90,
    )
    assert do("tenant", "acme") == changed
    assert [one.name for one in do("tenants")] == ["acme", "default"]
    token = do("issue_token", "tenant", tenant="acme", note="of a test", expires_in_seconds=60)
    assert token.token.startswith("sw_")
    agent = do("issue_token", Role.AGENT, node="n1")
    assert {one.id for one in do("tokens")} >= {token.id, agent.id}
    assert do("whoami").role == "admin"
    another = do("rotate_token", token.id, overlap_seconds=60, expires_in_seconds=30)
    assert (another.tenant, another.note) == ("acme", "of a test")
    assert do("revoke_token", token.id).id == token.id
    assert do("remove_tenant", "acme").name == "acme"

    # The cluster
    assert do("cluster").devices is None
    view = do("cluster", gpus=True)
    assert len(view.devices) == view.gpus == 3
    assert do("policy").rehearsals.share == 0.05
    stats = do("stats", seconds=60, rejections=1)
    assert len(stats.rejections) <= 1 <= len(stats.points)
    with pytest.raises(RejectedError, match="in memory only"):
        list(do("backup"))
    assert "A100-80GB" in [model.name for model in do("models")]
    assert [policy.in_use for policy in do("policies")].count(True) == 1
    assert do("readiness").role == "leading"
    kinds = [event.kind for event in do("audit", kinds=["tenant-set", "tenant-removed"])]
    assert kinds == ["tenant-removed", "tenant-set", "tenant-set", "tenant-set"]
    (gone,) = do("audit", tenant="default", subject=waits.id, kinds="ended")
    with closing(do("events", gone.seq - 1)) as events:
        assert next(events) == gone

    # Moves: one small instance on each GPU, where one GPU would do
    small = [do("allocate", "1g.10gb") for _ in range(8)]
    kept = {one.gpu: one.id for one in small}
    for one in small:
        if one.id not in kept.values():
            do("release", one.id)
    plan = do("plan", profile="7g.80gb", model="A100-80GB", budget=4, policy="mfi")
    assert plan.found is True
    assert plan.budget == 4
    assert do("carry_out", plan.moves) == len(plan.moves) == 1
    assert do("plan").found is True

    # The clock
    assert do("clock").held is False
    refused("accept_clock", 3600.0)

    # Foreign instances: none here; see tests/client/test_agents.py
    assert do("wait_until_active", small[0].id).state in ("placed", "released")
    refused("accept", "n1")
    refused("adopt", "n1", "MIG-1", "default")
    refused("evict", "n1", "MIG-1")

    # Clean up
    assert do("drain", "n1").state == "draining"
    assert do("drain", "n1", evict=True).state == "drained"
    assert do("node", "n1").devices[0].mask == "00000000"
    assert do("remove_node", "n1").name == "n1"
    return called


def test_errors_of_the_service_are_raised(admin: Any) -> None:
    with pytest.raises(RejectedError, match="no GPU model of this cluster offers") as full:
        admin.allocate("1g.10gb")
    assert (full.value.reason, full.value.status) == ("capacity", 409)
    admin.add_node("n1", "A100-80GB", 1)
    with pytest.raises(RejectedError, match="already exists") as exists:
        admin.add_node("n1", "A100-80GB", 1)
    assert exists.value.reason == "exists"
    with pytest.raises(ApiError, match="no allocation 'nothing'") as missing:
        admin.allocation("nothing")
    assert missing.value.status == 404
    with pytest.raises(ApiError, match=r"unknown profile '9g\.90gb'") as wrong:
        admin.allocate("9g.90gb")
    assert (wrong.value.status, wrong.value.problem.field) == (400, "profile")
    with pytest.raises(ApiError, match="state"):
        list(admin.allocations(state="asleep"))


def test_tokens_of_other_roles(service: Running, make: Any, admin: Any) -> None:
    admin.add_tenant("acme")
    secret = admin.issue_token("tenant", tenant="acme").token
    with make(service.url, secret) as acme:
        assert acme.whoami().tenant == "acme"
        with pytest.raises(ApiError, match="role tenant may not do this") as refused:
            acme.add_node("n1", "A100-80GB", 1)
        assert refused.value.status == 403
    with make(service.url, "sw_unknown") as stranger:
        for ask in (stranger.whoami, lambda: next(stranger.events())):
            with pytest.raises(ApiError, match="unknown token") as unknown:
                ask()
            assert unknown.value.status == 401


def test_a_rate_limited_request_is_retried(service: Running, make: Any, admin: Any) -> None:
    admin.add_tenant("acme", Quota(requests_per_second=1))
    secret = admin.issue_token("tenant", tenant="acme").token
    with make(service.url, secret) as patient:
        for _ in range(3):
            assert patient.whoami().tenant == "acme"
    with make(service.url, secret, patience=0) as hasty, pytest.raises(ApiError) as refused:
        [hasty.whoami() for _ in range(3)]
    assert refused.value.status == 429


def test_lists_span_pages(service: Running, make: Any, admin: Any) -> None:
    names = sorted(f"t{number:03}" for number in range(120))
    for name in names:
        admin.add_tenant(name)
    assert [tenant.name for tenant in admin.tenants()] == ["default", *names]


def test_an_application_in_the_same_process(service: Running) -> None:
    """The asynchronous client can call an ASGI application directly."""
    loop = service.service.runtime._loop
    assert loop is not None

    async def ask() -> str:
        transport = httpx.ASGITransport(service.service.app)
        async with AsyncClient("http://here", service.token, transport=transport) as client:
            return (await client.add_node("n1", "A100-80GB", 1)).name

    assert asyncio.run_coroutine_threadsafe(ask(), loop).result() == "n1"


def test_writes_find_the_leader(tmp_path: Path, make: Any) -> None:
    """A standby redirects writes to the leader and serves reads itself."""
    store = MemoryStore(time.time)
    with running(tmp_path / "a", store) as leader, running(tmp_path / "b", store) as standby:
        both = f"{standby.url},{leader.url}"
        with make(both, leader.token) as client:
            assert client.readiness().role == "following"
            client.add_tenant("acme")  # cannot be repeated, but was not carried out by a standby
            assert client.readiness().role == "leading"
        with make(standby.url, leader.token, patience=0) as alone:
            with pytest.raises(ApiError, match=f"{leader.url} does") as refused:
                alone.add_tenant("other")
            assert refused.value.problem.leader == leader.url


@pytest.mark.parametrize(
    ("server", "token", "problem"),
    [
        ("127.0.0.1:8080", "sw_x", "'127.0.0.1:8080' is not the address of a server"),
        ("http://", "sw_x", "is not the address"),
        ("http://host:port", "sw_x", "is not the address"),
        ("http://ho st", "sw_x", "is not the address"),
        ("http://host/?query=1", "sw_x", "is not the address"),
        ("http://a,", "sw_x", "'' is not the address"),
        ("http://name:secret@host", "sw_x", "is not the address"),
        (f"http://{'a' * 64}", "sw_x", "is not the address"),
        ([], "sw_x", "no server was given"),
        ("http://host", "", "invalid token"),
        ("http://host", "two words\n", "invalid token"),
        ("http://host", "ключ", "invalid token"),
    ],
)
def test_bad_addresses_and_tokens_are_refused(
    make: Any, server: Any, token: str, problem: str
) -> None:
    for cls in (Client, AsyncClient):
        with pytest.raises(SlicewiseError, match=re.escape(problem)):
            cls(server, token)


def test_certificate_authorities_are_loaded_for_https_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/at/all")
    for cls in (Client, AsyncClient):
        cls(["http://a", "http://[::1]:8080"], "sw_x")
        with pytest.raises(SlicewiseError, match="proxies or certificates"):
            cls(["http://a", "https://b"], "sw_x")
        cls("https://b", "sw_x", verify=False)


def test_unusable_proxies_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "nonsense://127.0.0.1:1")
    for cls in (Client, AsyncClient):
        with pytest.raises(SlicewiseError, match="proxies or certificates"):
            cls("http://host", "sw_x")


def test_wait_until_placed(service: Running, make: Any) -> None:
    """The event stream ends the wait without a delay."""
    with Client(service.url, service.token) as other:
        other.add_node("n1", "A100-80GB", 1)
        whole = other.allocate("7g.80gb")
        waits = other.allocate("1g.10gb", wait_seconds=600)

        def make_room() -> None:
            while not service.service.context.streams.open:
                time.sleep(0.01)
            other.add_tenant("acme")  # does not matter
            other.release(whole.id)

        with make(service.url, service.token) as client, ThreadPoolExecutor() as helper:
            done = helper.submit(make_room)
            placed = client.wait_until_placed(waits.id)
            done.result()
        assert (placed.id, placed.state, placed.node) == (waits.id, "placed", "n1")


def test_a_wait_times_out(admin: Any) -> None:
    waits = admin.allocate("1g.10gb", wait_seconds=0.3)
    assert waits.state == "queued"
    ended = admin.wait_until_placed(waits.id)
    assert (ended.state, ended.cause) == ("cancelled", "waited too long")


@pytest.mark.parametrize(("role", "after"), [("leading", "5"), ("starting", "0")])
def test_a_wait_with_a_server_that_lags_behind(make: Any, role: str, after: str) -> None:
    """Events come from one server, the allocation from another one that lags behind."""
    waiting = {"position": 1, "reason": "capacity", "detail": "", "deadline": None}
    view: dict[str, Any] = {
        **dict.fromkeys(AllocationView.__struct_fields__),
        "id": "a1",
        "state": "queued",
        "tenant": "default",
        "count": 1,
        "instances": [],
        "wanted": {"profile": "1g.10gb", "need": None, "models": []},
        "priority": 0,
        "preemptible": False,
        "reclaims": 0,
        "labels": {},
        "requested_at": "",
        "waiting": waiting,
    }
    states = ["queued", "queued", "queued", "placed"]
    served = {
        "seq": 6,
        "at": "",
        "actor": "queue",
        "kind": "served",
        "tenant": "default",
        "subject": "a1",
        "entry": {
            "kind": "served",
            "allocation": "a1",
            "tenant": {"id": "tenant:1", "name": "default"},
            "parts": [],
        },
    }

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/events":
            assert request.url.params["after"] == after
            return httpx.Response(200, content=b"data: " + msgspec.json.encode(served) + b"\n\n")
        if request.url.path == "/readyz":
            ready = {"ready": True, "role": role, "leader": None, "seq": 5, "problems": []}
            return httpx.Response(200, json=ready)
        return httpx.Response(200, json=view | {"state": states.pop(0)})

    with make("http://a", "sw_x", transport=httpx.MockTransport(answer)) as client:
        assert client.wait_until_placed("a1").state == "placed"
    assert states == []

"""A process: first start, leading, following, failures, readiness, metrics."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Clock, Harness

from slicewise.config.logs import logger, set_up_logs
from slicewise.config.settings import Settings
from slicewise.control.actors import internal
from slicewise.control.commands import Command, Cordon
from slicewise.control.ports import FencedError, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Profile
from slicewise.journal.entries import Row, TurnTaken
from slicewise.policies.least_lost import LeastLost
from slicewise.runtime.commit_loop import Outcome
from slicewise.runtime.ids import IdGenerator
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.bootstrap import write_private
from slicewise.server.requests import Receive, Scope, Send
from slicewise.server.routes.health import readiness
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore


def test_the_first_start(harness: Harness, tmp_path: Path) -> None:
    file = tmp_path / "first" / "admin-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert harness.get("/v1/whoami").json()["role"] == "admin"
    assert [t["name"] for t in harness.get("/v1/tenants").json()["tenants"]] == ["default"]
    assert harness.service.admin_token == file


def test_ids_sort_by_time() -> None:
    clock = Clock()
    ids = IdGenerator(clock)
    early = [ids("a") for _ in range(100)]
    clock.now += 0.001
    late = [ids("a") for _ in range(100)]
    clock.now += 365 * 86400
    much_later = ids("a")
    assert max(early) < min(late) < max(late) < much_later
    assert len({*early, *late}) == 200
    assert all(re.fullmatch("a[2-7a-z]{20}", identity) for identity in (*early, *late, much_later))


def test_answered_submissions_are_released(harness: Harness) -> None:
    """An outcome references its submission; the other direction would make a reference cycle."""
    told = harness.run(ask(harness, Cordon("nowhere")))
    assert told.answer.status == 404
    assert told.submission.future is None


async def ask(harness: Harness, command: Command) -> Outcome:
    """Submit a command, as handlers do."""
    return await harness.service.runtime.submit(command, internal("another"))


def restarted(harness: Harness) -> Harness:
    """The same store and folder, another process."""
    harness.close()
    return Harness(harness.folder, harness.settings, harness.store, harness.clock)


def test_a_valid_admin_token_is_kept(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.node()
    made = harness.place()
    again = restarted(harness)
    assert again.admin == harness.admin
    assert again.get(f"/v1/allocations/{made['id']}").json() == made
    assert len(again.get("/v1/tokens").json()["tokens"]) == 1
    again.close()


def test_a_missing_or_invalid_admin_token_is_replaced(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    file = tmp_path / "first" / "admin-token"
    for damage in ("missing", "unknown", "bytes", "revoked", "tenants"):
        if damage == "missing":
            file.unlink()
        elif damage == "unknown":
            file.write_text("sw_never-committed\n")
        elif damage == "bytes":
            file.write_bytes(b"\xff\xfe")
        elif damage == "revoked":
            own = harness.get("/v1/whoami").json()["id"]
            harness.delete(f"/v1/tokens/{own}")
        else:
            file.write_text(harness.tenant("acme"))
        harness = restarted(harness)
        assert harness.get("/v1/whoami").json()["role"] == "admin", damage
    harness.delete("/v1/tenants/default")
    harness = restarted(harness)
    assert harness.get("/v1/tenants/default").status_code == 404  # only the first start makes it
    harness.close()


def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SlicewiseError, match="cannot be written"):
        write_private(tmp_path / "file" / "admin-token", "x")

    async def start() -> None:
        clock = Clock()
        service = Service(
            MemoryStore(clock), Settings(data=tmp_path / "file"), SteadyClock(clock, clock)
        )
        try:
            await service.start()
        finally:
            await service.stop()

    with pytest.raises(SlicewiseError, match="cannot be"):
        asyncio.run(start())


def test_no_token_file_without_a_folder() -> None:
    async def start() -> tuple[Path | None, int]:
        clock = Clock()
        service = Service(MemoryStore(clock), Settings(), SteadyClock(clock, clock))
        await service.start()
        try:
            return service.admin_token, len(service.runtime.state.tokens)
        finally:
            await service.stop()

    assert asyncio.run(start()) == (None, 0)


def test_a_standby_answers_reads_and_refuses_writes(harness: Harness) -> None:
    second = harness.open("second")
    assert not second.runtime.leads
    harness.node()
    made = harness.place()
    harness.wait_for(lambda: second.runtime.replica.seq == harness.service.runtime.replica.seq)
    assert harness.get(f"/v1/allocations/{made['id']}", service=second).json() == made
    ready = harness.get("/readyz", service=second)
    assert ready.status_code == 200
    assert (ready.json()["role"], ready.json()["leader"]) == ("following", "http://first")
    for method, path, body in (
        ("POST", "/v1/allocations", {"profile": "1g.10gb"}),
        ("DELETE", f"/v1/allocations/{made['id']}", None),
        ("DELETE", "/v1/allocations/unknown", None),
        ("POST", "/v1/nodes/n1/cordon", None),
        ("DELETE", "/v1/nodes/n1", None),
    ):
        answer = harness.call(method, path, body, service=second)
        assert answer.status_code == 503, path
        assert answer.headers["retry-after"]
        assert answer.json()["leader"] == "http://first"
    run = harness.post("/v1/allocations/dry-run", {"profile": "1g.10gb"}, service=second)
    assert run.status_code == 200
    assert b"slicewise_is_leader 0.0" in harness.get("/metrics", service=second).content
    assert harness.get(f"/v1/allocations/{made['id']}").json()["state"] == "placed"


def test_a_standby_takes_over(harness: Harness) -> None:
    second = harness.open("second")
    harness.node()
    made = harness.place(key="k")
    harness.run(harness.service.stop())
    harness.services.remove(harness.service)
    harness.wait_for(lambda: second.runtime.leads and second.runtime.furnished)
    again = harness.post("/v1/allocations", {"profile": "1g.10gb"}, key="k", service=second)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == made
    gone = harness.delete(f"/v1/allocations/{made['id']}", service=second)
    assert gone.json()["state"] == "released"
    token = (harness.folder / "second" / "admin-token").read_text().strip()
    assert harness.get("/v1/whoami", token=token, service=second).json()["role"] == "admin"


def test_a_leader_that_loses_its_lease_follows(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = harness.store
    assert isinstance(store, MemoryStore)
    second = harness.open("second")
    harness.node()
    # The first cannot renew its lease, and does not know that it has expired.
    first = harness.service.runtime._elector

    class Paused:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def renew(self, epoch: int, seconds: float, steady: float) -> bool:
            return True

    monkeypatch.setattr(first, "_store", Paused())
    store.resign(harness.service.runtime.epoch)
    harness.wait_for(lambda: second.runtime.leads)
    answer = harness.post("/v1/allocations", {"profile": "1g.10gb"}, service=harness.service)
    assert answer.status_code == 503  # fenced by the store, not by its own view
    harness.wait_for(lambda: harness.service.runtime.leader is not None)
    answer = harness.post("/v1/allocations", {"profile": "1g.10gb"}, service=harness.service)
    assert answer.json()["leader"] == "http://second"
    harness.wait_for(lambda: second.runtime.furnished)
    made = harness.post("/v1/allocations", {"profile": "1g.10gb"}, service=second)
    assert made.status_code == 201
    harness.wait_for(lambda: harness.service.runtime.replica.seq == second.runtime.replica.seq)
    seen = harness.get(f"/v1/allocations/{made.json()['id']}")
    assert seen.json() == made.json()


def test_requests_without_a_leader(harness: Harness) -> None:
    runtime = harness.service.runtime
    writer, runtime.commit_loop = runtime.commit_loop, None
    answer = harness.post("/v1/nodes/n1/cordon")
    assert answer.status_code == 503
    assert "no process leads" in answer.json()["detail"]
    ready = harness.get("/readyz")
    assert (ready.status_code, ready.json()["problems"]) == (503, ["there is no leader"])
    runtime.commit_loop = writer
    runtime.stopping = True
    assert "stopping" in harness.post("/v1/nodes/n1/cordon").json()["detail"]
    assert harness.get("/readyz").json()["role"] == "stopping"
    runtime.stopping = False
    runtime.furnished = False
    assert harness.get("/readyz").status_code == 503
    runtime.furnished = True
    runtime.loaded = False
    assert harness.get("/readyz").json()["role"] == "starting"
    assert harness.get("/v1/nodes").status_code == 503
    assert harness.get("/healthz").json() == {"status": "ok"}
    runtime.loaded = True
    assert harness.get("/readyz").status_code == 200


class Faulty(MemoryStore):
    """A store that fails on demand."""

    broken = False

    def _check(self) -> None:
        if self.broken:
            raise StoreError("the cable is out")

    def append(self, *args: Any) -> None:
        self._check()
        super().append(*args)

    def rows(self, after: int, limit: int) -> list[Row]:
        self._check()
        return super().rows(after, limit)

    def renew(self, epoch: int, seconds: float, steady: float) -> bool:
        self._check()
        return super().renew(epoch, seconds, steady)

    def history(self, **options: Any) -> list[Row]:
        self._check()
        return super().history(**options)

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        self._check()
        return super().wait_for_rows(after, seconds)


def test_the_database_fails_and_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    store = Faulty(clock)
    harness = Harness(tmp_path, store=store, clock=clock)
    second = harness.open("second")
    harness.node()
    made = harness.place()
    store.broken = True
    answer = harness.post("/v1/allocations", {"profile": "1g.10gb"}, key="k")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    answer = harness.post("/v1/allocations", {"profile": "1g.10gb"}, key="k")
    assert answer.status_code == 503
    harness.wait_for(lambda: harness.service.runtime.store_trouble and second.runtime.store_trouble)
    problems = harness.get("/readyz").json()["problems"]
    assert problems == ["the database does not answer; see the log"]
    assert "the cable is out" in caplog.text
    assert b"slicewise_database_trouble 1.0" in harness.get("/metrics").content
    # Data in memory can still be read; data in the store cannot.
    assert harness.get(f"/v1/allocations/{made['id']}").status_code == 200
    lost = harness.get("/v1/allocations/unknown")
    assert lost.status_code == 503
    assert "cable" not in lost.text  # details of database errors are not public
    assert harness.get("/v1/audit").status_code == 503
    store.broken = False
    harness.wait_for(lambda: readiness(harness.service.runtime).ready)
    assert harness.post("/v1/allocations", {"profile": "1g.10gb"}, key="k").status_code == 201
    assert len(harness.get("/v1/allocations").json()["allocations"]) == 2
    harness.wait_for(lambda: second.runtime.store_trouble is None)
    harness.close()


def test_a_commit_loop_that_does_not_answer(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = busy.service.runtime
    assert runtime.commit_loop is not None
    monkeypatch.setattr(runtime.commit_loop, "submit", lambda job: None)

    async def ask() -> int:
        waiting = runtime.submit(Cordon("n1"), internal("tester"))
        runtime.expire_submissions()
        assert not waiting.done()
        busy.ticks += 61
        runtime.expire_submissions()
        return (await waiting).answer.status

    assert busy.run(ask()) == 503


def test_an_invalid_journal_ends_the_process(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = harness.service.runtime
    assert runtime.commit_loop is not None
    monkeypatch.setattr(runtime.commit_loop, "submit", lambda job: None)

    async def jump() -> int:
        waiting = runtime.submit(Cordon("n1"), internal("tester"))
        runtime._apply([Row(runtime.replica.seq + 5, 0, "x", TurnTaken(0))])
        await harness.service.failed.wait()
        return (await waiting).answer.status

    assert harness.run(jump()) == 503
    assert runtime.failure is not None
    assert "cannot apply the journal" in runtime.failure
    ready = harness.get("/readyz")
    assert ready.status_code == 503


def test_a_failed_follower_ends_the_process(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = harness.open("second")

    def odd(after: int, seconds: float) -> bool:
        raise RuntimeError("impossible")

    monkeypatch.setattr(harness.store, "wait_for_rows", odd)
    harness.run(standby.failed.wait())
    assert standby.runtime.failure is not None
    assert "impossible" in standby.runtime.failure
    monkeypatch.undo()


def test_a_failed_commit_loop_ends_the_process(
    busy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = busy.service.runtime.commit_loop
    assert writer is not None
    monkeypatch.setattr(type(writer), "alive", False)
    busy.run(busy.service.failed.wait())
    assert busy.service.runtime.failure == "the commit loop stopped unexpectedly"


def test_a_failed_leader_elector_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd(MemoryStore):
        def lead(self, holder: str, address: str, seconds: float) -> int | None:
            raise RuntimeError("impossible")

    async def start() -> None:
        clock = Clock()
        service = Service(Odd(clock), Settings(data=tmp_path), SteadyClock(clock, clock))
        try:
            await service.start()
        finally:
            await service.stop()

    monkeypatch.setattr("threading.excepthook", lambda args: None)
    with pytest.raises(SlicewiseError, match="impossible"):
        asyncio.run(start())


def test_a_lost_race_for_the_lease_is_retried(tmp_path: Path) -> None:
    class Raced(MemoryStore):
        lost = 0

        def lead(self, holder: str, address: str, seconds: float) -> int | None:
            if self.lost < 1:
                self.lost += 1
                raise FencedError("another process was faster")
            return super().lead(holder, address, seconds)

    clock = Clock()
    harness = Harness(tmp_path, store=Raced(clock), clock=clock)
    assert harness.service.runtime.leads
    harness.close()


def test_old_answers_are_deleted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.node()
    harness.place(key="k")
    store = harness.store
    assert isinstance(store, MemoryStore)
    assert len(store.kept_answers) >= 1
    harness.clock.now += 25 * 3600
    harness.wait_for(lambda: not store.kept_answers)
    assert harness.place(key="k")["id"]
    harness.close()


def test_the_lease_is_renewed_during_deletions(tmp_path: Path) -> None:
    class Endless(MemoryStore):
        forgot = renewed = 0

        def forget_answers(self, before: float) -> int:
            self.forgot += 1
            return 1

        def renew(self, epoch: int, seconds: float, steady: float) -> bool:
            self.renewed += 1
            return super().renew(epoch, seconds, steady)

    clock = Clock()
    store = Endless(clock)
    harness = Harness(tmp_path, {"lease_seconds": 0.1}, store=store, clock=clock)
    harness.wait_for(lambda: store.renewed >= 3)
    assert store.forgot >= 2
    harness.close()


def test_metrics(busy: Harness) -> None:
    token = busy.tenant("acme")
    for _ in range(2):
        busy.place("7g.80gb", lease_seconds=100)
    busy.post("/v1/allocations", {"profile": "1g.10gb"})
    busy.post("/v1/allocations", {"need": {"compute": 1, "memory_gb": 5}})
    busy.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 1000})
    busy.clock.now += 100
    busy.post("/v1/nodes/n1/uncordon")
    busy.get("/nowhere")
    answer = busy.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for line in (
        'slicewise_instances_placed_total{model="A100-80GB",profile="7g.80gb"} 2.0',
        'slicewise_instances_placed_total{model="A100-80GB",profile="1g.10gb"} 1.0',
        'slicewise_requests_rejected_total{profile="1g.10gb",reason="capacity"} 1.0',
        'slicewise_requests_rejected_total{profile="need",reason="capacity"} 1.0',
        "slicewise_requests_queued_total 1.0",
        'slicewise_allocations_ended_total{cause="lease ended"} 2.0',
        'slicewise_queue_wait_seconds_bucket{le="60.0"} 2.0',
        'slicewise_queue_wait_seconds_bucket{le="300.0"} 3.0',
        "slicewise_queue_depth 0.0",
        'slicewise_gpus{model="A100-80GB"} 2.0',
        'slicewise_utilization{model="A100-80GB"} 0.0625',
        'slicewise_placements_left{model="A100-80GB",profile="7g.80gb"} 1.0',
        'slicewise_gpus_with_room{model="A100-80GB",profile="1g.10gb"} 2.0',
        "slicewise_is_leader 1.0",
        "slicewise_database_trouble 0.0",
        'slicewise_http_requests_total{method="POST",route="/v1/allocations",status="409"} 2.0',
        'slicewise_http_requests_total{method="unknown",route="unknown",status="404"} 1.0',
    ):
        assert line in lines, line
    assert any(line.startswith("slicewise_commit_seconds_count") for line in lines)
    assert any(line.startswith('slicewise_fragmentation{reading="partial"}') for line in lines)
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    assert busy.get("/metrics", token=token).status_code == 403
    assert busy.get("/metrics", token=busy.token("read-only", tenant="acme")).status_code == 403
    assert busy.get("/metrics", token=None).status_code == 401


def test_pages_outside_the_api(tmp_path: Path) -> None:
    async def pages(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a dashboard"})

    async def start() -> list[tuple[int, str]]:
        clock = Clock()
        service = Service(
            MemoryStore(clock),
            Settings(),
            SteadyClock(clock, clock),
            pages=pages,
        )
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [await client.get(path) for path in ("/", "/healthz", "/v1/nowhere")]
        return [(answer.status_code, answer.text[:11]) for answer in answers]

    assert asyncio.run(start())[0] == (200, "a dashboard")
    assert [status for status, _ in asyncio.run(start())] == [200, 200, 404]


def test_lifespan_and_websockets(harness: Harness) -> None:
    app = harness.service.app
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message["type"])

    async def lifespan() -> None:
        words = ["lifespan.startup", "lifespan.shutdown"]

        async def receive() -> Any:
            return {"type": words.pop(0)}

        await app({"type": "lifespan"}, receive, send)

    async def websocket() -> None:
        async def receive() -> Any:
            return {"type": "websocket.connect"}

        await app({"type": "websocket"}, receive, send)

    harness.run(lifespan())
    harness.run(websocket())
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_disconnected_clients_get_no_answer(busy: Harness) -> None:
    def leaves_after(count: int) -> list[Any]:
        messages = [{"type": "http.request", "body": b"{", "more_body": True}] * count
        said: list[Any] = []

        async def receive() -> Any:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            said.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/allocations",
            "query_string": b"",
            "headers": [(b"authorization", f"Bearer {busy.admin}".encode())],
        }
        busy.run(busy.service.app(scope, receive, send))
        return said

    assert leaves_after(0) == leaves_after(2) == []


def test_metrics_may_be_public(tmp_path: Path) -> None:
    for public, status in ((True, 200), (False, 401)):
        harness = Harness(tmp_path / str(public), {"metrics_public": public})
        assert harness.get("/metrics", token=None).status_code == status
        harness.close()


def test_requests_may_be_logged_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    harness = Harness(tmp_path, {"log_requests": True})
    secret = harness.token("operator")
    harness.get("/v1/whoami", token=secret)
    harness.close()
    logged = [str(record.msg) for record in caplog.records]
    assert any("/v1/whoami" in line and "'status': 200" in line for line in logged)
    assert not any(secret in line or harness.admin in line for line in logged)


def test_a_failing_policy_fails_one_request(
    busy: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def score(self: object, gpu: object, profile: Profile, *rest: object) -> Any:
        if profile.name == "2g.20gb":
            raise ZeroDivisionError("another task's mistake")
        return right(self, gpu, profile, *rest)

    right: Any = LeastLost.score
    monkeypatch.setattr(LeastLost, "score", score)
    seq = busy.service.runtime.state.seq
    for wait in (0, 60):
        answer = busy.post("/v1/allocations", {"profile": "2g.20gb", "wait_seconds": wait}, key="k")
        assert answer.status_code == 500
        assert answer.json()["detail"] == (
            "policy 'rehearsed' failed on this request, and nothing was changed: see the log"
        )
    assert caplog.text.count("policy failed") == 1
    assert "another task's mistake" in caplog.text
    busy.ticks += 1
    assert busy.post("/v1/allocations", {"profile": "2g.20gb"}).status_code == 500
    assert caplog.text.count("policy failed") == 2
    assert busy.service.runtime.state.seq == seq
    assert busy.place("1g.10gb")["state"] == "placed"
    assert busy.get("/readyz").status_code == 200


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_contain_no_secrets(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root, stream = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr("sys.stderr", stream)
    level = root.level
    try:
        set_up_logs(form, "info")
        header = "Bearer " + "sw_secret"[::-1]
        try:
            raise KeyError(len(header))
        except KeyError:
            logger("slicewise.test").exception("request failed")
    finally:
        root.setLevel(level)
    assert "request failed" in stream.getvalue()
    assert "test_tracebacks_contain_no_secrets" in stream.getvalue()
    assert "KeyError" in stream.getvalue()
    assert "sw_secret"[::-1] not in stream.getvalue()

"""The life of a process: first start, leading, following, trouble, readiness, metrics."""

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
from tests.service.house import Clock, House

from slicewise.control.actors import internal
from slicewise.control.commands import Command, Cordon
from slicewise.control.entries import Row, TurnTaken
from slicewise.control.memory import MemoryStore
from slicewise.control.ports import FencedError, StoreError
from slicewise.control.writer import Told
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Profile
from slicewise.policies.least_lost import LeastLost
from slicewise.service.first_start import write_secret
from slicewise.service.health import readiness
from slicewise.service.logs import logger, set_up_logs
from slicewise.service.plant import Ids
from slicewise.service.service import Service
from slicewise.service.settings import Settings
from slicewise.service.steady import SteadyClock


def test_the_first_start(house: House, tmp_path: Path) -> None:
    file = tmp_path / "first" / "admin-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert house.get("/v1/whoami").json()["role"] == "admin"
    assert [t["name"] for t in house.get("/v1/tenants").json()["tenants"]] == ["default"]
    assert house.service.admin_token == file


def test_ids_made_later_come_later() -> None:
    clock = Clock()
    ids = Ids(clock)
    early = [ids("a") for _ in range(100)]
    clock.now += 0.001
    late = [ids("a") for _ in range(100)]
    clock.now += 365 * 86400
    much_later = ids("a")
    assert max(early) < min(late) < max(late) < much_later
    assert len({*early, *late}) == 200
    assert all(re.fullmatch("a[2-7a-z]{20}", identity) for identity in (*early, *late, much_later))


def test_whoever_was_told_is_let_go_of(house: House) -> None:
    """What is told holds the job; if the job held them as well, a ring would be left behind."""
    told = house.run(ask(house, Cordon("nowhere")))
    assert told.answer.status == 404
    assert told.job.tell is None


async def ask(house: House, command: Command) -> Told:
    """Hand in a command, as handlers do."""
    return await house.service.plant.ask(command, internal("somebody"))


def restarted(house: House) -> House:
    """The same store and folder, another process."""
    house.close()
    return House(house.folder, house.settings, house.store, house.clock)


def test_a_token_that_is_known_stays(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.node()
    made = house.place()
    again = restarted(house)
    assert again.admin == house.admin
    assert again.get(f"/v1/allocations/{made['id']}").json() == made
    assert len(again.get("/v1/tokens").json()["tokens"]) == 1
    again.close()


def test_a_token_file_that_is_lost_or_unknown_is_healed(tmp_path: Path) -> None:
    house = House(tmp_path)
    file = tmp_path / "first" / "admin-token"
    for damage in ("missing", "unknown", "bytes", "revoked", "tenants"):
        if damage == "missing":
            file.unlink()
        elif damage == "unknown":
            file.write_text("sw_never-committed\n")
        elif damage == "bytes":
            file.write_bytes(b"\xff\xfe")
        elif damage == "revoked":
            own = house.get("/v1/whoami").json()["id"]
            house.delete(f"/v1/tokens/{own}")
        else:
            file.write_text(house.tenant("acme"))
        house = restarted(house)
        assert house.get("/v1/whoami").json()["role"] == "admin", damage
    house.delete("/v1/tenants/default")
    house = restarted(house)
    assert house.get("/v1/tenants/default").status_code == 404  # only the first start makes it
    house.close()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SlicewiseError, match="cannot be written"):
        write_secret(tmp_path / "file" / "admin-token", "x")

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


def test_no_folder_no_file() -> None:
    async def start() -> tuple[Path | None, int]:
        clock = Clock()
        service = Service(MemoryStore(clock), Settings(), SteadyClock(clock, clock))
        await service.start()
        try:
            return service.admin_token, len(service.plant.state.tokens)
        finally:
            await service.stop()

    assert asyncio.run(start()) == (None, 0)


def test_a_standby_reads_and_sends_writers_away(house: House) -> None:
    second = house.open("second")
    assert not second.plant.leads
    house.node()
    made = house.place()
    house.wait_for(lambda: second.plant.replica.seq == house.service.plant.replica.seq)
    assert house.get(f"/v1/allocations/{made['id']}", service=second).json() == made
    ready = house.get("/readyz", service=second)
    assert ready.status_code == 200
    assert (ready.json()["role"], ready.json()["leader"]) == ("following", "http://first")
    for method, path, body in (
        ("POST", "/v1/allocations", {"profile": "1g.10gb"}),
        ("DELETE", f"/v1/allocations/{made['id']}", None),
        ("DELETE", "/v1/allocations/unknown", None),
        ("POST", "/v1/nodes/n1/cordon", None),
        ("DELETE", "/v1/nodes/n1", None),
    ):
        answer = house.call(method, path, body, service=second)
        assert answer.status_code == 503, path
        assert answer.headers["retry-after"]
        assert answer.json()["leader"] == "http://first"
    run = house.post("/v1/allocations/dry-run", {"profile": "1g.10gb"}, service=second)
    assert run.status_code == 200
    assert b"slicewise_is_leader 0.0" in house.get("/metrics", service=second).content
    assert house.get(f"/v1/allocations/{made['id']}").json()["state"] == "placed"


def test_a_standby_takes_over(house: House) -> None:
    second = house.open("second")
    house.node()
    made = house.place(key="k")
    house.run(house.service.stop())
    house.services.remove(house.service)
    house.wait_for(lambda: second.plant.leads and second.plant.furnished)
    again = house.post("/v1/allocations", {"profile": "1g.10gb"}, key="k", service=second)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json() == made
    gone = house.delete(f"/v1/allocations/{made['id']}", service=second)
    assert gone.json()["state"] == "released"
    token = (house.folder / "second" / "admin-token").read_text().strip()
    assert house.get("/v1/whoami", token=token, service=second).json()["role"] == "admin"


def test_a_leader_whose_lease_is_lost_follows(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = house.store
    assert isinstance(store, MemoryStore)
    second = house.open("second")
    house.node()
    # The first does not come to renew its lease, and does not know that it is over.
    first = house.service.plant._keeper

    class Paused:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def renew(self, epoch: int, seconds: float, steady: float) -> bool:
            return True

    monkeypatch.setattr(first, "_store", Paused())
    store.resign(house.service.plant.epoch)
    house.wait_for(lambda: second.plant.leads)
    answer = house.post("/v1/allocations", {"profile": "1g.10gb"}, service=house.service)
    assert answer.status_code == 503  # fenced by the store, whatever the first believes
    house.wait_for(lambda: house.service.plant.leader is not None)
    answer = house.post("/v1/allocations", {"profile": "1g.10gb"}, service=house.service)
    assert answer.json()["leader"] == "http://second"
    house.wait_for(lambda: second.plant.furnished)
    made = house.post("/v1/allocations", {"profile": "1g.10gb"}, service=second)
    assert made.status_code == 201
    house.wait_for(lambda: house.service.plant.replica.seq == second.plant.replica.seq)
    seen = house.get(f"/v1/allocations/{made.json()['id']}")
    assert seen.json() == made.json()


def test_nobody_leads(house: House) -> None:
    plant = house.service.plant
    writer, plant.writer = plant.writer, None
    answer = house.post("/v1/nodes/n1/cordon")
    assert answer.status_code == 503
    assert "nobody leads" in answer.json()["detail"]
    ready = house.get("/readyz")
    assert (ready.status_code, ready.json()["problems"]) == (503, ["nobody leads"])
    plant.writer = writer
    plant.stopping = True
    assert "stopping" in house.post("/v1/nodes/n1/cordon").json()["detail"]
    assert house.get("/readyz").json()["role"] == "stopping"
    plant.stopping = False
    plant.furnished = False
    assert house.get("/readyz").status_code == 503
    plant.furnished = True
    plant.loaded = False
    assert house.get("/readyz").json()["role"] == "starting"
    assert house.get("/v1/nodes").status_code == 503
    assert house.get("/healthz").json() == {"status": "ok"}
    plant.loaded = True
    assert house.get("/readyz").status_code == 200


class Faulty(MemoryStore):
    """A store that fails when told to."""

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


def test_the_database_is_cut_off_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = Faulty(clock)
    house = House(tmp_path, store=store, clock=clock)
    second = house.open("second")
    house.node()
    made = house.place()
    store.broken = True
    answer = house.post("/v1/allocations", {"profile": "1g.10gb"}, key="k")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    answer = house.post("/v1/allocations", {"profile": "1g.10gb"}, key="k")
    assert answer.status_code == 503
    house.wait_for(lambda: house.service.plant.store_trouble and second.plant.store_trouble)
    problems = house.get("/readyz").json()["problems"]
    assert problems == ["the database does not answer; the log tells more"]
    assert "the cable is out" in caplog.text
    assert b"slicewise_database_trouble 1.0" in house.get("/metrics").content
    # What is in memory can still be looked at; what is not, cannot.
    assert house.get(f"/v1/allocations/{made['id']}").status_code == 200
    lost = house.get("/v1/allocations/unknown")
    assert lost.status_code == 503
    assert "cable" not in lost.text  # what is wrong with the database is not for everybody
    assert house.get("/v1/audit").status_code == 503
    store.broken = False
    house.wait_for(lambda: readiness(house.service.plant).ready)
    assert house.post("/v1/allocations", {"profile": "1g.10gb"}, key="k").status_code == 201
    assert len(house.get("/v1/allocations").json()["allocations"]) == 2
    house.wait_for(lambda: second.plant.store_trouble is None)
    house.close()


def test_a_writer_that_does_not_answer(busy: House, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = busy.service.plant
    assert plant.writer is not None
    monkeypatch.setattr(plant.writer, "submit", lambda job: None)

    async def ask() -> int:
        waiting = plant.ask(Cordon("n1"), internal("tester"))
        plant.give_up_on_old()
        assert not waiting.done()
        busy.ticks += 61
        plant.give_up_on_old()
        return (await waiting).answer.status

    assert busy.run(ask()) == 503


def test_a_journal_that_cannot_be_followed_ends_the_process(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = house.service.plant
    assert plant.writer is not None
    monkeypatch.setattr(plant.writer, "submit", lambda job: None)

    async def jump() -> int:
        waiting = plant.ask(Cordon("n1"), internal("tester"))
        plant._take([Row(plant.replica.seq + 5, 0, "x", TurnTaken(0))])
        await house.service.failed.wait()
        return (await waiting).answer.status

    assert house.run(jump()) == 503
    assert plant.failure is not None
    assert "cannot be followed" in plant.failure
    ready = house.get("/readyz")
    assert ready.status_code == 503


def test_a_follower_that_fails_ends_the_process(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = house.open("second")

    def odd(after: int, seconds: float) -> bool:
        raise RuntimeError("impossible")

    monkeypatch.setattr(house.store, "wait_for_rows", odd)
    house.run(standby.failed.wait())
    assert standby.plant.failure is not None
    assert "impossible" in standby.plant.failure
    monkeypatch.undo()


def test_a_writer_that_dies_ends_the_process(busy: House, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = busy.service.plant.writer
    assert writer is not None
    monkeypatch.setattr(type(writer), "alive", False)
    busy.run(busy.service.failed.wait())
    assert busy.service.plant.failure == "the writer stopped unexpectedly"


def test_a_keeper_that_fails_ends_the_process(
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


def test_a_rival_that_is_faster(tmp_path: Path) -> None:
    class Raced(MemoryStore):
        lost = 0

        def lead(self, holder: str, address: str, seconds: float) -> int | None:
            if self.lost < 1:
                self.lost += 1
                raise FencedError("somebody else was faster")
            return super().lead(holder, address, seconds)

    clock = Clock()
    house = House(tmp_path, store=Raced(clock), clock=clock)
    assert house.service.plant.leads
    house.close()


def test_old_answers_are_forgotten(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.node()
    house.place(key="k")
    store = house.store
    assert isinstance(store, MemoryStore)
    assert len(store.kept_answers) >= 1
    house.clock.now += 25 * 3600
    house.wait_for(lambda: not store.kept_answers)
    assert house.place(key="k")["id"]
    house.close()


def test_the_lease_is_renewed_while_much_is_forgotten(tmp_path: Path) -> None:
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
    house = House(tmp_path, {"lease_seconds": 0.1}, store=store, clock=clock)
    house.wait_for(lambda: store.renewed >= 3)
    assert store.forgot >= 2
    house.close()


def test_metrics(busy: House) -> None:
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


def test_pages_beside_the_api(tmp_path: Path) -> None:
    from starlette.responses import PlainTextResponse

    async def start() -> list[tuple[int, str]]:
        clock = Clock()
        service = Service(
            MemoryStore(clock),
            Settings(),
            SteadyClock(clock, clock),
            pages=PlainTextResponse("a dashboard"),
        )
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
            answers = [await client.get(path) for path in ("/", "/healthz", "/v1/nowhere")]
        return [(answer.status_code, answer.text[:11]) for answer in answers]

    assert asyncio.run(start())[0] == (200, "a dashboard")
    assert [status for status, _ in asyncio.run(start())] == [200, 200, 404]


def test_what_is_no_request(house: House) -> None:
    app = house.service.app
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

    house.run(lifespan())
    house.run(websocket())
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


def test_those_who_leave_are_told_nothing(busy: House) -> None:
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
        house = House(tmp_path / str(public), {"metrics_public": public})
        assert house.get("/metrics", token=None).status_code == status
        house.close()


def test_requests_may_be_logged_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    house = House(tmp_path, {"log_requests": True})
    secret = house.token("operator")
    house.get("/v1/whoami", token=secret)
    house.close()
    logged = [str(record.msg) for record in caplog.records]
    assert any("/v1/whoami" in line and "'status': 200" in line for line in logged)
    assert not any(secret in line or house.admin in line for line in logged)


def test_a_policy_that_fails_costs_one_request(
    busy: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def score(self: object, gpu: object, profile: Profile, *rest: object) -> Any:
        if profile.name == "2g.20gb":
            raise ZeroDivisionError("somebody else's mistake")
        return right(self, gpu, profile, *rest)

    right: Any = LeastLost.score
    monkeypatch.setattr(LeastLost, "score", score)
    seq = busy.service.plant.state.seq
    for wait in (0, 60):
        answer = busy.post("/v1/allocations", {"profile": "2g.20gb", "wait_seconds": wait}, key="k")
        assert answer.status_code == 500
        assert answer.json()["detail"] == (
            "policy 'least-lost' failed while it decided this; nothing was changed, "
            "and the log tells more"
        )
    assert caplog.text.count("policy failed") == 1
    assert "somebody else's mistake" in caplog.text
    busy.ticks += 1
    assert busy.post("/v1/allocations", {"profile": "2g.20gb"}).status_code == 500
    assert caplog.text.count("policy failed") == 2
    assert busy.service.plant.state.seq == seq
    assert busy.place("1g.10gb")["state"] == "placed"
    assert busy.get("/readyz").status_code == 200


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_tell_no_secrets(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "test_tracebacks_tell_no_secrets" in stream.getvalue()
    assert "KeyError" in stream.getvalue()
    assert "sw_secret"[::-1] not in stream.getvalue()

"""Event streams and the audit log."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.server.harness import Harness

from slicewise.control.actors import internal
from slicewise.control.ports import StoreError
from slicewise.runtime import replica
from slicewise.server.routes import events


def follow(harness: Harness, path: str, count: int, **options: Any) -> list[dict[str, Any]]:
    """The next so many events of a stream."""

    async def read() -> list[dict[str, Any]]:
        async with harness.stream(path, **options) as reader:
            found = [await reader.event() for _ in range(count)]
            assert reader.status == 200
            return found

    return harness.run(read())


def number(event: dict[str, Any]) -> int:
    """The number of an event's entry."""
    return int(event["id"].rpartition("-")[2])


def test_a_stream_from_the_first_entry(busy: Harness) -> None:
    busy.place()
    found = follow(busy, "/v1/events?after=0", 5)
    kinds = ["tenant-set", "token-issued", "model-entered", "node-added", "allocated"]
    assert [event["event"] for event in found] == kinds
    assert list(map(number, found)) == [1, 2, 3, 4, 5]
    data = found[-1]["data"]
    assert (data["seq"], data["kind"], data["tenant"]) == (5, "allocated", "default")
    assert data["entry"]["allocation"]["parts"][0]["profile"] == "1g.10gb"
    assert data["at"].endswith("Z")
    assert found[1]["data"]["entry"]["digest"] == ""


def test_entries_are_streamed_when_they_are_committed(busy: Harness) -> None:
    async def read() -> list[str]:
        async with busy.stream("/v1/events") as reader:
            told = busy.service.runtime.replica
            before = told.seq
            assert (
                await reader.block() == f"retry: 2000\nid: {busy.service.runtime.history}-{before}"
            )
            waiting = asyncio.create_task(reader.event())
            await asyncio.sleep(0)
            assert not waiting.done()
            from slicewise.control.commands import Cordon

            await busy.service.runtime.submit(Cordon("n1"), internal("tester"))
            event = await waiting
            assert number(event) == before + 1
            return [event["event"], event["data"]["subject"]]

    assert busy.run(read()) == ["node-turned", "n1"]


def test_an_interrupted_stream_resumes(busy: Harness) -> None:
    for _ in range(3):
        busy.place()
    first = follow(busy, "/v1/events?after=4", 1)
    rest = follow(busy, "/v1/events?after=0", 2, headers={"last-event-id": first[0]["id"]})
    assert list(map(number, rest)) == [6, 7]
    for header in ("x", "-1", "1" * 18):
        assert busy.get("/v1/events", headers={"last-event-id": header}).status_code == 400
    assert busy.get("/v1/events?after=-1").status_code == 400


def test_old_rows_come_from_the_store(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    busy.service.runtime.replica._keep = 1
    busy.service.runtime.replica._recent.clear()
    monkeypatch.setattr(events, "_SENT_ROWS", 2)
    for _ in range(5):
        busy.place()
    assert busy.service.runtime.replica.since(0, 10) is None
    found = follow(busy, "/v1/events?after=1", 8)
    assert list(map(number, found)) == list(range(2, 10))
    assert replica.KEPT_ROWS > 1000


def test_a_tenant_gets_its_own_entries(busy: Harness) -> None:
    mine, other = busy.tenant("acme"), busy.tenant("other")
    busy.place(token=other)
    identity = busy.place(token=mine)["id"]
    busy.place()
    busy.delete(f"/v1/allocations/{identity}")  # by the admin
    for token in (mine, busy.token("read-only", tenant="acme")):
        found = follow(busy, "/v1/events?after=0", 4, token=token)
        assert {event["data"]["tenant"] for event in found} == {"acme"}
        kinds = [event["event"] for event in found]
        assert kinds == ["tenant-set", "token-issued", "allocated", "ended"]
        assert found[0]["data"]["actor"] == "operator"
        own = busy.get("/v1/whoami", token=mine).json()["id"]
        assert found[2]["data"]["actor"] == own
        assert found[3]["data"]["actor"] == "operator"


def test_a_heartbeat_updates_the_position(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.001)
    token = busy.tenant("acme")

    async def read() -> tuple[int, str]:
        async with busy.stream("/v1/events?after=5", token=token) as reader:
            await reader.block()
            event = await reader.event()  # the token
            return number(event), await reader.block()

    last, block = busy.run(read())
    seq = busy.service.runtime.replica.seq
    assert block == f": nothing new\nid: {busy.service.runtime.history}-{seq}"
    assert last <= seq


def test_entries_of_others_do_not_suppress_the_heartbeat(
    busy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_SECONDS", 0.02)
    token = busy.tenant("acme")

    async def read() -> str:
        async def others() -> None:
            from slicewise.control.commands import Cordon, Uncordon

            while True:
                await busy.service.runtime.submit(Cordon("n1"), internal("tester"))
                await busy.service.runtime.submit(Uncordon("n1"), internal("tester"))

        async with busy.stream("/v1/events", token=token) as reader:
            await reader.block()
            working = asyncio.create_task(others())
            block = await reader.block()
            working.cancel()
            return block

    assert busy.run(read()).startswith(": nothing new\nid: ")


def test_a_slow_reader_misses_nothing(busy: Harness) -> None:
    """It delays nothing, uses no memory, and continues where it stopped."""
    busy.service.runtime.replica._keep = 1
    busy.service.runtime.replica._recent.clear()

    async def read() -> list[int]:
        async with busy.stream("/v1/events?after=4") as reader:
            await reader.block()
            reader.paused = asyncio.Event()
            for _ in range(10):
                from slicewise.control.commands import Cordon, Uncordon

                await busy.service.runtime.submit(Cordon("n1"), internal("tester"))
                await busy.service.runtime.submit(Uncordon("n1"), internal("tester"))
            reader.paused.set()
            return [number(await reader.event()) for _ in range(20)]

    assert busy.run(read()) == list(range(5, 25))


def test_a_stream_ends_with_its_token(busy: Harness) -> None:
    token = busy.token("read-only")
    identity = busy.get("/v1/whoami", token=token).json()["id"]

    async def read() -> bool:
        async with busy.stream("/v1/events", token=token) as reader:
            await reader.block()
            from slicewise.control.commands import RevokeToken

            await busy.service.runtime.submit(RevokeToken(identity), internal("tester"))
            while not reader.ended:
                await asyncio.sleep(0.001)
            return reader.ended

    assert busy.run(read())
    assert busy.service.context.streams.open == 0


def test_streams_end_when_the_service_stops(busy: Harness) -> None:
    async def read() -> bool:
        async with busy.stream("/v1/events") as reader:
            await reader.block()
            busy.service.close_streams()
            while not reader.ended:
                await asyncio.sleep(0.001)
            return reader.ended

    assert busy.run(read())


def test_a_stream_ends_when_the_store_fails(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(after: int, limit: int) -> None:
        raise StoreError("gone fishing")

    busy.service.runtime.replica._recent.clear()
    monkeypatch.setattr(busy.store, "rows", fail)

    async def read() -> bool:
        async with busy.stream("/v1/events?after=0") as reader:
            await reader.block()
            while not reader.ended:
                await asyncio.sleep(0.001)
            return reader.ended

    assert busy.run(read())
    monkeypatch.undo()


def test_the_number_of_streams_is_limited(tmp_path: Any) -> None:
    harness = Harness(tmp_path, {"streams": 2, "streams_per_tenant": 1})
    try:
        token = harness.tenant("acme")

        async def open_three() -> tuple[int, int, int]:
            async with harness.stream("/v1/events", token=token) as first:
                await first.block()
                async with harness.stream("/v1/events", token=token) as second:
                    await second.block_or_end()
                    async with harness.stream("/v1/events") as third:
                        await third.block()
                        async with harness.stream("/v1/events") as fourth:
                            await fourth.block_or_end()
                            return second.status, third.status, fourth.status

        assert harness.run(open_three()) == (429, 200, 503)
        assert harness.service.context.streams.open == 0
    finally:
        harness.close()


def test_roles_that_may_stream_events(busy: Harness) -> None:
    assert busy.get("/v1/events", token=None).status_code == 401
    agent = busy.token("agent", node="n1")
    assert busy.get("/v1/events", token=agent).status_code == 403


def test_the_audit_log(busy: Harness) -> None:
    token = busy.tenant("acme")
    identity = busy.place(token=token)["id"]
    busy.delete(f"/v1/allocations/{identity}", token=token)
    busy.post("/v1/allocations", {"profile": "7g.80gb", "count": 9})

    def kinds(query: str) -> list[str]:
        answer = busy.get(f"/v1/audit?{query}")
        assert answer.status_code == 200, answer.text
        return [event["kind"] for event in answer.json()["events"]]

    assert kinds("")[0] == "rejected"
    assert kinds(f"subject={identity}") == ["ended", "allocated"]
    assert kinds("tenant=acme") == ["ended", "allocated", "token-issued", "tenant-set"]
    assert kinds("kind=ended&kind=rejected") == ["rejected", "ended"]
    assert "digest" not in busy.get("/v1/audit").text.replace('"digest":""', "")
    seen: list[int] = []
    cursor = ""
    while True:
        page = busy.get(f"/v1/audit?limit=3{cursor}").json()
        seen += [event["seq"] for event in page["events"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == busy.service.runtime.replica.seq
    for query in ("kind=ending", "limit=0", "cursor=eA"):
        assert busy.get(f"/v1/audit?{query}").status_code == 400, query

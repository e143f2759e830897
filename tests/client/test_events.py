"""The event stream: parsing, and resuming after an interruption."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.client.running import Running, running

from slicewise.client import ApiError, Client, ResyncError, UnreachableError
from slicewise.client.event_stream import RESUME_SECONDS, EventParser
from slicewise.core.errors import SlicewiseError
from slicewise.store.memory import MemoryStore


def event(seq: int, note: str = "", form: str = "{}") -> bytes:
    """An event as the service sends it."""
    entry = {"kind": "token-issued", "token": "t", "digest": "", "role": "admin", "note": note}
    document = {
        "seq": seq,
        "at": "2026-01-01T00:00:00.000Z",
        "actor": "t",
        "kind": "token-issued",
        "tenant": None,
        "subject": "t",
        "entry": entry,
    }
    text = json.dumps(document, ensure_ascii=False)
    return f"id: {seq}\nevent: token-issued\ndata: {form.format(text)}\n\n".encode()


def seqs(reader: EventParser, *pieces: bytes) -> list[int]:
    return [one.seq for piece in pieces for one in reader.feed(piece)]


def test_comments_and_unknown_fields_are_ignored() -> None:
    reader = EventParser(None)
    assert seqs(reader, b"retry: 2000\n\n: hello\n:\n", event(5), b"colour: red\nid\n\n") == [5]
    assert reader.after == "5"


def test_a_heartbeat_advances_the_position() -> None:
    reader = EventParser("3")
    assert seqs(reader, b": nothing new\nid: 9\n\n") == []
    assert reader.after == "9"
    assert seqs(reader, b"id: not a number\nid: -1\n\n") == []
    assert reader.after == "9"


def test_data_may_have_several_lines() -> None:
    whole = event(7)
    split = whole.replace(b', "at"', b'\ndata:, "at"').replace(b', "actor"', b'\ndata: , "actor"')
    assert split.count(b"data:") == 3
    assert EventParser(None).feed(split) == EventParser(None).feed(whole)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(end: bytes) -> None:
    stream = (event(1) + event(2) + b": end\n").replace(b"\n", end) + b"x"
    assert seqs(EventParser(None), stream) == [1, 2]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "ü", "\U0001f600"])
def test_text_may_contain_unicode_line_separators(character: str) -> None:
    (one,) = EventParser(None).feed(event(1, note=f"a{character}b"))
    assert json.loads(event(1, f"a{character}b").split(b"data: ")[1])["entry"]["note"] == (
        getattr(one.entry, "note", None)
    )


@given(st.data())
def test_events_do_not_depend_on_the_chunks(data: st.DataObject) -> None:
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    stream = b"".join(
        data.draw(st.sampled_from([event(seq, "ü\u2028"), b": hi\nid: %d\n\n" % seq]))
        for seq in range(1, 5)
    ).replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, parts = EventParser(None), EventParser(None)
    assert [one for piece in pieces for one in parts.feed(piece)] == whole.feed(stream)
    assert parts.after == whole.after == "4"


def test_a_truncated_event_does_not_advance_the_position() -> None:
    reader = EventParser(None)
    assert seqs(reader, event(1), event(2)[:-1]) == [1]
    assert reader.after == "1"
    reader.reset()
    assert seqs(reader, event(2)) == [2]


def test_an_unreadable_event_is_an_error() -> None:
    reader = EventParser("4")
    with pytest.raises(SlicewiseError, match="this client cannot read an event"):
        reader.feed(b'id: 5\ndata: {"seq": 5}\n\n')
    assert reader.after == "4"


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream of these chunks that then breaks or ends."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


class Streams:
    """A service with scripted streams that records its requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, str]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            ready = {"ready": True, "role": "leading", "leader": None, "seq": 40, "problems": []}
            ready["history"] = HISTORY
            return httpx.Response(200, content=json.dumps(ready).encode())
        self.asked.append((request.url.host, dict(request.url.params)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def stream(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, stream=Pieces(*pieces))


def problem(status: int, detail: str) -> httpx.Response:
    document = {"type": "urn:x", "title": "t", "status": status, "detail": detail}
    return httpx.Response(status, content=json.dumps(document).encode())


HISTORY = "0123456789abcdef"
BREAK = httpx.RemoteProtocolError("peer closed connection")


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    noted: list[float] = []

    async def sleep(seconds: float) -> None:
        noted.append(seconds)

    monkeypatch.setattr("slicewise.client.blocking_client.sleep", noted.append)
    monkeypatch.setattr("slicewise.client.async_client.sleep", sleep)
    return noted


def take(make: Any, streams: Streams, number: int, *after: int, server: str = "http://a") -> Any:
    transport = httpx.MockTransport(streams)
    with (
        make(server, "sw_x", transport=transport, patience=0) as client,
        closing(client.events(*after)) as events,
    ):
        return [next(events).seq for _ in range(number)]


def test_a_broken_stream_resumes_at_its_position(make: Any, paused: list[float]) -> None:
    streams = Streams(
        stream(event(1), event(2)[:20], BREAK),
        stream(event(2), b"id: 0123456789abcdef-7\n\n"),
        BREAK,
        problem(503, "starting"),
        stream(event(8)),
    )
    assert take(make, streams, 3, 0) == [1, 2, 8]
    assert [asked["after"] for _, asked in streams.asked] == ["0", "1", *[f"{HISTORY}-7"] * 3]
    assert all(pause > 0 for pause in paused)


def test_a_stream_starts_at_the_current_position_by_default(make: Any, paused: list[float]) -> None:
    """The position is read before the first stream, so nothing is missed if that breaks at once."""
    streams = Streams(stream(BREAK), stream(event(41)))
    assert take(make, streams, 1) == [41]
    assert [asked["after"] for _, asked in streams.asked] == [f"{HISTORY}-40"] * 2


def test_empty_streams_are_retried_with_backoff(make: Any, paused: list[float]) -> None:
    streams = Streams(*(stream() for _ in range(6)), stream(event(1)), stream(), stream(event(2)))
    assert take(make, streams, 2, 0) == [1, 2]
    assert paused[5] > paused[0]
    assert paused[6] <= 0.05  # it was alive again


def test_another_server_continues_the_stream(make: Any, paused: list[float]) -> None:
    streams = Streams(stream(event(1), BREAK), httpx.ConnectError("gone"), stream(event(2)))
    assert take(make, streams, 2, 0, server="http://a,http://b") == [1, 2]
    assert [host for host, _ in streams.asked] == ["a", "a", "b"]


def test_another_history_is_a_resync_error(make: Any, paused: list[float]) -> None:
    streams = Streams(stream(event(1)), problem(410, "another history"))
    with pytest.raises(ResyncError, match="another history"):
        take(make, streams, 2, 0)


@pytest.mark.parametrize("status", [401, 403, 400, 500])
def test_a_refused_stream_is_an_error(make: Any, status: int) -> None:
    with pytest.raises(ApiError, match="no!") as refused:
        take(make, Streams(problem(status, "no!")), 1, 0)
    assert refused.value.status == status


def test_a_revoked_token_ends_the_stream(make: Any, paused: list[float]) -> None:
    streams = Streams(stream(event(1)), problem(401, "unknown token"))
    with pytest.raises(ApiError, match="unknown token"):
        take(make, streams, 2, 0)


def test_no_server_at_the_start(make: Any) -> None:
    with pytest.raises(UnreachableError, match="no answer from http://a"):
        take(make, Streams(httpx.ConnectError("gone")), 1, 0)


def test_no_server_after_an_interruption(make: Any, paused: list[float]) -> None:
    """A broken stream is retried for longer than a first connection."""
    now = [0.0]
    streams = Streams(stream(event(1)), *(httpx.ConnectError("gone") for _ in range(200)))
    with make("http://a", "sw_x", transport=httpx.MockTransport(streams), patience=0) as client:
        endpoints = getattr(client, "_client", client)._endpoints
        endpoints.clock = lambda: now[0]
        with closing(client.events(0)) as events:
            assert next(events).seq == 1
            advance = iter(range(0, 1000, 10))

            def clock() -> float:
                now[0] = float(next(advance))
                return now[0]

            endpoints.clock = clock
            with pytest.raises(UnreachableError):
                next(events)
    assert RESUME_SECONDS <= now[0] + 2 <= RESUME_SECONDS + 20


def test_events_as_they_happen(admin: Any, service: Running) -> None:
    with Client(service.url, service.token) as other, closing(admin.events(0)) as events:
        assert [next(events).kind for _ in range(2)] == ["tenant-set", "token-issued"]
        other.add_tenant("acme")
        heard = next(events)
    assert (heard.kind, heard.tenant, heard.subject) == ("tenant-set", "acme", "acme")


def test_a_stream_survives_a_restart_of_the_service(tmp_path: Path, make: Any) -> None:
    store = MemoryStore(time.time)
    with running(tmp_path / "a", store) as first:
        port = int(first.url.rpartition(":")[2])
        client = make(first.url, first.token)
        events = client.events(0)
        assert [next(events).seq for _ in range(2)] == [1, 2]
    with client, running(tmp_path / "a", store, port) as second:
        with Client(second.url, second.token) as other:
            other.add_tenant("acme")
        with closing(events):
            assert next(events).subject == "acme"


def test_labels_with_unicode_line_separators(admin: Any) -> None:
    admin.add_node("n1", "A100-80GB", 1)
    made = admin.allocate("1g.10gb", labels={"odd": "a\u2028b\x85c\nd"})
    with closing(admin.events(0)) as events:
        for one in events:
            if one.subject == made.id:
                break
    assert one.entry.allocation.labels == {"odd": "a\u2028b\x85c\nd"}


def test_a_closed_generator_closes_its_connection(service: Running) -> None:
    runtime = service.service.runtime
    assert runtime._loop is not None
    with Client(service.url, service.token) as client:
        events = client.events(0)
        next(events)
        assert service.service.context.streams.open == 1
        events.close()
        while service.service.context.streams.open:
            runtime._loop.call_soon_threadsafe(runtime.replica.notify)  # as the next entry would
            time.sleep(0.01)

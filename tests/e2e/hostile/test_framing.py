"""Request framing: each request gets one response, however it is written or split."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

import pytest
from tests.e2e.hostile.raw import Raw, cut, every
from tests.e2e.hostile.sender import CHUNKED, HIDDEN, OFFERS, WISH, Sender
from tests.e2e.server import PATIENCE_SECONDS, Server


@pytest.fixture(scope="module")
def sender(server: Server) -> Sender:
    return Sender(server)


def check_one_response(sender: Sender, raw: Raw, id: str, status: int = 200) -> None:
    """Check that a request gets one response, and the next one on the connection its own."""
    answer = raw.answer()
    assert answer is not None
    assert (answer.status, answer.id) == (status, id), answer
    assert not answer.closes
    after = sender.id()
    raw.send(sender.get(after, more=b"Connection: close\r\n"))
    assert [(a.status, a.id) for a in raw.answers()] == [(200, after)]


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_offer_is_ignored(
    server: Server, sender: Sender, offer: bytes, chunked: bool
) -> None:
    for content, status in ((WISH, 200), (HIDDEN, 400)):
        id = sender.id()
        if chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
            whole = sender.post(id, body, offer + CHUNKED, length=None)
        else:
            body = content
            whole = sender.post(id, body, offer)
        head = len(whole) - len(body)
        for pieces in ([whole], cut(whole, [head]), cut(whole, [head, head + 5]), every(whole, 1)):
            with Raw(server.address) as raw:
                raw.send(*pieces, pause=0.02 if len(pieces) < 4 else 0.0005)
                check_one_response(sender, raw, id, status)


def test_an_upgrade_request_split_anywhere(server: Server, sender: Sender) -> None:
    id = sender.id()
    whole = sender.post(id, HIDDEN, OFFERS["h2c"])
    for place in range(1, len(whole)):
        with Raw(server.address) as raw:
            raw.send(*cut(whole, [place]))
            raw.send(sender.get("behind", more=b"Connection: close\r\n"))
            assert [(a.status, a.id) for a in raw.answers()] == [(400, id), (200, "behind")], place


def test_a_request_after_an_upgrade_without_a_body(server: Server, sender: Sender) -> None:
    for offer in OFFERS.values():
        with Raw(server.address) as raw:
            raw.send(
                sender.get("one", more=offer),
                sender.get("two", more=b"Connection: close\r\n") + HIDDEN,
            )
            assert [(a.status, a.id) for a in raw.answers()] == [(200, "one"), (200, "two")]


def test_an_h2c_offer_is_ignored(server: Server, sender: Sender) -> None:
    more = OFFERS["h2c"] + b"User-Agent: curl/8\r\nAccept: */*\r\n"
    with Raw(server.address) as raw:
        raw.send(sender.post("h2c", more=more, path="/v1/allocations"))
        check_one_response(sender, raw, "h2c", 201)


POST = b"POST /v1/allocations/dry-run HTTP/1.1\r\n"
GET = b"GET /v1/whoami HTTP/1.1\r\n"
HOST = b"Host: x\r\n"
SIZED = b"Content-Length: %d\r\n" % len(HIDDEN)

AMBIGUOUS = {
    # Lines
    "folded header": GET + HOST + b"X-A: b\r\n folded: c\r\n\r\n",
    "folded host": GET + b"Host: x\r\n\ty\r\n\r\n",
    "folded first": GET + b" " + HOST + b"\r\n",
    "folded coding": POST + HOST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"GET /v1/whoami HTTP/1.1\nHost: x\n\n",
    "one bare line feed": GET + b"Host: x\nX-A: b\r\n\r\n",
    "a bare line feed in a value": GET + HOST + b"X-A: b\nTransfer-Encoding: chunked\r\n\r\n",
    "a bare carriage return": GET + HOST + b"X-A: b\rTransfer-Encoding: chunked\r\n\r\n",
    "a bare end": GET + HOST + b"\n",
    "two carriage returns": GET + b"Host: x\r\r\n\r\n",
    "carriage return and text": GET + b"Host: x\r\n\rX\r\n\r\n",
    "a zero byte": GET + HOST + b"X-A: b\0c\r\n\r\n",
    "a control character": GET + HOST + b"X-A: b\x0bc\r\n\r\n",
    "a delete character": GET + HOST + b"X-A: \x7f\r\n\r\n",
    "space before the colon": POST + HOST + b"Content-Length : 5\r\n\r\nGET /",
    "tab before the colon": POST + HOST + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "no colon": GET + HOST + b"X-A\r\n\r\n",
    "no name": GET + HOST + b": b\r\n\r\n",
    "a name in brackets": GET + HOST + b"X(A): b\r\n\r\n",
    "a name beyond ASCII": GET + HOST + b"X-\xc4: b\r\n\r\n",
    # The request line
    "HTTP/0.9": b"GET /v1/whoami\r\n\r\n",
    "HTTP/0.9 and nothing else": b"GET /healthz\r\n",
    "two spaces": b"GET  /v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space at the end": b"GET /v1/whoami HTTP/1.1 \r\n" + HOST + b"\r\n",
    "a space in the target": b"GET /v1/who ami HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab": b"GET\t/v1/whoami\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in front": b" " + GET + HOST + b"\r\n",
    "three empty lines": b"\r\n\r\n\r\n" + GET + HOST + b"\r\n",
    "another version": b"GET /v1/whoami HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a longer version": b"GET /v1/whoami HTTP/1.10\r\n" + HOST + b"\r\n",
    "a small version": b"GET /v1/whoami http/1.1\r\n" + HOST + b"\r\n",
    "a small method": b"get /v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "an endless method": b"A" * 40 + b" /v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "a fragment": b"GET /v1/whoami#x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a target beyond ASCII": b"GET /v1/\xff HTTP/1.1\r\n" + HOST + b"\r\n",
    "a relative target": b"GET v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "only a question": b"GET ?x HTTP/1.1\r\n" + HOST + b"\r\n",
    "a star": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "another scheme": b"GET ftp://x/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "another host": b"GET http://y/v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "a user": b"GET http://u@x/v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT and a path": b"CONNECT /v1/whoami HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT and a URL": b"CONNECT http://x/ HTTP/1.1\r\n" + HOST + b"\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    # Host, and headers that may occur once
    "no host": GET + b"\r\n",
    "two hosts": GET + HOST + HOST + b"\r\n",
    "two other hosts": GET + HOST + b"host: y\r\n\r\n",
    "hosts with a comma": GET + b"Host: x, y\r\n\r\n",
    "a path for a host": GET + b"Host: x/y\r\n\r\n",
    "a user for a host": GET + b"Host: u@x\r\n\r\n",
    "no name for a host": GET + b"Host:\r\n\r\n",
    "two authorizations": GET
    + HOST
    + b"Authorization: Bearer a\r\nauthorization: Bearer a\r\n\r\n",
    "two keys": POST + HOST + b"Idempotency-Key: a\r\nIdempotency-Key: b\r\n\r\n",
    "two types": POST + HOST + b"Content-Type: a/b\r\nContent-Type: application/json\r\n\r\n",
    "two encodings": POST + HOST + b"Content-Encoding: identity\r\ncontent-encoding: gzip\r\n\r\n",
    "two places in the events": GET + HOST + b"Last-Event-ID: 1\r\nLast-Event-ID: 2\r\n\r\n",
    # The length of the body
    "two lengths": POST + HOST + SIZED + b"Content-Length: 0\r\n\r\n" + HIDDEN,
    "two equal lengths": POST + HOST + SIZED + SIZED + b"\r\n" + HIDDEN,
    "lengths with a comma": POST + HOST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a negative length": POST + HOST + b"Content-Length: -2\r\n\r\n{}",
    "a signed length": POST + HOST + b"Content-Length: +2\r\n\r\n{}",
    "a spaced length": POST + HOST + b"Content-Length: 1 0\r\n\r\n{}",
    "a length in hexadecimal": POST + HOST + b"Content-Length: 0x2\r\n\r\n{}",
    "a length with a point": POST + HOST + b"Content-Length: 2.0\r\n\r\n{}",
    "a length with a stroke": POST + HOST + b"Content-Length: 1_0\r\n\r\n{}",
    "a length in other digits": POST + HOST + "Content-Length: ٢\r\n\r\n{}".encode(),
    "a quoted length": POST + HOST + b'Content-Length: "2"\r\n\r\n{}',
    "an empty length": POST + HOST + b"Content-Length:\r\n\r\n{}",
    "an endless length": POST + HOST + b"Content-Length: 18446744073709551618\r\n\r\n{}",
    "length and chunks": POST + HOST + SIZED + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": POST + HOST + CHUNKED + SIZED + b"\r\n0\r\n\r\n" + HIDDEN,
    "gzip and chunks": POST + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks and gzip": POST + HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + HOST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunks in two lines": POST + HOST + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "gzip and chunks in two lines": POST
    + HOST
    + b"Transfer-Encoding: gzip\r\n"
    + CHUNKED
    + b"\r\n0\r\n\r\n",
    "identity": POST + HOST + b"Transfer-Encoding: identity\r\n\r\n",
    "identity and length": POST + HOST + SIZED + b"Transfer-Encoding: identity\r\n\r\n" + HIDDEN,
    "xchunked": POST + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked and a parameter": POST + HOST + b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "chunked and a comma": POST + HOST + b"Transfer-Encoding: chunked,\r\n\r\n0\r\n\r\n",
    "quoted chunked": POST + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "an empty coding": POST + HOST + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0") + HOST + CHUNKED + b"\r\n0\r\n\r\n",
}
CHUNKS = {
    "no size": b"\r\n{}\r\n0\r\n\r\n",
    "a letter": b"g\r\n{}\r\n",
    "a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "a negative size": b"-2\r\n{}\r\n0\r\n\r\n",
    "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a stroke": b"0_2\r\n{}\r\n0\r\n\r\n",
    "a space in front": b" 2\r\n{}\r\n0\r\n\r\n",
    "a space behind": b"2 \r\n{}\r\n0\r\n\r\n",
    "a space before an extension": b"2 ;a=b\r\n{}\r\n0\r\n\r\n",
    "an overflow of 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "an endless size": b"0" * 200 + b"2\r\n{}\r\n0\r\n\r\n",
    "a bare line feed": b"2\n{}\r\n0\r\n\r\n",
    "a bare carriage return": b"2\r{}\r\n0\r\n\r\n",
    "a bare line feed in an extension": b"2;a\n{}\r\n0\r\n\r\n",
    "a carriage return in an extension": b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "a zero byte in an extension": b"2;a\0\r\n{}\r\n0\r\n\r\n",
    "an endless extension": b"2;" + b"a" * 1000 + b"\r\n{}\r\n0\r\n\r\n",
    "tiny chunks": b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
    "too short": b"1\r\n{}\r\n0\r\n\r\n",
    "too long": b"3\r\n{}\r\n0\r\n\r\n",
    "no end of a line": b"2\r\n{}0\r\n\r\n",
    "a line feed for an end": b"2\r\n{}\n0\r\n\r\n",
    "a trailer without a colon": b"2\r\n{}\r\n0\r\nx\r\n\r\n",
    "a folded trailer": b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n",
    "a trailer with a bare line feed": b"2\r\n{}\r\n0\r\nx: y\n\r\n",
    "a trailer with a space": b"2\r\n{}\r\n0\r\nx : y\r\n\r\n",
    "a request for a trailer": b"2\r\n{}\r\n0\r\n" + HIDDEN,
    "endless trailers": b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 4000 + b"\r\n",
}


def assert_refused(server: Server, make: Callable[[], bytes], status: int = 400) -> None:
    """Check for one error response, the end of the connection, and no further responses."""
    data = make()
    for pieces in ([data], every(data, 7)):
        if len(pieces) > 500:
            continue
        with Raw(server.address) as raw:
            raw.send(*pieces, pause=0.0005)
            raw.send(b"\r\n\r\n", HIDDEN)
            answers = raw.answers()
            assert [a.status for a in answers] == [status], answers
            assert answers[0].closes
            assert answers[0].headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_requests_are_refused(server: Server, sender: Sender, name: str) -> None:
    assert_refused(server, lambda: AMBIGUOUS[name])


@pytest.mark.parametrize("name", CHUNKS)
def test_ambiguous_chunks_are_refused(server: Server, sender: Sender, name: str) -> None:
    # The body is read before the response, which reports that it is invalid.
    assert_refused(server, lambda: sender.post("c", CHUNKS[name], CHUNKED, length=None))


def test_invalid_chunks_after_the_response(server: Server) -> None:
    # The response needs no body and was sent already, so only the connection can be closed.
    for bad in CHUNKS.values():
        with Raw(server.address) as raw:
            raw.send(POST + HOST + b"X-Request-Id: early\r\n" + CHUNKED + b"\r\n")
            answer = raw.answer()
            assert answer is not None
            assert (answer.status, answer.id) == (401, "early")
            raw.send(bad, HIDDEN)
            assert raw.closed(), bad


def test_unusual_but_unambiguous_requests_are_served(server: Server, sender: Sender) -> None:
    bearer = sender.bearer
    wish = b"Content-Type: application/json\r\n" + CHUNKED
    for data, status in (
        (b"\r\n" + GET + HOST + bearer + b"\r\n", 200),
        (b"GET http://x/v1/whoami HTTP/1.1\r\nhOST:x\r\n" + bearer + b"\r\n", 200),
        (b"GET HTTP://X/v1/whoami HTTP/1.1\r\n" + HOST + bearer + b"\r\n", 200),
        (b"GET http://x?y=z HTTP/1.1\r\n" + HOST + b"\r\n", 200),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"MADE-UP /nowhere HTTP/1.1\r\n" + HOST + b"\r\n", 404),
        (b"TRACE /healthz HTTP/1.1\r\n" + HOST + b"\r\n", 405),
        (GET + b"Host: [::1]:8080\r\n" + bearer + b"\r\n", 200),
        (GET + b"Host: a_b.c-d:\r\n" + bearer + b"\r\n", 200),
        (GET + HOST + bearer + SIZED + b"\r\n" + HIDDEN, 200),
        (GET + HOST + bearer + b"Content-Length: 000\r\n\r\n", 200),
        (GET + HOST + bearer + b"X-A:\r\nX-B: \xc3\xa4\r\nX-A: c\r\n\r\n", 200),
        (POST + HOST + bearer + wish + b"\r\n15;a=b\r\n" + WISH + b"\r\n0;c\r\nd: e\r\n\r\n", 200),
        (POST + HOST + bearer + wish + b"\r\n00015\r\n" + WISH + b"\r\n000\r\n\r\n", 200),
        (POST + HOST + bearer + wish.replace(b"chunked", b"CHUNKED") + b"\r\n0\r\n\r\n", 400),
    ):
        for pieces in ([data], every(data, 1)):
            with Raw(server.address) as raw:
                raw.send(*pieces, pause=0.0005)
                raw.send(sender.get("next", more=b"Connection: close\r\n"))
                answers = raw.answers()
                assert [a.status for a in answers] == [status, 200], data
                assert answers[1].id == "next"


def test_http_1_0_closes_after_the_response(server: Server, sender: Sender) -> None:
    for more in (b"", HOST, HOST + b"Connection: keep-alive\r\n"):
        with Raw(server.address) as raw:
            raw.send(GET.replace(b"1.1", b"1.0") + sender.bearer + more + b"\r\n" + HIDDEN)
            answers = raw.answers()
            assert [a.status for a in answers] == [200]
            assert answers[0].closes


def test_http_1_0_has_no_chunks(server: Server, sender: Sender) -> None:
    with Raw(server.address) as raw:
        raw.send(sender.get("s", "/v1/events").replace(b"HTTP/1.1", b"HTTP/1.0"))
        head = raw.read_until(b"\r\n\r\n").lower()
        assert b"\r\nconnection: close\r\n" in head
        assert b"transfer-encoding" not in head
        assert raw.read_until(b"\n") == b"retry: 2000\n"


def test_expect_100_continue(server: Server, sender: Sender) -> None:
    waits = b"Expect: 100-Continue\r\n"
    whole = sender.post("w", more=waits)
    with Raw(server.address) as raw:
        raw.send(whole[: -len(WISH)])
        assert raw.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.send(WISH)
        check_one_response(sender, raw, "w")
    # A response before the body closes the connection: the next bytes may be the body or a request.
    for behind in (WISH, HIDDEN):
        with Raw(server.address) as raw:
            raw.send(whole.replace(sender.bearer, b"")[: -len(WISH)])
            answer = raw.answer()
            assert answer is not None
            assert (answer.status, answer.id, answer.closes) == (401, "w", True)
            raw.send(behind)
            assert raw.closed()
    # A client that does not wait keeps its connection.
    with Raw(server.address) as raw:
        raw.send(whole)
        check_one_response(sender, raw, "w")


def test_pipelined_requests_are_answered_in_order(server: Server, sender: Sender) -> None:
    chance = random.Random(1)
    for _ in range(20):
        ids = [sender.id() for _ in range(chance.randint(2, 30))]
        row = [
            sender.post(id, path=chance.choice(("/v1/allocations", "/v1/allocations/dry-run")))
            if chance.random() < 0.5
            else sender.get(id, chance.choice(("/v1/whoami", "/healthz", "/v1/nowhere")))
            for id in ids
        ]
        data = b"".join(row)
        places = chance.sample(range(1, len(data)), chance.randint(0, 20))
        with Raw(server.address) as raw:
            raw.send(*cut(data, places))
            assert [answer.id for id in ids if (answer := raw.answer())] == ids


def test_nothing_after_the_last_request_is_answered(server: Server, sender: Sender) -> None:
    for last in (b"close", b"keep-alive, Close", b"x\r\nConnection: close"):
        with Raw(server.address) as raw:
            raw.send(sender.post("l", more=b"Connection: " + last + b"\r\n") + HIDDEN * 3)
            assert [(a.status, a.id) for a in raw.answers()] == [(200, "l")]


def test_a_refusal_comes_after_earlier_responses(server: Server, sender: Sender) -> None:
    for bad in (AMBIGUOUS["folded header"], AMBIGUOUS["bare line feeds"], b"\0"):
        row = b"".join(sender.post(f"p{n}", path="/v1/allocations") for n in range(5))
        with Raw(server.address) as raw:
            raw.send(row + bad + HIDDEN)
            answers = raw.answers()
            assert [a.id for a in answers] == ["p0", "p1", "p2", "p3", "p4", ""]
            assert [a.status for a in answers] == [201] * 5 + [400]


def test_an_encoded_body_is_refused(server: Server, sender: Sender) -> None:
    for encoding in (b"gzip", b"br", b"identity, gzip", b"x"):
        with Raw(server.address) as raw:
            raw.send(sender.post("e", more=b"Content-Encoding: " + encoding + b"\r\n"))
            check_one_response(sender, raw, "e", 415)
    with Raw(server.address) as raw:
        raw.send(sender.post("e", more=b"Content-Encoding: Identity\r\n"))
        check_one_response(sender, raw, "e")
    twice = sender.post("t").replace(b"application/json", b"application/json; a=b, text/plain")
    with Raw(server.address) as raw:
        raw.send(twice)
        check_one_response(sender, raw, "t", 415)


def test_a_refusal_closes_the_connection_while_more_is_sent(server: Server) -> None:
    def send_on(raw: socket.socket) -> None:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            raw.sendall(HIDDEN)
            time.sleep(0.1)

    with socket.create_connection(server.address, PATIENCE_SECONDS) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while raw.recv(1 << 16):
            pass
        with pytest.raises(ConnectionError):
            send_on(raw)


def test_too_many_headers(server: Server, sender: Sender) -> None:
    with Raw(server.address) as raw:
        raw.send(sender.get("many", more=b"a: b\r\n" * 120))
        check_one_response(sender, raw, "many")
    assert_refused(server, lambda: sender.get("more", more=b"a: b\r\n" * 200), 431)


def test_refusals_are_counted_and_logged(server: Server) -> None:
    before = server.metric("slicewise_malformed_requests_total")
    assert_refused(server, lambda: AMBIGUOUS["no host"])
    assert server.metric("slicewise_malformed_requests_total") == before + 2
    assert "malformed requests refused" in server.log.read_text()


def streams(server: Server) -> int:
    """Return the number of open event streams."""
    return int(server.metric("slicewise_event_streams"))


def test_a_stream_ends_when_its_client_disconnects(server: Server, sender: Sender) -> None:
    for _ in range(5):
        with Raw(server.address) as raw:
            raw.send(sender.get("s", "/v1/events"), sender.get("behind") * 10)
            raw.read_until(b"retry")
            assert streams(server) >= 1
    give_up = time.monotonic() + PATIENCE_SECONDS
    while streams(server) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert streams(server) == 0


def test_requests_behind_a_stream_are_buffered_up_to_a_limit(
    server: Server, sender: Sender
) -> None:
    before = server.resident_bytes
    many = sender.get("behind") * 1000
    with socket.create_connection(server.address, 1.0) as raw:
        raw.sendall(sender.get("s", "/v1/events"))
        raw.recv(1)
        with pytest.raises(TimeoutError):
            raw.sendall(many * 2000)
    assert server.resident_bytes - before < 1 << 25


def test_the_rest_of_a_refused_body_is_read_up_to_a_limit(server: Server, sender: Sender) -> None:
    head = sender.post("large", b"", length=b"9999999999")
    with Raw(server.address) as raw:
        raw.send(head)
        answer = raw.answer()
        assert answer is not None
        assert (answer.status, answer.id) == (413, "large")
        for _ in range(40):
            raw.send(b" " * (1 << 16))
        assert raw.closed()

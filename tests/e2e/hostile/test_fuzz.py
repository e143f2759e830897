"""Thousands of generated connections: each request gets at most one response, its own."""

from __future__ import annotations

import os

import h11
import pytest
from tests.e2e.conftest import Tell
from tests.e2e.hostile.fuzz_http import Conversation, Fuzzer
from tests.e2e.hostile.raw import Answer, AnswerError, Raw
from tests.e2e.hostile.reference import Asked, Reading, read
from tests.e2e.hostile.sender import Sender, Victim
from tests.e2e.server import Server

MESSAGES = int(os.environ.get("SLICEWISE_FUZZ_MESSAGES", "1000"))
FIRST = int(os.environ.get("SLICEWISE_FUZZ_FIRST", "0"))
VICTIM_EVERY = 5


def test_each_request_gets_at_most_one_response(server: Server, seed: int, tell: Tell) -> None:
    sender = Sender(server)
    fuzzer = Fuzzer(sender, seed)
    sent, number, answered, refused = 0, FIRST, 0, 0
    with Victim(sender, lambda: Raw(server.address)) as victim:
        while sent < MESSAGES:
            conversation = fuzzer.conversation(number)
            reading = read(conversation.data)
            with Raw(server.address) as raw:
                raw.send(*conversation.pieces, pause=conversation.pause)
                if number % VICTIM_EVERY == 0:
                    victim.ask(f"victim-{number}")
                try:
                    answers = responses(raw, reading)
                    check(reading, answers)
                except (AnswerError, AssertionError, TimeoutError) as error:
                    raise AssertionError(
                        reproduction(conversation, reading, seed, error)
                    ) from error
            sent += conversation.messages
            number += 1
            answered += len(answers)
            refused += bool(answers) and is_refusal(answers[-1])
    assert server.runs
    tell(f"{sent} messages on {number - FIRST} connections: {answered} answers, {refused} refusals")


def reproduction(conversation: Conversation, reading: Reading, seed: int, error: Exception) -> str:
    """Return what is needed to reproduce a failure."""
    return (
        f"{error}\nagain: SLICEWISE_E2E_SEED={seed} SLICEWISE_FUZZ_FIRST={conversation.number} "
        f"SLICEWISE_FUZZ_MESSAGES=1\nsent: {conversation.pieces!r}\nread as: {reading}"
    )


def responses(raw: Raw, reading: Reading) -> list[Answer]:
    """Return all responses until the end of the connection."""
    methods = [asked.method for asked in (*reading.asked, *filter(None, [reading.begun]))]
    answers: list[Answer] = []

    def listen(enough: int | None = None) -> None:
        while enough is None or len(answers) < enough:
            method = methods[len(answers)] if len(answers) < len(methods) else "GET"
            answer = raw.answer(method)
            if answer is None:
                return
            answers.append(answer)

    if reading.end == "open":
        # The service waits for more, unless the bytes are invalid already.
        listen(len(reading.asked))
        raw.done()
    listen()
    return answers


def check(reading: Reading, answers: list[Answer]) -> None:
    """Check that each complete request has its own response, followed by at most one more."""
    for number, (asked, answer) in enumerate(zip(reading.asked, answers, strict=False)):
        check_own_response(asked, answer)
        if asked.waits and answer.closes:
            assert len(answers) == number + 1, answers
            return
    assert len(answers) >= len(reading.asked), answers
    more = answers[len(reading.asked) :]
    if reading.end == "refused":
        assert len(more) == 1, more
    elif reading.end == "open":
        assert len(more) <= 1, more
    else:
        assert not more, more
    for answer in more:
        if reading.begun is None:
            assert is_refusal(answer), answer
        elif not is_refusal(answer):
            check_own_response(reading.begun, answer)


def check_own_response(asked: Asked, answer: Answer) -> None:
    assert not is_refusal(answer), answer
    path = asked.target.split(b"?")[0]
    if asked.id is not None and (path.startswith(b"/v1/") or path in (b"/healthz", b"/readyz")):
        assert answer.id == asked.id, answer
    else:  # a page has its own id, or none
        assert answer.id == asked.id or "." not in answer.id, answer


def is_refusal(answer: Answer) -> bool:
    """Return whether a response refuses unreadable bytes."""
    return answer.status in (400, 431) and answer.closes and not answer.id


@pytest.mark.parametrize("number", range(4))
def test_h11_parses_the_same_requests(server: Server, seed: int, number: int) -> None:
    """h11 parses accepted requests the same way, or refuses them."""
    fuzzer = Fuzzer(Sender(server), seed + number)
    alike = 0
    for one in range(max(10, MESSAGES // 16)):
        conversation = fuzzer.conversation(one)
        expected = [(a.method, a.target, a.body) for a in read(conversation.data).asked]
        found = parse_with_h11(conversation.data, len(expected))
        assert found == expected[: len(found)], (seed + number, one, conversation.data)
        alike += len(found)
    assert alike


def parse_with_h11(data: bytes, count: int) -> list[tuple[str, bytes, bytes]]:
    """Parse up to this many requests with h11: method, target, body."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[tuple[str, bytes, bytes]] = []
    try:
        while len(found) < count:
            event = connection.next_event()
            assert isinstance(event, h11.Request), event
            body = b""
            while isinstance(more := connection.next_event(), h11.Data):
                body += more.data
            assert isinstance(more, h11.EndOfMessage), more
            found.append((event.method.decode(), event.target, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except h11.ProtocolError:  # h11 refuses it, or the connection ends
        pass
    return found

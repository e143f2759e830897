"""One request, at most one answer, never another's: thousands of made-up connections."""

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


def test_one_request_has_at_most_one_answer(server: Server, seed: int, tell: Tell) -> None:
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
                    answers = heard(raw, reading)
                    check(reading, answers)
                except (AnswerError, AssertionError, TimeoutError) as error:
                    raise AssertionError(how(conversation, reading, seed, error)) from error
            sent += conversation.messages
            number += 1
            answered += len(answers)
            refused += bool(answers) and is_refusal(answers[-1])
    assert server.runs
    tell(f"{sent} messages on {number - FIRST} connections: {answered} answers, {refused} refusals")


def how(conversation: Conversation, reading: Reading, seed: int, error: Exception) -> str:
    """What is needed to see it again."""
    return (
        f"{error}\nagain: SLICEWISE_E2E_SEED={seed} SLICEWISE_FUZZ_FIRST={conversation.number} "
        f"SLICEWISE_FUZZ_MESSAGES=1\nsent: {conversation.pieces!r}\nread as: {reading}"
    )


def heard(raw: Raw, reading: Reading) -> list[Answer]:
    """Every answer on the connection, up to its end."""
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
        # The service waits for more, unless it has seen already that this is no request.
        listen(len(reading.asked))
        raw.done()
    listen()
    return answers


def check(reading: Reading, answers: list[Answer]) -> None:
    """Each complete request has its own answer, and behind them there is one more at most."""
    for number, (asked, answer) in enumerate(zip(reading.asked, answers, strict=False)):
        assert_its(asked, answer)
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
            assert_its(reading.begun, answer)


def assert_its(asked: Asked, answer: Answer) -> None:
    assert not is_refusal(answer), answer
    path = asked.target.split(b"?")[0]
    if asked.id is not None and (path.startswith(b"/v1/") or path in (b"/healthz", b"/readyz")):
        assert answer.id == asked.id, answer
    else:  # a page has an id of its own, or none
        assert answer.id == asked.id or "." not in answer.id, answer


def is_refusal(answer: Answer) -> bool:
    """Whether this refuses what could not be read."""
    return answer.status in (400, 431) and answer.closes and not answer.id


@pytest.mark.parametrize("number", range(4))
def test_another_reader_reads_the_same(server: Server, seed: int, number: int) -> None:
    """What is accepted means the same to h11, or nothing."""
    fuzzer = Fuzzer(Sender(server), seed + number)
    alike = 0
    for one in range(max(10, MESSAGES // 16)):
        conversation = fuzzer.conversation(one)
        expected = [(a.method, a.target, a.body) for a in read(conversation.data).asked]
        found = as_h11_reads(conversation.data, len(expected))
        assert found == expected[: len(found)], (seed + number, one, conversation.data)
        alike += len(found)
    assert alike


def as_h11_reads(data: bytes, count: int) -> list[tuple[str, bytes, bytes]]:
    """Up to so many requests of a connection: method, target, body."""
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
    except h11.ProtocolError:  # it refuses this, or the connection ends with it
        pass
    return found

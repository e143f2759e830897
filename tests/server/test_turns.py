"""Turns on the event loop, the fair lock, and the limits on requests in flight."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest

from slicewise.control.answers import RefusedError
from slicewise.server.limits import MAX_TURNS, FairLock, FairTurns, InFlight


class Time:
    """A timer that the test advances."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


def test_a_turn_is_granted_immediately_while_the_round_has_time() -> None:
    async def run() -> None:
        timer = Time()
        turns = FairTurns(timer, 0.001)
        for _ in range(100):
            turn = turns.take("a")
            with pytest.raises(StopIteration):
                turn.send(None)  # it never waits

    asyncio.run(run())


def test_turns_rotate_between_callers_when_the_round_is_over() -> None:
    served: list[str] = []

    async def run() -> None:
        timer = Time()
        turns = FairTurns(timer, 0.001)

        async def work(name: str) -> None:
            await turns.take(name[0])
            served.append(name)
            timer.now += 0.002

        every = [f"a{n}" for n in range(20)] + ["b0", "b1", "c0"]
        await asyncio.gather(*map(work, every))

    asyncio.run(run())
    assert sorted(served) == sorted([f"a{n}" for n in range(20)] + ["b0", "b1", "c0"])
    assert served.index("b0") < 4
    assert served.index("c0") < 4
    assert served.index("b1") < 7


def test_a_round_grants_as_many_turns_as_fit() -> None:
    rounds: list[int] = []

    async def run() -> None:
        timer = Time()
        turns = FairTurns(timer, 0.001)
        number = 0

        async def count() -> None:
            nonlocal number
            while True:
                await asyncio.sleep(0)
                number += 1

        counting = asyncio.create_task(count())

        async def work() -> None:
            await turns.take("a")
            rounds.append(number)
            timer.now += 0.0001

        await asyncio.gather(*(work() for _ in range(400)))
        counting.cancel()

    asyncio.run(run())
    per_round = {one: rounds.count(one) for one in rounds}
    assert max(per_round.values()) <= MAX_TURNS
    late = [count for one, count in per_round.items() if one > max(rounds) // 2][:-1]
    assert min(late) >= 5, "several short turns fit into a round"


def test_a_cancelled_request_takes_no_turn() -> None:
    async def run() -> list[str]:
        timer = Time()
        turns = FairTurns(timer, 0.001)
        served = []

        async def work(name: str) -> None:
            await turns.take(name)
            served.append(name)
            timer.now += 0.002

        first = asyncio.create_task(work("first"))
        cancelled = asyncio.create_task(work("cancelled"))
        last = asyncio.create_task(work("last"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait((first, cancelled, last))
        return served

    assert asyncio.run(run()) == ["first", "last"]


def test_a_fair_lock_rotates_between_callers() -> None:
    async def run() -> list[str]:
        lock, served = FairLock(), []

        async def work(name: str) -> None:
            async with lock.hold(name[0]):
                await asyncio.sleep(0)
                served.append(name)

        await asyncio.gather(*map(work, ["a0", "a1", "a2", "b0", "c0"]))
        return served

    assert asyncio.run(run()) == ["a0", "a1", "b0", "c0", "a2"]


def test_a_fair_lock_survives_cancelled_waiters() -> None:
    async def run() -> int:
        lock, inside = FairLock(), 0

        async def work() -> None:
            nonlocal inside
            async with lock.hold("a"):
                inside += 1
                assert inside == 1
                await asyncio.sleep(0)
                inside -= 1

        done = 0
        for cancelled in range(6):
            tasks = [asyncio.create_task(work()) for _ in range(6)]
            for _ in range(cancelled):
                await asyncio.sleep(0)
            tasks[cancelled].cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
                    done += 1
            inside = 0
        async with lock.hold("b"):
            return done

    assert asyncio.run(run()) >= 30


def test_a_lock_granted_to_a_cancelled_waiter_is_passed_on() -> None:
    async def run() -> list[str]:
        lock, served = FairLock(), []

        async def work(name: str) -> None:
            async with lock.hold(name):
                served.append(name)

        async with lock.hold("a"):
            granted = asyncio.create_task(work("b"))
            after = asyncio.create_task(work("c"))
            await asyncio.sleep(0)
        granted.cancel()  # it holds the lock, but has not run yet
        await asyncio.wait((granted, after))
        return served

    assert asyncio.run(run()) == ["c"]


def test_requests_in_flight_are_limited_by_caller() -> None:
    in_flight = InFlight(requests=2, unread=100, total_unread=150)
    for share in ("a", "a", "b"):
        in_flight.begin(share)
    assert in_flight.requests == 3
    with pytest.raises(RefusedError, match="this caller has 2 requests in flight"):
        in_flight.begin("a")
    in_flight.begin("b")
    for share in ("a", "b", "b"):
        in_flight.end(share)
    assert in_flight.requests == 1
    in_flight.begin("a")


def test_unread_bytes_are_limited_by_caller_and_in_total() -> None:
    in_flight = InFlight(requests=9, unread=100, total_unread=150)
    with ExitStack() as stack:
        stack.enter_context(in_flight.sending("a", 60))
        with (
            pytest.raises(RefusedError, match="60 unread bytes of answers"),
            in_flight.sending("a", 60),
        ):
            pass
        stack.enter_context(in_flight.sending("a", 40))
        stack.enter_context(in_flight.sending("b", 40))
        with pytest.raises(RefusedError, match="unread"):
            in_flight.check_unread("b", 20)  # the total
        stack.enter_context(in_flight.sending("c", 1000))  # a single answer may have any size
        assert in_flight.unread == 1140
    assert in_flight.unread == 0
    with in_flight.sending("a", 100):
        pass

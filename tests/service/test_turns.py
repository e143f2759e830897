"""Turns on the event loop, the fair lock, and what a caller may have under way."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest

from slicewise.control.answers import RefusedError
from slicewise.service.turns import _MIXED_ROUNDS, ALONE, MOST_AT_ONCE, FairLock, Flights, Turns


class Time:
    """A timer that goes on when it is told to."""

    now = 1.0

    def __call__(self) -> float:
        return self.now


def test_a_turn_is_granted_at_once_while_there_is_time() -> None:
    async def run() -> None:
        timer = Time()
        turns = Turns(timer, 0.001)
        for _ in range(100):
            turn = turns.take("a")
            with pytest.raises(StopIteration):
                turn.send(None)  # it never waits

    asyncio.run(run())


def test_callers_take_turns_when_the_time_is_used_up() -> None:
    served: list[str] = []

    async def run() -> None:
        timer = Time()
        turns = Turns(timer, 0.001)

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
        turns = Turns(timer, 0.001)
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
    assert max(per_round.values()) <= ALONE * MOST_AT_ONCE
    late = [count for one, count in per_round.items() if one > max(rounds) // 2][:-1]
    assert min(late) >= 5, "short turns share a round"


def test_a_caller_that_is_alone_has_longer_rounds() -> None:
    """And loses them when another one asks."""

    async def run() -> list[int]:
        timer = Time()
        turns = Turns(timer, 0.001)
        granted = []
        for others in (0, 1):
            for _ in range(2 * _MIXED_ROUNDS):  # rounds in which it is alone, or not
                await turns.take("a")
                if others:
                    await turns.take("b")
                await asyncio.sleep(0)
            count = 0
            while turns.at_once("a"):
                timer.now += 0.0005
                count += 1
            granted.append(count)
            await asyncio.sleep(0)
        return granted

    alone, beside = asyncio.run(run())
    assert alone > beside


def test_a_request_that_left_takes_no_turn() -> None:
    async def run() -> list[str]:
        timer = Time()
        turns = Turns(timer, 0.001)
        served = []

        async def work(name: str) -> None:
            await turns.take(name)
            served.append(name)
            timer.now += 0.002

        first = asyncio.create_task(work("first"))
        left = asyncio.create_task(work("left"))
        stays = asyncio.create_task(work("stays"))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait((first, left, stays))
        return served

    assert asyncio.run(run()) == ["first", "stays"]


def test_a_fair_lock_goes_round() -> None:
    async def run() -> list[str]:
        lock, served = FairLock(), []

        async def work(name: str) -> None:
            async with lock.hold(name[0]):
                await asyncio.sleep(0)
                served.append(name)

        await asyncio.gather(*map(work, ["a0", "a1", "a2", "b0", "c0"]))
        return served

    assert asyncio.run(run()) == ["a0", "a1", "b0", "c0", "a2"]


def test_a_fair_lock_survives_those_who_leave() -> None:
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


def test_a_lock_granted_to_one_who_leaves_is_passed_on() -> None:
    async def run() -> list[str]:
        lock, served = FairLock(), []

        async def work(name: str) -> None:
            async with lock.hold(name):
                served.append(name)

        async with lock.hold("a"):
            granted = asyncio.create_task(work("b"))
            after = asyncio.create_task(work("c"))
            await asyncio.sleep(0)
        granted.cancel()  # it has been given the lock, and does not know yet
        await asyncio.wait((granted, after))
        return served

    assert asyncio.run(run()) == ["c"]


def test_limits_are_a_callers_own() -> None:
    flights = Flights(requests=2, unread=100, unread_in_all=150)
    for share in ("a", "a", "b"):
        flights.enter(share)
    assert flights.requests == 3
    with pytest.raises(RefusedError, match="2 requests of this caller"):
        flights.enter("a")
    flights.enter("b")
    for share in ("a", "b", "b"):
        flights.leave(share)
    assert flights.requests == 1
    flights.enter("a")


def test_what_is_unread_is_limited_by_caller_and_in_all() -> None:
    flights = Flights(requests=9, unread=100, unread_in_all=150)
    with ExitStack() as stack:
        stack.enter_context(flights.answer("a", 60))
        with pytest.raises(RefusedError, match="60 bytes of answers"), flights.answer("a", 60):
            pass
        stack.enter_context(flights.answer("a", 40))
        stack.enter_context(flights.answer("b", 40))
        with pytest.raises(RefusedError, match="unread"):
            flights.check_unread("b", 20)  # all together
        stack.enter_context(flights.answer("c", 1000))  # one may always be sent
        assert flights.unread == 1140
    assert flights.unread == 0
    with flights.answer("a", 100):
        pass

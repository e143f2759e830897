"""The steady clock: advances with uptime, corrects small differences slowly, holds steps."""

from __future__ import annotations

import logging

import pytest
from tests.server.harness import Clock

from slicewise.journal.entries import STEP_SECONDS
from slicewise.runtime.steady_clock import MAX_SLEW, SteadyClock, running_time

DAY = 86_400.0
BEGUN = 1_700_000_000.0


class Times:
    """The uptime and the wall clock of a machine."""

    def __init__(self) -> None:
        self.wall, self.running = Clock(), Clock()
        self.running.now = 1000.0
        self.clock = SteadyClock(self.wall, self.running)

    def go_on(self, seconds: float, looks: int = 1, accepted: float = 0.0) -> float:
        """Let time pass with regular comparisons; return by how much service time advanced."""
        before = self.clock() + accepted
        for _ in range(looks):
            self.wall.now += seconds / looks
            self.running.now += seconds / looks
            self.clock.compare(accepted)
        return self.clock() + accepted - before


@pytest.fixture
def times() -> Times:
    return Times()


def test_it_advances_with_uptime(times: Times) -> None:
    assert times.clock() == BEGUN
    assert times.go_on(10) == 10
    assert (times.clock.step, times.clock.steps) == (0, 0)
    before = SteadyClock()()
    assert running_time() <= running_time()
    assert SteadyClock()() >= before


@pytest.mark.parametrize("step", [DAY, -DAY, STEP_SECONDS, -STEP_SECONDS])
def test_a_step_is_held_and_logged_once_until_the_clock_is_right_again(
    times: Times, step: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        times.wall.now += step
        assert times.go_on(60, looks=600) == pytest.approx(60)
        assert times.clock.step == pytest.approx(step)
        assert times.clock.steps == 1
        times.wall.now -= step
        assert times.go_on(60, looks=600) == pytest.approx(60)
    assert (times.clock.step, times.clock.steps) == (0, 1)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "clock step held" in told[0]
    assert "clock step over" in told[1]


def test_a_second_step_is_logged_too(times: Times) -> None:
    times.wall.now += DAY
    times.go_on(1)
    times.wall.now += DAY
    times.go_on(1)
    assert times.clock.steps == 2
    assert times.clock.step == pytest.approx(2 * DAY)
    times.wall.now = 1e30  # an impossible year, but reported all the same
    times.go_on(1)
    assert times.clock.steps == 3


@pytest.mark.parametrize("off", [1.5, -1.5])
def test_a_small_difference_is_corrected_slowly(times: Times, off: float) -> None:
    times.wall.now += off
    last = times.clock()
    for _ in range(100):
        passed = times.go_on(1, looks=10)
        assert abs(passed - 1) <= MAX_SLEW + 1e-5
        assert times.clock() > last
        last = times.clock()
    times.go_on(2000, looks=2000)
    assert times.clock() == pytest.approx(times.wall(), abs=0.001)
    assert times.clock.steps == 0


def test_a_pause_between_reading_the_clocks_is_no_step(times: Times) -> None:
    clock = SteadyClock(times.wall, times.running)

    def slow_wall() -> float:
        times.running.now += 30
        times.wall.now += 30
        return times.wall.now

    clock.wall = slow_wall
    clock.compare(0)
    assert clock.steps == 0
    assert clock() == times.wall.now


def test_accepted_steps_are_part_of_service_time(times: Times) -> None:
    times.wall.now += DAY
    times.go_on(1)
    assert times.clock.step == pytest.approx(DAY)
    assert times.go_on(10, accepted=DAY) == pytest.approx(10)
    assert times.clock.step == 0


# At a start


@pytest.mark.parametrize("away", [0, 5, 3600])
def test_a_start_adds_the_time_the_service_was_stopped(times: Times, away: float) -> None:
    times.clock.begin(BEGUN - away, 0, 3600)
    assert times.clock() == BEGUN
    times.clock.begin(0, 0, 3600)
    assert times.clock() == BEGUN


@pytest.mark.parametrize("ahead", [3601, DAY, -1, -DAY])
def test_a_start_with_an_implausible_clock_continues_from_the_last_time(
    times: Times, ahead: float
) -> None:
    reached = BEGUN - ahead
    times.clock.begin(reached, 0, 3600)
    assert times.clock() == reached
    assert times.go_on(10) == pytest.approx(10, abs=10 * MAX_SLEW)
    assert times.clock.step == (pytest.approx(ahead) if abs(ahead) > STEP_SECONDS else 0)


@pytest.mark.parametrize("ahead", [DAY, -DAY])
def test_the_stopped_time_is_added_once_the_clock_is_plausible(times: Times, ahead: float) -> None:
    times.wall.now += ahead
    times.clock.begin(BEGUN - 600, 0, 3600)
    times.go_on(10)
    assert times.clock() == pytest.approx(BEGUN - 590)
    times.wall.now -= ahead
    times.go_on(1)
    assert times.clock() == pytest.approx(BEGUN + 11)
    assert times.clock.step == 0
    times.wall.now += 600  # only once
    times.go_on(1)
    assert times.clock() == pytest.approx(BEGUN + 12)
    assert times.clock.step == pytest.approx(600)


def test_a_start_with_accepted_steps(times: Times) -> None:
    times.clock.begin(BEGUN - 5 - DAY, DAY, 3600)
    assert times.clock() + DAY == BEGUN


# Beside a leader


def test_a_follower_adopts_the_time_of_the_leader(times: Times) -> None:
    times.clock.follow(BEGUN - 5, 10)
    assert times.clock() == BEGUN
    times.clock.follow(BEGUN - 11, 10)
    assert times.clock() == BEGUN - 11
    times.clock.follow(BEGUN + DAY, 10)
    assert times.clock() == BEGUN + DAY
    times.go_on(1)
    assert times.clock.step == pytest.approx(-DAY)
    times.clock.advance_to(BEGUN)
    assert times.clock() == BEGUN + DAY + 1
    times.clock.advance_to(BEGUN + 2 * DAY)
    assert times.clock() == BEGUN + 2 * DAY


def test_a_former_follower_trusts_its_own_time(times: Times) -> None:
    times.wall.now += DAY
    times.clock.begin(BEGUN - 600, 0, 3600)
    times.clock.follow(BEGUN, 10)
    times.wall.now = BEGUN + 600
    times.go_on(1)
    assert times.clock() == pytest.approx(BEGUN + 1)
    assert times.clock.step == pytest.approx(600)

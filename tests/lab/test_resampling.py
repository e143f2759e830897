"""Resampled traces: weeks of days as recorded, some twice and some not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from slicewise import Request, SlicewiseError
from slicewise.lab.timeline import DAY, WEEK, lay_out, resample_weeks
from slicewise.lab.trace import Job

BEGIN = Fraction(500_000)
DAYS = 17
END = BEGIN + (DAYS + 1) * DAY


def job(line: int, arrival: Fraction, lifetime: int | None) -> Job:
    kept = None if lifetime is None else Fraction(lifetime)
    return Job(line, arrival, kept, Request("1g.10gb"), 1, 1, "1g.10gb", "")


def weeks(days: int = DAYS) -> list[Job]:
    """Two earlier jobs, then 10 a day, some of which outlast the recording; and half a day."""
    early = [job(2, Fraction(0), None), job(3, BEGIN - 1, 5)]
    later = [
        job(10 * day + n + 4, BEGIN + day * DAY + n * 8000, None if n == 5 else 1000 * n + 1)
        for day in range(days + 1)
        for n in range(5 if day == days else 10)
    ]
    return early + later


def days_drawn(drawn: list[Job], days: int = DAYS) -> list[int]:
    """Which of the recorded days each day is."""
    order: list[int] = []
    for place in range(days):
        begin = BEGIN + place * DAY
        (which,) = {(e.line - 4) // 10 for e in drawn if begin <= e.arrival < begin + DAY}
        order.append(which)
    return order


def test_days_are_copied_unchanged_and_earlier_jobs_stay() -> None:
    jobs = weeks()
    there = {each.line: each for each in jobs}
    drawn = resample_weeks(jobs, BEGIN, END, np.random.default_rng(3))
    assert drawn == resample_weeks(jobs, BEGIN, END, np.random.default_rng(3)), "the same again"
    assert drawn != resample_weeks(jobs, BEGIN, END, np.random.default_rng(4))
    assert drawn[:2] == jobs[:2]
    assert drawn == sorted(drawn, key=lambda each: each.arrival)
    assert len(drawn) == 2 + DAYS * 10, "whole days of ten; the half day is left out"
    for number, each in enumerate(drawn[2:]):
        before = there[each.line]
        moved = DAY * (number // 10 - (each.line - 4) // 10)
        stayed = END - before.arrival if before.lifetime is None else before.lifetime
        assert each == replace(before, arrival=before.arrival + moved, lifetime=stayed)


def test_days_stay_in_weeks() -> None:
    seen: Counter[int] = Counter()
    rng = np.random.default_rng(7)
    for _ in range(200):
        order = days_drawn(resample_weeks(weeks(), BEGIN, END, rng))
        firsts = order[::WEEK]
        seen.update(firsts)
        assert order == [(firsts[i // WEEK] + i % WEEK) % DAYS for i in range(DAYS)]
    assert set(seen) == set(range(DAYS)), "a week may begin on any day"
    expected = 200 * 3 / DAYS
    assert all(abs(count - expected) < 5 * expected**0.5 for count in seen.values())


def test_a_short_trace_wraps_around() -> None:
    order = days_drawn(resample_weeks(weeks(2), BEGIN, END, np.random.default_rng(1)), 2)
    assert sorted(order) == [0, 1]
    with pytest.raises(SlicewiseError, match="less than two whole days"):
        resample_weeks(weeks(1), BEGIN, END, np.random.default_rng(1))


def test_a_resampled_trace_can_be_laid_out() -> None:
    drawn = resample_weeks(weeks(), BEGIN, END, np.random.default_rng(3))
    timeline = lay_out(drawn, BEGIN, Fraction(10))
    assert timeline.preplaced == 2
    assert len(timeline.arrivals) == 10 * DAYS
    assert timeline.seconds == pytest.approx(((DAYS - 1) * DAY + 9 * 8000) / 10)

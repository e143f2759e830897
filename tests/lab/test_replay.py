"""Replays: events in order, all or nothing, and figures that agree with a direct count."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Cluster, Geometry, Instance, Reason, Request, Scheduler, SlicewiseError
from slicewise.lab.timeline import QUIET, Timeline, busy_begin, lay_out
from slicewise.lab.trace import Job
from slicewise.lab.trace_replay import EngineHost, compare, figures, replay
from slicewise.policies.mfi import Mfi
from slicewise.policies.registry import policy, policy_names

NOTHING = {str(reason): 0 for reason in Reason}
SIZES = {"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 4, "4g.40gb": 4, "7g.80gb": 8}


def job(
    line: int, arrival: float | str, lifetime: float | str | None, profile: str, count: int = 1
) -> Job:
    return Job(
        line,
        Fraction(str(arrival)),
        None if lifetime is None else Fraction(str(lifetime)),
        Request(profile),
        count,
        count * SIZES[profile],
        f"{count} x {profile}" if count > 1 else profile,
        f"tenant-{line % 2}",
    )


def order(timeline: Timeline) -> list[tuple[float, int, bool]]:
    return [
        (seconds, timeline.jobs[number].line, arrives)
        for seconds, number, arrives in timeline.events
    ]


def ignore(units: int) -> None:
    """Ignore progress."""


def test_departures_precede_arrivals_and_ties_are_broken_by_line() -> None:
    # 0.1 + 0.2 is not 0.3 in binary: the times must be compared exactly.
    jobs = [
        job(2, "0.1", "0.2", "1g.10gb"),
        job(3, "0.2", "0.1", "1g.10gb"),
        job(4, "0.3", "9", "1g.10gb"),
        job(5, "0.3", "9", "1g.10gb"),
    ]
    timeline = lay_out(jobs, Fraction("0.1"))
    assert [event[1:] for event in order(timeline)] == [
        (2, True),
        (3, True),
        (2, False),
        (3, False),
        (4, True),
        (5, True),
    ]
    assert timeline.seconds == pytest.approx(0.2)


def test_arrivals_are_compressed_and_lifetimes_kept() -> None:
    jobs = [job(2, 100, 30, "1g.10gb"), job(3, 160, 5, "2g.20gb"), job(4, 400, None, "1g.10gb")]
    timeline = lay_out(jobs, Fraction(100), Fraction(3))
    assert order(timeline) == [(0, 2, True), (20, 3, True), (25, 3, False), (30, 2, False),
                               (100, 4, True)]  # fmt: skip
    assert timeline.offered_slices == pytest.approx((30 * 1 + 5 * 2) / 100)


def test_running_jobs_are_placed_beforehand() -> None:
    jobs = [
        job(2, 0, 1000, "1g.10gb"),
        job(3, 10, 20, "1g.10gb"),
        job(4, 20, None, "2g.20gb"),
        job(5, 500, 10, "3g.40gb"),
        job(6, 2000, 10, "3g.40gb"),
    ]
    timeline = lay_out(jobs, Fraction(500), Fraction(2))
    assert [each.line for each in timeline.jobs] == [2, 4, 5, 6]
    assert (timeline.preplaced, timeline.over_before) == (2, 1)
    # The first leaves 500 seconds after the beginning, uncompressed; the third never does.
    assert order(timeline) == [
        (0, 2, True),
        (0, 4, True),
        (0, 5, True),
        (10, 5, False),
        (500, 2, False),
        (750, 6, True),
    ]
    assert [each.line for each in timeline.arrivals] == [5, 6]
    with pytest.raises(SlicewiseError, match="no request for a GPU arrives after the beginning"):
        lay_out(jobs, Fraction(2001))


def test_the_dense_part_begins_after_the_last_gap_among_the_first_hundredth() -> None:
    def at(*times: int) -> list[Job]:
        return [job(line, time, 5, "1g.10gb") for line, time in enumerate(times, 2)]

    begin = 10 * QUIET
    dense = [begin + 60 * i for i in range(300)]
    night = [dense[-1] + QUIET + 1 + 60 * i for i in range(300)]
    assert busy_begin(at(0, QUIET + 1, QUIET + 2, *dense)) == begin
    assert busy_begin(at(0, *dense, *night)) == begin, "a quiet night is no beginning"
    assert busy_begin(at(*dense)) == begin
    assert busy_begin(at(0, begin)) == 0, "too few to tell"


def test_several_instances_are_placed_together_or_not_at_all(a100: Geometry) -> None:
    host = EngineHost(a100, 3, policy("mfi"))
    assert host.enter(0, job(2, 0, 1, "1g.10gb")) is None
    before = list(host.totals.state_of)
    assert host.enter(1, job(3, 0, 1, "7g.80gb", 3)) is Reason.CAPACITY
    assert host.totals.state_of == before
    assert host.totals.instance_count == 1
    assert host.enter(2, job(4, 0, 1, "7g.80gb", 2)) is None
    assert host.totals.occupied_slices == 17
    host.leave(2)
    assert host.totals.state_of == before


def test_figures_by_hand(a100: Geometry) -> None:
    """One GPU: half taken for 10 s, all for 10 s; a 7g.80gb and a pair are rejected."""
    jobs = [
        job(2, 0, 20, "4g.40gb"),
        job(3, 10, 10, "3g.40gb"),
        job(4, 15, 10, "7g.80gb"),
        job(5, 15, 10, "1g.10gb", 2),
        job(6, 20, 10, "7g.80gb"),
        job(7, 40, 10, "7g.80gb"),
    ]
    timeline = lay_out(jobs, Fraction(0))
    host = EngineHost(a100, 1, policy("first-fit"))
    row = figures(replay(timeline, host), host.totals)
    by_profile = row.pop("by_profile")
    assert row == {
        "arrivals": 6,
        "rejected": 2,
        "rejected_share": 2 / 6,
        "rejected_slices_share": 10 / 34,
        "utilization_percent": pytest.approx(100 * (10 * 4 + 10 * 8 + 10 * 8) / 40 / 8),
        "peak_utilization_percent": 100,
        "active_gpus_percent": pytest.approx(100 * 30 / 40),
        "peak_active_gpus_percent": 100,
        "fragmentation": 0,  # a free half blocks no window
        "preplaced_rejected": 0,
        "rejected_by_reason": {**NOTHING, "capacity": 2},
        "by_tenant": {
            "tenant-0": {"arrivals": 3, "rejected": 1},
            "tenant-1": {"arrivals": 3, "rejected": 1},
        },
    }
    assert isinstance(by_profile, dict)
    assert by_profile["7g.80gb"] == {**NOTHING, "arrivals": 3, "capacity": 1}
    assert by_profile["2 x 1g.10gb"]["capacity"] == 1


def test_jobs_placed_beforehand_are_not_arrivals(a100: Geometry) -> None:
    jobs = [job(2, 0, None, "7g.80gb"), job(3, 0, None, "7g.80gb"), job(4, 9, 1, "1g.10gb")]
    rows = compare(lay_out(jobs, Fraction(9)), a100, 1, [policy("mfi")], ignore)
    assert [row["policy"] for row in rows] == ["mfi", "oracle"]
    for row in rows:
        assert (row["arrivals"], row["rejected"], row["preplaced_rejected"]) == (1, 1, 1)
        assert row["utilization_percent"] is None, "no time passed"


STREAM = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.one_of(st.none(), st.integers(1, 20)),
        st.sampled_from(sorted(SIZES)),
        st.sampled_from([1, 1, 1, 2, 3]),
    ),
    min_size=1,
    max_size=40,
)


def second_by_second(a100: Geometry, name: str, jobs: list[Job], gpus: int) -> dict[str, Any]:
    """The slow twin: simulates every second, without a timeline."""
    cluster = Cluster.of(a100, gpus)
    scheduler = Scheduler(cluster, name)
    last = max(int(each.arrival) for each in jobs)
    held: list[tuple[int | None, int, list[Instance]]] = []
    rejected = slices = occupied = active = 0
    fragmentation = 0.0
    first = min(int(each.arrival) for each in jobs)
    for now in range(first, last + 1):
        for entry in sorted((e for e in held if e[0] == now), key=lambda e: e[1]):
            held.remove(entry)
            for instance in entry[2]:
                scheduler.release(instance)
        for each in sorted(jobs, key=lambda each: each.line):
            if each.arrival != now:
                continue
            outcomes: list[Instance] = []
            for _ in range(each.count):
                outcome = scheduler.submit(each.request)
                if not outcome:
                    rejected += 1
                    slices += each.slices
                    for instance in reversed(outcomes):
                        cluster.undo_place(instance)
                    break
                assert isinstance(outcome, Instance)
                outcomes.append(outcome)
            else:
                end = None if each.lifetime is None else now + int(each.lifetime)
                held.append((end, each.line, outcomes))
        if now < last:
            occupied += cluster.occupied_slices
            active += cluster.active_gpus
            fragmentation += cluster.fragmentation()
    time = last - first
    return {
        "rejected": rejected,
        "rejected_slices_share": pytest.approx(slices / sum(each.slices for each in jobs)),
        "utilization_percent": pytest.approx(100 * occupied / time / gpus / 8) if time else None,
        "active_gpus_percent": pytest.approx(100 * active / time / gpus) if time else None,
        "fragmentation": pytest.approx(fragmentation / time) if time else None,
    }


@settings(max_examples=40, deadline=None)
@given(stream=STREAM, name=st.sampled_from(policy_names()))
def test_a_replay_equals_a_simulation_second_by_second(
    a100: Geometry, stream: list[tuple[int, int | None, str, int]], name: str
) -> None:
    jobs = [job(line, *each) for line, each in enumerate(stream, 2)]
    ordered = sorted(jobs, key=lambda each: (each.arrival, each.line))
    timeline = lay_out(ordered, ordered[0].arrival)
    rows = compare(timeline, a100, 3, [policy(name), policy(name)], ignore)
    expected = second_by_second(a100, name, jobs, 3)
    assert {figure: rows[0][figure] for figure in expected} == expected
    assert rows[0] == rows[1], "the same again"


def test_any_other_host_is_measured_the_same_way(a100: Geometry) -> None:
    """Any implementation of `Host` can be replayed."""

    class Doorman(EngineHost):
        def enter(self, number: int, each: Job) -> Reason | None:
            return Reason.CAPACITY if number % 2 else super().enter(number, each)

    jobs = [job(line, line, 5, "1g.10gb") for line in range(2, 12)]
    host = Doorman(a100, 2, policy("mfi"))
    assert figures(replay(lay_out(jobs, Fraction(2)), host), host.totals)["rejected_share"] == 0.5


def test_the_limit_has_a_row_and_every_row_has_the_limit(a100: Geometry) -> None:
    """Two half-empty GPUs: moving an instance makes room for a whole one."""
    jobs = [
        job(2, 0, None, "4g.40gb"),
        job(3, 0, 10, "4g.40gb"),
        job(4, 5, None, "3g.40gb"),
        job(5, 5, None, "3g.40gb"),
        job(6, 10, None, "1g.10gb", 2),
        job(7, 20, 5, "2g.20gb"),
    ]
    ticks: list[int] = []
    timeline = lay_out(jobs, Fraction(0))
    mfi, limit = compare(timeline, a100, 2, [policy("mfi")], ticks.append)
    assert ticks == [1, 1]
    assert (mfi["policy"], limit["policy"]) == ("mfi", "oracle")
    assert list(mfi) == list(limit)
    for row in (mfi, limit):
        assert row["oracle_rejected_share"] == limit["rejected_share"]
        assert row["oracle_missing"] is None
    assert limit["utilization_percent"] == pytest.approx(100 * (5 * 8 + 5 * 16 + 10 * 14) / 20 / 16)
    for figure in ("active_gpus_percent", "peak_active_gpus_percent", "fragmentation"):
        assert limit[figure] is None
        assert mfi[figure] is not None
    (alone,) = compare(timeline, a100, 2, [policy("mfi")], ticks.append, oracle=False)
    assert ticks == [1, 1, 1]
    about_it = {"oracle_rejected_share": None, "oracle_missing": "it was not requested"}
    assert alone == {**mfi, **about_it}


def test_a_missing_limit_has_a_reason(a100: Geometry) -> None:
    media = Job(3, Fraction(1), None, Request("1g.10gb+me"), 1, 1, "1g.10gb+me", "arrivals")
    timeline = lay_out([job(2, 0, None, "1g.10gb"), media], Fraction(0))
    mfi, limit = compare(timeline, a100, 1, [policy("mfi")], ignore)
    assert limit["policy"] == "oracle"
    assert mfi["rejected"] == 0
    for row in (mfi, limit):
        assert row["oracle_rejected_share"] is None
        assert "media-extension may run out" in str(row["oracle_missing"])
    assert limit["arrivals"] == 2
    assert limit["rejected"] is limit["rejected_share"] is None
    unknown = dict.fromkeys(NOTHING)
    assert limit["rejected_by_reason"] == unknown
    both: dict[str, Any] = {
        label: {"arrivals": 1, **unknown} for label in ("1g.10gb", "1g.10gb+me")
    }
    assert limit["by_profile"] == both
    assert limit["by_tenant"] == {
        "arrivals": {"arrivals": 1, "rejected": None},
        "tenant-0": {"arrivals": 1, "rejected": None},
    }


def test_a_replay_needs_policies_without_the_name_of_the_limit(a100: Geometry) -> None:
    class Impostor(Mfi):
        name = "oracle"

    timeline = lay_out([job(2, 0, 1, "1g.10gb")], Fraction(0))
    with pytest.raises(SlicewiseError, match="at least one policy"):
        compare(timeline, a100, 1, [], ignore)
    with pytest.raises(SlicewiseError, match="'oracle' is the name of the limit"):
        compare(timeline, a100, 1, [Impostor()], ignore)
    (row,) = compare(timeline, a100, 1, [Impostor()], ignore, oracle=False)
    assert row["fragmentation"] is row["oracle_rejected_share"] is None


@settings(max_examples=60, deadline=None)
@given(stream=STREAM, name=st.sampled_from(policy_names()), gpus=st.integers(1, 6))
def test_a_policy_that_rejects_nothing_needs_as_many_gpus_as_the_limit(
    a100: Geometry, stream: list[tuple[int, int | None, str, int]], name: str, gpus: int
) -> None:
    """With a GPU per instance, a policy that accepts any GPU with room rejects nothing."""
    jobs = [job(line, *each) for line, each in enumerate(stream, 2)]
    ordered = sorted(jobs, key=lambda each: (each.arrival, each.line))
    timeline = lay_out(ordered, ordered[0].arrival)
    row, limit = compare(timeline, a100, gpus, [policy(name)], ignore)
    if row["rejected"] == 0:
        assert limit["rejected"] == 0
    each_alone = compare(timeline, a100, timeline.peak_instances, [policy(name)], ignore)
    assert each_alone[1]["rejected"] == 0
    if not name.endswith("-strict"):
        assert each_alone[0]["rejected"] == 0


def test_instances_at_the_peak() -> None:
    jobs = [
        job(2, 0, None, "1g.10gb", 3),
        job(3, 4, 2, "7g.80gb", 2),
        job(4, 6, 1, "1g.10gb"),
        job(5, 9, 1, "1g.10gb"),
    ]
    assert lay_out(jobs, Fraction(0)).peak_instances == 5, "who leaves is gone before who comes"


def test_nodes_matter_to_policies_that_choose_one_first(a100: Geometry) -> None:
    host = EngineHost(a100, 19, policy("peer-das"))
    assert [len(node.gpus) for node in host.totals.nodes] == [8, 8, 3]
    assert [len(n.gpus) for n in EngineHost(a100, 4, policy("mfi"), 3).totals.nodes] == [3, 1]
    kinds = sorted(SIZES)
    jobs = [
        job(n, n, 30 + n % 17, kinds[n * 7 % 11 % len(kinds)], 1 + n % 2) for n in range(2, 300)
    ]
    timeline = lay_out(jobs, Fraction(2))

    def rejected(name: str, each: int) -> object:
        rows = compare(timeline, a100, 12, [policy(name)], ignore, each)
        assert rows[0]["oracle_rejected_share"] == rows[1]["rejected_share"]
        return rows[0]["rejected_by_reason"]

    for name in ("peer-das", "peer-hami"):
        assert rejected(name, 4) != rejected(name, 12)
    assert rejected("mfi", 4) == rejected("mfi", 12)


class Reaching(EngineHost):
    """Records the highest GPU it ever used."""

    reach = 0

    def enter(self, number: int, each: Job) -> Reason | None:
        reason = super().enter(number, each)
        used = [gpu + 1 for gpu in range(self.totals.gpus) if self.totals.state(gpu).mask]
        self.reach = max([self.reach, *used])
        return reason


@settings(max_examples=50, deadline=None)
@given(
    stream=STREAM,
    name=st.sampled_from([n for n in policy_names() if not n.startswith("round-robin")]),
)
def test_unused_nodes_do_not_matter(
    a100: Geometry, stream: list[tuple[int, int | None, str, int]], name: str
) -> None:
    """Removing or adding them changes nothing, if nothing was rejected."""
    jobs = [job(line, *each) for line, each in enumerate(stream, 2)]
    ordered = sorted(jobs, key=lambda each: (each.arrival, each.line))
    timeline = lay_out(ordered, ordered[0].arrival)
    host = Reaching(a100, timeline.peak_instances + 1 & ~1, policy(name), 2)
    tally = replay(timeline, host)
    if tally.rejected:
        return
    least = host.reach + 1 & ~1
    most = host.totals.gpus + 4 if least < host.totals.gpus else least
    for gpus in range(least, most + 1, 2):
        other = Reaching(a100, gpus, policy(name), 2)
        again = replay(timeline, other)
        again.fragmentation *= gpus / host.totals.gpus  # a mean over all GPUs
        assert again.fragmentation == pytest.approx(tally.fragmentation)
        assert replace(again, fragmentation=tally.fragmentation) == tally
        assert other.reach == host.reach

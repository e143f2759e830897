"""The limit counts correctly: compared with all possible placements, and slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Catalog, Geometry, Need, Profile, Reason, Request
from slicewise.core.geometry import Budget
from slicewise.lab import oracle
from slicewise.lab.experiment import TRACE
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.repacking import Repacking, Rule, repacking, smallest
from slicewise.lab.trace import Job
from slicewise.lab.trace_oracle import Limit, OracleHost, limit_of
from slicewise.lab.workload import run_generator

Counts = tuple[int, ...]

SEVEN = Geometry(
    "seven",
    slices=7,
    compute=7,
    profiles=(
        Profile("1g", 1, 1, 1, tuple(range(7))),
        Profile("2g", 2, 2, 2, (0, 2, 4)),
        Profile("4g", 4, 4, 4, (0,)),
    ),
)
"""Sizes that do not divide the slices: three can be lost to the largest, one to the middle."""


def model(name: str) -> Geometry:
    return SEVEN if name == SEVEN.model else Catalog.builtin().find(name).require()


def mix_of(geometry: Geometry, *names: str) -> Mix:
    profiles = tuple(geometry.profile(name) for name in names) or geometry.plain_profiles
    return Mix("mix", geometry, profiles, (1 / len(profiles),) * len(profiles))


@cache
def holdable(geometry: Geometry, profiles: tuple[Profile, ...], gpus: int) -> frozenset[Counts]:
    """Every multiset of profiles that so many GPUs can hold, by making every placement."""
    if gpus > 1:
        one, rest = holdable(geometry, profiles, 1), holdable(geometry, profiles, gpus - 1)
        return frozenset(tuple(map(sum, zip(a, b, strict=True))) for a in one for b in rest)
    found: set[Counts] = set()
    seen: set[tuple[int, Counts]] = set()
    frontier = [(0, (0,) * len(profiles))]
    while frontier:
        mask, counts = frontier.pop()
        if (mask, counts) in seen:
            continue
        seen.add((mask, counts))
        found.add(counts)
        for kind, profile in enumerate(profiles):
            more = tuple(n + (k == kind) for k, n in enumerate(counts))
            needs = [
                sum(n * each for n, each in zip(more, column, strict=True))
                for column in zip(*map(geometry.needs, profiles), strict=True)
            ]
            if all(n <= b.total for n, b in zip(needs, geometry.all_budgets, strict=True)):
                frontier += [
                    (mask | profile.window(start), more)
                    for start in profile.starts
                    if not mask & profile.window(start)
                ]
    return frozenset(found)


counting = cache(oracle.counting)


def fits(chosen: Repacking, counts: Sequence[int], gpus: int) -> bool:
    """The rule's answer for counts by kind."""
    rule = counting(chosen, gpus)
    running = np.zeros(len(chosen.sizes), np.int64)
    np.add.at(running, rule.columns, counts)
    if chosen.rule is Rule.HALVES:
        compiled = oracle.fits_halves(running, gpus)
    else:
        compiled = oracle.fits_aligned(running, rule.sizes, rule.room, gpus)
    assert compiled == chosen.fits(running.tolist(), gpus)
    return bool(compiled)


@pytest.mark.parametrize(
    ("name", "names", "rule", "largest"),
    [
        ("A100-80GB", (), Rule.HALVES, 3),
        ("A100-80GB", ("3g.40gb", "1g.20gb", "7g.80gb"), Rule.HALVES, 4),
        ("A30", (), Rule.ALIGNED, 4),
        ("RTX-PRO-6000", (), Rule.ALIGNED, 4),
        ("RTX-PRO-6000", ("1g.24gb", "1g.24gb-me", "2g.48gb-me"), Rule.ALIGNED, 3),
        ("RTX-PRO-4500", (), Rule.ALIGNED, 4),
        ("Thor", ("3g.0gb",), Rule.ALIGNED, 4),
        ("seven", (), Rule.ALIGNED, 4),
    ],
)
def test_counting_is_exact(name: str, names: tuple[str, ...], rule: Rule, largest: int) -> None:
    """Every multiset, and those just too large, on one GPU and on several."""
    mix = mix_of(model(name), *names)
    chosen = repacking(mix)
    assert isinstance(chosen, Repacking)
    assert chosen.rule is rule
    for gpus in range(1, largest + 1):
        truth = holdable(mix.geometry, mix.profiles, gpus)
        most = [max(counts[kind] for counts in truth) for kind in range(len(mix.profiles))]
        for counts in product(*(range(n + 2) for n in most)):
            assert fits(chosen, counts, gpus) == (counts in truth), (gpus, counts)


def test_every_model_has_a_rule_or_a_reason(geometry: Geometry) -> None:
    chosen = repacking(parse_mix("uniform", geometry))
    if geometry.model == "Thor-iGPU":
        assert isinstance(chosen, str)
        assert "compute-context may run out" in chosen
    else:
        assert isinstance(chosen, Repacking)
        six = len(geometry.plain_profiles) == 6
        assert chosen.rule is (Rule.HALVES if six else Rule.ALIGNED)


def test_a_model_without_a_rule_has_a_reason(a100: Geometry) -> None:
    last = (Profile("1g", 1, 1, 1, (2,)), Profile("3g", 3, 3, 3, (0,)))
    odd = (Profile("2g", 2, 2, 2, (0, 2, 4)), Profile("3g", 3, 3, 3, (0, 3)))
    for mix, reason in (
        (mix_of(a100, "1g.10gb", "1g.10gb+me"), "media-extension may run out before the slices do"),
        (mix_of(Geometry("last", 3, 3, last)), "1g starts at 2 and not at every multiple of 1"),
        (mix_of(Geometry("odd", 6, 6, odd)), "windows of 3 slices are not made of windows of 2"),
        (mix_of(Geometry("poor", 6, 5, odd[:1])), "compute may run out before the slices do"),
    ):
        chosen = repacking(mix)
        assert isinstance(chosen, str)
        assert chosen == f"no exact rule says what {mix.geometry.model} could hold: {reason}"


def test_a_budget_that_cannot_run_out_does_not_matter() -> None:
    profiles = (Profile("1g", 1, 1, 1, (0, 1), uses={"media": 1}),)
    rich = Geometry("rich", 2, 2, profiles, budgets=(Budget("media", 2),))
    assert isinstance(repacking(mix_of(rich)), Repacking)


@pytest.mark.parametrize("name", ["A100-80GB", "A30", "RTX-PRO-6000", "seven"])
def test_the_loop_accepts_what_could_be_rearranged(name: str) -> None:
    """Decision for decision against the multisets that the placements themselves allow."""
    mix, gpus, longest, slots = mix_of(model(name)), 2, 9, 3000
    chosen = repacking(mix)
    assert isinstance(chosen, Repacking)
    truth = holdable(mix.geometry, mix.profiles, gpus)
    rng = run_generator(5, 0)
    kinds = rng.integers(0, len(mix.profiles), slots)
    lifetimes = rng.integers(1, longest, slots, endpoint=True)

    expected: list[tuple[int, int]] = []
    living: list[tuple[int, int]] = []
    for slot, (kind, lifetime) in enumerate(zip(kinds.tolist(), lifetimes.tolist(), strict=True)):
        living = [(end, k) for end, k in living if end != slot]
        wanted = [k for _, k in living] + [kind]
        accepted = tuple(map(wanted.count, range(len(mix.profiles)))) in truth
        if accepted:
            living.append((slot + lifetime, kind))
        expected.append((accepted, sum(mix.profiles[k].size for _, k in living)))

    rule = oracle.counting(chosen, gpus)
    counts = oracle.new_counts(rule, longest)
    trace = np.zeros((slots, len(TRACE)), np.int32)
    for part in (slice(0, 7), slice(7, 1800), slice(1800, None)):  # as long runs are drawn
        begin = part.start
        oracle.advance(rule, counts, kinds[part], lifetimes[part], begin, trace[part])
    assert [(a, o) for a, o in trace[:, [0, 2]].tolist()] == expected
    assert 0.1 < trace[:, 0].mean() < 0.9, "a stream of one answer would show little"
    assert not trace[:, [1, 3, 4]].any()


def test_a_need_counts_as_the_profile_that_fits_inside_all_others(geometry: Geometry) -> None:
    """On every model, for every distinct need: the least wasteful profile, if any."""
    for compute in range(geometry.compute + 1):
        for memory in {profile.memory_gb for profile in geometry.plain_profiles}:
            offered = [p for _, p in Request(Need(compute, memory)).candidates(geometry)]
            found = smallest(offered)
            if found is None:
                assert not offered or geometry.model == "Thor-iGPU"
                continue
            assert found.size == min(profile.size for profile in offered)
            for other in offered:
                for start in other.starts:
                    windows = [found.window(inner) for inner in found.starts]
                    assert any(window & ~other.window(start) == 0 for window in windows)
    if len(geometry.plain_profiles) == 6:
        assert smallest(geometry.plain_profiles) == min(
            geometry.plain_profiles, key=lambda p: (p.size, p.compute)
        )


def job(number: int, want: str | Need, count: int = 1) -> Job:
    request = Request(want)
    return Job(number, Fraction(number), None, request, count, count, str(request), "")


def possible(geometry: Geometry, living: Sequence[Job]) -> set[Counts]:
    """Every multiset of profiles that these jobs could be given."""
    profiles = geometry.plain_profiles
    found = {(0,) * len(profiles)}
    for each in living:
        kinds = [profiles.index(profile) for _, profile in each.request.candidates(geometry)]
        for _ in range(each.count):
            found = {
                tuple(n + (k == kind) for k, n in enumerate(counts))
                for counts in found
                for kind in kinds
            }
    return found


NEEDS = st.builds(Need, st.integers(0, 4), st.sampled_from([0.0, 1.5, 5.0, 15.0, 25.0, 41.0]))


@pytest.mark.parametrize("name", ["A100-80GB", "A30", "RTX-PRO-6000", "seven"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_host_accepts_what_could_be_rearranged(name: str, data: st.DataObject) -> None:
    """A job is placed completely or not at all, for any choice of profiles and any moves."""
    geometry = model(name)
    gpus = data.draw(st.integers(1, 2))
    truth = holdable(geometry, geometry.plain_profiles, gpus)
    named = st.sampled_from([profile.name for profile in geometry.plain_profiles])
    wants = data.draw(
        st.lists(st.tuples(named | NEEDS, st.sampled_from([1, 1, 1, 2, 3])), min_size=1, max_size=9)
    )
    jobs = [job(number, *want) for number, want in enumerate(wants)]
    limit = limit_of(jobs, geometry)
    assert isinstance(limit, Limit)
    host = OracleHost(geometry, gpus, limit)
    living: list[Job] = []
    for number, each in enumerate(jobs):
        served = bool(each.request.candidates(geometry))
        fitting = possible(geometry, [*living, each]) & truth if served else set()
        reason = host.enter(number, each)
        assert (reason is None) == bool(fitting)
        if reason is None:
            living.append(each)
        else:
            assert reason is (Reason.CAPACITY if served else Reason.UNKNOWN_PROFILE)
        leaves: bool = data.draw(st.booleans())
        if living and leaves:
            gone = data.draw(st.sampled_from(living))
            living.remove(gone)
            host.leave(gone.line)
        sizes = [profile.size for profile in geometry.plain_profiles]
        volumes = [sum(n * size for n, size in zip(counts, sizes, strict=True))
                   for counts in possible(geometry, living)]  # fmt: skip
        assert host.totals.occupied_slices == min(volumes)
    for each in living:
        host.leave(each.line)
    assert host.totals.occupied_slices == 0


def test_without_a_rule_there_is_no_host(a100: Geometry) -> None:
    variant = limit_of([job(0, "1g.10gb"), job(1, "1g.10gb+me")], a100)
    assert isinstance(variant, str)
    assert "media-extension may run out before the slices do" in variant
    sides = Geometry("sides", 4, 4, (Profile("low", 2, 2, 2, (0,)), Profile("high", 2, 2, 2, (2,))))
    either = limit_of([job(0, Need(1, 1))], sides)
    assert either == (
        "no exact rule says what sides could hold: 1 compute slice and 1 GB may be low or high, "
        "and none of them fits wherever the others do"
    )

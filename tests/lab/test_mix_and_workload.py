"""Distributions and arrivals."""

from __future__ import annotations

import numpy as np
import pytest

from slicewise import Geometry, SlicewiseError, load_geometry
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.workload import Lifetime, draw_kinds, fill_up, longest_lifetime, run_generator


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_mixes_are_distributions(a100: Geometry, name: str) -> None:
    mix = parse_mix(name, a100)
    assert sum(mix.probabilities) == pytest.approx(1)
    assert {p.name for p in mix.profiles} == {p.name for p in a100.plain_profiles}


def test_published_mixes_match_profiles_by_shape(a100: Geometry) -> None:
    mix = parse_mix("skew-small", load_geometry("H200"))
    assert dict(zip((p.name for p in mix.profiles), mix.probabilities, strict=True)) == {
        "7g.141gb": 0.05,
        "4g.71gb": 0.10,
        "3g.71gb": 0.10,
        "2g.35gb": 0.20,
        "1g.35gb": 0.25,
        "1g.18gb": 0.30,
    }
    assert parse_mix("uniform", load_geometry("A30")).probabilities == (1 / 3,) * 3
    with pytest.raises(SlicewiseError, match="A30-24GB has others: write it out"):
        parse_mix("bimodal", load_geometry("A30"))


def test_a_mix_can_be_written_out(a100: Geometry) -> None:
    mix = parse_mix("1g.10gb=0.75, 7g.80gb=0.25,2g.20gb=0", a100)
    assert [p.name for p in mix.profiles] == ["1g.10gb", "7g.80gb"]
    assert mix.mean_size == 0.75 * 1 + 0.25 * 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bimodel", "did you mean bimodal"),
        ("1g.10gb=0.5", "sums to 0.5, not to 1"),
        ("1g.10gb=0.5,1g.10gb=0.5", "named twice"),
        ("1g.10gb=x", "is not PROFILE=PROBABILITY"),
        ("1g.10gb=0.5,=0.5", "unknown profile"),
        ("1g.10gb=-1,7g.80gb=2", "the probability of 1g.10gb is -1"),
        ("1g.10gb=nan", "the probability of 1g.10gb is nan"),
        ("9g.10gb=1", "unknown profile on A100-80GB"),
    ],
)
def test_a_bad_mix_is_refused(a100: Geometry, text: str, problem: str) -> None:
    with pytest.raises(SlicewiseError, match=problem):
        parse_mix(text, a100)


def test_draws_follow_the_mix(a100: Geometry) -> None:
    mix = parse_mix("skew-big", a100)
    kinds = draw_kinds(run_generator(3, 0), mix, 200_000)
    shares = np.bincount(kinds, minlength=6) / len(kinds)
    assert shares == pytest.approx(mix.probabilities, abs=0.005)


@pytest.mark.parametrize("lifetime", Lifetime)
def test_filling_up_ends_when_demand_reaches_capacity(a100: Geometry, lifetime: Lifetime) -> None:
    mix = parse_mix("uniform", a100)
    sizes = np.array([p.size for p in mix.profiles])
    for run in range(20):
        arrivals, bins = fill_up(run_generator(1, run), mix, 10, lifetime)
        demand = np.cumsum(sizes[arrivals.kinds])
        assert demand[-1] >= 80 > demand[-2]
        assert bins.tolist() == [min(d * 20 // 80, 19) for d in demand.tolist()]
        longest = 80 if lifetime is Lifetime.CAPACITY else len(demand)
        assert 1 <= arrivals.lifetimes.min() <= arrivals.lifetimes.max() <= longest


def test_a_mix_of_small_profiles_draws_until_full(a100: Geometry) -> None:
    arrivals, _ = fill_up(run_generator(1, 0), parse_mix("1g.10gb=1", a100), 5, Lifetime.CAPACITY)
    assert len(arrivals.kinds) == 40


def test_runs_differ_and_repeat() -> None:
    draws = [run_generator(1, run).random() for run in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1]
    assert run_generator(2, 0).random() != draws[0]


def test_the_load_sets_the_lifetime(a100: Geometry) -> None:
    mix = parse_mix("uniform", a100)  # mean size 3.5
    assert longest_lifetime(mix, 100, 0.85) == round(2 * 0.85 * 800 / 3.5)
    assert longest_lifetime(mix, 1, 3.5 / 8 / 2) == 1
    with pytest.raises(SlicewiseError, match=r"load 0.001 is too low for 1 A100-80GB: .* 0\.22"):
        longest_lifetime(mix, 1, 0.001)

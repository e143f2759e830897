"""Rehearsals find the better table, and runs with them are the same on the engine and compiled."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from slicewise import Catalog, Geometry, Need, Request
from slicewise.engine.demand import DemandEstimate
from slicewise.engine.rehearsal import Rehearsal, Standing
from slicewise.lab import rehearsal as rehearsals
from slicewise.lab.experiment import Steady
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.rehearsal import rehearse, scene_of, simulate
from slicewise.lab.rehearsing import CompiledRehearsing, EngineRehearsing
from slicewise.lab.sustained import Knowledge
from slicewise.lab.workload import Arrivals, draw_kinds, longest_lifetime
from slicewise.policies.least_lost import LeastLost
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice, Rehearsed, forms_for

A100 = Catalog.builtin().find("A100-80GB").require()
A30 = Catalog.builtin().find("A30-24GB").require()
HARD = "4g.40gb=0.39,3g.40gb=0.05,2g.20gb=0.56"
"""`least-lost-time` rejects more than twice as much as `least-lost` here."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals that take milliseconds, and are as likely to be wrong."""
    monkeypatch.setattr(rehearsals, "SCREENING", 4)
    monkeypatch.setattr(rehearsals, "FINALS", 8)
    monkeypatch.setattr(rehearsals, "LEASE_RUNS", 6)
    monkeypatch.setattr(rehearsals, "LEAST_SLOTS", 1200)


def demand_of(
    text: str, load: float = 0.85, gpus: int = 100, requests: int = 2000
) -> DemandEstimate:
    """Return the estimate after so many requests of a mix at a load."""
    mix, rng, demand = parse_mix(text, A100), random.Random(1), DemandEstimate()
    longest = longest_lifetime(mix, gpus, load)
    for at in range(requests):
        for profile in rng.choices(mix.profiles, mix.probabilities):
            demand.asked(at, Request(profile.name))
            demand.ended(profile.name, rng.randint(1, longest))
    return demand


def test_a_scene_has_the_load_that_was_seen() -> None:
    demand = demand_of("uniform", gpus=1000)
    scene = scene_of(demand, ((A100, 1000),))
    assert scene is not None
    assert scene.gpus == ((A100, 100),)
    assert scene.load == pytest.approx(0.85, rel=0.06)
    assert scene.running == pytest.approx(demand.running / 10, rel=0.05)
    arrivals, settled = scene.draw(np.random.default_rng(1))
    sizes = scene.sizes[arrivals.kinds]
    slots = np.arange(len(sizes))
    for at in (settled // 2, settled, len(sizes) - 1):  # from the first slots on
        there = (slots <= at) & (slots + arrivals.lifetimes > at)
        assert sizes[there].sum() / 800 == pytest.approx(0.85, abs=0.15)


def test_a_flood_of_requests_does_not_make_rehearsals_long() -> None:
    """The load that was seen is told; what is simulated is bounded."""
    demand = DemandEstimate()
    for step in range(400):
        demand.asked(step * 1e-4, Request("1g.10gb"))
        demand.ended("1g.10gb", 3600.0)
    scene = scene_of(demand, ((A100, 10),))
    assert scene is not None
    assert scene.load > 100_000
    assert scene.running == pytest.approx(rehearsals.MOST_LOAD * 80, rel=0.01)
    assert scene.slots < 50_000


def test_a_scene_of_several_models() -> None:
    demand, rng = DemandEstimate(), random.Random(1)
    wants = [Request("1g.10gb"), Request("4g.24gb"), Request(Need(1, 6)), Request("no such")]
    for at in range(1000):
        demand.asked(at, rng.choice(wants))
        demand.ended("1g.10gb", 20.0)
    scene = scene_of(demand, ((A100, 400), (A30, 40), (A100, 0)))
    assert scene is not None
    assert scene.gpus == ((A100, 100), (A30, 10))
    assert scene.requests == tuple(want for want in demand.asked_for if want != wants[3])
    assert scene.shares.sum() == pytest.approx(1)
    assert dict(zip(scene.requests, scene.sizes.tolist(), strict=True)) == {
        wants[0]: 1,
        wants[1]: 4,
        wants[2]: 1,
    }


@pytest.mark.parametrize("what", ["no GPU", "no lifetime", "nothing offered"])
def test_too_little_is_known(what: str) -> None:
    demand = demand_of("uniform", requests=50)
    cluster = ((A100, 100),)
    match what:
        case "no GPU":
            cluster = ((A100, 0),)
        case "no lifetime":
            demand = DemandEstimate()
            demand.asked(1, Request("1g.10gb"))
            demand.asked(2, Request("1g.10gb"))
        case _:
            cluster = ((A30, 100),)
    assert rehearse(demand, cluster) is None


def test_the_better_table_wins_where_least_lost_time_alone_is_far_worse() -> None:
    rehearsal = rehearse(demand_of(HARD), ((A100, 100),))
    assert rehearsal is not None
    found = {finding.choice.form: finding for finding in rehearsal.findings}
    assert next(iter(found)) == "least-lost"
    assert found["time"].requests.value > 2 * found["least-lost"].requests.value
    assert found["time"].fewer_requests.high < 0
    assert rehearsal.standing.choice.form in ("time-scarce", "time-scarce-stranding-1")
    assert rehearsal.standing.requests == 2000
    winner = found[rehearsal.standing.choice.form]
    assert winner.fewer_requests.low > 0
    assert winner.slices.value < found["least-lost"].slices.value


def test_least_lost_stays_without_rejections(short: None) -> None:
    rehearsal = rehearse(demand_of("uniform", load=0.2), ((A100, 100),))
    assert rehearsal is not None
    assert rehearsal.standing.choice == DEFAULT_CHOICE
    assert rehearsal.load == pytest.approx(0.2, rel=0.1)
    assert {finding.requests.value for finding in rehearsal.findings} == {0.0}


def test_the_same_estimate_gives_the_same_rehearsal(short: None) -> None:
    demand = demand_of(HARD)
    restored = DemandEstimate.of(demand.data())
    assert rehearse(demand, ((A100, 100),)) == rehearse(restored, ((A100, 100),))
    demand.asked(1e4, Request("4g.40gb"))
    assert rehearse(demand, ((A100, 100),)) != rehearse(restored, ((A100, 100),))


def test_the_choice_in_force_is_among_the_finalists(short: None) -> None:
    demand = demand_of("uniform", load=1.0)
    every = forms_for(demand.shares, [A100])
    for choice in every:
        rehearsal = rehearse(demand, ((A100, 100),), choice)
        assert rehearsal is not None
        assert [finding.choice for finding in rehearsal.findings] == list(every)
        used = next(f for f in rehearsal.findings if f.choice == choice)
        if used.runs == rehearsal.findings[0].runs:
            assert used.fewer_than_used.value == 0


def test_a_run_is_the_steady_experiments() -> None:
    """The same arrivals under the same table are rejected in the same slots."""
    mix = parse_mix("uniform", A100)
    scene = scene_of(demand_of("uniform"), ((A100, 100),))
    assert scene is not None
    steady = Steady((mix,), (LeastLost(),), oracle=False)
    arrivals, settled = scene.draw(np.random.default_rng(5))
    order = [[r.want for r in scene.requests].index(p.name) for p in mix.profiles]
    kinds = np.argsort(order)[arrivals.kinds]
    trace = np.zeros((len(kinds), 5), np.int32)
    longest = int(arrivals.lifetimes.max())
    steady._fresh_cluster(0, 0, longest)(Arrivals(kinds, arrivals.lifetimes), 0, trace)
    sums = simulate(scene, DEFAULT_CHOICE, arrivals, settled)
    assert sums.rejected == (trace[settled:, 0] == 0).sum()
    assert sums.arrivals == len(kinds) - settled


def test_leases_are_rehearsed_if_something_is_said_of_lifetimes(short: None) -> None:
    """The findings say what leases would bring."""
    mix, rng, demand = parse_mix("uniform", A100), random.Random(1), DemandEstimate()
    longest = longest_lifetime(mix, 100, 1.0)
    for at in range(1500):
        demand.asked(at, Request(rng.choice(mix.profiles).name))
        lifetime = rng.randint(1, longest)
        demand.ended(rng.choice(mix.profiles).name, lifetime, lifetime)
    rehearsal = rehearse(demand, ((A100, 100),))
    assert rehearsal is not None
    found = {finding.choice.name: finding for finding in rehearsal.findings}
    assert found["time+leases"].fewer_requests.low > 0
    assert rehearsal.standing.choice == found["time+leases"].choice
    assert rehearsal.standing.choice.mean_lifetime == demand.mean_lifetime
    again = rehearse(demand, ((A100, 100),), rehearsal.standing.choice)
    assert again is not None
    assert again.standing.choice == rehearsal.standing.choice
    silent = demand_of("uniform", load=1.0)
    rehearsal = rehearse(silent, ((A100, 100),))
    assert rehearsal is not None
    assert not any(finding.choice.leases for finding in rehearsal.findings)


# Rehearsals during a run


def drifting(first: Mix, second: Mix, slots: int, longest: int, seed: int) -> Arrivals:
    """Return arrivals of a mix and then of another one of the same profiles."""
    rng = np.random.default_rng(seed)
    kinds = np.concatenate([draw_kinds(rng, mix, slots) for mix in (first, second)])
    return Arrivals(kinds, rng.integers(1, longest, 2 * slots, endpoint=True))


def mixes(names: str, first: tuple[float, ...], second: tuple[float, ...]) -> tuple[Mix, Mix]:
    profiles = tuple(A100.profile(name) for name in names.split())
    return Mix("first", A100, profiles, first), Mix("second", A100, profiles, second)


@pytest.mark.parametrize(
    ("parts", "load", "leases"),
    [
        (
            mixes("4g.40gb 2g.20gb 1g.20gb", (0.33, 0.33, 0.34), (0.1, 0.1, 0.8)),
            1.0,
            Knowledge.NONE,
        ),
        (
            mixes("4g.40gb 2g.20gb 1g.20gb 7g.80gb", (0.3, 0.4, 0.3, 0), (0.2, 0.3, 0.3, 0.2)),
            0.95,
            Knowledge.NONE,
        ),
        (
            mixes("4g.40gb 2g.20gb 1g.20gb", (0.33, 0.33, 0.34), (0.1, 0.1, 0.8)),
            1.0,
            Knowledge.HALF,
        ),
    ],
)
def test_engine_and_compiled_runs_are_the_same(
    parts: tuple[Mix, Mix], load: float, leases: Knowledge, short: None
) -> None:
    """Also in what they switch to, and when: after changes, and for profiles not asked for."""
    longest = longest_lifetime(parts[0], 30, load)
    arrivals = drifting(*parts, 1210, longest, seed=4)
    stated = leases.stated(np.random.default_rng(3), arrivals.lifetimes, longest / 2)
    arrivals = arrivals._replace(stated=stated)
    seen: list[list[tuple[int, Standing, str]]] = []
    traces = []
    for compiled in (True, False):
        switches: list[tuple[int, Standing, str]] = []

        def switched(
            slot: int,
            standing: Standing,
            why: str,
            rehearsal: Rehearsal | None,
            to: list[tuple[int, Standing, str]] = switches,
        ) -> None:
            assert (rehearsal is not None) == standing.rehearsed
            to.append((slot, standing, why))

        run = (
            CompiledRehearsing(parts[0], 30, longest, switched)
            if compiled
            else EngineRehearsing(parts[0], 30, 8, switched)
        )
        trace = np.zeros((len(arrivals.kinds), 5), np.int32)
        for begin in range(0, len(trace), 777):  # in uneven parts
            part = slice(begin, begin + 777)
            run.advance(
                Arrivals(*(column[part] for column in (*arrivals[:2], stated))), begin, trace[part]
            )
        seen.append(switches)
        traces.append(trace[:, [0, 2, 3, 4]])
    assert seen[0] == seen[1]
    assert (traces[0] == traces[1]).all()
    whys = " | ".join(why for _, _, why in seen[0])
    assert "changed" in whys or "was not asked for" in whys
    choices = {standing.choice for _, standing, _ in seen[0]}
    assert choices > {DEFAULT_CHOICE}
    assert any(choice.leases for choice in choices) == (leases is not Knowledge.NONE)


def test_the_steady_experiment_rehearses(short: None) -> None:
    mix = parse_mix("4g.40gb=0.33,2g.20gb=0.33,1g.20gb=0.34", A100)
    policies = (LeastLost(), Rehearsed())
    one = Steady((mix,), policies, gpus=20, load=1.0, lifetimes=20, oracle=False)
    twin = replace(one, on_engine=True)
    ticks: list[int] = []
    sums = one.simulate(0, 1, 0, ticks.append)
    same = twin.simulate(0, 1, 0, ticks.append)
    assert sum(ticks) == one.units(0) + twin.units(0)
    assert sums[:4].tolist() == same[:4].tolist()
    assert sums[1] < one.simulate(0, 0, 0, ticks.append)[1]


def test_a_policy_without_rehearsals_is_least_lost(geometry: Geometry) -> None:
    assert Rehearsed().choice == Choice("least-lost")
    first = next(iter(geometry.plain_profiles))
    assert forms_for({Request(first.name): 1.0}, [geometry])[0] == DEFAULT_CHOICE

"""The arrivals of the steady experiment: laws of lifetimes and mixes that change."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slicewise import Catalog, SlicewiseError
from slicewise.cli.main import exit_status
from slicewise.lab.experiment import STEADY_COLUMNS, Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.results import steady_rows
from slicewise.lab.runner import run_experiment
from slicewise.lab.sustained import Drift, DriftKind, Knowledge, LifetimeLaw, Sustained, drift
from slicewise.lab.workload import draw_kinds, longest_lifetime, run_generator
from slicewise.policies.registry import policy

A100 = Catalog.builtin().find("A100-80GB").require()
UNIFORM, SMALL = parse_mix("uniform", A100), parse_mix("skew-small", A100)
SLOTS = 60_000


def sizes_there(arriving: Sustained, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return how many slices are asked for at once, by slot, if nothing is rejected."""
    mix = arriving.mix if arriving.drift is None else arriving.drift.first
    kinds, lifetimes, _ = arriving.draw(run_generator(seed, 0), 0, arriving.slots)
    sizes = np.array([profile.size for profile in mix.profiles])[kinds]
    change = np.zeros(arriving.slots + arriving.longest + 1, np.int64)
    np.add.at(change, np.arange(len(kinds)), sizes)
    np.add.at(change, np.arange(len(kinds)) + lifetimes, -sizes)
    return np.cumsum(change)[: arriving.slots]


@pytest.mark.parametrize("law", LifetimeLaw)
def test_every_law_has_the_load(law: LifetimeLaw) -> None:
    arriving = Sustained(UNIFORM, 100, 0.85, SLOTS, law)
    there = sizes_there(arriving)
    settled = 6 * longest_lifetime(UNIFORM, 100, 0.85)
    tolerance = 0.05 if law is LifetimeLaw.HEAVY else 0.02
    assert there[settled:].mean() / 800 == pytest.approx(0.85, abs=tolerance)
    assert there[settled : 2 * settled].mean() / 800 == pytest.approx(0.85, abs=0.1)
    lifetimes = arriving.draw(run_generator(1, 0), SLOTS, SLOTS).lifetimes
    assert lifetimes.min() >= 1
    assert lifetimes.max() <= arriving.longest


def test_laws_differ_in_their_tails() -> None:
    drawn = {
        law: Sustained(UNIFORM, 100, 0.85, SLOTS, law).draw(run_generator(1, 0), SLOTS, SLOTS)
        for law in LifetimeLaw
    }
    spread = {law: float(a.lifetimes.std() / a.lifetimes.mean()) for law, a in drawn.items()}
    assert spread[LifetimeLaw.UNIFORM] == pytest.approx(3**-0.5, rel=0.02)
    assert spread[LifetimeLaw.EXPONENTIAL] == pytest.approx(1, rel=0.03)
    assert spread[LifetimeLaw.HEAVY] > 2


def test_uniform_arrivals_are_those_of_the_published_figures() -> None:
    """The stream of a run is drawn as ever: kinds of the next requests, then their lifetimes."""
    rng, same = run_generator(7, 3), run_generator(7, 3)
    arrivals = Sustained(SMALL, 100, 0.9, SLOTS).draw(rng, 0, 500)
    assert arrivals.kinds.tolist() == draw_kinds(same, SMALL, 500).tolist()
    longest = longest_lifetime(SMALL, 100, 0.9)
    assert arrivals.lifetimes.tolist() == same.integers(1, longest, 500, endpoint=True).tolist()


def test_what_is_said_of_lifetimes() -> None:
    arriving = Sustained(UNIFORM, 100, 0.85, SLOTS)
    lifetimes = arriving.draw(run_generator(1, 0), 0, 20_000).lifetimes
    said = {
        each: each.stated(run_generator(1, 1), lifetimes, arriving.mean_lifetime)
        for each in Knowledge
    }
    assert said[Knowledge.EXACT].tolist() == lifetimes.tolist()
    assert not said[Knowledge.NONE].any()
    early = lifetimes / said[Knowledge.EARLY]
    assert 0.3 < early.min() < 0.52
    assert early.max() <= 1
    assert len(set(said[Knowledge.CLASSES].tolist())) == 3
    # A third of uniform lifetimes is in each class, and what is said is their mean.
    for value in set(said[Knowledge.CLASSES].tolist()):
        of = lifetimes[said[Knowledge.CLASSES] == value]
        assert len(of) / len(lifetimes) == pytest.approx(1 / 3, abs=0.02)
        assert of.mean() == pytest.approx(value, rel=0.05)
    wrong = said[Knowledge.WRONG]
    assert (wrong == lifetimes).mean() == pytest.approx(0.5, abs=0.02)
    assert wrong.mean() == pytest.approx(lifetimes.mean(), rel=0.02)
    half = said[Knowledge.HALF]
    assert (half == 0).mean() == pytest.approx(0.5, abs=0.02)
    assert (half[half > 0] == lifetimes[half > 0]).all()


def test_what_is_said_changes_only_the_policy_that_uses_it() -> None:
    policies = (policy("least-lost"), policy("lease-aware"))
    sums = {
        leases: [
            Steady((UNIFORM,), policies, gpus=20, load=1.0, lifetimes=8, leases=leases).simulate(
                0, entrant, 0, lambda done: None
            )
            for entrant in range(3)
        ]
        for leases in Knowledge
    }
    for leases in Knowledge:
        for entrant in (0, 2):
            assert (sums[leases][entrant] == sums[Knowledge.EXACT][entrant]).all()
    rejected = {leases: int(found[1][1]) for leases, found in sums.items()}
    assert len(set(rejected.values())) > 3


SHARES = {
    DriftKind.SUDDEN: [0, 0, 0, 1, 1, 1],
    DriftKind.GRADUAL: [0, 0, 0.3, 0.7, 1, 1],
    DriftKind.APPEARS: [0, 0, 0, 1, 1, 1],
    DriftKind.RETURNS: [0, 0, 1, 1, 0, 0],
}


@pytest.mark.parametrize("kind", DriftKind)
def test_a_drift_changes_the_mix_and_keeps_the_load(kind: DriftKind) -> None:
    changing = drift(kind, SMALL)
    points = np.array([0.1, 0.2, 0.4, 0.6, 0.8, 0.9])
    assert changing.share(points).tolist() == pytest.approx(SHARES[kind])
    arriving = Sustained(changing.first, 100, 0.85, SLOTS, drift=changing)
    kinds = arriving.draw(run_generator(1, 0), 0, SLOTS).kinds
    largest = [p.name for p in changing.first.profiles].index("7g.80gb")
    for begin, end, share in ((0.0, 0.2, 0.1), (0.4, 0.45, 0.375), (0.8, 1, 0.9)):
        part = kinds[int(begin * SLOTS) : int(end * SLOTS)]
        second = float(changing.share(np.array([share]))[0])
        if kind is DriftKind.GRADUAL and begin == 0.4:
            second = 0.35
        expected = (1 - second) * changing.first.probabilities[largest]
        expected += second * changing.second.probabilities[largest]
        assert (part == largest).mean() == pytest.approx(expected, abs=0.02)
    there = sizes_there(arriving)
    for begin in range(6000, SLOTS, 6000):
        assert there[begin : begin + 6000].mean() / 800 == pytest.approx(0.85, abs=0.05)


def test_a_drift_to_a_mix_of_other_profiles() -> None:
    changing = drift(DriftKind.SUDDEN, parse_mix("1g.10gb=1", A100), parse_mix("2g.20gb=1", A100))
    assert changing.first.profiles == changing.second.profiles
    assert (changing.first.probabilities, changing.second.probabilities) == ((1, 0), (0, 1))
    assert changing.first.name == "1g.10gb=1"
    swapped = drift(DriftKind.GRADUAL, SMALL).second
    assert dict(zip((p.name for p in swapped.profiles), swapped.probabilities, strict=True))[
        "7g.80gb"
    ] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("kind", "mix", "to", "message"),
    [
        (DriftKind.SUDDEN, "uniform", None, "is the same with large and small swapped"),
        (DriftKind.APPEARS, "1g.10gb=1", None, "has one profile, which cannot vanish"),
        (DriftKind.RETURNS, "uniform", "bimodal", "of one profile, not to another mix"),
    ],
)
def test_drifts_that_cannot_be(kind: DriftKind, mix: str, to: str | None, message: str) -> None:
    with pytest.raises(SlicewiseError, match=message):
        drift(kind, parse_mix(mix, A100), None if to is None else parse_mix(to, A100))


def test_windows_add_up() -> None:
    changing: Drift = drift(DriftKind.SUDDEN, SMALL)
    steady = Steady(
        (changing.first,),
        (policy("mfi"), policy("least-lost")),
        gpus=20,
        runs=2,
        lifetimes=10,
        drift=(changing,),
        windows=4,
    )
    outcome = run_experiment(steady, 1, lambda done: None)
    for sums in (sample for cell in outcome.samples.values() for sample in cell.values()):
        rest = sums[len(STEADY_COLUMNS) :]
        assert (rest[:4].sum(), rest[4:].sum()) == (sums[0], sums[1])
        assert rest[:4].max() - rest[:4].min() <= 1
    mfi, least, oracle = steady_rows(outcome)
    for row in (mfi, least, oracle):
        assert len(row["windows"]) == 4  # type: ignore[arg-type]
    assert {w["rejected_share_difference"] for w in mfi["windows"]} == {0.0}  # type: ignore[attr-defined]


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["simulate", "--experiment", "steady", "--gpus", "10", "--duration", "5"]
    short += ["--runs", "2", "--policy", "least-lost", "--workers", "1"]
    assert (
        exit_status([*short, "--drift", "returns", "--lifetimes", "heavy", "--leases", "early"])
        == 0
    )
    assert "rejected % by part of the run" in capsys.readouterr().out
    assert exit_status([*short, "--drift", "sudden", "--drift-to", "bimodal", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [len(row["windows"]) for row in rows] == [8, 8]
    for extra, message in (
        (["--experiment", "published", "--leases", "half"], "--leases needs"),
        (["--drift-to", "bimodal"], "--drift-to needs --drift sudden"),
        (["--experiment", "published", "--lifetimes", "heavy"], "--lifetimes needs"),
        (["--experiment", "queueing", "--drift", "sudden"], "--drift needs --experiment steady"),
    ):
        assert exit_status([*short, *extra]) != 0
        assert message in capsys.readouterr().err

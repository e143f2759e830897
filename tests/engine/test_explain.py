"""Explanations: the choice, its cost, and why the alternatives lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.last_gpu import LastGpu

from slicewise import (
    AdaptivePolicy,
    Cluster,
    Geometry,
    Need,
    Policy,
    Reason,
    Rejection,
    Request,
    Scheduler,
    SlicewiseError,
    TablePolicy,
)
from slicewise.catalog import load_geometry
from slicewise.core.fragmentation import Reading, score
from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.engine.explain import Cost, Explainer, Place, cost_of, open_places
from slicewise.policies.base import Preference
from slicewise.policies.fits import BestFit, FirstFit
from slicewise.policies.registry import policy

A100 = load_geometry("A100-80GB")
A30 = load_geometry("A30-24GB")

POLICIES = [
    "least-lost",
    "least-lost-time",
    "rehearsed",
    "mfi",
    "mfi-overlap",
    "first-fit",
    "best-fit",
    "best-fit-strict",
    "worst-fit",
    "round-robin",
    "round-robin-strict",
]
REQUESTS = [
    Request("1g.10gb"),
    Request("2g.20gb"),
    Request("3g.40gb"),
    Request("7g.80gb"),
    Request("1g.6gb"),
    Request(Need(1, 5)),
    Request(Need(2, 10), ("A100-80GB",)),
    Request("1g.10gb", ("A30-24GB",)),
]


class Switching(AdaptivePolicy):
    """First-fit on an empty cluster, then best-fit."""

    name = "switching"
    summary = "First-fit, then best-fit."

    def __init__(self) -> None:
        self._first, self._then = FirstFit(), BestFit()

    def table(self, cluster: Cluster) -> TablePolicy:
        return self._then if cluster.active_gpus else self._first


class ExcludesEmpty(TablePolicy):
    """Excludes empty GPUs."""

    name = "avoiding"
    summary = "Never an empty GPU."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        starts = gpu.feasible_starts(profile)
        return Preference(0, starts[0]) if starts and gpu.mask else None


def mixed() -> Cluster:
    cluster = Cluster()
    cluster.add_node("a", A100, 3)
    cluster.add_node("b", A30, 2)
    cluster.add_node("c", A100, 2)
    return cluster


def observable(cluster: Cluster) -> object:
    """Return everything observable about a cluster."""
    return (
        list(cluster.state_of),
        list(cluster.instances()),
        [list(members) for members in cluster.members],
        cluster.first.tolist(),
        cluster.fragmentation(Reading.PARTIAL),
        cluster.fragmentation(Reading.OVERLAP),
    )


def slow_cost(cluster: Cluster, gpu: int, profile: Profile, start: int) -> Cost:
    """Return the cost from the definition, window by window."""
    state = cluster.state(gpu)
    geometry, mask = state.geometry, state.mask
    after = mask | profile.window(start)
    placement = geometry.placement(profile.name, start)
    assert placement is not None
    then = state.after(placement)

    def places(at: GpuState) -> int:
        return sum(
            not p.window(s) & at.mask and at.within_budgets(p)
            for p in geometry.plain_profiles
            for s in p.starts
        )

    return Cost(
        score(geometry, after, Reading.PARTIAL) - score(geometry, mask, Reading.PARTIAL),
        score(geometry, after, Reading.OVERLAP) - score(geometry, mask, Reading.OVERLAP),
        places(state) - places(then),
    )


@pytest.mark.unmeasured
@given(
    name=st.sampled_from([*POLICIES, "switching", "avoiding", "last"]),
    steps=st.lists(st.tuples(st.sampled_from(REQUESTS), st.booleans()), max_size=30),
    wanted=st.sampled_from(REQUESTS),
    drained=st.booleans(),
)
def test_an_explanation_predicts_the_next_decision(
    name: str, steps: list[tuple[Request, bool]], wanted: Request, drained: bool
) -> None:
    own: dict[str, Policy] = {
        "switching": Switching(),
        "avoiding": ExcludesEmpty(),
        "last": LastGpu(),
    }
    scheduler = Scheduler(mixed(), own.get(name) or policy(name))
    cluster = scheduler.cluster
    for request, release in steps:
        scheduler.submit(request)
        instances = list(cluster.instances())
        if release and instances:
            scheduler.release(instances[len(instances) // 2])
    if drained:
        cluster.drain("a")
    before, turn = observable(cluster), scheduler.turn

    def kind(gpu: int) -> tuple[object, ...]:
        seen = cluster.states[cluster.state_of[gpu]]
        return seen.geometry, seen.mask, seen.used

    explanation = Explainer(scheduler).explain(wanted, most=10_000)

    assert observable(cluster) == before
    assert scheduler.turn == turn
    # The alternatives are all open placements, GPU by GPU, except the chosen one.
    open_there: Counter[tuple[object, ...]] = Counter()
    lowest: dict[tuple[object, ...], int] = {}
    for gpu in cluster.schedulable:
        state = cluster.state(gpu)
        for _, profile in wanted.candidates(state.geometry):
            for start in state.feasible_starts(profile):
                where = *kind(gpu), profile.name, start
                open_there[where] += 1
                lowest.setdefault(where, gpu)
    first_of: dict[tuple[object, ...], int] = {}
    for other in explanation.others:
        where = *kind(other.gpu), other.placement.profile.name, other.placement.start
        assert other.alike <= open_there[where]
        open_there[where] -= other.alike
        first_of[where] = min(other.gpu, first_of.get(where, other.gpu))
        assert other.cost == slow_cost(
            cluster, other.gpu, other.placement.profile, other.placement.start
        )
        assert other.why
    open_there = +open_there
    outcome = explanation.outcome
    if isinstance(outcome, Place):
        (where,) = open_there
        assert where == (
            *kind(outcome.gpu),
            outcome.placement.profile.name,
            outcome.placement.start,
        )
        del lowest[where]
        first_of.pop(where, None)
        assert outcome.cost == slow_cost(
            cluster, outcome.gpu, outcome.placement.profile, outcome.placement.start
        )
    else:
        assert not open_there
    assert first_of == lowest
    happened = scheduler.submit(wanted)
    if isinstance(happened, Rejection):
        assert outcome == happened
    else:
        assert isinstance(outcome, Place)
        placed = outcome.gpu, outcome.placement.profile.name, outcome.placement.start
        assert placed == happened[1:4]


@pytest.mark.unmeasured
@given(
    requests=st.lists(st.sampled_from(REQUESTS), max_size=20),
    wanted=st.sampled_from(REQUESTS),
    name=st.sampled_from(POLICIES),
)
def test_an_explanation_for_another_policy_predicts_its_decision(
    requests: list[Request], wanted: Request, name: str
) -> None:
    scheduler = Scheduler(mixed(), "round-robin")
    for request in requests:
        scheduler.submit(request)
    before, turn = observable(scheduler.cluster), scheduler.turn
    other = policy(name)
    choice = Explainer(scheduler).choice(wanted, other)
    assert observable(scheduler.cluster) == before
    assert scheduler.turn == turn
    rival = Scheduler(scheduler.cluster, other)
    rival.turn = turn
    happened = rival.submit(wanted)
    if isinstance(happened, Rejection):
        assert choice == happened
    else:
        assert isinstance(choice, Place)
        assert (choice.gpu, choice.placement.start) == (happened.gpu, happened.start)


def explained(name: str | Policy, *busy: tuple[int, str, int], wanted: str) -> list[str]:
    """Explain a request on three A100s and return why the alternatives lost."""
    scheduler = Scheduler(Cluster.of(A100, 3), name)
    for gpu, profile, start in busy:
        scheduler.cluster.place(gpu, profile, start)
    return [other.why for other in Explainer(scheduler).explain(Request(wanted)).others]


def test_scores_are_stated() -> None:
    whys = explained("mfi", (0, "1g.10gb", 0), wanted="3g.40gb")
    assert whys[0] == "mfi: F grows by 0; at the chosen place F grows by -8"

    whys = explained("least-lost", (0, "1g.10gb", 0), wanted="3g.40gb")
    assert whys[0].startswith("least-lost: 8 placements lost on balance on an empty GPU, which is")
    assert whys[0].endswith("; at the chosen place 6.5 placements lost on balance")
    whys = explained("best-fit", (0, "1g.10gb", 0), (1, "2g.20gb", 0), wanted="1g.10gb")
    assert any("a score of" in why for why in whys)


def test_gpus_are_named_by_node() -> None:
    scheduler = Scheduler(Cluster.of(A100, 4, gpus_per_node=2), "first-fit")
    for gpu in range(3):
        scheduler.cluster.place(gpu, "7g.80gb", 0)
    scheduler.cluster.place(3, "1g.10gb", 0)
    scheduler.cluster.release(scheduler.cluster.instances_on(2)[0])
    explained = Explainer(scheduler).explain(Request("2g.20gb"))
    assert "as good to first-fit, but GPU 0 of 'node-1' comes first" in [
        other.why for other in explained.others
    ]


def test_ties_are_stated() -> None:
    assert explained("mfi", wanted="7g.80gb") == []  # all GPUs are equal: no alternative
    whys = explained("first-fit", (0, "1g.10gb", 0), wanted="3g.40gb")
    assert whys[0] == "as good to first-fit, but GPU 0 comes first"
    whys = explained("round-robin", (0, "1g.10gb", 0), wanted="3g.40gb")
    assert whys[0] == "as good to round-robin, but GPU 0 comes first in turn"
    whys = explained("mfi", wanted="3g.40gb")
    assert whys == ["as good to mfi, but slice 0 comes first"]


def test_other_starts_and_excluded_gpus_are_stated() -> None:
    whys = explained("first-fit", wanted="3g.40gb")
    assert whys == ["first-fit would place it differently on such a GPU"]
    whys = explained(ExcludesEmpty(), (0, "1g.10gb", 0), wanted="3g.40gb")
    assert whys == ["avoiding does not consider such a GPU"] * 2
    scheduler = Scheduler(Cluster.of(A100, 1), ExcludesEmpty())
    explanation = Explainer(scheduler).explain(Request("3g.40gb"))
    assert isinstance(explanation.outcome, Rejection)
    assert [o.why for o in explanation.others] == ["avoiding does not consider such a GPU"] * 2


def test_a_strict_policy_tries_no_other() -> None:
    busy = [(0, "1g.10gb", 0), (0, "1g.10gb", 2), (0, "1g.10gb", 4)]
    whys = explained("best-fit-strict", *busy, wanted="3g.40gb")
    assert whys == ["best-fit-strict picked GPU 0 and tries no other"] * 2


def test_a_scan_policy_has_one_general_reason() -> None:
    whys = explained(LastGpu(), wanted="3g.40gb")
    assert whys == ["last-gpu looks at every GPU itself, and chose otherwise"]


def test_waste_is_stated() -> None:
    scheduler = Scheduler(Cluster.of(A100, 1), "mfi")
    explanation = Explainer(scheduler).explain(Request(Need(1, 20)), most=100)
    assert isinstance(explanation.outcome, Place)
    assert explanation.outcome.placement.profile.name == "1g.20gb"
    assert "7g.80gb is more than was asked for: it wastes 80% of a GPU, the chosen profile 0%" in [
        other.why for other in explanation.others
    ]


def test_the_number_of_alternatives_is_limited() -> None:
    explainer = Explainer(Scheduler(mixed()))
    assert len(explainer.explain(Request("1g.10gb"), most=2).others) == 2
    assert explainer.explain(Request("1g.10gb"), most=0).others == ()


def test_the_work_does_not_grow_with_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def work(gpus: int) -> int:
        scheduler = Scheduler(Cluster.of(A100, gpus), "least-lost")
        for _ in range(gpus):
            scheduler.submit("1g.10gb")
        explainer = Explainer(scheduler)
        looked.clear()
        explainer.explain(Request("2g.20gb"))
        return len(looked)

    original = GpuState.feasible_starts

    def counted(self: GpuState, profile: Profile) -> tuple[int, ...]:
        looked.append(1)
        return original(self, profile)

    monkeypatch.setattr(GpuState, "feasible_starts", counted)
    work(7)  # fill the tables
    assert work(7) == work(700)  # one GPU in seven is full


def test_an_impossible_request_is_rejected_with_a_reason() -> None:
    explanation = Explainer(Scheduler(mixed())).explain(Request("nonsense"))
    assert isinstance(explanation.outcome, Rejection)
    assert explanation.outcome.reason is Reason.UNKNOWN_PROFILE
    assert explanation.others == ()


def test_a_scan_policy_may_find_nothing() -> None:
    choice = Explainer(Scheduler(mixed())).choice(Request("nonsense"), LastGpu())
    assert isinstance(choice, Rejection)


def test_a_policy_of_an_unknown_kind_is_refused() -> None:
    class Odd(Policy):
        name = "odd"
        summary = "Neither table nor scan."

    with pytest.raises(SlicewiseError, match="'odd' is of no kind that can be explained"):
        Explainer(Scheduler(mixed())).choice(Request("1g.10gb"), Odd())


def test_costs_of_a_geometry(geometry: Geometry) -> None:
    """For every placement on an empty GPU of every model."""
    empty = GpuState(geometry, 0, (0,) * len(geometry.all_budgets))
    cluster = Cluster.of(geometry, 1)
    for placement in geometry.placements:
        assert cost_of(empty, placement) == slow_cost(
            cluster, 0, placement.profile, placement.start
        )
    assert open_places(empty) == sum(len(p.starts) for p in geometry.plain_profiles)


def test_gpus_that_differ_only_in_what_the_policy_does_not_look_at_are_one_place() -> None:
    cluster = Cluster.of(A100, 3)
    cluster.place(1, "2g.20gb", 0)
    for start in (0, 1):
        cluster.place(2, "1g.10gb", start)
    assert cluster.state_of[1] != cluster.state_of[2]
    scheduler = Scheduler(cluster, "worst-fit")
    others = Explainer(scheduler).explain(Request("4g.40gb")).others
    assert others == ()
    others = Explainer(scheduler).explain(Request("3g.40gb")).others
    assert [(o.gpu, o.placement.start, o.alike) for o in others] == [(0, 0, 1), (1, 4, 2)]


def test_a_policy_that_tells_instances_apart_has_a_place_for_each(a100: Geometry) -> None:
    """Least-lost-time counts the instances in a window: the same slices are two places."""
    cluster = Cluster.of(a100, 4)
    cluster.place(0, "4g.40gb", 0)
    for gpu, layout in ((1, "2g"), (2, "1g 1g"), (3, "1g.20")):
        for start, profile in enumerate(layout.split()):
            cluster.place(gpu, {"2g": "2g.20gb", "1g": "1g.10gb"}.get(profile, "1g.20gb"), start)
    cluster.place(0, "3g.40gb", 4)
    explanation = Explainer(Scheduler(cluster, "least-lost-time")).explain(Request("1g.10gb"), 100)
    assert isinstance(explanation.outcome, Place)
    assert (explanation.outcome.gpu, explanation.outcome.placement.start) == (2, 2)
    at_two = [o for o in explanation.others if o.placement.start == 2]
    assert [(other.gpu, other.alike) for other in at_two] == [(1, 1), (3, 1)]
    assert all("slice-lifetimes" in other.why for other in at_two)

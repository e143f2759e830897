"""Rehearsed tables in the controller: it uses a winner, and returns before an unknown request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.control.test_policy_choices import choice
from tests.kubernetes.test_controller import controller, tell, with_node
from tests.kubernetes.test_cycle import Scene

from slicewise.control.commands import ChoosePolicy
from slicewise.control.policy_choices import PolicyChoices
from slicewise.control.state import State
from slicewise.engine.rehearsal import Finding, Interval, Rehearsal, Standing
from slicewise.kubernetes.controller import Controller
from slicewise.policies import registry
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice, Rehearsed

FIGURE = Interval(0.01, 0.005, 0.015)


def won(state: State, winner: Choice) -> Rehearsal:
    """A rehearsal that a choice won, as of now."""
    estimate = state.demand.estimate
    findings = tuple(Finding(one, 48, *[FIGURE] * 5) for one in (DEFAULT_CHOICE, winner))
    standing = Standing(winner, estimate.requests, estimate.changes, rehearsed=True)
    return Rehearsal(standing, "it won", 0.85, findings)


@pytest.fixture
def rehearsed() -> Iterator[None]:
    """`rehearsed` is the default policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "DEFAULT", "rehearsed")
        registry.policy_class.cache_clear()
        yield
    registry.policy_class.cache_clear()


def table(state: State) -> str:
    """The table in force, as the policy and the state have it."""
    assert isinstance(state.scheduler.policy, Rehearsed)
    assert state.scheduler.policy.choice == state.policy.standing.choice
    return state.policy.standing.choice.name


def test_pods_are_counted_as_demand() -> None:
    scene = Scene("n1", gpus=2)
    scene.ask("a", "1g.10gb", "2g.20gb")
    scene.ask("b", "7g.80gb")
    assert set(scene.decide()) == {"a", "b"}
    estimate = scene.cache.state.demand.estimate
    assert {str(one.want) for one in estimate.asked_for} == {"1g.10gb", "2g.20gb", "7g.80gb"}
    scene.now += 60
    scene.end("b")
    assert [(stay.profile, stay.lifetime) for stay in estimate.stays] == [("7g.80gb", 60)]


def test_a_pod_with_an_unknown_profile_switches_back_before_it_is_placed(rehearsed: None) -> None:
    scene = Scene("n1", gpus=2)
    state = scene.cache.state
    scene.ask("a", "1g.10gb")
    scene.decide()
    PolicyChoices(scene.cache).choose(ChoosePolicy(won(state, choice("1g.10gb"))))
    scene.ask("b", "1g.10gb")
    assert set(scene.decide()) == {"b"}
    assert table(state) == "time"
    scene.ask("c", "1g.10gb", "3g.40gb")
    assert set(scene.decide()) == {"c"}
    assert table(state) == "least-lost"
    follower = State("rehearsed")
    follower.seq = scene.cache.journal.rows(0, 1)[0].seq - 1
    for row in scene.cache.journal.rows(0, 1000):
        follower.apply(row)
    assert table(follower) == "least-lost"
    assert follower.demand.snapshot() == state.demand.snapshot()


def test_the_controller_uses_a_winner_and_says_why_not(rehearsed: None) -> None:
    one: Controller = controller()
    with_node(one)
    state, answers = one.cache.state, list[str]()
    one.choose(won(state, choice("1g.10gb")), answers.append)
    tell(one)
    assert (table(state), answers) == ("time", [""])
    late = won(state, choice("2g.20gb"))
    old = Standing(late.standing.choice, -1, 0, True)
    one.choose(Rehearsal(old, "it won", 0.85, late.findings), answers.append)
    tell(one)
    assert answers[1].startswith("the rehearsal is out of date")
    assert table(state) == "time"

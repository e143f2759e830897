"""Evictions: what is sent to the API, and what follows from its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.objects import pod
from tests.kubernetes.test_preemption import URGENT, Scene

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api_client import (
    ApiUnreachableError,
    ConflictError,
    KubernetesApiError,
    NotFoundError,
)
from slicewise.kubernetes.event_series import Regarding
from slicewise.kubernetes.evictions import EvictionClient, Evictions


class Api:
    """An API that takes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self.refusals: dict[str, SlicewiseError] = {}

    def write(self, method: str, path: str, body: Any, **query: str) -> bytes:
        assert method == "POST"
        self.asked.append((path, body, query))
        refusal = self.refusals.get(path + ("?dryRun" if query else ""))
        if refusal is not None:
            raise refusal
        return b"{}"

    def pages(self, path: str, kind: object, fields: str = "") -> list[Any]:
        if path in self.refusals:
            raise self.refusals[path]
        return []


class Recorder:
    """Takes down events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def report_event(self, about: Regarding, reason: str, action: str, text: str) -> None:
        self.events.append((about.name, reason))


def path(name: str) -> str:
    return f"/api/v1/namespaces/team/pods/{name}/eviction"


def client(api: Api, leads: bool = True) -> EvictionClient:
    return EvictionClient(api, lambda: leads)  # type: ignore[arg-type]


def test_all_pods_are_tried_without_effect_before_the_first_is_evicted() -> None:
    api = Api()
    pods = [pod("a"), pod("b")]
    assert client(api).evict(pods) == (pods, None)
    assert [(where, query) for where, _, query in api.asked] == [
        (path("a"), {"dryRun": "All"}),
        (path("b"), {"dryRun": "All"}),
        (path("a"), {}),
        (path("b"), {}),
    ]
    _, body, _ = api.asked[2]
    # The pod's own grace period counts, and no other pod of the same name is evicted.
    assert body["deleteOptions"] == {"preconditions": {"uid": "uid-a"}, "dryRun": []}
    assert body["metadata"] == {"name": "a", "namespace": "team"}


def test_no_pod_is_evicted_if_one_must_stay() -> None:
    api = Api()
    api.refusals[f"{path('b')}?dryRun"] = refusal = ApiUnreachableError("budget")
    assert client(api).evict([pod("a"), pod("b")]) == ([], refusal)
    assert len(api.asked) == 2


@pytest.mark.parametrize("kind", [ConflictError, NotFoundError])
def test_a_pod_that_is_gone_counts_as_evicted(kind: type[KubernetesApiError]) -> None:
    api = Api()
    api.refusals[path("a")] = api.refusals[f"{path('a')}?dryRun"] = kind(404, "Gone", "gone")
    assert client(api).evict([pod("a")]) == ([pod("a")], None)


def test_without_the_lease_nothing_is_sent() -> None:
    api = Api()
    gone, error = client(api, leads=False).evict([pod("a")])
    assert gone == []
    assert "no pod was evicted" in str(error)
    assert api.asked == []


class Story:
    """A pod that needs the slices of another, and an API."""

    def __init__(self) -> None:
        self.scene = Scene("n1")
        self.scene.run("a", "7g.80gb")
        self.scene.ask("u", "7g.80gb", **URGENT)
        self.scene.decide()
        self.api, self.recorder = Api(), Recorder()
        self.leads = True
        self.evictions = Evictions(
            EvictionClient(self.api, lambda: self.leads),  # type: ignore[arg-type]
            self.scene.cycle.preemption,
            self.run,
            self.recorder,  # type: ignore[arg-type]
            self.scene.stats,
        )

    def run(self, work: Callable[[], Any], then: Callable[[Any, Any], None]) -> None:
        try:
            then(work(), None)
        except SlicewiseError as error:
            then(None, error)


def test_a_victim_is_evicted_once_and_told() -> None:
    story = Story()
    for _ in range(4):
        story.evictions.step()
        story.scene.now += 10.0
    assert [where for where, _, query in story.api.asked if not query] == [path("a")]
    assert story.recorder.events == [("a", "Preempted")]
    assert story.scene.stats.evicted == 1


def test_a_budget_that_changed_meanwhile_asks_for_patience() -> None:
    story = Story()
    story.api.refusals[f"{path('a')}?dryRun"] = ApiUnreachableError("budget")
    story.evictions.step()
    story.evictions.step()
    assert story.scene.attempts == 1
    assert story.evictions.problem == ""
    story.api.refusals.clear()
    story.scene.now += 10.0
    story.evictions.step()
    assert story.scene.stats.evicted == 1


def test_a_refusal_ends_the_attempt_and_is_told_to_the_operator() -> None:
    story = Story()
    story.api.refusals[f"{path('a')}?dryRun"] = KubernetesApiError(403, "Forbidden", "may not")
    story.evictions.step()
    story.evictions.step()
    assert story.scene.attempts == 0
    assert "no pods are evicted for others" in story.evictions.problem
    story.evictions.clear()
    assert story.evictions.problem == ""


def test_unreadable_budgets_evict_no_pod() -> None:
    story = Story()
    where = "/apis/policy/v1/poddisruptionbudgets"
    story.api.refusals[where] = KubernetesApiError(403, "Forbidden", "may not list")
    story.evictions.step()
    assert story.scene.attempts == 0
    assert "may not list" in story.evictions.problem


def test_a_replica_that_leads_no_more_chooses_no_victims() -> None:
    story = Story()
    story.leads = False
    story.evictions.step()
    assert story.scene.attempts == 0

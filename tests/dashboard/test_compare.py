"""The policy comparison over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Harness

from slicewise import load_geometry
from slicewise.config.settings import Settings
from slicewise.dashboard import comparison_routes as compare
from slicewise.dashboard.comparison import ComparisonTerms, PolicyComparison
from slicewise.dashboard.comparison_routes import Comparisons
from slicewise.journal.entries import Role
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.service import Service


class Destination(Harness):
    """A harness whose services have the dashboard's routes."""

    def open(self, name: str, address: str = "", **settings: Any) -> Service:
        assert self.store is not None
        chosen = Settings(data=self.folder / name, lease_seconds=0.5, **settings)
        steady = SteadyClock(self.clock, self.clock)
        made = Service(self.store, chosen, steady, routes=compare.routes())
        self.services.append(made)
        self.run(made.start(address or f"http://{name}"))
        return made


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Destination]:
    made = Destination(tmp_path)
    yield made
    made.close()


def test_pages_of_a_run(home: Destination) -> None:
    terms = "a=round-robin&b=mfi&mix=bimodal&gpus=4&load=100&seed=2"
    whole = home.get(f"/v1/compare?{terms}&steps=60").json()
    assert whole["a"] == "round-robin"
    assert whole["b"] == "mfi"
    assert whole["model"] == "A100-80GB"
    assert whole["mixes"] == ["uniform", "skew-small", "skew-big", "bimodal"]
    assert whole["end"] == 4000
    assert len(whole["steps"]) == 60
    second = home.get(f"/v1/compare?{terms}&begin=40&steps=20").json()
    assert second["steps"] == whole["steps"][40:]
    last = whole["steps"][-1]
    for side in ("a", "b"):
        placed = sum(step[side]["gpu"] is not None for step in whole["steps"])
        assert last[side]["accepted"] == placed


def test_defaults_and_other_models(home: Destination) -> None:
    view = home.get("/v1/compare?steps=1").json()
    assert (view["b"], view["gpus"], view["load"]) == ("least-lost", 16, 90)
    other = home.get("/v1/compare?model=A30&steps=5").json()
    assert other["model"] == "A30-24GB"
    assert other["mixes"] == ["uniform"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("a=nonsense", "a"),
        ("b=nonsense", "b"),
        ("mix=nonsense", "mix"),
        ("model=A30&mix=bimodal", "mix"),
        ("model=nonsense", "model"),
        ("gpus=0", "gpus"),
        ("gpus=65", "gpus"),
        ("steps=501", "steps"),
        ("begin=4001", "begin"),
        ("load=9", "load"),
        ("seed=-1", "seed"),
        ("nonsense=1", None),
    ],
)
def test_invalid_parameters_are_refused(home: Destination, query: str, field: str | None) -> None:
    answer = home.get(f"/v1/compare?{query}")
    assert answer.status_code == 400
    assert answer.json().get("field") == field


def test_every_role_may_compare(home: Destination) -> None:
    assert home.get("/v1/compare", token=None).status_code == 401
    home.tenant("acme")
    home.node()
    more = {Role.TENANT: {"tenant": "acme"}, Role.AGENT: {"node": "n1"}}
    for role in Role:
        token = home.token(role, **more.get(role, {}))
        assert home.get("/v1/compare?steps=1", token=token).status_code == 200


def test_the_route_is_documented(home: Destination) -> None:
    paths = home.get("/openapi.json", token=None).json()["paths"]
    assert paths["/v1/compare"]["get"]["operationId"] == "compare"
    names = {one["name"] for one in paths["/v1/compare"]["get"]["parameters"]}
    assert {"a", "b", "mix", "model", "gpus", "load", "seed", "begin", "steps"} == names


def test_the_number_of_cached_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PolicyComparison] = []

    class Counted(PolicyComparison):
        def __init__(self, terms: Any) -> None:
            super().__init__(terms)
            made.append(self)

    monkeypatch.setattr(compare, "PolicyComparison", Counted)
    comparisons = Comparisons()
    geometry = load_geometry("A100-80GB")
    runs = [
        ComparisonTerms(("mfi", "mfi"), geometry, "uniform", 1, 0.5, seed) for seed in range(17)
    ]
    for terms in runs:
        comparisons.run(terms)
    assert len(made) == 17
    assert comparisons.run(runs[16]) is made[16]  # still there
    comparisons.run(runs[0])  # evicted, computed again
    assert len(made) == 18

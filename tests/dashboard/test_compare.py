"""The comparison over HTTP: pages of a run, checked, bounded, open to everybody with a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.house import House

from slicewise import load_geometry
from slicewise.control.entries import Role
from slicewise.dashboard import compare
from slicewise.dashboard.compare import Comparisons
from slicewise.dashboard.duel import Duel, Terms
from slicewise.service.service import Service
from slicewise.service.settings import Settings
from slicewise.service.steady import SteadyClock


class Home(House):
    """A house whose services have what the dashboard brings along."""

    def open(self, name: str, address: str = "", **settings: Any) -> Service:
        assert self.store is not None
        chosen = Settings(data=self.folder / name, lease_seconds=0.5, **settings)
        steady = SteadyClock(self.clock, self.clock)
        made = Service(self.store, chosen, steady, routes=compare.routes())
        self.services.append(made)
        self.run(made.start(address or f"http://{name}"))
        return made


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path)
    yield made
    made.close()


def test_a_run_in_pages(home: Home) -> None:
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


def test_defaults_and_other_models(home: Home) -> None:
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
def test_nonsense_is_refused_by_name(home: Home, query: str, field: str | None) -> None:
    answer = home.get(f"/v1/compare?{query}")
    assert answer.status_code == 400
    assert answer.json().get("field") == field


def test_everybody_with_a_token_may_compare(home: Home) -> None:
    assert home.get("/v1/compare", token=None).status_code == 401
    home.tenant("acme")
    home.node()
    more = {Role.TENANT: {"tenant": "acme"}, Role.AGENT: {"node": "n1"}}
    for role in Role:
        token = home.token(role, **more.get(role, {}))
        assert home.get("/v1/compare?steps=1", token=token).status_code == 200


def test_it_is_in_the_document(home: Home) -> None:
    paths = home.get("/openapi.json", token=None).json()["paths"]
    assert paths["/v1/compare"]["get"]["operationId"] == "compare"
    names = {one["name"] for one in paths["/v1/compare"]["get"]["parameters"]}
    assert {"a", "b", "mix", "model", "gpus", "load", "seed", "begin", "steps"} == names


def test_only_so_many_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Duel] = []

    class Counted(Duel):
        def __init__(self, terms: Any) -> None:
            super().__init__(terms)
            made.append(self)

    monkeypatch.setattr(compare, "Duel", Counted)
    comparisons = Comparisons()
    geometry = load_geometry("A100-80GB")
    runs = [Terms(("mfi", "mfi"), geometry, "uniform", 1, 0.5, seed) for seed in range(17)]
    for terms in runs:
        comparisons.run(terms)
    assert len(made) == 17
    assert comparisons.run(runs[16]) is made[16]  # still there
    comparisons.run(runs[0])  # pushed out, made anew
    assert len(made) == 18

"""Decisions are the same whether a model was forgotten or has never been there."""

from __future__ import annotations

import random

import pytest

from slicewise import Catalog, Cluster, Rejection, Request
from slicewise.core.states import state_space
from slicewise.core.tables import drop_tables
from slicewise.engine.openings import Openings
from slicewise.engine.scheduler import Scheduler

CATALOG = Catalog.builtin()
ASKED = [Request(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "1g.6gb")]


@pytest.mark.parametrize("policy", ["default", "mfi", "first-fit", "round-robin"])
def test_a_scheduler_decides_as_if_a_model_had_never_been_there(policy: str) -> None:
    chance = random.Random(policy)
    plain, other = (Scheduler(Cluster(), policy) for _ in range(2))
    others = Openings(plain.cluster), Openings(other.cluster)
    gone = CATALOG.find("A30-24GB").require()
    other.cluster.know(gone)
    for scheduler in (plain, other):
        for name in ("A100-80GB", "H100-80GB"):
            scheduler.cluster.add_node(name, CATALOG.find(name).require(), 3)
    living: list[tuple[int, int]] = []
    for step in range(200):
        if step in (40, 120):
            other.cluster.forget(gone)
        if step == 80:
            other.cluster.know(gone)  # at the end, by other numbers than before
        if living and chance.random() < 0.4:
            one, two = living.pop(chance.randrange(len(living)))
            plain.release(one)
            other.release(two)
            continue
        asked = chance.choice(ASKED)
        here, there = plain.submit(asked), other.submit(asked)
        near = [openings.of(asked, 1, ()) for openings in others]
        assert [(o.gpu, o.placement) for o in near[0]] == [(o.gpu, o.placement) for o in near[1]]
        if isinstance(here, Rejection) or isinstance(there, Rejection):
            assert isinstance(here, Rejection)
            assert isinstance(there, Rejection)
            assert asked.want == "1g.6gb" or here.reason == there.reason
        else:
            assert (here.gpu, here.profile, here.start) == (there.gpu, there.profile, there.start)
            living.append((here.id, there.id))


def test_tables_are_dropped_and_made_again() -> None:
    geometry = CATALOG.find("A30-24GB").require()
    before = state_space(geometry)
    assert state_space(geometry) is before
    drop_tables()
    after = state_space(geometry)
    assert after is not before
    assert after.after_place == before.after_place

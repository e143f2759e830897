"""Requests by profile name and by need."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slicewise import Catalog, Geometry, Need, Reason, Rejection, Request, SlicewiseError


def test_a_name_matches_its_profile_without_waste(a100: Geometry) -> None:
    assert Request("2g.20gb").candidates(a100) == ((Fraction(0), a100.profile("2g.20gb")),)
    assert Request("2g.10gb").candidates(a100) == ()


def test_a_need_matches_every_plain_profile_that_covers_it(a100: Geometry) -> None:
    found = Request(Need(2, 20)).candidates(a100)
    assert {profile.name: waste for waste, profile in found} == {
        "2g.20gb": Fraction(0),
        "3g.40gb": (Fraction(1, 7) + Fraction(20, 80)) / 2,
        "4g.40gb": (Fraction(2, 7) + Fraction(20, 80)) / 2,
        "7g.80gb": (Fraction(5, 7) + Fraction(60, 80)) / 2,
    }
    assert Request(Need(8, 1)).candidates(a100) == ()


def test_a_request_can_be_limited_to_models(a100: Geometry) -> None:
    assert Request("1g.10gb", ("H100-80GB-SXM5",)).candidates(a100) == ()
    assert Request("1g.10gb", (a100.model,)).candidates(a100)


def test_memory_is_ignored_if_the_model_states_none() -> None:
    thor = Catalog.builtin().find("Thor-iGPU").require()
    assert {p.name: w for w, p in Request(Need(2, 0)).candidates(thor)} == {
        "2g.0gb": Fraction(0),
        "3g.0gb": Fraction(1, 6),
    }


@pytest.mark.parametrize("need", [(-1, 5), (1, -5), (1, float("nan")), (1, float("inf"))])
def test_an_impossible_need_is_refused(need: tuple[int, float]) -> None:
    with pytest.raises(SlicewiseError, match="a need of"):
        Need(*need)


def test_text_of_requests() -> None:
    assert str(Request(Need(2, 20), ("A30", "A100-80GB"))) == (
        "2 compute slices and 20 GB on A30 or A100-80GB"
    )
    rejection = Rejection(Request("1g.10gb"), Reason.CAPACITY, "all is full")
    assert not rejection
    assert str(rejection) == "all is full"

"""Quantities of the Kubernetes API."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api.quantities import amount


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("128974848", 128974848),
        ("+3", 3),
        ("-3", -3),
        ("1.5", Fraction(3, 2)),
        ("1.", 1),
        (".5", Fraction(1, 2)),
        ("100m", Fraction(1, 10)),
        ("1000m", 1),
        ("5u", Fraction(5, 10**6)),
        ("5n", Fraction(5, 10**9)),
        ("1k", 1000),
        ("12M", 12 * 10**6),
        ("12E", 12 * 10**18),
        ("1Ki", 1024),
        ("1.5Gi", 3 * 2**29),
        ("1Ei", 2**60),
        ("2e3", 2000),
        ("12E3", 12000),
        ("1e-3", Fraction(1, 1000)),
        ("1E+2", 100),
    ],
)
def test_every_form_of_a_quantity(text: str, number: int | Fraction) -> None:
    assert amount(text) == number
    assert isinstance(amount(text), int) == (Fraction(number).denominator == 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 Gi",
        "1K",
        "1gi",
        "Gi",
        "1e",
        "--1",
        "1.2.3",
        "1e999999999",
        "1m1",
        "\u0661",
        "9" * 99,
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(SlicewiseError, match="is not a quantity") as caught:
        amount(text)
    assert repr(text[:64]) in str(caught.value)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", "m", "k", "Gi", "e2"]))
def test_a_suffix_is_a_factor(number: int, suffix: str) -> None:
    assert amount(f"{number}{suffix}") == number * Fraction(amount(f"1{suffix}"))

"""Parses the quantities of Kubernetes ("100m", "1Gi", "1.5", "2e3") into exact numbers.

A quantity is a decimal number with a decimal or binary suffix, or with an exponent.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from slicewise.core.errors import SlicewiseError

Amount = int | Fraction
"""An exact number: an int if it is whole."""

_TEXT = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))"
    r"(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]+))?"
)
_BINARY = {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {
    letter: Fraction(10) ** power
    for letter, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
}
_FACTORS = {**_BINARY, **_DECIMAL}
_MAX_TEXT = 64
_MAX_EXPONENT = 100
"""A limit far above real quantities: a huge exponent would exhaust memory."""


@lru_cache(maxsize=1 << 14)
def amount(text: str) -> Amount:
    """The exact number of a quantity.

    >>> amount("1Gi"), amount("100m")
    (1073741824, Fraction(1, 10))
    """
    match = _TEXT.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None or abs(int(match["exponent"] or 0)) > _MAX_EXPONENT:
        raise SlicewiseError(
            f"{text[:_MAX_TEXT]!r} is not a quantity; write it like 2, 1.5, 100m, 20Gi or 2e3"
        )
    number = Fraction(match["number"])
    if match["suffix"]:
        number *= _FACTORS[match["suffix"]]
    elif match["exponent"]:
        number *= Fraction(10) ** int(match["exponent"])
    return number.numerator if number.denominator == 1 else number

"""Means with 95% intervals over independent runs, and paired differences.

Every figure is a ratio of sums over runs (accepted over arrived, occupied over capacity). Its
interval follows from the residuals of the runs, as usual for ratio estimators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95% confidence interval (NaN: unknown)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numerators and denominators of one figure, run by run."""

    numerators: Floats
    denominators: Floats

    @property
    def value(self) -> float:
        """The ratio of the sums; NaN if the denominator is zero."""
        total = float(self.denominators.sum())
        return float(self.numerators.sum()) / total if total else math.nan

    @property
    def residuals(self) -> Floats:
        """The contribution of each run; their spread is the uncertainty of the figure."""
        mean = float(self.denominators.mean())
        if not mean:
            return np.full(len(self.numerators), math.nan)
        return (self.numerators - self.value * self.denominators) / mean

    def estimate(self) -> Estimate:
        """Return the figure with its interval."""
        return _around(self.value, self.residuals)

    def minus(self, other: Ratio) -> Estimate:
        """Return the difference to another figure of the same runs, paired run by run."""
        return _around(self.value - other.value, self.residuals - other.residuals)


def _around(value: float, residuals: Floats) -> Estimate:
    runs = len(residuals)
    if runs < 2:
        return Estimate(value, math.nan, math.nan)
    error = float(np.std(residuals, ddof=1)) / math.sqrt(runs)
    margin = student_t(runs - 1) * error
    return Estimate(value, value - margin, value + margin)


def student_t(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t distribution.

    Exact for 1 and 2 degrees of freedom, otherwise the Cornish-Fisher expansion around the normal
    quantile with an error below 0.2%.
    """
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = 1.959963984540054
    n = degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )

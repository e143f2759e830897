"""What is compared: five quantities, how each is written, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass

from slicewise.paper.published import RATIO

_ROUNDING = 1e-9
"""So that a difference of exactly the margin counts as within it."""


@dataclass(frozen=True)
class Quantity:
    """One figure of the paper that ours is held against."""

    key: str
    """The column of the results."""
    title: str
    meaning: str
    margin: float
    """The largest difference that still counts as agreement."""
    relative: float = 0.0
    """A share of the published value that is allowed instead, where that is more."""
    decimals: int = 3
    unit: str = ""
    """What the numbers are in; said once, in headings."""

    def within(self, published: float, ours: float, margin: float | None = None) -> bool:
        """Whether two values agree, by this quantity's margin or another one."""
        if margin is None:
            margin = max(self.margin, self.relative * abs(published))
        return abs(ours - published) <= margin + _ROUNDING

    def text(self, value: float) -> str:
        """A value with the digits that mean something."""
        return f"{value:.{self.decimals}f}"

    @property
    def margin_text(self) -> str:
        """The margin in words."""
        text = f"{self.margin:g}{' points' if self.unit == '%' else ''}"
        if not self.relative:
            return text
        return f"{text} or {100 * self.relative:g}% of the published value, whichever is more"


QUANTITIES = (
    Quantity(
        "acceptance_rate",
        "Acceptance rate",
        "the share of the requests in the row that found a place",
        margin=0.04,
    ),
    Quantity(
        RATIO,
        "Scheduled workloads relative to MFI",
        "the requests placed so far, divided by those that MFI placed of the same arrivals",
        margin=0.06,
    ),
    Quantity(
        "utilization_percent",
        "Utilization",
        "the memory slices in use",
        margin=3,
        decimals=1,
        unit="%",
    ),
    Quantity(
        "active_gpus_percent",
        "Active GPUs",
        "the GPUs with at least one instance",
        margin=6,
        decimals=1,
        unit="%",
    ),
    Quantity(
        "fragmentation",
        "Fragmentation",
        "the score F, averaged over all GPUs and over all demand rows",
        margin=0.1,
        relative=0.25,
    ),
)
"""In the order in which they are shown."""

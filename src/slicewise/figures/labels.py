"""What the figures of the results are called, and the range each is shown in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FigureLabel:
    """One column of the results as a drawing names it."""

    title: str
    axis: str
    top: float | None = None
    """The largest value it can have, where there is one."""


LABELS = {
    "scheduled_ratio_to_mfi": FigureLabel("Scheduled workloads", "relative to MFI", 1.0),
    "acceptance_rate": FigureLabel("Acceptance rate", "accepted share of arrivals", 1.0),
    "utilization_percent": FigureLabel("Utilization", "slices in use (%)", 100.0),
    "active_gpus_percent": FigureLabel("Active GPUs", "GPUs in use (%)", 100.0),
    "fragmentation": FigureLabel("Fragmentation", "mean score F over GPUs"),
}
"""By column, in the order in which they are shown."""

PANELS = tuple(name for name in LABELS if name != "fragmentation")
"""The four that the paper shows together."""

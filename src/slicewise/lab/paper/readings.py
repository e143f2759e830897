"""The two readings of the paper: what its text says, and what its numbers are consistent with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from slicewise.core.geometry import Geometry
from slicewise.lab.experiment import Published
from slicewise.lab.measure import Measure
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.published import REFERENCE
from slicewise.lab.workload import Lifetime
from slicewise.policies.registry import policy


class ReadingName(StrEnum):
    """A reading by name."""

    DATA = "data"
    TEXT = "text"


@dataclass(frozen=True)
class PaperReading:
    """A way to run the paper's experiment."""

    name: ReadingName
    summary: str
    gpus: int
    measure: Measure
    mfi: str
    """Our policy for the paper's MFI; it names the guide."""

    @property
    def schemes(self) -> Mapping[str, str]:
        """The paper's names of our policies."""
        return {self.mfi: REFERENCE, **_BASELINES}

    def experiment(
        self, geometry: Geometry, runs: int, seed: int, lifetime: Lifetime = Lifetime.CAPACITY
    ) -> Published:
        """Return the published experiment under this reading."""
        return Published(
            mixes=tuple(parse_mix(name, geometry) for name in PUBLISHED),
            policies=tuple(map(policy, self.schemes)),
            gpus=self.gpus,
            runs=runs,
            seed=seed,
            lifetime=lifetime,
            measure=self.measure,
        )


_BASELINES = {
    "best-fit-strict": "BF-BI",
    "worst-fit-strict": "WF-BI",
    "first-fit-strict": "FF",
    "round-robin-strict": "RR",
}

READINGS = {
    reading.name: reading
    for reading in (
        PaperReading(
            ReadingName.DATA,
            "what the published numbers are consistent with",
            gpus=40,
            measure=Measure.COMPUTE,
            mfi="mfi-either",
        ),
        PaperReading(
            ReadingName.TEXT, "what the paper says", gpus=100, measure=Measure.MEMORY, mfi="mfi"
        ),
    )
}
"""In the order of the report."""


@dataclass(frozen=True)
class Point:
    """A point on which the readings differ."""

    title: str
    data: str
    text: str
    confidence: str
    """Of the reading ``data``."""


DIFFERENCES = (
    Point(
        "GPUs", "40", "100", "about 97%: arithmetic; acceptance and scheduled workloads fit, too"
    ),
    Point(
        "Utilization",
        "the mean of compute utilization (of 7 slices) and memory utilization (of 8)",
        "memory slices in use",
        "about 85%: one fit",
    ),
    Point(
        "Fragmentation is averaged over",
        "the active GPUs, after every request",
        "all GPUs, at the end of each demand row",
        "about 90%: one fit",
    ),
    Point(
        "A profile counts in F",
        "if its compute slices fit in the free ones; it adds its compute slices",
        "if its memory slices fit in the free ones; it adds its memory slices",
        "about 90% for the condition, 80% for the weight",
    ),
    Point(
        "A blocked window counts",
        "if a compute slice behind it is free",
        "if a memory slice in it is free",
        "about 55%: neighbours fit nearly as well",
    ),
    Point(
        "MFI is guided by",
        "the same F, in which a free memory slice also makes a window count (mfi-either)",
        "the F of the text (mfi)",
        "about 40%: the best of 204 guides tried, and not the metric itself",
    ),
)


def common_points(lifetime: str) -> list[str]:
    """Return what both readings share; ``lifetime`` is the rule that ran."""
    return [
        _LIFETIMES.get(lifetime, f"Lifetimes follow the rule {lifetime!r}."),
        "A 7g.80gb instance takes a window of 8 memory slices, as on the hardware; the paper's "
        "table counts its 7 compute slices.",
        "The baselines are strict: they pick one GPU by its free compute and memory, and when "
        "that one has no legal window the request is rejected without trying another.",
        "The row 0.85 covers demand from 85% up to 90% of capacity; acceptance is counted over "
        "the arrivals in it; scheduled workloads, utilization and active GPUs are read at its "
        "end.",
    ]


_LIFETIMES = {
    "capacity": "Lifetimes are uniform between 1 slot and as many slots as the cluster has "
    "memory slices (8 per GPU). The paper's own words give the number of slots until demand "
    "reaches 100%, but with that utilization stays near 50%, far from its figures.",
    "saturation": "Lifetimes are uniform between 1 slot and the number of slots until demand "
    "reaches 100% of capacity. These are the paper's own words, but utilization then stays near "
    "50%, far from its figures; the rule \u201ccapacity\u201d comes closer.",
}

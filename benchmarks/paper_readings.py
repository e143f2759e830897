"""Try other guides for MFI and other numbers of GPUs in the reading of the paper that fits.

    .venv/bin/python benchmarks/paper_readings.py [--runs N] [--seed N]...

The tables are in docs/research/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from slicewise import Geometry, load_geometry
from slicewise.lab.executors import local_executor
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.published import REFERENCE, published
from slicewise.lab.paper.readings import READINGS, PaperReading, ReadingName
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import Outcome, run_missing

DATA = READINGS[ReadingName.DATA]
GUIDES = ("mfi", "mfi-overlap", "mfi-compute", "mfi-either", "least-lost")
MORE_GPUS = (80, 120)


def ignore(units: int) -> None:
    """Ignore progress."""


def comparisons(
    geometry: Geometry, readings: Sequence[PaperReading], runs: int, seed: int
) -> list[Comparison]:
    """Run the readings together and compare each with the paper."""
    outcomes = [Outcome(reading.experiment(geometry, runs, seed)) for reading in readings]
    run_missing(outcomes, local_executor(None), ignore)
    return [
        compare(
            published_rows(outcome, reading.mfi, reading.schemes),
            mean_fragmentation(outcome, reading.schemes),
        )
        for reading, outcome in zip(readings, outcomes, strict=True)
    ]


def line(title: str, comparison: Comparison) -> str:
    """Return a row of the table: MFI's active GPUs and F, and the count."""
    mfi = [
        cell.text(cell.ours)
        for figure in ("active_gpus_percent", "fragmentation")
        for cell in comparison.of(figure)
        if cell.policy == REFERENCE
    ]
    count = f"{comparison.agreeing} of {len(comparison.cells)}"
    return f"{title:<12} {' '.join(f'{number:>6}' for number in mfi)}   {count}"


def main() -> None:
    """Print a table per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, action="append")
    options = parser.parse_args()
    geometry = load_geometry("A100-80GB")
    paper = published()
    for seed in options.seed or [1]:
        print(f"seed {seed}: MFI's active GPUs (3 distributions), its F (4), figures in margin")
        theirs = [
            f"{by_policy[REFERENCE]:.3f}"
            for figure in ("active_gpus_percent", "fragmentation")
            for by_policy in paper.figures[figure].values()
        ]
        print(f"{'published':<12} {' '.join(f'{number:>6}' for number in theirs)}")
        guided = [replace(DATA, mfi=name) for name in GUIDES]
        sized = [replace(DATA, gpus=gpus) for gpus in MORE_GPUS]
        found = comparisons(geometry, [*guided, *sized], options.runs, seed)
        titles = [*GUIDES, *(f"{gpus} GPUs" for gpus in MORE_GPUS)]
        for title, comparison in zip(titles, found, strict=True):
            print(line(title, comparison))


if __name__ == "__main__":
    main()

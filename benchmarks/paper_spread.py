"""Show how much chance there is in the number of figures within their margin.

    .venv/bin/python benchmarks/paper_spread.py [--reading data|text] [--blocks N] [--seed N]...

A block is 500 runs, as many as the paper has. The table is in docs/research/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from statistics import mean

from slicewise import load_geometry
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.published import REFERENCE, published
from slicewise.lab.paper.readings import READINGS, PaperReading, ReadingName
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import Outcome, run_experiment


def ignore(units: int) -> None:
    """Ignore progress."""


def compared(outcome: Outcome, reading: PaperReading, runs: Iterable[int]) -> Comparison:
    """Compare some of the runs with the paper."""
    chosen = frozenset(runs)
    part = replace(
        outcome,
        samples={
            cell: {run: sample for run, sample in samples.items() if run in chosen}
            for cell, samples in outcome.samples.items()
        },
    )
    return compare(
        published_rows(part, reading.mfi, reading.schemes),
        mean_fragmentation(part, reading.schemes),
    )


def deviations(comparison: Comparison, blocks: int) -> str:
    """Return the root mean square of the differences by quantity, in standard errors of a block.

    Cells with hardly any spread are left out: the acceptance of MFI, which rejects a few requests
    in 500 runs, and policies that always use every GPU.
    """
    found: list[str] = []
    for quantity in comparison.quantities:
        squares = [
            cell.difference**2 / (error**2 * blocks)
            for cell in comparison.judged(quantity.key)
            if (error := (cell.half_interval or 0) / 1.96) > 0
            and (quantity.key, cell.policy) != ("acceptance_rate", REFERENCE)
        ]
        found.append(f"{quantity.title} {mean(squares) ** 0.5:.1f} ({len(squares)} cells)")
    return ", ".join(found)


def main() -> None:
    """Print the counts of the blocks and of all runs, per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reading", type=ReadingName, default=ReadingName.DATA)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--seed", type=int, action="append")
    options = parser.parse_args()
    reading, size = READINGS[options.reading], published().runs
    geometry = load_geometry("A100-80GB")
    for seed in options.seed or [1]:
        runs = size * options.blocks
        outcome = run_experiment(reading.experiment(geometry, runs, seed), None, ignore)
        counts = [
            compared(outcome, reading, range(begin, begin + size)).agreeing
            for begin in range(0, runs, size)
        ]
        whole = compared(outcome, reading, range(runs))
        print(f"seed {seed}, {options.blocks} blocks of {size} runs: {counts}")
        print(f"  mean {mean(counts):.1f}; all {runs:,} runs together: {whole.agreeing}")
        outside = [cell for cell in whole.cells if not cell.within]
        for cell in outside:
            print(
                f"  outside: {cell.quantity.title}, {cell.distribution} {cell.policy}: "
                f"{cell.text(cell.ours)} against {cell.text(cell.published)}"
            )
        print(f"  deviations in standard errors: {deviations(whole, options.blocks)}")


if __name__ == "__main__":
    main()

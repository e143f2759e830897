"""Compare the disciplines of waiting at several loads. Prints the tables of docs/queue.md.

    .venv/bin/python benchmarks/queue_table.py [RUNS] [LOAD,...] [SCENARIO,...] [DURATION] [SEED]

100 A100-80GB with least-lost; a request gives up after one mean lifetime. The defaults take about
two hours on two cores.
"""

from __future__ import annotations

import argparse

from slicewise import load_geometry, policy
from slicewise.lab.queueing import Queueing, queueing_rows
from slicewise.lab.results import Row
from slicewise.lab.runner import run_experiment
from slicewise.lab.tenants import scenario

FIGURES = {
    "others' wait": ("affected", "mean_wait_lifetimes", 100, 1),
    "mean wait": ("all", "mean_wait_lifetimes", 100, 1),
    "gave up": ("all", "gave_up_share", 100, 1),
    "7g gave up": ("7g.80gb", "gave_up_share", 100, 1),
    "false waits": ("all", "false_wait_share", 100, 1),
    "util.": ("all", "utilization_percent", 1, 1),
    "Jain": ("all", "fairness", 1, 3),
    "attempts": ("all", "attempts_per_pass", 1, 1),
}


def cell(row: Row, figure: str, scale: float, digits: int) -> str:
    """Format a figure with its interval."""
    value, interval = row[figure], row[f"{figure}_ci95"]
    if not isinstance(value, float):
        return "-"
    if not isinstance(interval, list):
        return f"{scale * value:.{digits}f}"
    return f"{scale * value:.{digits}f} ± {scale * (interval[1] - interval[0]) / 2:.{digits}f}"


def line(rows: list[Row]) -> str:
    """Format the rows of one discipline as a row of the table."""
    by_group = {str(row["name"] or row["group"]): row for row in rows}
    cells = [cell(by_group[group], *figure) for group, *figure in FIGURES.values()]  # type: ignore[arg-type]
    return f"| {rows[0]['load']:g} | `{rows[0]['discipline']}` | {' | '.join(cells)} |"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("runs", type=int, nargs="?", default=20)
    made.add_argument("loads", nargs="?", default="0.85,0.95,1.05", help="separated by commas")
    made.add_argument("scenarios", nargs="?", default="flood,starving", help="separated by commas")
    made.add_argument("duration", type=int, nargs="?", default=8, help="in longest lifetimes")
    made.add_argument("seed", type=int, nargs="?", default=1)
    return made


def main(options: argparse.Namespace) -> None:
    """Run every scenario and load."""
    scenarios = tuple(
        scenario(name, load_geometry("A100-80GB")) for name in options.scenarios.split(",")
    )
    print(f"100 A100-80GB, least-lost, {options.runs} runs; waits in % of the mean lifetime")
    for each in scenarios:
        print(f"\n{each.name}\n\n| load | discipline | {' | '.join(FIGURES)} |")
        print(f"|--:|---|{'--:|' * len(FIGURES)}")
        for load in map(float, options.loads.split(",")):
            what = Queueing(
                (each.mix,),
                (policy("least-lost"),),
                runs=options.runs,
                seed=options.seed,
                load=load,
                lifetimes=options.duration,
                warmup=2,
                scenarios=(each,),
            )
            rows = queueing_rows(run_experiment(what, None, lambda units: None))
            for way in what.ways:
                print(line([row for row in rows if row["discipline"] == way.name]), flush=True)


if __name__ == "__main__":  # worker processes import this file too
    main(parser().parse_args())

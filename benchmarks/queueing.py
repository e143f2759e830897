"""Measure what waiting is worth: reject at once, fifo, backfill. Prints the table of docs/queue.md.

    .venv/bin/python benchmarks/queueing.py [RUNS] [POLICY,...] [LOAD,...] [SEED]

Uniform requests on 100 A100-80GB. All three get the same arrivals; with a queue, a request gives up
after one mean lifetime. The defaults take about ten minutes on two cores.
"""

from __future__ import annotations

import argparse

from slicewise import Discipline, load_geometry, policy
from slicewise.lab.experiment import Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.queueing import Queued, queue_rows
from slicewise.lab.results import Row, steady_rows
from slicewise.lab.runner import run_experiment

DISCIPLINES = {"fifo": Discipline(), "backfill 16": Discipline(16)}


def percent(row: Row, figure: str, digits: int = 1) -> str:
    """Format a share, or a wait in mean lifetimes, as a percentage with its interval."""
    value, interval = row.get(figure), row.get(f"{figure}_ci95")
    if not isinstance(value, float):
        return "-"
    if not isinstance(interval, list):
        return f"{100 * value:.{digits}f}"
    return f"{100 * value:.{digits}f} ± {50 * (interval[1] - interval[0]):.{digits}f}"


def line(load: float, queue: str, row: Row) -> str:
    """Format a row of the table."""
    utilization = row["utilization_percent"]
    cells = [
        f"{load:g} | `{row['policy']}` | {queue}",
        percent(row, "rejected_share", 2),
        percent(row, "waited_share"),
        percent(row, "mean_wait_lifetimes"),
        percent(row, "wait_p95_lifetimes"),
        percent(row, "wait_p99_lifetimes"),
        f"{utilization:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("runs", type=int, nargs="?", default=20)
    made.add_argument("policies", nargs="?", default="mfi,least-lost", help="separated by commas")
    made.add_argument("loads", nargs="?", default="0.85,0.9,0.95", help="separated by commas")
    made.add_argument("seed", type=int, nargs="?", default=1)
    return made


def main(options: argparse.Namespace) -> None:
    """Run every load with and without a queue, on the same arrivals."""
    runs, seed = options.runs, options.seed
    mixes = (parse_mix("uniform", load_geometry("A100-80GB")),)
    policies = tuple(policy(name) for name in options.policies.split(","))
    print(f"uniform, 100 A100-80GB, {runs} runs, seed {seed}; waits in % of the mean lifetime\n")
    print("| load | policy | queue | rejected % | waited % | mean | 95% | 99% | util. % |")
    print("|--:|---|---|--:|--:|--:|--:|--:|--:|")
    for load in map(float, options.loads.split(",")):
        settings = (mixes, policies, 100, runs, seed)
        steady = Steady(*settings, load=load, oracle=False)
        tables = {"none": steady_rows(run_experiment(steady, None, lambda units: None))}
        for name, discipline in DISCIPLINES.items():
            queued = Queued(*settings, load=load, discipline=discipline)
            tables[name] = queue_rows(run_experiment(queued, None, lambda units: None))
        for place in range(len(policies)):
            for name, rows in tables.items():
                print(line(load, name, rows[place]), flush=True)


if __name__ == "__main__":  # worker processes import this file too
    main(parser().parse_args())

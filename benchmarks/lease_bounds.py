"""What `lease-aware` loses by comparing fewer GPUs. Prints the table of docs/scaling.md.

    .venv/bin/python benchmarks/lease_bounds.py [GPUS] [LOAD] [RUNS] [DURATION] [SEED]

The steady experiment with all ends known on A100-80GB: the share of rejected requests when all GPUs
are compared, and the difference when fewer are, of a state and in all. The arrivals are the same.
The defaults take some minutes on two cores.
"""

from __future__ import annotations

import argparse

import numpy as np

from slicewise import load_geometry
from slicewise.lab.experiment import Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.statistics import Ratio
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost import LeastLost

MIXES = ("uniform", "skew-small", "skew-big", "bimodal")
BOUNDS = ((16, 32), (16, 64), (8, 32))
"""GPUs of a state, and in all."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("gpus", type=int, nargs="?", default=100)
    made.add_argument("load", type=float, nargs="?", default=0.85)
    made.add_argument("runs", type=int, nargs="?", default=60)
    made.add_argument("duration", type=int, nargs="?", default=40)
    made.add_argument("seed", type=int, nargs="?", default=901)
    return made


def main(options: argparse.Namespace) -> None:
    """Run and print a line for each mix."""
    every = LeaseAware(per_state=options.gpus, most=options.gpus)
    bounded = [LeaseAware(per_state=of_state, most=most) for of_state, most in BOUNDS]
    titles = [f"{most}, {of_state} of a state" for of_state, most in BOUNDS]
    print("rejected, %", "least-lost", "the limit", "all", *titles, sep=" | ")
    for name in MIXES:
        mix = parse_mix(name, load_geometry("A100-80GB"))
        experiment = Steady(
            (mix,),
            (LeastLost(), every, *bounded),
            gpus=options.gpus,
            runs=options.runs,
            seed=options.seed,
            load=options.load,
            lifetimes=options.duration,
        )
        found = []
        for entrant in experiment.entrants(0):
            runs = range(options.runs)
            sums = np.array([experiment.simulate(0, entrant, run, lambda _: None) for run in runs])
            found.append(Ratio(sums[:, 1].astype(float), sums[:, 0].astype(float)))
        plain, full, *others, limit = found
        cells = [f"{100 * ratio.value:.3f}" for ratio in (plain, limit, full)]
        for other in others:
            apart = other.minus(full)
            cells.append(f"{100 * apart.value:+.4f} ± {50 * (apart.high - apart.low):.4f}")
        print(name, *cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main(parser().parse_args())

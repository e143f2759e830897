"""Measure the speed of the compiled reproduction relative to the engine and the reference.

Runs all 20 combinations of the published experiment compiled, on all cores as `reproduce` does and
on one. The engine and the plain reference then run a sample of the same runs in the same process.
The ratios are the result; the seconds are for orientation.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

from slicewise import Request, load_geometry, policy
from slicewise.lab.experiment import Published
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.readings import READINGS, ReadingName
from slicewise.lab.runner import run_experiment
from slicewise.lab.workload import fill_up, run_generator
from slicewise.policies.reference import Decision, ReferenceGpu, ReferenceScheduler

TEXT = READINGS[ReadingName.TEXT]


def ignore(units: int) -> None:
    """Ignore progress."""


def whole(runs: int, workers: int | None, on_engine: bool = False) -> float:
    """Return the mean seconds per run of one combination."""
    geometry = load_geometry("A100-80GB")
    mixes = tuple(parse_mix(name, geometry) for name in PUBLISHED)
    policies = tuple(policy(name) for name in TEXT.schemes)
    experiment = Published(mixes, policies, TEXT.gpus, runs, 1, on_engine)
    begin = time.perf_counter()
    run_experiment(experiment, workers, ignore)
    return (time.perf_counter() - begin) / (runs * len(mixes) * len(policies))


def by_reference() -> float:
    """Return the seconds the plain reference takes for one run of MFI on one mix."""
    geometry = load_geometry("A100-80GB")
    mix = parse_mix("uniform", geometry)
    experiment = Published((mix,), (policy("mfi"),), TEXT.gpus, 1, 1)
    arrivals, _ = fill_up(run_generator(1, 0), mix, TEXT.gpus, experiment.lifetime)
    scheduler = ReferenceScheduler([ReferenceGpu(geometry) for _ in range(TEXT.gpus)], "mfi")
    leaving: defaultdict[int, list[Decision]] = defaultdict(list)
    begin = time.perf_counter()
    for slot, (kind, lifetime) in enumerate(zip(arrivals.kinds, arrivals.lifetimes, strict=True)):
        for decision in leaving.pop(slot, ()):
            scheduler.release(decision)
        outcome = scheduler.submit(Request(mix.profiles[kind].name))
        if isinstance(outcome, Decision):
            leaving[slot + int(lifetime)].append(outcome)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print the ratios."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    whole(1, 1)  # compile, or load the compiled code
    combinations = len(PUBLISHED) * len(TEXT.schemes)
    together = whole(runs, None)
    alone = whole(runs, 1)
    engine = whole(2, 1, on_engine=True)
    reference = by_reference()
    print(f"{combinations} combinations x {runs} runs, compiled")
    print(f"  all cores {together * runs * combinations:8.2f} s (worker processes starting incl.)")
    print(f"  one core  {alone * runs * combinations:8.2f} s = {alone * 1e6:.0f} us a run")
    print("times that, for the same work on one core:")
    print(f"  the readable engine (a sample of 2 runs)      {engine / alone:8.0f} x")
    print(f"  the plain reference (MFI on uniform, one run) {reference / alone:8.0f} x")


if __name__ == "__main__":
    main()

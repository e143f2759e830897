"""How fast is the compiled reproduction? As a ratio to the readable engine and the reference.

Runs all 20 combinations of the published experiment compiled, on all cores as `reproduce` does
and on one; then the engine and the plain reference do a sample of the same runs in this very
process. Prints seconds for orientation; the ratios are what counts.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict

from slicewise import Request, load_geometry, policy
from slicewise.cli.reproduce import GPUS, SCHEMES
from slicewise.policies.reference import Decision, ReferenceGpu, ReferenceScheduler
from slicewise.sim.experiment import Published
from slicewise.sim.mix import PUBLISHED, parse_mix
from slicewise.sim.runner import run_experiment
from slicewise.sim.workload import fill_up, run_generator


def ignore(units: int) -> None:
    """Nobody watches."""


def whole(runs: int, workers: int | None, on_engine: bool = False) -> float:
    """Seconds a run of one combination takes, on average over all of them."""
    geometry = load_geometry("A100-80GB")
    mixes = tuple(parse_mix(name, geometry) for name in PUBLISHED)
    policies = tuple(policy(name) for name in SCHEMES)
    experiment = Published(mixes, policies, GPUS, runs, 1, on_engine)
    begin = time.perf_counter()
    run_experiment(experiment, workers, ignore)
    return (time.perf_counter() - begin) / (runs * len(mixes) * len(policies))


def by_reference() -> float:
    """Seconds the plain reference takes for one run of MFI on one mix."""
    geometry = load_geometry("A100-80GB")
    mix = parse_mix("uniform", geometry)
    experiment = Published((mix,), (policy("mfi"),), GPUS, 1, 1)
    arrivals, _ = fill_up(run_generator(1, 0), mix, GPUS, experiment.lifetime)
    scheduler = ReferenceScheduler([ReferenceGpu(geometry) for _ in range(GPUS)], "mfi")
    leaving: defaultdict[int, list[Decision]] = defaultdict(list)
    begin = time.perf_counter()
    for slot, (kind, lifetime) in enumerate(zip(*arrivals, strict=True)):
        for decision in leaving.pop(slot, ()):
            scheduler.release(decision)
        outcome = scheduler.submit(Request(mix.profiles[kind].name))
        if isinstance(outcome, Decision):
            leaving[slot + int(lifetime)].append(outcome)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    whole(1, 1)  # compiles, or loads what was compiled
    combinations = len(PUBLISHED) * len(SCHEMES)
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

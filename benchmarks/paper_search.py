"""Search for the F of the paper's Fig. 6, and for the guide of its MFI.

    .venv/bin/python benchmarks/paper_search.py [--runs N] [--seed N]

Scores 90 formulas on the published F of the four baselines, which do not depend on MFI, and then
runs MFI under each of them. The tables are in docs/research/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import mean

from slicewise import Cluster, Geometry, Instance, Scheduler, load_geometry, policy
from slicewise.core.compute_fragmentation import Use, arrangements, compute_window
from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.lab.experiment import Published
from slicewise.lab.measure import Measure
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.comparison import Cell, compare
from slicewise.lab.paper.published import REFERENCE, published
from slicewise.lab.paper.readings import READINGS, ReadingName
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import run_experiment
from slicewise.lab.workload import Lifetime, fill_up, run_generator
from slicewise.policies.base import Preference, TablePolicy

DATA = READINGS[ReadingName.DATA]
BASELINES = {ours: theirs for ours, theirs in DATA.schemes.items() if theirs != REFERENCE}
MODEL = "A100-80GB"


@dataclass(frozen=True)
class Formula:
    """Which profiles count, which of their windows, and how much they add."""

    fits: str
    """The free slices that a profile must fit in: compute, memory or both."""
    blocked: str
    """The occupied slices that block a window: compute, memory or either."""
    free: str
    """The slices of a blocked window of which one must be free; any: no such condition."""
    adds: str

    def __str__(self) -> str:
        return f"{self.fits:<8} {self.blocked:<8} {self.free:<8} {self.adds:<8}"

    def of(self, geometry: Geometry, use: Use, taken: int) -> int:
        """Return F while these compute slices are taken."""
        total = 0
        for profile in geometry.plain_profiles:
            room = {
                "compute": profile.compute <= geometry.compute - use.compute,
                "memory": profile.size <= geometry.slices - use.mask.bit_count(),
            }
            if not (all(room.values()) if self.fits == "both" else room[self.fits]):
                continue
            weight = profile.compute if self.adds == "compute" else profile.size
            for start in profile.starts:
                memory, compute = profile.window(start), compute_window(geometry, profile, start)
                occupied = {"compute": bool(compute & taken), "memory": bool(memory & use.mask)}
                stranded = {"compute": bool(compute & ~taken), "memory": bool(memory & ~use.mask)}
                blocked = {**occupied, "either": any(occupied.values())}
                counts = {
                    **stranded,
                    "either": any(stranded.values()),
                    "both": all(stranded.values()),
                    "any": True,
                }
                total += weight * (blocked[self.blocked] and counts[self.free])
        return total


FORMULAS = tuple(
    Formula(*choice)
    for choice in product(
        ("compute", "memory", "both"),
        ("compute", "memory", "either"),
        ("compute", "memory", "either", "both", "any"),
        ("compute", "memory"),
    )
)


@cache
def table(geometry: Geometry, formula: Formula) -> Mapping[Use, int]:
    """Return F by use, in the arrangement with the least F."""
    return {
        use: min(formula.of(geometry, use, taken) for taken in masks)
        for use, masks in arrangements(geometry).items()
    }


class Guided(TablePolicy):
    """MFI under a formula."""

    summary = "MFI under another F."

    def __init__(self, name: str, formula: Formula) -> None:
        self.name = name  # type: ignore[misc]  # an instance per formula, not a class
        self.formula = formula

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The feasible start where F grows least, then the lowest."""
        scores, used = table(gpu.geometry, self.formula), gpu.used[0]
        growth = [
            (
                scores[Use(gpu.mask | profile.window(start), used + profile.compute)]
                - scores[Use(gpu.mask, used)],
                start,
            )
            for start in gpu.feasible_starts(profile)
        ]
        return Preference(*min(growth)) if growth else None


def visits(task: tuple[str, str, int, int]) -> dict[Use, float]:
    """Return the mean share of the active GPUs in each use, over all slots of all runs."""
    mix_name, baseline, runs, seed = task
    geometry = load_geometry(MODEL)
    mix = parse_mix(mix_name, geometry)
    shares: defaultdict[Use, float] = defaultdict(float)
    slots = 0
    for run in range(runs):
        arrivals, _ = fill_up(run_generator(seed, run), mix, DATA.gpus, Lifetime.CAPACITY)
        cluster = Cluster.of(geometry, DATA.gpus)
        scheduler = Scheduler(cluster, policy(baseline))
        ending: defaultdict[int, list[Instance]] = defaultdict(list)
        active: dict[int, Use] = {}

        for slot, (kind, lifetime) in enumerate(
            zip(arrivals.kinds, arrivals.lifetimes, strict=True)
        ):
            changed = ending.pop(slot, [])
            for instance in changed:
                scheduler.release(instance)
            outcome = scheduler.submit(mix.profiles[kind].name)
            if isinstance(outcome, Instance):
                ending[slot + int(lifetime)].append(outcome)
                changed.append(outcome)
            for gpu in {instance.gpu for instance in changed}:
                state = cluster.state(gpu)
                active[gpu] = Use(state.mask, state.used[0])
                if not state.mask:
                    del active[gpu]
            for use in active.values():
                shares[use] += 1 / len(active)
        slots += len(arrivals.kinds)
    return {use: share / slots for use, share in shares.items()}


def fit(runs: int, seed: int) -> list[tuple[Formula, float, float]]:
    """Return every formula with the relative errors of the baselines' F: mean square root, most."""
    geometry = load_geometry(MODEL)
    cells = list(product(PUBLISHED, BASELINES))
    with ProcessPoolExecutor() as workers:
        found = list(workers.map(visits, [(*cell, runs, seed) for cell in cells]))
    fitted: list[tuple[Formula, float, float]] = []
    for formula in FORMULAS:
        scores = table(geometry, formula)
        errors = [
            sum(share * scores[use] for use, share in shares.items())
            / published().figures["fragmentation"][mix][BASELINES[baseline]]
            - 1
            for (mix, baseline), shares in zip(cells, found, strict=True)
        ]
        fitted.append((formula, mean(e * e for e in errors) ** 0.5, max(map(abs, errors))))
    return sorted(fitted, key=lambda each: each[1])


def distinct() -> list[Formula]:
    """Return one formula of all that give the same F everywhere."""
    geometry = load_geometry(MODEL)
    found: dict[tuple[int, ...], Formula] = {}
    for formula in FORMULAS:
        found.setdefault(tuple(table(geometry, formula).values()), formula)
    return list(found.values())


def guides(runs: int, seed: int) -> list[tuple[Formula, list[Cell]]]:
    """Run MFI under each formula; return its active GPUs and its F, the best fit first."""
    geometry = load_geometry(MODEL)
    formulas = {f"guide-{number}": formula for number, formula in enumerate(distinct())}
    experiment = Published(
        mixes=tuple(parse_mix(name, geometry) for name in PUBLISHED),
        policies=tuple(Guided(name, formula) for name, formula in formulas.items()),
        gpus=DATA.gpus,
        runs=runs,
        seed=seed,
        measure=Measure.COMPUTE,
    )
    outcome = run_experiment(experiment, None, ignore)
    fitted: list[tuple[Formula, list[Cell]]] = []
    for name, formula in formulas.items():
        label = {name: REFERENCE}
        comparison = compare(
            [row for row in published_rows(outcome, name, label) if row["policy"] == REFERENCE],
            [row for row in mean_fragmentation(outcome, label) if row["policy"] == REFERENCE],
        )
        fitted.append(
            (formula, [*comparison.of("active_gpus_percent"), *comparison.of("fragmentation")])
        )
    return sorted(fitted, key=lambda each: max(map(in_margins, each[1])))


def in_margins(cell: Cell) -> float:
    """Return the size of a difference as a multiple of its margin."""
    return abs(cell.difference) / max(
        cell.quantity.margin, cell.quantity.relative * abs(cell.published)
    )


def ignore(units: int) -> None:
    """Ignore progress."""


def main() -> None:
    """Print both searches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shown", type=int, default=12)
    options = parser.parse_args()
    heading = f"{'fits':<8} {'blocked':<8} {'free':<8} {'adds':<8}"
    print(f"{len(FORMULAS)} formulas on the F of {len(BASELINES)} baselines, the best first")
    print(f"{heading} {'error, rms':>11} {'largest':>8}")
    for formula, error, most in fit(options.runs, options.seed)[: options.shown]:
        print(f"{formula} {error:>11.1%} {most:>8.1%}")
    found = guides(options.runs, options.seed)
    both = sum(all(cell.within for cell in cells) for _, cells in found)
    print(f"\n{len(found)} different formulas as the guide of MFI, the best first")
    print(f"{heading} MFI's active GPUs (3), its F (4); ! outside the margin")
    for formula, cells in found[: options.shown]:
        texts = (cell.text(cell.ours) + ("" if cell.within else "!") for cell in cells)
        print(f"{formula} {' '.join(f'{text:>6}' for text in texts)}")
    print(f"{both} of {len(found)} within the margins in all 7 figures")


if __name__ == "__main__":
    main()

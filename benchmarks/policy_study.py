"""Compare the default policy with all others. Prints the tables of docs/study.md.

    .venv/bin/python benchmarks/policy_study.py [MODEL ...] [--loads 0.85,0.9] [--runs N]
        [--fewer N] [--engine-runs N] [--seed N] [--workers N]

For every model and load: the rejections of each policy, and the paired difference from the default.
Policies close to the default have the most runs. Those known to be far off have fewer, and those
that examine GPUs one by one fewer still, because each of their runs takes a hundred times as long.
Run number n has the same arrivals in all of them. No policy was chosen on the default seed. All of
it takes about an hour on two cores.

`MODEL` may also be `partial-mixes` (H100-80GB, workloads without some of the profiles) or
`published` (the paper's experiment: does the default accept as much as MFI?).
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import numpy as np

from slicewise import Geometry, load_geometry, policy, policy_names
from slicewise.lab.experiment import ORACLE, PUBLISHED_COLUMNS, Published, Steady
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.progress import run_with_progress
from slicewise.lab.results import Row, steady_rows
from slicewise.lab.workload import BINS
from slicewise.policies.base import TablePolicy
from slicewise.policies.registry import DEFAULT

PAPER = {name: name for name in ("uniform", "skew-small", "skew-big", "bimodal")}
OF_THREE = {
    "uniform": (1 / 3, 1 / 3, 1 / 3),
    "skew-small": (0.60, 0.30, 0.10),
    "skew-big": (0.10, 0.30, 0.60),
    "bimodal": (0.45, 0.10, 0.45),
}
"""The same four distributions for models with three plain profiles, smallest first."""
PARTIAL = {
    "1g+4g": "1g.10gb=0.7,4g.40gb=0.3",
    "1g+3g": "1g.10gb=0.5,3g.40gb=0.5",
    "1g+2g+3g": "1g.10gb=0.6,2g.20gb=0.2,3g.40gb=0.2",
    "2g+3g+7g": "2g.20gb=0.5,3g.40gb=0.25,7g.80gb=0.25",
}
PARTS = {
    "A100-80GB": (0.85, 0.90, 1.0),
    "H100-80GB": (0.85, 0.90),
    "A30": (0.85, 0.90),
    "RTX-PRO-6000-Blackwell-96GB": (0.85, 0.90),
    "partial-mixes": (0.85, 0.90),
    "published": (),
}
"""The parts of the study, and their default loads."""
FAR = ("worst-fit", "round-robin")
"""With the strict ones: policies that are far from the default everywhere."""


class Cell(NamedTuple):
    """The rejections of one policy with one distribution, in percent, relative to the default."""

    rejected: float
    half: float
    more: float
    more_half: float
    runs: int

    def apart_from(self, other: Cell) -> bool:
        """Return whether the two unpaired intervals do not overlap."""
        return abs(self.rejected - other.rejected) > self.half + other.half


def mixes_of(part: str) -> tuple[Mix, ...]:
    """Return the distributions of a part by their short names."""
    geometry = load_geometry("H100-80GB" if part == "partial-mixes" else part)
    texts = PARTIAL if part == "partial-mixes" else PAPER
    if len(geometry.plain_profiles) == 3:
        texts = {name: _of_three(geometry, shares) for name, shares in OF_THREE.items()}
    parsed = ((name, parse_mix(text, geometry)) for name, text in texts.items())
    return tuple(Mix(name, geometry, mix.profiles, mix.probabilities) for name, mix in parsed)


def _of_three(geometry: Geometry, shares: tuple[float, ...]) -> str:
    names = [p.name for p in sorted(geometry.plain_profiles, key=lambda profile: profile.size)]
    return ",".join(f"{name}={share}" for name, share in zip(names, shares, strict=True))


def tiers(options: argparse.Namespace) -> list[tuple[list[str], int]]:
    """Group all policies except the default by their number of runs."""
    others = [name for name in policy_names() if name != DEFAULT]
    slow = [name for name in others if not isinstance(policy(name), TablePolicy)]
    far = [n for n in others if n not in slow and (n in FAR or n.endswith("-strict"))]
    near = [name for name in others if name not in slow and name not in far]
    return [(near, options.runs), (far, options.fewer), (slow, options.engine_runs)]


def measure(part: str, load: float, options: argparse.Namespace) -> dict[str, list[Cell]]:
    """Return, by policy, a cell for each distribution."""
    cells: dict[str, list[Cell]] = {}
    for names, runs in tiers(options):
        experiment = Steady(
            mixes_of(part),
            (policy(DEFAULT), *map(policy, names)),
            runs=runs,
            seed=options.seed,
            load=load,
            oracle=not cells,
        )
        found: dict[str, list[Cell]] = {}
        for row in steady_rows(run_with_progress(experiment, options.workers, "slots")):
            found.setdefault(str(row["policy"]), []).append(_cell(row))
        cells = found | cells  # keep the default's cells of the first tier, which has the most runs
    return cells


def _cell(row: Row) -> Cell:
    figures: list[float] = []
    for name in ("rejected_share", "rejected_share_difference"):
        value, interval = row[name], row[f"{name}_ci95"]
        if not isinstance(value, float) or not isinstance(interval, list):
            figures += [math.nan, math.nan]  # no oracle for this distribution
        else:
            figures += [100 * value, 50 * (interval[1] - interval[0])]
    runs = row["runs"]
    assert isinstance(runs, int)
    rejected, half, more, more_half = figures
    return Cell(rejected, half, more, more_half, runs)


def print_cells(cells: dict[str, list[Cell]], names: list[str]) -> None:
    """Print the rejected shares, and the differences from the default with a summary."""
    base = cells[DEFAULT]
    ranked = sorted(cells, key=lambda name: sum(cell.rejected for cell in cells[name]))
    print("\n| rejected, % | runs |", " | ".join(names), "|")
    print("|---|--:|", "--:|" * len(names))
    for name in ranked:
        figures = [f"{cell.rejected:.3f} ± {cell.half:.3f}" for cell in cells[name]]
        print(f"| `{name}` | {cells[name][0].runs} |", " | ".join(figures), "|")
    print(f"\n| more than `{DEFAULT}`, apart? |", " | ".join(names), "|")
    print("|---|", "--:|" * len(names))
    for name in ranked:
        if name not in (DEFAULT, ORACLE):
            figures = [
                f"{cell.more:+.3f} ± {cell.more_half:.3f} "
                f"{'yes' if cell.apart_from(ours) else 'no'}"
                for cell, ours in zip(cells[name], base, strict=True)
            ]
            print(f"| `{name}` |", " | ".join(figures), "|")
    print()
    rivals = [cells[name] for name in ranked if name not in (DEFAULT, ORACLE)]
    for at, name in enumerate(names):
        ours = base[at]
        below = sum(c[at].more - c[at].more_half > 0 for c in rivals)
        above = sum(c[at].more + c[at].more_half < 0 for c in rivals)
        apart = sum(c[at].more > 0 and c[at].apart_from(ours) for c in rivals)
        share = ours.rejected / cells["mfi"][at].rejected
        print(
            f"- {name}: {share:.0%} of `mfi`; of {len(rivals)} others, paired below {below}, "
            f"above {above}; intervals apart from {apart}"
        )


def print_published(options: argparse.Namespace) -> None:
    """Print the rejections of the default and of MFI in the paper's experiment."""
    geometry = load_geometry("A100-80GB")
    mixes = tuple(parse_mix(name, geometry) for name in PAPER)
    experiment = Published(mixes, (policy("mfi"), policy(DEFAULT)), runs=500, seed=options.seed)
    outcome = run_with_progress(experiment, options.workers, "runs")
    asked, accepted = (PUBLISHED_COLUMNS.index(name) for name in ("arrivals", "scheduled"))
    print(f"\n### published, 100 A100-80GB, 500 runs, seed {options.seed}\n")
    print(f"| | requested | rejected by `mfi` | by `{DEFAULT}` | bins behind |")
    print("|---|--:|--:|--:|--:|")
    for m, mix in enumerate(mixes):
        runs = outcome.paired_runs(m)
        mfi, ours = (np.array([outcome.samples[m, p][run] for run in runs]) for p in (0, 1))
        total = int(mfi[:, :, asked].sum())
        rejected = [total - int(cells[:, -1, accepted].sum()) for cells in (mfi, ours)]
        behind = int((ours[:, :, accepted].sum(0) < mfi[:, :, accepted].sum(0)).sum())
        print(f"| {mix.name} | {total} | {rejected[0]} | {rejected[1]} | {behind} of {BINS} |")


def main() -> None:
    """Run the given parts and print each when it is done."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="MODEL", help=", ".join(PARTS))
    parser.add_argument("--loads", help="separated by commas (default: those of the study)")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--fewer", type=int, default=100)
    parser.add_argument("--engine-runs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"{min(unknown)!r} is not one of {', '.join(PARTS)}")
    for part in options.parts or PARTS:
        if part == "published":
            print_published(options)
            continue
        loads = map(float, options.loads.split(",")) if options.loads else PARTS[part]
        for load in loads:
            print(f"\n### {part}, load {load:.2f}, 100 GPUs, seed {options.seed}")
            print_cells(measure(part, load, options), [mix.name for mix in mixes_of(part)])


if __name__ == "__main__":  # worker processes import this file too
    main()

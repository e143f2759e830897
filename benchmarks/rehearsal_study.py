"""What rehearsals are worth: the figures of the chapter on `rehearsed` in docs/study.md.

Parts, each with the limit beside, paired with `least-lost` on the same arrivals:

- ``mixes``: the paper's mixes at three loads, and some that lack profiles, rehearsed in the run
- ``random``: mixes drawn by a seed, rehearsed once on an estimate of their demand, then compared
- ``models``: the same on H100, A30 and RTX PRO 6000
- ``leases``: the paper's mixes under `lease-aware`, by what is known of lifetimes
- ``known``: the same under `rehearsed`, which finds out within the run what knowing is worth
- ``drift``: mixes that change within the run, by parts of the run
- ``cost``: the processor time of one rehearsal

Every line is printed when it is known, so that a run that is stopped has its results. With
``--checkpoint``, finished runs are kept in a file: a study that was stopped goes on from there, and
one with more runs begins with those of an earlier one. A file belongs to one version of the code.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from slicewise import Geometry, Profile, Request, load_geometry, policy
from slicewise.core.states import GpuState
from slicewise.engine.demand import DemandEstimate
from slicewise.engine.rehearsal import Rehearsal
from slicewise.lab.checkpoint import Checkpoint, load_finished
from slicewise.lab.executors import local_executor
from slicewise.lab.experiment import Steady
from slicewise.lab.mix import PUBLISHED, Mix, parse_mix
from slicewise.lab.rehearsal import rehearse
from slicewise.lab.results import Row, steady_rows
from slicewise.lab.runner import Outcome, run_missing
from slicewise.lab.sustained import Drift, DriftKind, Knowledge, Sustained, drift
from slicewise.policies.base import Key, Policy, ScorePolicy
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.rehearsed import Choice, Rehearsed, table_for

PARTIAL = (
    "4g.40gb=0.39,3g.40gb=0.05,2g.20gb=0.56",
    "2g.20gb=0.5,3g.40gb=0.5",
    "1g.10gb=0.34,2g.20gb=0.33,3g.40gb=0.33",
    "4g.40gb=0.33,2g.20gb=0.33,1g.20gb=0.34",
    "1g.10gb=0.5,7g.80gb=0.5",
    "1g.10gb=0.7,4g.40gb=0.3",
)
MODELS = ("H100-80GB", "A30-24GB", "RTX-PRO-6000-Blackwell-96GB")
REQUESTS = 3000
"""What an estimate has seen before the rehearsal of parts that rehearse once."""


def main() -> None:
    """Run the parts that were named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("mixes", "random", "models", "leases", "known", "drift", "cost")
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--runs", type=int, default=200, help="of each mix (default 200)")
    parser.add_argument("--mixes", type=int, default=100, help="random ones (default 100)")
    parser.add_argument("--gpus", type=int, default=100)
    parser.add_argument("--loads", type=float, nargs="+", default=None)
    parser.add_argument("--seed", type=int, default=0x782A872, help="of mixes and arrivals")
    parser.add_argument("--only", default="", help="mixes, models or drifts with this in the name")
    parser.add_argument("--checkpoint", type=Path, help="a file that keeps finished runs")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    for part in options.parts:
        print(f"# {part}: {options.runs} runs, seed {options.seed}", flush=True)
        globals()[f"_{part}"](options)


def _run(steady: Steady, options: argparse.Namespace) -> list[Row]:
    """Run what the checkpoint does not have, and return the rows."""
    outcome = Outcome(steady)
    if options.checkpoint is None:
        run_missing([outcome], local_executor(options.workers), lambda done: None)
        return steady_rows(outcome)
    load_finished(options.checkpoint, [outcome])
    with Checkpoint(options.checkpoint, [steady]) as checkpoint:
        executor = local_executor(options.workers)
        run_missing([outcome], executor, lambda done: None, checkpoint.keep)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return steady_rows(outcome)


def _mixes(options: argparse.Namespace) -> None:
    a100 = load_geometry("A100-80GB")
    for load in options.loads or (0.85, 0.90, 1.0):
        for name in PUBLISHED:
            if options.only in name:
                _within(parse_mix(name, a100), load, options)
    for name in PARTIAL:
        if options.only in name:
            _within(parse_mix(name, a100), (options.loads or (0.85,))[0], options)


def _within(mix: Mix, load: float, options: argparse.Namespace) -> None:
    """Rehearse within each run."""
    policies = policy("least-lost"), Rehearsed()
    rows = _compare(mix, load, policies, options)
    print(f"{load:.2f} {mix.name:40} {_line(rows)}", flush=True)


def _compare(mix: Mix, load: float, policies: Any, options: argparse.Namespace) -> list[Row]:
    steady = Steady(
        (mix,), policies, options.gpus, options.runs, options.seed % 2**31 + 1, load=load
    )
    return _run(steady, options)


def _line(rows: list[Row]) -> str:
    """Rejected requests in %: least-lost, the other and the limit; the difference; slices."""
    least, other, limit = rows
    text = f"{_share(least)} {_share(other)} {_share(limit)}"
    low, high = cast("list[float]", other["rejected_share_difference_ci95"])
    value = cast("float", other["rejected_share_difference"])
    text += f"  {100 * value:+.3f} ± {50 * (high - low):.3f}"
    slices = cast("float", other["rejected_slices_share"])
    slices -= cast("float", least["rejected_slices_share"])
    return f"{text}  slices {100 * slices:+.3f}"


def _share(row: Row) -> str:
    value = cast("float | None", row["rejected_share"])
    return "     -" if value is None else f"{100 * value:6.3f}"


def _random(options: argparse.Namespace) -> None:
    _once(load_geometry("A100-80GB"), options.mixes, options)


def _models(options: argparse.Namespace) -> None:
    for name in MODELS:
        if options.only in name:
            _once(load_geometry(name), options.mixes, options)


def _once(geometry: Geometry, count: int, options: argparse.Namespace) -> None:
    """Rehearse each mix once, and compare the choice with least-lost on other arrivals.

    A mix that seems worse is compared again with other arrivals: of a hundred that are level, two
    or three seem worse by chance.
    """
    for load in options.loads or (0.85, 0.95):
        better = level = worse = 0
        gap = closed = 0.0
        chosen: dict[str, int] = {}
        for number, mix in enumerate(random_mixes(geometry, count, options.seed)):
            rehearsal = _rehearsed(mix, load, options, number)
            choice = rehearsal.standing.choice
            chosen[choice.form] = chosen.get(choice.form, 0) + 1
            rows = _compare(mix, load, (policy("least-lost"), Chosen(choice)), options)
            least, other, limit = rows
            low, high = cast("list[float]", other["rejected_share_difference_ci95"])
            if low > 0:
                again = argparse.Namespace(**{**vars(options), "seed": options.seed + 1})
                rows = _compare(mix, load, (policy("least-lost"), Chosen(choice)), again)
                low = cast("list[float]", rows[1]["rejected_share_difference_ci95"])[0]
                print(f"  seemed worse, again: {mix.name} {_line(rows)}", flush=True)
            better += high < 0
            worse += low > 0
            level += not (high < 0 or low > 0)
            if limit["rejected_share"] is not None:
                first = cast("float", least["rejected_share"])
                gap += first - cast("float", limit["rejected_share"])
                closed += first - cast("float", other["rejected_share"])
            print(f"{load:.2f} {mix.name:70} {choice.form:24} {_line(rows)}", flush=True)
        share = 100 * closed / gap if gap else math.nan
        print(f"## {geometry.model} {load:.2f}: {better} better, {level} level, {worse} worse; "
              f"{share:.0f}% of the gap; {chosen}", flush=True)  # fmt: skip


class Chosen(ScorePolicy):
    """The table of a choice, under a name of its own."""

    name = "chosen"
    summary = "The table of a choice."

    def __init__(self, choice: Choice) -> None:
        table = table_for(choice)
        assert isinstance(table, ScorePolicy)  # nothing is said of lifetimes here
        self._table = table

    def score(self, gpu: GpuState, profile: Profile, start: int) -> Key:
        """Score as the table does."""
        return self._table.score(gpu, profile, start)


def random_mixes(geometry: Geometry, count: int, seed: int) -> Iterator[Mix]:
    """Draw mixes: two or more of the plain profiles, with probabilities from a flat Dirichlet."""
    rng = np.random.default_rng(seed)
    plain = geometry.plain_profiles
    for _ in range(count):
        some = rng.choice(len(plain), rng.integers(2, len(plain), endpoint=True), replace=False)
        shares = np.round(rng.dirichlet(np.ones(len(some))), 2)
        shares[shares.argmax()] += 1 - shares.sum()
        named = [f"{plain[i].name}={p:.2f}" for i, p in zip(some, shares, strict=True) if p > 0]
        yield parse_mix(",".join(named), geometry)


def _rehearsed(mix: Mix, load: float, options: argparse.Namespace, number: int) -> Rehearsal:
    """Rehearse on an estimate of what arrives at such a cluster."""
    arriving = Sustained(mix, options.gpus, load, REQUESTS)
    rng = np.random.default_rng([options.seed, number])
    arrivals = arriving.draw(rng, 0, REQUESTS)
    ended = arriving.draw(rng, 0, REQUESTS)
    demand = DemandEstimate()
    for at in range(REQUESTS):
        demand.asked(at, Request(mix.profiles[arrivals.kinds[at]].name))
        demand.ended(mix.profiles[ended.kinds[at]].name, float(ended.lifetimes[at]))
    found = rehearse(demand, ((mix.geometry, options.gpus),))
    assert found is not None
    return found


def _leases(options: argparse.Namespace) -> None:
    _by_knowledge(LeaseAware(), tuple(Knowledge), options)


def _known(options: argparse.Namespace) -> None:
    _by_knowledge(Rehearsed(), tuple(Knowledge), options)


def _by_knowledge(
    other: Policy, knowledge: tuple[Knowledge, ...], options: argparse.Namespace
) -> None:
    """Compare on the paper's mixes, by what is said of lifetimes."""
    a100 = load_geometry("A100-80GB")
    for load in options.loads or (0.85,):
        for leases in knowledge:
            for name in PUBLISHED:
                if options.only not in name and options.only != leases:
                    continue
                steady = Steady(
                    (parse_mix(name, a100),),
                    (policy("least-lost"), other),
                    options.gpus,
                    options.runs,
                    options.seed % 2**31 + 1,
                    load=load,
                    leases=leases,
                )
                rows = _run(steady, options)
                least, rest, limit = (cast("float", row["rejected_share"]) for row in rows)
                gap = 100 * (least - rest) / (least - limit)
                line = f"{load:.2f} {name:12} {leases:8} {_line(rows)}  {gap:.0f}% of the gap"
                print(line, flush=True)


def _drift(options: argparse.Namespace) -> None:
    """Compare by parts of the run; print how often a part was worse by more than chance."""
    a100 = load_geometry("A100-80GB")
    hard = parse_mix(PARTIAL[0], a100)
    cases: list[Drift] = [
        drift(DriftKind.SUDDEN, parse_mix("skew-small", a100)),
        drift(DriftKind.SUDDEN, parse_mix(PARTIAL[3], a100), hard),
        drift(DriftKind.GRADUAL, parse_mix(PARTIAL[3], a100), hard),
        drift(DriftKind.APPEARS, parse_mix("uniform", a100)),
        drift(DriftKind.RETURNS, parse_mix("uniform", a100)),
        drift(DriftKind.RETURNS, parse_mix(PARTIAL[4], a100)),
    ]
    for case in cases:
        if options.only not in case.kind:
            continue
        steady = Steady(
            (case.first,),
            (policy("least-lost"), Rehearsed()),
            options.gpus,
            options.runs,
            options.seed % 2**31 + 1,
            drift=(case,),
            windows=16,
            lifetimes=60,
        )
        rows = _run(steady, options)
        print(f"{case.kind:8} {case.first.name} to {case.second.name}: {_line(rows)}", flush=True)
        for row in rows:
            windows = cast("list[Row]", row["windows"])
            shares = " ".join(f"{100 * cast('float', w['rejected_share']):6.2f}" for w in windows)
            print(f"  {row['policy']:12} {shares}", flush=True)
        differences = cast("list[Row]", rows[1]["windows"])
        cells, halves, means = [], [], []
        for window in differences:
            interval = window["rejected_share_difference_ci95"] or [0, 0]
            low, high = cast("list[float]", interval)
            cells.append("worse" if low > 0 else "better" if high < 0 else "level")
            means.append(50 * (low + high))
            halves.append(50 * (high - low))
        print(f"  {'difference':12} {' '.join(f'{mean:+6.2f}' for mean in means)}")
        print(f"  {'±':12} {' '.join(f'{half:6.2f}' for half in halves)}")
        print(f"  {'':12} {' '.join(f'{cell:>6}' for cell in cells)}", flush=True)


def _cost(options: argparse.Namespace) -> None:
    """Print the processor time of a rehearsal: of the first, and with its tables made."""
    a100 = load_geometry("A100-80GB")
    for name in ("uniform", "bimodal", PARTIAL[0]):
        mix = parse_mix(name, a100)
        _rehearsed(parse_mix("skew-big", a100), 0.85, options, 0)  # compiles
        for again in ("first", "again"):
            begin = time.process_time()
            found = _rehearsed(mix, 0.85, options, 0)
            seconds = time.process_time() - begin
            print(
                f"{name:40} {again} {seconds:.2f} s, {len(found.findings)} candidates", flush=True
            )


if __name__ == "__main__":
    main()

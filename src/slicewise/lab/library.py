"""Experiments from Python: what the commands of the laboratory run, as functions.

Each returns a `Result`: rows of figures that can be shown as a table, drawn, and turned into a data
frame. The same arguments give the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import slicewise
from slicewise.catalog import load_geometry
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.checkpoint import FILE_NAME, Checkpoint, load_finished
from slicewise.lab.executors import local_executor
from slicewise.lab.experiment import Published, Steady, Tick
from slicewise.lab.migration import Migration, migration_rows
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.paper.readings import READINGS, ReadingName
from slicewise.lab.planned import planned
from slicewise.lab.planning import Count, Question
from slicewise.lab.progress import progress as progress_bar
from slicewise.lab.progress import report_slow_policies
from slicewise.lab.queueing import Queueing, queueing_rows
from slicewise.lab.result import Result
from slicewise.lab.results import published_rows, steady_rows
from slicewise.lab.runner import Outcome, missing_units, run_missing
from slicewise.lab.sustained import Knowledge, LifetimeLaw
from slicewise.lab.sweep_file import load_sweep, summary_rows
from slicewise.lab.tables import Row, published_table, replay_table, steady_table
from slicewise.lab.trace_input import TraceOptions, load_trace
from slicewise.lab.trace_replay import GPUS_PER_NODE, compare
from slicewise.policies.base import Policy, TablePolicy
from slicewise.policies.registry import check_different, policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Policies = str | Policy | Iterable[str | Policy]
"""Policies by name, or as objects, such as one of your own."""
Model = str | Path | Geometry
"""A GPU model by name, by the path of its file, or as an object."""
Distribution = str | Mapping[str, float] | Mix
"""The name of a distribution, or the share of each profile."""

E = TypeVar("E", bound=StrEnum)

POLICIES = ("mfi", "least-lost", "mfi-overlap", "first-fit", "best-fit", "worst-fit", "round-robin")
PLANNED = ("least-lost", "best-fit", "mfi", "first-fit", "peer-parvagpu", "peer-nvidia-dra")

_INTERRUPTED = "Interrupted: the figures cover the finished runs."


def simulate(
    policies: Policies = POLICIES,
    distributions: Distribution | Sequence[Distribution] = "uniform",
    *,
    experiment: str = "steady",
    model: Model = "A100-80GB",
    gpus: int = 100,
    runs: int = 20,
    seed: int = 1,
    load: float = 0.85,
    duration: int = 40,
    warmup: int = 3,
    oracle: bool = True,
    lifetimes: str = "uniform",
    leases: str | None = None,
    migrate: float | None = None,
    gpus_per_node: int = 8,
    workers: int | None = 1,
    progress: bool = True,
    cache: str | Path | None = None,
) -> Result:
    """Compare policies on the same arrivals.

    ``experiment`` is steady (a constant ``load`` for ``duration`` longest lifetimes) or published
    (the paper's: an empty cluster is filled once). ``migrate`` allows that many moves for each
    arrival. With ``workers`` of None all cores are used; a script then needs the usual
    ``if __name__ == "__main__"``. Runs that a ``cache`` folder has are not repeated.
    """
    geometry = _geometry(model)
    common: dict[str, Any] = {
        "mixes": _mixes(distributions, geometry),
        "policies": _policies(policies),
        "gpus": gpus,
        "runs": runs,
        "seed": seed,
        "gpus_per_node": gpus_per_node,
    }
    if experiment == "published":
        if migrate is not None or leases is not None:
            raise SlicewiseError("moves and leases need the steady experiment")
        return run(Published(**common), workers=workers, progress=progress, cache=cache)
    if experiment != "steady":
        raise SlicewiseError(f"experiment {experiment!r} is neither steady nor published")
    common |= {"load": load, "lifetimes": duration, "warmup": warmup, "oracle": oracle}
    common["law"] = _one_of(LifetimeLaw, "lifetimes", lifetimes)
    if leases is not None:
        common["leases"] = _one_of(Knowledge, "leases", leases)
    steady = Steady(**common) if migrate is None else Migration(**common, share=migrate)
    return run(steady, workers=workers, progress=progress, cache=cache)


def run(
    experiment: Published | Steady,
    *,
    workers: int | None = 1,
    progress: bool = True,
    cache: str | Path | None = None,
) -> Result:
    """Run an experiment; an interruption keeps the finished runs."""
    outcome = Outcome(experiment)
    published = isinstance(experiment, Published)
    _run_all([outcome], "runs" if published else "slots", workers, progress, cache)
    geometry = experiment.mixes[0].geometry
    settings: dict[str, object] = {
        "experiment": type(experiment).__name__.lower(),
        "model": geometry.model,
        "gpus": experiment.gpus,
        "runs": experiment.runs,
        "seed": experiment.seed,
        "interrupted": outcome.interrupted,
    }
    title = f"{experiment.gpus} {geometry.model}, {experiment.runs} runs"
    if isinstance(experiment, Steady):
        settings["load"] = experiment.load
        title = f"{title} at load {experiment.load:g}"
    return Result(
        title,
        settings,
        tuple(rows_of(outcome)),
        slicewise.__version__,
        (_INTERRUPTED,) if outcome.interrupted else (),
        published_table if published else steady_table,
        _draw_published if published else _draw_steady,
    )


def rows_of(outcome: Outcome) -> Sequence[Row]:
    """Return the rows of an experiment that ran."""
    match outcome.experiment:
        case Published():
            return published_rows(outcome)
        case Queueing():
            return queueing_rows(outcome)
        case Migration():
            return migration_rows(outcome)
        case _:
            return steady_rows(outcome)


def replay(
    trace: str | Path,
    policies: Policies = POLICIES,
    *,
    model: Model = "A100-80GB",
    gpus: int = 100,
    gpus_per_node: int = GPUS_PER_NODE,
    scale: float | None = None,
    compress: float | None = None,
    begin: float | None = None,
    strict: bool = False,
    oracle: bool = True,
    progress: bool = True,
) -> Result:
    """Compare policies on the requests of a recorded trace, a CSV file."""
    geometry, chosen = _geometry(model), _policies(policies)
    recorded = load_trace(Path(trace), TraceOptions(None, scale, compress, begin, strict), geometry)
    timeline = recorded.timeline
    with _shown(progress, len(chosen) + oracle, "replays") as tick:
        rows = compare(timeline, geometry, gpus, chosen, tick, gpus_per_node, oracle)
    settings: dict[str, object] = {
        **recorded.setting,
        "model": geometry.model,
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "begin_seconds": float(timeline.begin),
        "offered_load": timeline.offered_slices / (gpus * geometry.slices),
    }

    def draw(rows: Sequence[Row]) -> Figure:
        from slicewise.lab.figures.replay import replay_bars

        return replay_bars(rows, settings)

    return Result(
        f"{recorded.trace.source} on {gpus} {geometry.model}",
        settings,
        tuple(rows),
        slicewise.__version__,
        tuple(recorded.skipped_lines()),
        replay_table,
        draw,
    )


def plan(
    demand: float,
    policies: Policies = PLANNED,
    distributions: Distribution | Sequence[Distribution] = "uniform",
    *,
    target: float = 0.001,
    count: str = "requests",
    reference: str = "first-fit",
    model: Model = "A100-80GB",
    runs: int | None = None,
    seed: int = 1,
    duration: int = 40,
    warmup: int = 3,
    step: int = 1,
    gpus_per_node: int = 8,
    oracle: bool = True,
    workers: int | None = 1,
    progress: bool = True,
) -> Result:
    """Find the smallest cluster that rejects at most ``target`` of a demand, under each policy.

    ``demand`` is in whole GPUs: the slices requested at a time, on average.
    """
    geometry = _geometry(model)
    chosen = _policies(policies)
    if reference not in {each.name for each in chosen}:
        chosen = (*chosen, policy(reference))
    _check_own(chosen, workers, None)
    question = Question(
        _mixes(distributions, geometry),
        chosen,
        demand,
        target,
        _one_of(Count, "count", count),
        reference,
        seed=seed,
        step=step,
        gpus_per_node=gpus_per_node,
        lifetimes=duration,
        warmup=warmup,
        oracle=oracle,
    )

    def watch(clusters: int, units: int) -> AbstractContextManager[Tick]:
        return _shown(progress, units, "slots")

    return planned(question, runs, workers, watch)


def reproduce(
    *,
    reading: str = "data",
    runs: int = 500,
    seed: int = 1,
    workers: int | None = 1,
    progress: bool = True,
    cache: str | Path | None = None,
) -> Result:
    """Run the paper's experiment: as its numbers fit (data), or as its text says (text)."""
    chosen = READINGS[_one_of(ReadingName, "reading", reading)]
    experiment = chosen.experiment(load_geometry("A100-80GB"), runs, seed)
    return run(experiment, workers=workers, progress=progress, cache=cache)


def sweep(
    file: str | Path,
    *,
    workers: int | None = 1,
    progress: bool = True,
    cache: str | Path | None = None,
) -> Result:
    """Run every combination of an experiment file (TOML)."""
    chosen = load_sweep(file)
    outcomes = chosen.outcomes()
    unit = "slots" if chosen.kind == "steady" else "runs"
    _run_all(outcomes, unit, workers, progress, cache)
    rows = summary_rows(outcomes)
    if not rows:
        raise SlicewiseError("interrupted before every policy had finished a run: no results yet")
    interrupted = any(outcome.interrupted for outcome in outcomes)
    return Result(
        chosen.title or chosen.name,
        {"file": chosen.text, "interrupted": interrupted},
        tuple(rows),
        slicewise.__version__,
        (_INTERRUPTED,) if interrupted else (),
        steady_table if chosen.kind == "steady" else published_table,
        _draw_steady if chosen.kind == "steady" else _draw_published,
    )


# Running


def _run_all(
    outcomes: Sequence[Outcome],
    unit: str,
    workers: int | None,
    progress: bool,
    cache: str | Path | None,
) -> None:
    experiments = [outcome.experiment for outcome in outcomes]
    for experiment in experiments:
        _check_own(experiment.policies, workers, cache)
        if progress:
            report_slow_policies(experiment.policies, experiment.on_engine)
    file = None if cache is None else Path(cache).expanduser() / FILE_NAME
    if file is not None:
        load_finished(file, outcomes)
    executor = local_executor(workers)
    with _shown(progress, missing_units(outcomes), unit) as tick:
        if file is None:
            run_missing(outcomes, executor, tick)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with Checkpoint(file, experiments) as kept:
            run_missing(outcomes, executor, tick, kept.keep)


def _check_own(policies: Sequence[Policy], workers: int | None, cache: str | Path | None) -> None:
    """Refuse what cannot work with a policy that is defined in a notebook or script."""
    for each in policies:
        if type(each).__module__ != "__main__":
            continue
        if workers != 1:
            raise SlicewiseError(
                f"policy {each.name!r} is defined here, where worker processes cannot load it: "
                "use workers=1, or put it into a module"
            )
        if cache is not None and not isinstance(each, TablePolicy):
            raise SlicewiseError(
                f"policy {each.name!r} is defined here and has no tables, so a cache could not "
                "tell when it changes: leave the cache out, or put it into a module"
            )


def _shown(progress: bool, units: int, unit: str) -> AbstractContextManager[Tick]:
    if progress and units:
        return progress_bar(units, unit)
    return nullcontext(lambda done: None)


# Arguments


def _geometry(model: Model) -> Geometry:
    return model if isinstance(model, Geometry) else load_geometry(model)


def _policies(given: Policies) -> tuple[Policy, ...]:
    every = (given,) if isinstance(given, str | Policy) else tuple(given)
    chosen = tuple(policy(each) if isinstance(each, str) else each for each in every)
    check_different(chosen)
    return chosen


def _mixes(given: Distribution | Sequence[Distribution], geometry: Geometry) -> tuple[Mix, ...]:
    every = (given,) if isinstance(given, str | Mapping | Mix) else tuple(given)
    return tuple(_mix(each, geometry) for each in every)


def _mix(given: Distribution, geometry: Geometry) -> Mix:
    if isinstance(given, Mix):
        return given
    if isinstance(given, Mapping):
        given = ",".join(f"{name}={share}" for name, share in given.items())
    return parse_mix(given, geometry)


def _one_of(kind: type[E], name: str, value: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise SlicewiseError(f"{name} {value!r} is not one of {known}") from None


# Drawing: matplotlib is loaded when something is drawn


def _draw_steady(rows: Sequence[Row]) -> Figure:
    from slicewise.lab.figures.bars import steady_bars

    return steady_bars(rows)


def _draw_published(rows: Sequence[Row]) -> Figure:
    from slicewise.lab.figures.curves import demand_curves

    return demand_curves(rows, *dict.fromkeys(str(row["distribution"]) for row in rows))

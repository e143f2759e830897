"""`slicewise simulate`: compare policies on simulated arrivals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slicewise.cli.choices import chosen_geometry, chosen_mixes, chosen_policies
from slicewise.cli.options import (
    AsJson,
    CsvFile,
    ExperimentName,
    GeometryFiles,
    Gpus,
    ModelName,
    PlotFile,
    Seed,
    Workers,
    positive_workers,
)
from slicewise.cli.output import (
    Row,
    as_csv,
    as_json,
    prepare_files,
    say_written,
    write_text,
)
from slicewise.cli.queueing import (
    POLICIES,
    DisciplineOption,
    PatienceOption,
    QueueingOptions,
    ReserveAfterOption,
    ReserveShareOption,
    ScenarioOption,
    print_queueing,
)
from slicewise.cli.steady import (
    DriftOption,
    DriftToOption,
    LeasesOption,
    LifetimesOption,
    SteadyOptions,
    print_drift,
)
from slicewise.cli.tables import print_table, rich_table
from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import Experiment, Published, Steady
from slicewise.lab.library import POLICIES as DEFAULT_POLICIES
from slicewise.lab.library import rows_of
from slicewise.lab.migration import Migration
from slicewise.lab.progress import run_with_progress
from slicewise.lab.queueing import Queueing
from slicewise.lab.runner import Outcome
from slicewise.lab.tables import Table, published_table, runs_of, steady_table
from slicewise.lab.workload import Lifetime


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy; repeat, or separate by commas (default: all but the strict ones; "
            f"with --experiment queueing {POLICIES[0]}).",
        ),
    ] = None,
    distribution: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="uniform, skew-small, skew-big, bimodal, or 1g.10gb=0.5,7g.80gb=0.5; "
            "may be repeated (default: uniform).",
        ),
    ] = None,
    model: ModelName = None,
    geometry: GeometryFiles = None,
    gpus: Gpus = 100,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", help="GPUs on a node, for policies that choose a node.")
    ] = 8,
    runs: Annotated[int, typer.Option(metavar="N", help="Independent runs.")] = 20,
    seed: Seed = 1,
    experiment: Annotated[
        ExperimentName,
        typer.Option(
            help="Fill the cluster once, run at a constant load, or let tenants wait for room."
        ),
    ] = ExperimentName.PUBLISHED,
    load: Annotated[
        float, typer.Option(metavar="X", help="Steady, queueing: offered load, 1 is all slices.")
    ] = 0.85,
    duration: Annotated[
        int,
        typer.Option(metavar="N", help="Steady, queueing: length of a run, in longest lifetimes."),
    ] = 40,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Steady, queueing: how much of it is not measured.")
    ] = 3,
    oracle: Annotated[
        bool,
        typer.Option(
            help="Steady: also run the limit, an oracle that rearranges all instances at no cost."
        ),
    ] = True,
    scenario: ScenarioOption = None,
    discipline: DisciplineOption = None,
    patience: PatienceOption = None,
    reserve_after: ReserveAfterOption = None,
    reserve_share: ReserveShareOption = None,
    lifetimes: LifetimesOption = None,
    leases: LeasesOption = None,
    drift: DriftOption = None,
    drift_to: DriftToOption = None,
    migrate: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Steady: moves an arrival earns to rescue rejected requests; 0.02 is 2 in 100.",
        ),
    ] = None,
    lifetime: Annotated[
        Lifetime, typer.Option(help="Published: the rule for the longest lifetime.")
    ] = Lifetime.CAPACITY,
    workers: Workers = None,
    json: AsJson = False,
    csv: CsvFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare policies on the same arrivals, with 95% intervals over the runs."""
    chosen = chosen_geometry(model, geometry)
    options = QueueingOptions(scenario, discipline, patience, reserve_after, reserve_share)
    sustained = SteadyOptions(lifetimes, leases, drift, drift_to)
    waits = experiment is ExperimentName.QUEUEING
    if experiment is not ExperimentName.STEADY:
        sustained.check_unused()
    if migrate is not None and experiment is not ExperimentName.STEADY:
        raise SlicewiseError("--migrate needs --experiment steady")
    if waits and distribution is not None:
        raise SlicewiseError(
            "--distribution: the tenants of a scenario have their own; choose with --scenario"
        )
    settings: dict[str, Any] = {
        "policies": chosen_policies(policy or list(POLICIES if waits else DEFAULT_POLICIES)),
        "gpus": gpus,
        "runs": runs,
        "seed": seed,
        "gpus_per_node": gpus_per_node,
    }
    kind: type[Experiment]
    if waits:
        kind = Queueing
        settings |= {"load": load, "lifetimes": duration, "warmup": warmup}
        settings |= options.settings(chosen)
    else:
        options.check_unused()
        settings["mixes"] = chosen_mixes(distribution or ["uniform"], chosen)
        if experiment is ExperimentName.PUBLISHED:
            kind = Published
            settings["lifetime"] = lifetime
        else:
            kind = Steady
            settings |= {"load": load, "lifetimes": duration, "warmup": warmup, "oracle": oracle}
            settings |= sustained.settings(settings["mixes"], chosen)
            if migrate is not None:
                kind = Migration
                settings["share"] = migrate
    what = kind(**settings)
    prepare_files(csv, plot)
    unit = "runs" if isinstance(what, Published) else "slots"
    outcome = run_with_progress(what, positive_workers(workers), unit)
    rows: list[Row] = [*rows_of(outcome)]
    if csv is not None:
        write_text(csv, as_csv(rows))
    if plot is not None:
        _plot(what, rows, plot)
    if json:
        typer.echo(as_json(_document(outcome, experiment, rows)), nl=False)
    elif isinstance(what, Published):
        _print_published(rows)
    elif isinstance(what, Queueing):
        print_queueing(what, rows)
    else:
        _print_steady(rows)
        if drift is not None:
            print_drift(rows)
    say_written(csv, plot)


def _document(outcome: Outcome, name: ExperimentName, rows: list[Row]) -> dict[str, object]:
    experiment = outcome.experiment
    return {
        "experiment": str(name),
        "model": experiment.mixes[0].geometry.model,
        "gpus": experiment.gpus,
        "runs": experiment.runs,
        "seed": experiment.seed,
        "interrupted": outcome.interrupted,
        "results": rows,
    }


def _print_steady(rows: list[Row]) -> None:
    table = steady_table(rows)
    first, gpus, load = (rows[0][name] for name in ("compared_with", "gpus", "load"))
    title = f"{gpus} GPUs at load {load:g}, {runs_of(rows)} runs; vs {first}: rejected %, paired"
    _print(table, title)


def _print_published(rows: list[Row]) -> None:
    _print(published_table(rows), "at 85% demand (all demand bins: --json or --csv)")


def _print(table: Table, title: str) -> None:
    console = Console(highlight=False)
    print_table(rich_table(table, f"{title}; ± is a 95% interval over runs"), Console())
    for note in table.notes:
        console.print(note, soft_wrap=True)


def _plot(experiment: Experiment, rows: list[Row], path: Path) -> None:
    from slicewise.lab.figures.bars import steady_bars
    from slicewise.lab.figures.curves import demand_curves
    from slicewise.lab.figures.queueing import queueing_bars
    from slicewise.lab.figures.save import save_as

    if isinstance(experiment, Queueing):
        save_as(queueing_bars(rows), path)
    elif isinstance(experiment, Steady):
        save_as(steady_bars(rows), path)
    else:
        save_as(demand_curves(rows, *(mix.name for mix in experiment.mixes)), path)

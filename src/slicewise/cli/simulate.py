"""`slicewise simulate`: any policies, any distribution, any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    runs_of,
    say_written,
    write_text,
)
from slicewise.cli.progress import run_with_progress
from slicewise.cli.tables import print_table
from slicewise.cli.waiting import (
    PATIENCE,
    BackfillOption,
    OvertakesOption,
    PatienceOption,
    PriorityShareOption,
    QueueOption,
    Waiting,
)
from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import ORACLE, Experiment, Published, Steady
from slicewise.sim.migration import Migration, migration_rows
from slicewise.sim.queueing import Queued, queue_rows
from slicewise.sim.results import published_rows, steady_rows
from slicewise.sim.runner import Outcome
from slicewise.sim.workload import Lifetime

DEFAULT_POLICIES = [
    "mfi",
    "least-lost",
    "mfi-overlap",
    "first-fit",
    "best-fit",
    "worst-fit",
    "round-robin",
]


def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy; give several, or commas between (default: ours, but the strict ones).",
        ),
    ] = None,
    distribution: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="uniform, skew-small, skew-big, bimodal, or 1g.10gb=0.5,7g.80gb=0.5; "
            "several may be given (default: uniform).",
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
        ExperimentName, typer.Option(help="Fill up once, or go on at a constant load.")
    ] = ExperimentName.PUBLISHED,
    load: Annotated[
        float, typer.Option(metavar="X", help="Steady: offered load, 1 is all slices.")
    ] = 0.85,
    duration: Annotated[
        int, typer.Option(metavar="N", help="Steady: how many longest lifetimes to run for.")
    ] = 40,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Steady: how many of them are not measured.")
    ] = 3,
    oracle: Annotated[
        bool,
        typer.Option(
            help="Steady: also run the limit, an oracle that rearranges all instances at no cost "
            "(not with a queue)."
        ),
    ] = True,
    queue: QueueOption = None,
    backfill: BackfillOption = None,
    overtakes: OvertakesOption = None,
    patience: PatienceOption = None,
    priority_share: PriorityShareOption = None,
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
    mixes = chosen_mixes(distribution or ["uniform"], chosen)
    policies = chosen_policies(policy or DEFAULT_POLICIES)
    waiting = Waiting(queue, backfill, overtakes, patience, priority_share)
    waiting.check(experiment is ExperimentName.STEADY)
    if migrate is not None and (experiment is not ExperimentName.STEADY or queue is not None):
        raise SlicewiseError("--migrate needs --experiment steady, and no --queue")
    what: Experiment
    if experiment is ExperimentName.PUBLISHED:
        what = Published(
            mixes, policies, gpus, runs, seed, gpus_per_node=gpus_per_node, lifetime=lifetime
        )
    elif migrate is not None:
        what = Migration(
            mixes,
            policies,
            gpus,
            runs,
            seed,
            gpus_per_node=gpus_per_node,
            load=load,
            lifetimes=duration,
            warmup=warmup,
            oracle=oracle,
            share=migrate,
        )
    elif queue is None:
        what = Steady(
            mixes,
            policies,
            gpus,
            runs,
            seed,
            gpus_per_node=gpus_per_node,
            load=load,
            lifetimes=duration,
            warmup=warmup,
            oracle=oracle,
        )
    else:
        what = Queued(
            mixes,
            policies,
            gpus,
            runs,
            seed,
            gpus_per_node=gpus_per_node,
            load=load,
            lifetimes=duration,
            warmup=warmup,
            discipline=waiting.discipline,
            patience=PATIENCE if patience is None else patience,
            priority_share=priority_share or 0.0,
        )
    prepare_files(csv, plot)
    unit = "runs" if isinstance(what, Published) else "slots"
    outcome = run_with_progress(what, positive_workers(workers), unit)
    rows = _rows(outcome)
    if csv is not None:
        write_text(csv, as_csv([_without_groups(row) for row in rows]))
    if plot is not None:
        _plot(what, rows, plot)
    if json:
        typer.echo(as_json(_document(outcome, experiment, rows)), nl=False)
    elif isinstance(what, Published):
        _print_published(rows)
    elif isinstance(what, Queued):
        _print_queued(rows)
    else:
        _print_steady(rows)
    say_written(csv, plot)


def _rows(outcome: Outcome) -> list[Row]:
    match outcome.experiment:
        case Published():
            return [*published_rows(outcome)]
        case Queued():
            return [*queue_rows(outcome)]
        case Migration():
            return [*migration_rows(outcome)]
        case _:
            return [*steady_rows(outcome)]


def _without_groups(row: Row) -> Row:
    """A row without what is told apart inside it: the same columns for every distribution."""
    return {name: value for name, value in row.items() if not isinstance(value, dict)}


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


_Columns = dict[str, tuple[str, float, int]]
"""By heading: the figure, what to multiply it with, and how many digits to show."""


def _print_steady(rows: list[Row]) -> None:
    first = rows[0]["compared_with"]
    columns: _Columns = {
        "rejected %": ("rejected_share", 100, 2),
        "of slices": ("rejected_slices_share", 100, 2),
        "util. %": ("utilization_percent", 1, 1),
        "active %": ("active_gpus_percent", 1, 1),
        "F": ("fragmentation", 1, 2),
        f"vs {first}" if len(str(first)) < 12 else "vs first": (
            "rejected_share_difference",
            100,
            2,
        ),
    }
    if "migrated_share" in rows[0]:
        del columns["active %"]  # a line holds no more
        columns["moves %"] = ("migrated_share", 100, 2)
    gpus, load = (rows[0][name] for name in ("gpus", "load"))
    title = f"{gpus} GPUs at load {load:g}, {runs_of(rows)} runs; vs {first}: rejected %, paired"
    _print_by_distribution(rows, columns, title)
    for missing in dict.fromkeys(r["oracle_missing"] for r in rows if r["policy"] == ORACLE):
        if missing is not None:
            Console().print(f"{ORACLE}: {missing}", highlight=False, soft_wrap=True)


def _print_queued(rows: list[Row]) -> None:
    first = rows[0]
    forever = first["patience_lifetimes"] is None
    urgent = first["priority_share"] != 0
    columns: _Columns = {
        # Nobody gives up who waits for ever; what is left over tells whether the queue grows.
        "left %" if forever else "rejected %": (
            "still_waiting_share" if forever else "rejected_share",
            100,
            2,
        ),
        "waited %": ("waited_share", 100, 1),
        "mean wait": ("mean_wait_lifetimes", 100, 1),
    }
    if urgent:
        columns["first"] = ("priority_mean_wait_lifetimes", 100, 1)
    columns["95%"] = ("wait_p95_lifetimes", 100, 1)
    if not urgent:
        columns["99%"] = ("wait_p99_lifetimes", 100, 1)
    columns["util. %"] = ("utilization_percent", 1, 1)
    behind, overtakes, patience = (
        first[name] for name in ("backfill", "overtakes", "patience_lifetimes")
    )
    title = (
        f"{first['gpus']} GPUs at load {first['load']:g}, {runs_of(rows)} runs; "
        + (f"backfill {behind}, {overtakes} overtakes" if behind else "fifo")
        + (", waiting for ever" if forever else f", patience {patience:g} mean lifetimes")
        + "; waits in % of the mean lifetime"
        + (f", first: of the {first['priority_share']:.0%} with priority" if urgent else "")
        + ("; left: still waiting at the end" if forever else "")
    )
    _print_by_distribution(rows, columns, title)


def _print_published(rows: list[Row]) -> None:
    columns: _Columns = {
        "acceptance": ("acceptance_rate", 1, 3),
        "sched/mfi": ("scheduled_ratio_to_mfi", 1, 3),
        "util. %": ("utilization_percent", 1, 1),
        "active %": ("active_gpus_percent", 1, 1),
        "F": ("fragmentation", 1, 2),
    }
    at_85 = [row for row in rows if row["demand"] == 0.85]
    _print_by_distribution(at_85, columns, "at 85% demand (all demand bins: --json or --csv)")


def _print_by_distribution(rows: list[Row], columns: _Columns, title: str) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0), caption=f"{title}; ± is a 95% interval over runs")
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for distribution in dict.fromkeys(str(row["distribution"]) for row in rows):
        # Written out it can be long: with a line for each profile, it pushes no figures away.
        table.add_row(Text(distribution.replace(",", ",\n"), "bold"))
        for row in rows:
            if row["distribution"] == distribution:
                cells = (_cell(row, *column) for column in columns.values())
                table.add_row(Text(f"  {row['policy']}"), *cells)
    print_table(table, Console())


def _cell(row: Row, figure: str, scale: float, digits: int) -> str:
    value, interval = row[figure], row[f"{figure}_ci95"]
    if not isinstance(value, (int, float)):
        return "-"
    text = f"{value * scale:.{digits}f}"
    if not isinstance(interval, list):
        return text
    return f"{text}±{(interval[1] - interval[0]) / 2 * scale:.{digits}f}"


def _plot(experiment: Experiment, rows: list[Row], path: Path) -> None:
    from slicewise.figures.bars import steady_bars
    from slicewise.figures.demand import demand_curves
    from slicewise.figures.save import save_as
    from slicewise.figures.waiting import waiting_bars

    if isinstance(experiment, Queued):
        save_as(waiting_bars(rows), path)
    elif isinstance(experiment, Steady):
        save_as(steady_bars(rows), path)
    else:
        save_as(demand_curves(rows, *(mix.name for mix in experiment.mixes)), path)

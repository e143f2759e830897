"""`slicewise reproduce`: run the paper's experiment and compare the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import slicewise
from slicewise.catalog import load_geometry
from slicewise.cli.options import DEFAULT_MODEL, AsJson, Seed, Workers, positive_workers
from slicewise.cli.output import Row, as_csv, as_json, prepare_folder, write_text
from slicewise.cli.progress import run_with_progress
from slicewise.cli.tables import print_table
from slicewise.lab.experiment import Published
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.comparison import Cell, Comparison, compare
from slicewise.lab.paper.findings import findings
from slicewise.lab.paper.published import published
from slicewise.lab.paper.report import RunMeta, caption, render_report
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import Outcome
from slicewise.lab.workload import Lifetime
from slicewise.policies.registry import policy

SCHEMES = {
    "mfi": "MFI",
    "best-fit-strict": "BF-BI",
    "worst-fit-strict": "WF-BI",
    "first-fit-strict": "FF",
    "round-robin-strict": "RR",
}
"""Our policies, with the paper's names."""

GPUS = 100


def reproduce(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the results, figures and report.")
    ],
    runs: Annotated[
        int, typer.Option(metavar="N", help="Independent runs (the paper: 500).")
    ] = 500,
    seed: Seed = 1,
    lifetime: Annotated[
        Lifetime,
        typer.Option(help="Longest lifetime: what fits the figures, or the paper's definition."),
    ] = Lifetime.CAPACITY,
    workers: Workers = None,
    json: AsJson = False,
) -> None:
    """Run the published experiment and compare our figures with the paper's."""
    geometry = load_geometry(DEFAULT_MODEL)
    experiment = Published(
        mixes=tuple(parse_mix(name, geometry) for name in PUBLISHED),
        policies=tuple(policy(name) for name in SCHEMES),
        gpus=GPUS,
        runs=runs,
        seed=seed,
        lifetime=lifetime,
    )
    workers = positive_workers(workers)
    prepare_folder(out)
    outcome = run_with_progress(experiment, workers, "runs")
    rows: list[Row] = [*published_rows(outcome, labels=SCHEMES)]
    fragmentation: list[Row] = [*mean_fragmentation(outcome, SCHEMES)]
    comparison = compare(rows, fragmentation)
    document = {
        **_meta(outcome, lifetime),
        "results": rows,
        "mean_fragmentation": fragmentation,
        "comparison": [_compared(cell) for cell in comparison.cells],
    }
    write_text(out / "results.json", as_json(document))
    write_text(out / "results.csv", as_csv(rows))
    svgs = _draw(rows, fragmentation, out)
    meta = RunMeta(
        runs=runs,
        seed=seed,
        gpus=GPUS,
        model=geometry.model,
        lifetime=lifetime,
        version=slicewise.__version__,
        command=f"slicewise reproduce --runs {runs} --seed {seed} --lifetime {lifetime} --out DIR",
        interrupted=_missing(outcome),
    )
    write_text(out / "report.html", render_report(meta, comparison, findings(comparison), svgs))
    if json:
        typer.echo(as_json(document), nl=False)
    else:
        _print(comparison, out)


def _meta(outcome: Outcome, lifetime: Lifetime) -> dict[str, object]:
    experiment = outcome.experiment
    return {
        "experiment": "published",
        "model": experiment.mixes[0].geometry.model,
        "gpus": experiment.gpus,
        "runs": experiment.runs,
        "seed": experiment.seed,
        "lifetime": str(lifetime),
        "interrupted": outcome.interrupted,
        "version": slicewise.__version__,
    }


def _compared(cell: Cell) -> dict[str, object]:
    return {
        "figure": cell.figure,
        "distribution": cell.distribution,
        "policy": cell.policy,
        "published": cell.published,
        "ours": cell.ours,
        "difference": cell.difference,
        "within_margin": cell.within,
    }


def _missing(outcome: Outcome) -> str:
    if not outcome.interrupted:
        return ""
    mixes = outcome.experiment.mixes
    finished = ", ".join(f"{mix.name} {len(outcome.paired_runs(m))}" for m, mix in enumerate(mixes))
    return f"Runs that every policy finished: {finished}, of {outcome.experiment.runs} each."


def _draw(rows: list[Row], fragmentation: list[Row], out: Path) -> dict[str, str]:
    """Write the figures; return some of them as SVG for the report."""
    from slicewise.lab.figures.bars import bars_at_demand, fragmentation_bars
    from slicewise.lab.figures.curves import demand_curves
    from slicewise.lab.figures.save import save_figure, svg_text

    paper = published().figures
    distributions = dict.fromkeys(str(row["distribution"]) for row in rows)
    figures = {
        **{f"demand-{name}": demand_curves(rows, name) for name in distributions},
        "bars": bars_at_demand(rows, published=paper),
        "fragmentation": fragmentation_bars(fragmentation, published=paper),
    }
    for name, figure in figures.items():
        save_figure(figure, out / name)
    shown = ("demand-uniform", "bars", "fragmentation")
    return {
        name: svg_text(figures[name], name, caption(name).alt) for name in shown if name in figures
    }


def _print(comparison: Comparison, out: Path) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, title="Published|ours at 85% demand")
    table.add_column("", no_wrap=True, min_width=10)
    for quantity in comparison.quantities:
        table.add_column(_SHORT[quantity.key], justify="right", no_wrap=True)
    cells = {(c.distribution, c.policy, c.figure): c for c in comparison.cells}
    for distribution in dict.fromkeys(cell.distribution for cell in comparison.cells):
        table.add_row(Text(distribution, "bold"))
        for scheme in SCHEMES.values():
            row = [cells.get((distribution, scheme, q.key)) for q in comparison.quantities]
            table.add_row(f"  {scheme}", *map(_side_by_side, row))
    print_table(table, console)
    outside = sum(not cell.within for cell in comparison.cells)
    console.print(
        f"\n! marks the {outside} of {len(comparison.cells)} figures that lie outside their "
        "margin; F is the mean over all demand. The report says what is not explained."
    )
    typer.echo(f"Report: {out / 'report.html'} (figures, results.json and results.csv beside it)")


_SHORT = {
    "acceptance_rate": "acceptance",
    "scheduled_ratio_to_mfi": "sched/MFI",
    "utilization_percent": "util. %",
    "active_gpus_percent": "active %",
    "fragmentation": "mean F",
}


def _side_by_side(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    digits = 1 if cell.quantity.unit == "%" else 2
    text = f"{cell.published:.{digits}f}|{cell.ours:.{digits}f}"
    return Text(f"{text} ") if cell.within else Text(f"{text}!", "bold")

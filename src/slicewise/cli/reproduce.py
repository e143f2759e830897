"""`slicewise reproduce`: run the paper's experiment and compare the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from slicewise.cli.tables import print_table
from slicewise.lab.paper.arithmetic import impossible, possible_gpus, possible_runs
from slicewise.lab.paper.comparison import Cell, Comparison, SideBySide, compare, side_by_side
from slicewise.lab.paper.published import published
from slicewise.lab.paper.readings import READINGS, PaperReading, ReadingName
from slicewise.lab.paper.report import RunMeta, caption, render_report
from slicewise.lab.progress import run_together_with_progress
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import Outcome
from slicewise.lab.workload import Lifetime

Comparisons = Mapping[str, Comparison]
"""By the name of the reading."""


def reproduce(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the results, figures and report.")
    ],
    reading: Annotated[
        ReadingName,
        typer.Option(
            help="Reading to print and draw: what the numbers fit, or what the paper says. The "
            "report has both."
        ),
    ] = ReadingName.DATA,
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
    experiments = [r.experiment(geometry, runs, seed, lifetime) for r in READINGS.values()]
    workers = positive_workers(workers)
    prepare_folder(out)
    outcomes = dict(
        zip(READINGS, run_together_with_progress(experiments, workers, "runs"), strict=True)
    )
    rows: dict[ReadingName, list[Row]] = {}
    means: dict[ReadingName, list[Row]] = {}
    for name, outcome in outcomes.items():
        schemes = READINGS[name].schemes
        rows[name] = [*published_rows(outcome, READINGS[name].mfi, schemes)]
        means[name] = [*mean_fragmentation(outcome, schemes)]
    comparisons: Comparisons = {name: compare(rows[name], means[name]) for name in READINGS}
    document = {
        "experiment": "published",
        "model": geometry.model,
        "runs": runs,
        "seed": seed,
        "lifetime": str(lifetime),
        "interrupted": any(outcome.interrupted for outcome in outcomes.values()),
        "version": slicewise.__version__,
        "readings": {name: _reading_facts(READINGS[name], comparisons[name]) for name in READINGS},
        "arithmetic": {
            "gpus_of_the_text": published().gpus,
            "impossible_with_them": [
                [each.distribution, each.policy, each.percent]
                for each in impossible(published().gpus)
            ],
            "possible_gpus": possible_gpus(),
            "possible_runs": possible_runs(),
        },
        "results": _labelled(rows),
        "mean_fragmentation": _labelled(means),
        "comparison": [_compared(line) for line in side_by_side(comparisons)],
    }
    write_text(out / "results.json", as_json(document))
    write_text(out / "results.csv", as_csv(_labelled(rows)))
    svgs = _draw(rows[reading], means[reading], out)
    options = f"--reading {reading} --runs {runs} --seed {seed} --lifetime {lifetime}"
    meta = RunMeta(
        reading=reading,
        runs=runs,
        seed=seed,
        model=geometry.model,
        lifetime=lifetime,
        version=slicewise.__version__,
        command=f"slicewise reproduce {options} --out DIR",
        interrupted=_missing(outcomes),
    )
    write_text(out / "report.html", render_report(meta, comparisons, svgs))
    if json:
        typer.echo(as_json(document), nl=False)
    else:
        _print(comparisons, reading, out)


def _reading_facts(reading: PaperReading, comparison: Comparison) -> dict[str, object]:
    return {
        "summary": reading.summary,
        "gpus": reading.gpus,
        "measure": str(reading.measure),
        "mfi": reading.mfi,
        "within_margin": comparison.agreeing,
        "compared": len(comparison.cells),
    }


def _labelled(rows: Mapping[ReadingName, Sequence[Row]]) -> list[Row]:
    return [{"reading": str(name), **row} for name, each in rows.items() for row in each]


def _compared(line: SideBySide) -> dict[str, object]:
    found: dict[str, object] = {
        "figure": line.quantity.key,
        "distribution": line.distribution,
        "policy": line.policy,
        "published": line.published,
    }
    for name, cell in line.cells.items():
        found[str(name)] = {
            "ours": cell.ours,
            "difference": cell.difference,
            "within_margin": cell.within,
        }
    return found


def _missing(outcomes: Mapping[ReadingName, Outcome]) -> str:
    parts: list[str] = []
    for name, outcome in outcomes.items():
        if outcome.interrupted:
            mixes = enumerate(outcome.experiment.mixes)
            parts += [f"{name} {mix.name} {len(outcome.paired_runs(m))}" for m, mix in mixes]
    if not parts:
        return ""
    runs = next(iter(outcomes.values())).experiment.runs
    return f"Runs that every policy finished: {', '.join(parts)}, of {runs} each."


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


def _print(comparisons: Comparisons, reading: ReadingName, out: Path) -> None:
    comparison = comparisons[reading]
    console = Console(highlight=False)
    title = f"Published|ours at 85% demand, reading {reading}"
    table = Table(box=None, pad_edge=False, title=title)
    table.add_column("", no_wrap=True, min_width=10)
    for quantity in comparison.quantities:
        table.add_column(_SHORT[quantity.key], justify="right", no_wrap=True)
    cells = {(c.distribution, c.policy, c.figure): c for c in comparison.cells}
    for distribution in dict.fromkeys(cell.distribution for cell in comparison.cells):
        table.add_row(Text(distribution, "bold"))
        for scheme in READINGS[reading].schemes.values():
            row = [cells.get((distribution, scheme, q.key)) for q in comparison.quantities]
            table.add_row(f"  {scheme}", *map(_side_by_side, row))
    print_table(table, console)
    console.print("\n! marks what lies outside its margin; F is the mean over all demand.")
    counts = (f"{name} {each.agreeing} of {len(each.cells)}" for name, each in comparisons.items())
    gpus = ", ".join(f"{name} {reading.gpus}" for name, reading in READINGS.items())
    console.print(f"Numbers of GPUs: {gpus}; the paper's digits allow {_multiples()}.")
    console.print(f"Figures within their margin: {', '.join(counts)}.")
    typer.echo(f"Report: {out / 'report.html'} (figures, results.json and results.csv beside it)")


def _multiples() -> str:
    """Name the numbers of GPUs that the digits allow."""
    *most, last = possible_gpus()
    return f"{', '.join(map(str, most))} or {last}"


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

"""`slicewise sweep`: an experiment file, run on all cores or a Ray cluster, and resumed at will."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.options import AsJson, Workers, positive_workers
from slicewise.cli.output import as_json, prepare_folder
from slicewise.cli.progress import progress
from slicewise.cli.sweep_results import Plan, document, plan_of, print_rows, write_results
from slicewise.core.errors import SlicewiseError
from slicewise.sim.crew import Crew, local_crew
from slicewise.sim.finished import FinishedLog, load_finished
from slicewise.sim.on_ray import OnRay
from slicewise.sim.runner import Outcome, missing_runs, missing_units, run_missing
from slicewise.sim.sweep import Sweep, summary_rows
from slicewise.sim.sweep_file import load_sweep

_INTERRUPTED = 130


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file (TOML).")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; what is finished there is kept."),
    ] = None,
    workers: Workers = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on this Ray cluster: HOST:PORT, or auto for the one this machine is in.",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say what would be run, and run nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run every combination of an experiment file; what is finished already is not run again."""
    for package in ("numba", "pyarrow", "matplotlib"):
        if find_spec(package) is None:
            raise SlicewiseError(f"{package} is not installed: install slicewise[lab]")
    positive_workers(workers)
    if workers is not None and ray is not None:
        raise SlicewiseError("--workers is for this machine and --ray for a cluster: give one")
    chosen = load_sweep(file)
    outcomes = chosen.outcomes()
    if check:
        if out is not None:
            load_finished(out / "runs", outcomes)
        _print_check(plan_of(chosen, outcomes), json)
        return
    if out is None:
        raise SlicewiseError("--out DIR is missing: the folder the results go to")
    prepare_folder(out)
    damaged = load_finished(out / "runs", outcomes)
    _announce(plan_of(chosen, outcomes), damaged)
    _run(chosen, outcomes, local_crew(workers) if ray is None else OnRay(ray), out)
    rows = summary_rows(outcomes)
    if not rows:
        raise SlicewiseError("interrupted before every policy had finished a run: no results yet")
    write_results(chosen, outcomes, rows, out)
    if json:
        typer.echo(as_json(document(chosen, outcomes, rows)), nl=False)
    else:
        print_rows(rows)
        typer.echo(f"Report: {out / 'report.html'} (summary.parquet and runs.parquet beside it)")
    left = missing_runs(outcomes)
    if left:
        _say(f"Interrupted with {left:,} runs left; the same command goes on from here.")
        raise typer.Exit(_INTERRUPTED)


def _run(chosen: Sweep, outcomes: Sequence[Outcome], crew: Crew, out: Path) -> None:
    unit = "slots" if chosen.kind == "steady" else "runs"
    with (
        progress(missing_units(outcomes), unit) as tick,
        FinishedLog(out / "runs", chosen.experiments) as log,
        # Ray tells of lost nodes on standard output, where only results belong.
        redirect_stdout(sys.stderr),
    ):
        run_missing(outcomes, crew, tick, log.keep)


def _announce(plan: Plan, damaged: int) -> None:
    if damaged:
        _say(f"{damaged} damaged lines in the folder of finished runs: those runs are run again.")
    if plan["finished"]:
        _say(f"{plan['finished']:,} of {plan['runs']:,} runs are finished already.")


def _say(words: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(words, soft_wrap=True)


def _print_check(plan: Plan, json: bool) -> None:
    if json:
        typer.echo(as_json(plan), nl=False)
        return
    for name, given in plan.items():
        if isinstance(given, list) and given:
            words = "; ".join(
                f"{item:g}" if isinstance(item, float) else str(item) for item in given
            )
            typer.echo(f"{name:<14} {words}")
    points = "1 point" if plan["points"] == 1 else f"{plan['points']:,} points"
    typer.echo(
        f"{points}, {plan['runs_each']:,} runs for each distribution and policy: "
        f"{plan['runs']:,} runs, {plan['finished']:,} finished, {plan['missing']:,} to run"
    )

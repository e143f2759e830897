"""`slicewise sweep`: run an experiment file on all cores or a Ray cluster; resumable."""

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
from slicewise.cli.sweep_results import Plan, document, plan_of, print_rows, write_results
from slicewise.core.errors import SlicewiseError
from slicewise.lab.checkpoint import FILE_NAME, Checkpoint, load_finished
from slicewise.lab.executors import Executor, local_executor
from slicewise.lab.progress import progress
from slicewise.lab.ray_executor import RayExecutor
from slicewise.lab.runner import Outcome, missing_runs, missing_units, run_missing
from slicewise.lab.sweep_file import Sweep, load_sweep, summary_rows

_INTERRUPTED = 130


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An experiment file (TOML).")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; finished runs in it are kept."),
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
        bool, typer.Option("--check", help="Print what would run, and run nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run every combination of an experiment file; finished runs are not repeated."""
    for package in ("numba", "pyarrow", "matplotlib", "jinja2"):
        if find_spec(package) is None:
            raise SlicewiseError(f"{package} is not installed: install slicewise[lab]")
    positive_workers(workers)
    if workers is not None and ray is not None:
        raise SlicewiseError("--workers is for this machine and --ray for a cluster: give one")
    chosen = load_sweep(file)
    outcomes = chosen.outcomes()
    if check:
        if out is not None:
            load_finished(out / FILE_NAME, outcomes)
        _print_check(plan_of(chosen, outcomes), json)
        return
    if out is None:
        raise SlicewiseError("--out DIR is missing: the folder the results go to")
    prepare_folder(out)
    load_finished(out / FILE_NAME, outcomes)
    _announce(plan_of(chosen, outcomes))
    _run(chosen, outcomes, local_executor(workers) if ray is None else RayExecutor(ray), out)
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
        _print_note(f"Interrupted with {left:,} runs left; run the same command to resume.")
        raise typer.Exit(_INTERRUPTED)


def _run(chosen: Sweep, outcomes: Sequence[Outcome], executor: Executor, out: Path) -> None:
    unit = "slots" if chosen.kind == "steady" else "runs"
    with (
        progress(missing_units(outcomes), unit) as tick,
        Checkpoint(out / FILE_NAME, chosen.experiments) as log,
        # Ray reports lost nodes on standard output, which is for results only.
        redirect_stdout(sys.stderr),
    ):
        run_missing(outcomes, executor, tick, log.keep)


def _announce(plan: Plan) -> None:
    if plan["finished"]:
        _print_note(f"{plan['finished']:,} of {plan['runs']:,} runs are finished already.")


def _print_note(words: str) -> None:
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

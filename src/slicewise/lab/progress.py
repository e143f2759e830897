"""A progress bar with the time left, on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from slicewise.lab.executors import local_executor
from slicewise.lab.experiment import Experiment, Tick
from slicewise.lab.runner import Outcome, missing_units, run_missing
from slicewise.policies.base import Policy, ScanPolicy, TablePolicy


def run_with_progress(experiment: Experiment, workers: int | None, unit: str) -> Outcome:
    """Run an experiment with a progress display."""
    (outcome,) = run_together_with_progress([experiment], workers, unit)
    return outcome


def run_together_with_progress(
    experiments: Sequence[Experiment], workers: int | None, unit: str
) -> list[Outcome]:
    """Run several experiments on the same workers, with one progress display."""
    for experiment in experiments:
        report_slow_policies(experiment.policies, experiment.on_engine)
    outcomes = [Outcome(experiment) for experiment in experiments]
    with progress(missing_units(outcomes), unit) as tick:
        run_missing(outcomes, local_executor(workers), tick)
    if any(outcome.interrupted and _has_results(outcome) for outcome in outcomes):
        console = Console(stderr=True, highlight=False)
        console.print("Interrupted: the results cover the finished runs.")
    return outcomes


def _has_results(outcome: Outcome) -> bool:
    return any(map(outcome.paired_runs, range(len(outcome.experiment.mixes))))


def report_slow_policies(policies: Iterable[Policy], on_engine: bool = False) -> None:
    """Name the policies that are not compiled, on standard error."""
    console = Console(stderr=True, highlight=False)
    for policy in policies:
        if isinstance(policy, ScanPolicy):
            console.print(f"{policy.name} runs on the slow path: it scans GPUs one by one.")
        elif on_engine or not isinstance(policy, TablePolicy):
            console.print(f"{policy.name} is not compiled: the engine runs it.")


@contextmanager
def progress(total: int, unit: str) -> Iterator[Tick]:
    """Show a bar on a terminal, else a line per 10%; yield a callback for finished work."""
    console = Console(stderr=True, highlight=False)
    show = _bar if console.is_terminal else _lines
    with show(console, total, unit) as tick:
        yield tick


@contextmanager
def _bar(console: Console, total: int, unit: str) -> Iterator[Tick]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("preparing (the first time compiles)", total=total)

        def tick(units: int) -> None:
            bar.update(task, advance=units, description="simulating")

        yield tick


@contextmanager
def _lines(console: Console, total: int, unit: str) -> Iterator[Tick]:
    """For logs and pipes: a line per 10%."""
    done = tenths = 0

    def tick(units: int) -> None:
        nonlocal done, tenths
        done += units
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            console.print(f"simulating: {tenths}0% of {total} {unit}", soft_wrap=True)

    yield tick

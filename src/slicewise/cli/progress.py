"""A progress bar with the time left, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
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

from slicewise.policies.base import ScanPolicy
from slicewise.sim.experiment import Experiment, Tick
from slicewise.sim.runner import Outcome, run_experiment, total_units


def run_with_progress(experiment: Experiment, workers: int | None, unit: str) -> Outcome:
    """Run an experiment and show how far it is."""
    console = Console(stderr=True, highlight=False)
    for policy in experiment.policies:
        if isinstance(policy, ScanPolicy):
            console.print(f"{policy.name} decides on the slow path: it looks at GPUs one by one.")
        elif experiment.runs_on_engine(policy):
            console.print(f"{policy.name} is not compiled: the engine runs it.")
    with progress(total_units(experiment), unit) as tick:
        outcome = run_experiment(experiment, workers, tick)
    if outcome.interrupted and any(map(outcome.paired_runs, range(len(experiment.mixes)))):
        console.print("Interrupted: the results are of the runs that were finished.")
    return outcome


@contextmanager
def progress(total: int, unit: str) -> Iterator[Tick]:
    """A bar on a terminal, a line now and then elsewhere; yields what to call as work is done."""
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
    """For logs and pipes: a line every tenth of the way."""
    done = tenths = 0

    def tick(units: int) -> None:
        nonlocal done, tenths
        done += units
        if done * 10 // total > tenths:
            tenths = done * 10 // total
            console.print(f"simulating: {tenths}0% of {total} {unit}", soft_wrap=True)

    yield tick

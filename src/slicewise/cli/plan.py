"""`slicewise plan`: the GPUs a demand needs under each policy, and the GPUs saved."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.choices import chosen_geometry, chosen_mixes, chosen_policies
from slicewise.cli.options import (
    AsJson,
    CsvFile,
    GeometryFiles,
    ModelName,
    PlotFile,
    Workers,
    positive_workers,
)
from slicewise.cli.output import as_csv, as_json, prepare_files, say_written, write_text
from slicewise.cli.plan_text import print_plan
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.experiment import Tick
from slicewise.lab.library import PLANNED
from slicewise.lab.planned import planned, planned_for_trace
from slicewise.lab.planning import (
    RUNS,
    Count,
    Question,
    percent,
    runs_for,
)
from slicewise.lab.progress import progress, report_slow_policies
from slicewise.lab.result import Result
from slicewise.lab.trace import TraceFormat
from slicewise.lab.trace_input import TraceOptions, load_trace
from slicewise.lab.trace_planning import (
    TraceQuestion,
)
from slicewise.policies.base import Policy, TablePolicy

SEED, DURATION, WARMUP = 1, 40, 3

_QUIET_SLOTS, _QUIET_EVENTS = 20_000_000, 500_000
"""Rounds with no more compiled slots (or trace events) than this are too short for progress."""


def plan(
    load: Annotated[
        str | None,
        typer.Option(
            metavar="DEMAND",
            help="The demand: slices requested at a time, on average, in whole GPUs (85) or in "
            "slices ('680 slices').",
        ),
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            "--mix",
            "--distribution",
            metavar="NAME",
            help="uniform, skew-small, skew-big, bimodal, or 1g.10gb=0.5,7g.80gb=0.5; "
            "may be repeated (default: uniform).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded requests instead: a CSV file, as in replay."),
    ] = None,
    target_rejection: Annotated[
        str, typer.Option(metavar="SHARE", help="The share that may be rejected: 0.1% or 0.001.")
    ] = "0.1%",
    count: Annotated[
        Count, typer.Option(help="Count rejected requests, or the slices they request.")
    ] = Count.REQUESTS,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"A policy; repeat, or separate by commas (default: {', '.join(PLANNED)}).",
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option(metavar="NAME", help="The policy that savings are counted from.")
    ] = "first-fit",
    model: ModelName = None,
    geometry: GeometryFiles = None,
    step: Annotated[
        int, typer.Option(metavar="N", help="Consider only multiples of this many GPUs.")
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", help="GPUs on a node, for policies that choose a node.")
    ] = 8,
    oracle: Annotated[
        bool, typer.Option(help="Also find the limit, an oracle that rearranges all at no cost.")
    ] = True,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Independent runs (default: {RUNS}, more for a low target)."
        ),
    ] = None,
    duration: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Longest lifetimes in a run (default: {DURATION})."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"How many are not measured (default: {WARMUP})."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"The same seed gives the same result (default: {SEED})."),
    ] = None,
    form: Annotated[
        TraceFormat | None,
        typer.Option("--format", help="Trace: what the file is (default: by its header)."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(metavar="X", help="Trace: multiply recorded shares of a GPU (default: 1)."),
    ] = None,
    compress: Annotated[
        float | None,
        typer.Option(metavar="X", help="Trace: divide arrival times (default: 1)."),
    ] = None,
    begin: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Trace: start of the measurement, as in replay."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Trace: refuse a file with a malformed row.")
    ] = False,
    workers: Workers = None,
    json: AsJson = False,
    csv: CsvFile = None,
    curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every cluster tried to this file, as CSV."),
    ] = None,
    plot: PlotFile = None,
) -> None:
    """Find the smallest cluster for a demand under each policy, and the GPUs saved."""
    of_draws = {"--load": load, "--mix": mix, "--runs": runs, "--duration": duration}
    of_draws |= {"--warmup": warmup, "--seed": seed, "--workers": workers}
    of_traces = {"--format": form, "--scale": scale, "--compress": compress, "--begin": begin}
    of_traces |= {"--strict": strict or None}
    if trace is None:
        _refuse(of_traces, "is for recorded requests: it needs --trace")
    else:
        _refuse(of_draws, "is for drawn requests: it cannot be used with --trace")
    chosen = chosen_geometry(model, geometry)
    policies, reference = _with_reference(chosen_policies(policy or list(PLANNED)), reference)
    target = _share(target_rejection)
    prepare_files(csv, plot, curve)

    if trace is None:
        question = Question(
            chosen_mixes(mix or ["uniform"], chosen),
            policies,
            _gpus(load, chosen),
            target,
            count,
            reference,
            seed=SEED if seed is None else seed,
            step=step,
            gpus_per_node=gpus_per_node,
            lifetimes=DURATION if duration is None else duration,
            warmup=WARMUP if warmup is None else warmup,
            oracle=oracle,
        )
        result = _plan_demand(question, runs, positive_workers(workers))
    else:
        options = TraceOptions(form, scale, compress, begin, strict)
        recorded = load_trace(trace, options, chosen)
        timeline = recorded.timeline
        asked = TraceQuestion(
            timeline, chosen, policies, target, count, reference, step, gpus_per_node, oracle
        )
        rounds = _Rounds("replays", _QUIET_EVENTS // len(timeline.events))
        result = planned_for_trace(asked, recorded, rounds)

    if csv is not None:
        write_text(csv, as_csv(result.rows))
    if curve is not None:
        write_text(curve, as_csv(result.curve))
    if plot is not None:
        result.plot().save(plot)
    if json:
        document = {**result.settings, "results": result.rows, "curve": result.curve}
        typer.echo(as_json(document), nl=False)
    else:
        print_plan(result)
    say_written(csv, curve, plot)


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, given in options.items():
        if given is not None:
            raise SlicewiseError(f"{name} {why}")


def _with_reference(policies: tuple[Policy, ...], reference: str) -> tuple[tuple[Policy, ...], str]:
    """Return the policies with the reference added if it is missing, and the reference's name."""
    compared, *others = chosen_policies([reference])
    if others:
        raise SlicewiseError(f"--reference takes one policy, not {reference!r}")
    known = any(policy.name == compared.name for policy in policies)
    return policies if known else (*policies, compared), compared.name


_DEMAND = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>gpus?|slices?)?", re.IGNORECASE)
_SHARE = re.compile(r"(?P<number>[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?) ?(?P<percent>%)?")


def _gpus(load: str | None, geometry: Geometry) -> float:
    """Parse a demand; return it in whole GPUs."""
    if load is None:
        raise SlicewiseError("the demand is missing: --load 85 (GPUs), or --trace FILE")
    found = _DEMAND.fullmatch(load.strip())
    if found is None:
        raise SlicewiseError(
            f"--load {load!r} is not a demand: write 85 (in whole GPUs) or '680 slices'"
        )
    slices = (found["unit"] or "gpus").lower().startswith("slice")
    return float(found["number"]) / (geometry.slices if slices else 1)


def _share(text: str) -> float:
    """Parse a share exactly: 0.1% is one thousandth."""
    found = _SHARE.fullmatch(text.strip().lower())
    if found is None:
        raise SlicewiseError(f"--target-rejection {text!r} is not a share: write 0.1% or 0.001")
    return float(Fraction(found["number"]) / (100 if found["percent"] else 1))


def _plan_demand(question: Question, runs: int | None, workers: int | None) -> Result:
    needed = runs_for(question, runs)
    if runs is None and needed > RUNS:
        Console(stderr=True, highlight=False).print(
            f"{percent(question.target)} is rare: {needed} runs instead of {RUNS}.",
            soft_wrap=True,
        )
    report_slow_policies(question.policies)
    compiled = all(isinstance(policy, TablePolicy) for policy in question.policies)
    return planned(question, needed, workers, _Rounds("slots", _QUIET_SLOTS if compiled else 0))


class _Rounds:
    """Reports each round of a search: the clusters it tries, and its progress if it is long."""

    def __init__(self, unit: str, quiet_units: int) -> None:
        self._unit, self._quiet_units = unit, quiet_units
        self._number = 0

    @contextmanager
    def __call__(self, clusters: int, units: int) -> Iterator[Tick]:
        console = Console(stderr=True, highlight=False)
        self._number += 1
        console.print(f"round {self._number}: {clusters} clusters to try")
        try:
            if console.is_terminal or units > self._quiet_units:
                with progress(units, self._unit) as tick:
                    yield tick
            else:
                yield lambda done: None
        except KeyboardInterrupt:
            console.print("Interrupted: an unfinished search has no result.")
            raise

"""`slicewise plan`: how many GPUs a demand needs, and what the choice of a policy saves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from slicewise.cli.output import Row, as_csv, as_json, prepare_files, say_written, write_text
from slicewise.cli.plan_text import Planned, print_plan
from slicewise.cli.progress import progress
from slicewise.cli.replay import _exact, _in_words, _nothing_left, not_replayed
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.policies.base import Policy, ScanPolicy, TablePolicy
from slicewise.sim.experiment import Tick
from slicewise.sim.planning import (
    RUNS,
    Count,
    Question,
    curve_rows,
    make_plans,
    percent,
    plan_rows,
    runs_for,
)
from slicewise.sim.timeline import Timeline, busy_begin, lay_out
from slicewise.sim.trace import TraceFormat, fit, read_trace
from slicewise.sim.trace_planning import (
    TraceQuestion,
    plan_trace,
    trace_curve_rows,
    trace_plan_rows,
)

DEFAULT_POLICIES = [
    "least-lost",
    "best-fit",
    "mfi",
    "first-fit",
    "peer-parvagpu",
    "peer-nvidia-dra",
]
SEED, DURATION, WARMUP = 1, 40, 3

_QUIET_SLOTS, _QUIET_EVENTS = 20_000_000, 500_000
"""Rounds of no more than this, slots compiled, are over before anyone would look at a log."""


def plan(
    load: Annotated[
        str | None,
        typer.Option(
            metavar="DEMAND",
            help="What has to be carried: slices asked for at a time, on average, in whole GPUs "
            "(85), or as they are ('680 slices').",
        ),
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(
            "--mix",
            "--distribution",
            metavar="NAME",
            help="uniform, skew-small, skew-big, bimodal, or 1g.10gb=0.5,7g.80gb=0.5; "
            "several may be given (default: uniform).",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded requests instead: a CSV file, as in replay."),
    ] = None,
    target_rejection: Annotated[
        str, typer.Option(metavar="SHARE", help="How much may be rejected: 0.1% or 0.001.")
    ] = "0.1%",
    count: Annotated[
        Count, typer.Option(help="Count rejected requests, or the slices they ask for.")
    ] = Count.REQUESTS,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy; give several, or commas between "
            f"(default: {', '.join(DEFAULT_POLICIES)}).",
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option(metavar="NAME", help="The policy that savings are counted from.")
    ] = "first-fit",
    model: ModelName = None,
    geometry: GeometryFiles = None,
    step: Annotated[
        int, typer.Option(metavar="N", help="Only clusters of a multiple of so many GPUs.")
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", help="GPUs on a node, for policies that choose a node.")
    ] = 8,
    oracle: Annotated[
        bool, typer.Option(help="Also the limit, an oracle that rearranges all at no cost.")
    ] = True,
    runs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help=f"Independent runs (default: {RUNS}, or more if the target asks)."
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
        typer.Option(metavar="SECONDS", help="Trace: measure from here on, as in replay."),
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
    """Find the smallest cluster for a demand under each policy, and what choosing one saves."""
    of_draws = {"--load": load, "--mix": mix, "--runs": runs, "--duration": duration}
    of_draws |= {"--warmup": warmup, "--seed": seed, "--workers": workers}
    of_traces = {"--format": form, "--scale": scale, "--compress": compress, "--begin": begin}
    of_traces |= {"--strict": strict or None}
    if trace is None:
        _refuse(of_traces, "is for recorded requests: it goes with --trace")
    else:
        _refuse(of_draws, "is for drawn requests: it does not go with --trace")
    chosen = chosen_geometry(model, geometry)
    policies, reference = _with_reference(chosen_policies(policy or DEFAULT_POLICIES), reference)
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
        result = _of_draws(question, runs, positive_workers(workers))
    else:
        timeline, about, notes = _timeline(trace, form, chosen, scale, compress, begin, strict)
        asked = TraceQuestion(
            timeline, chosen, policies, target, count, reference, step, gpus_per_node, oracle
        )
        result = _of_trace(asked, about, notes)

    if csv is not None:
        write_text(csv, as_csv(result.rows))
    if curve is not None:
        write_text(curve, as_csv(result.curve))
    if plot is not None:
        _plot(result, plot)
    if json:
        document = {**result.setting, "results": result.rows, "curve": result.curve}
        typer.echo(as_json(document), nl=False)
    else:
        print_plan(result)
    say_written(csv, curve, plot)


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, given in options.items():
        if given is not None:
            raise SlicewiseError(f"{name} {why}")


def _with_reference(policies: tuple[Policy, ...], reference: str) -> tuple[tuple[Policy, ...], str]:
    """The policies, the reference among them, and its own name."""
    compared, *others = chosen_policies([reference])
    if others:
        raise SlicewiseError(f"--reference takes one policy, not {reference!r}")
    known = any(policy.name == compared.name for policy in policies)
    return policies if known else (*policies, compared), compared.name


_DEMAND = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?) ?(?P<unit>gpus?|slices?)?", re.IGNORECASE)
_SHARE = re.compile(r"(?P<number>[0-9]*\.?[0-9]+(e-?[0-9]{1,2})?) ?(?P<percent>%)?")


def _gpus(load: str | None, geometry: Geometry) -> float:
    """A demand as it was typed, in whole GPUs."""
    if load is None:
        raise SlicewiseError("say what has to be carried: --load 85 (GPUs), or --trace FILE")
    found = _DEMAND.fullmatch(load.strip())
    if found is None:
        raise SlicewiseError(
            f"--load {load!r} is not a demand: write 85 (in whole GPUs) or '680 slices'"
        )
    slices = (found["unit"] or "gpus").lower().startswith("slice")
    return float(found["number"]) / (geometry.slices if slices else 1)


def _share(text: str) -> float:
    """A share as it was typed: 0.1% is a thousandth, and not the nearest to a tenth of it."""
    found = _SHARE.fullmatch(text.strip().lower())
    if found is None:
        raise SlicewiseError(f"--target-rejection {text!r} is not a share: write 0.1% or 0.001")
    return float(Fraction(found["number"]) / (100 if found["percent"] else 1))


def _of_draws(question: Question, runs: int | None, workers: int | None) -> Planned:
    question = replace(question, runs=runs_for(question, runs))
    console = Console(stderr=True, highlight=False)
    if runs is None and question.runs > RUNS:
        console.print(
            f"{percent(question.target)} is seldom: {question.runs} runs instead of {RUNS}.",
            soft_wrap=True,
        )
    for policy in question.policies:
        if isinstance(policy, ScanPolicy):
            console.print(f"{policy.name} decides on the slow path: it looks at GPUs one by one.")
        elif not isinstance(policy, TablePolicy):
            console.print(f"{policy.name} is not compiled: the engine runs it.")
    compiled = all(isinstance(policy, TablePolicy) for policy in question.policies)
    watch = _Rounds("slots", _QUIET_SLOTS if compiled else 0)
    plans = make_plans(question, workers, watch)
    setting: Row = {
        "demand_gpus": question.demand,
        **_asked(question, question.mixes[0].geometry),
        "runs": question.runs,
        "seed": question.seed,
        "duration": question.lifetimes,
        "warmup": question.warmup,
    }
    title = f"Demand of {question.demand:g} {setting['model']}, {_words(question)}"
    return Planned(title, setting, plan_rows(question, plans), curve_rows(plans))


def _of_trace(question: TraceQuestion, about: Row, notes: Sequence[str]) -> Planned:
    quiet = _QUIET_EVENTS // len(question.timeline.events)
    found, missing = plan_trace(question, _Rounds("replays", quiet))
    setting: Row = {**about, **_asked(question, question.geometry)}
    rows = trace_plan_rows(question, found, missing)
    title = f"{about['trace']} on {setting['model']}, {_words(question)}"
    return Planned(title, setting, rows, trace_curve_rows(question, found), tuple(notes))


def _asked(question: Question | TraceQuestion, geometry: Geometry) -> Row:
    return {
        "model": geometry.model,
        "target_rejected_share": question.target,
        "count": str(question.count),
        "reference": question.reference,
        "step": question.step,
        "gpus_per_node": question.gpus_per_node,
    }


def _words(question: Question | TraceQuestion) -> str:
    of = "requests" if question.count is Count.REQUESTS else "slices asked for"
    return f"at most {percent(question.target)} of {of} rejected"


def _timeline(
    path: Path,
    form: TraceFormat | None,
    geometry: Geometry,
    scale: float | None,
    compress: float | None,
    begin: float | None,
    strict: bool,
) -> tuple[Timeline, Row, list[str]]:
    """A trace as `slicewise replay` reads it, what was read, and what was left out."""
    factor = _exact("--scale", 1 if scale is None else scale, 0.001, 1000)
    squeeze = _exact("--compress", 1 if compress is None else compress, 0.001, 1_000_000)
    start = None if begin is None else _exact("--begin", begin, 0, 1e15)
    recorded = read_trace(path, form, strict=strict)
    if recorded.format is TraceFormat.PLAIN and scale is not None:
        raise SlicewiseError("--scale is for shares of a GPU, and a plain trace has none")
    fitted = fit(recorded, geometry, factor, strict=strict)
    if not fitted.jobs:
        raise SlicewiseError(_nothing_left(recorded, fitted))
    if start is None:
        dense = recorded.format is TraceFormat.ALIBABA
        start = busy_begin(fitted.jobs) if dense else fitted.jobs[0].arrival
    timeline = lay_out(fitted.jobs, start, squeeze)
    about: Row = {
        "trace": recorded.source,
        "format": str(recorded.format),
        "scale": float(factor) if recorded.format is TraceFormat.ALIBABA else None,
        "compress": float(squeeze),
        "begin_seconds": float(timeline.begin),
        "preplaced": timeline.preplaced,
        "arrivals": len(timeline.arrivals),
        "offered_gpus": timeline.offered_slices / geometry.slices,
        **not_replayed(recorded, fitted, timeline),
    }
    return timeline, about, list(_in_words(recorded, fitted, timeline.over_before))


class _Rounds:
    """Shows how far each round is, and says how many clusters it tries."""

    def __init__(self, unit: str, quiet: int) -> None:
        self._unit, self._quiet = unit, quiet
        self._number = 0

    @contextmanager
    def __call__(self, clusters: int, units: int) -> Iterator[Tick]:
        console = Console(stderr=True, highlight=False)
        self._number += 1
        console.print(f"round {self._number}: {clusters} clusters to try")
        try:
            if console.is_terminal or units > self._quiet:
                with progress(units, self._unit) as tick:
                    yield tick
            else:
                yield lambda done: None
        except KeyboardInterrupt:
            console.print("Interrupted: half a search has no answer.")
            raise


def _plot(planned: Planned, path: Path) -> None:
    from slicewise.figures.planning import planning_curves
    from slicewise.figures.save import save_as

    setting = {**planned.setting, "title": planned.title}
    save_as(planning_curves(planned.rows, planned.curve, setting), path)

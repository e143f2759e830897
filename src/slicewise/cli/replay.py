"""`slicewise replay`: recorded requests instead of drawn ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slicewise.cli.choices import chosen_geometry, chosen_policies
from slicewise.cli.options import AsJson, CsvFile, GeometryFiles, Gpus, ModelName, PlotFile
from slicewise.cli.output import Row, as_csv, as_json, prepare_files, say_written, write_text
from slicewise.cli.progress import progress
from slicewise.cli.simulate import DEFAULT_POLICIES
from slicewise.cli.tables import print_table
from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import ORACLE
from slicewise.sim.replay import GPUS_PER_NODE, MAX_GPUS, compare
from slicewise.sim.timeline import Timeline, busy_begin, lay_out
from slicewise.sim.trace import Fitted, Trace, TraceFormat, fit, read_trace

_SHOWN_LINES = 5
"""Malformed rows named in the text; JSON has them all."""


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A CSV file of requests.")],
    form: Annotated[
        TraceFormat | None,
        typer.Option("--format", help="What the file is (default: by its header)."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy; give several, or commas between (default: those of simulate).",
        ),
    ] = None,
    model: ModelName = None,
    geometry: GeometryFiles = None,
    gpus: Gpus = 100,
    gpus_per_node: Annotated[
        int, typer.Option(metavar="N", help="GPUs on a node, for policies that choose a node.")
    ] = GPUS_PER_NODE,
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Multiply recorded shares of a GPU, before the smallest profile that covers "
            "one is taken (default: 1).",
        ),
    ] = None,
    compress: Annotated[
        float,
        typer.Option(metavar="X", help="Divide arrival times; lifetimes stay as recorded."),
    ] = 1,
    begin: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Measure from here on, in the trace's time; who is there already is placed "
            "beforehand (default: alibaba-2023 the dense part, plain the first arrival).",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a file with a malformed row.")
    ] = False,
    oracle: Annotated[
        bool,
        typer.Option(
            help="Also run the limit, an oracle that rearranges all instances at no cost."
        ),
    ] = True,
    json: AsJson = False,
    csv: CsvFile = None,
    plot: PlotFile = None,
) -> None:
    """Compare policies on the requests of a recorded trace."""
    chosen = chosen_geometry(model, geometry)
    policies = chosen_policies(policy or DEFAULT_POLICIES)
    for what, number in (("gpus", gpus), ("gpus per node", gpus_per_node)):
        if not 1 <= number <= MAX_GPUS:
            raise SlicewiseError(f"{what} must be 1 to {MAX_GPUS}, not {number}")
    factor = _exact("--scale", 1 if scale is None else scale, 0.001, 1000)
    squeeze = _exact("--compress", compress, 0.001, 1_000_000)
    start = None if begin is None else _exact("--begin", begin, 0, 1e15)
    prepare_files(csv, plot)

    recorded = read_trace(trace, form, strict=strict)
    if recorded.format is TraceFormat.PLAIN and scale is not None:
        raise SlicewiseError("--scale is for shares of a GPU, and a plain trace has none")
    fitted = fit(recorded, chosen, factor, strict=strict)
    if not fitted.jobs:
        raise SlicewiseError(_nothing_left(recorded, fitted))
    if start is None:
        dense = recorded.format is TraceFormat.ALIBABA
        start = busy_begin(fitted.jobs) if dense else fitted.jobs[0].arrival
    timeline = lay_out(fitted.jobs, start, squeeze)
    with progress(len(policies) + oracle, "replays") as tick:
        results = compare(timeline, chosen, gpus, policies, tick, gpus_per_node, oracle)

    setting: Row = {
        "trace": recorded.source,
        "format": str(recorded.format),
        "model": chosen.model,
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "scale": float(factor) if recorded.format is TraceFormat.ALIBABA else None,
        "compress": float(squeeze),
        "offered_load": timeline.offered_slices / (gpus * chosen.slices),
    }
    if csv is not None:
        write_text(csv, as_csv([dict(_flat({**setting, **row})) for row in results]))
    if plot is not None:
        _plot(setting, results, plot)
    if json:
        typer.echo(as_json(_document(setting, recorded, fitted, timeline, results)), nl=False)
    else:
        _print(setting, recorded, fitted, timeline, results)
    say_written(csv, plot)


def _exact(option: str, value: float, low: float, high: float) -> Fraction:
    """A number as it was typed: 0.2 is one fifth, and not the nearest binary fraction."""
    if not (math.isfinite(value) and low <= value <= high):
        raise SlicewiseError(f"{option} must be {low:g} to {high:g}, not {value:g}")
    return Fraction(str(value))


def _left_out(trace: Trace, fitted: Fitted, over_before: int) -> dict[str, int]:
    return {
        "without_gpu": trace.without_gpu,
        "zero_lifetime": trace.zero_lifetime,
        "over_before_begin": over_before,
        "no_profile": fitted.no_profile,
        "malformed": len(fitted.malformed),
    }


_LEFT_OUT_WORDS = {
    "without_gpu": "without a GPU",
    "zero_lifetime": "of zero lifetime",
    "over_before_begin": "over before the beginning",
    "no_profile": "larger than any profile",
    "malformed": "malformed",
}


def not_replayed(trace: Trace, fitted: Fitted, timeline: Timeline) -> Row:
    """What is not replayed, as data: the counts, and all malformed rows."""
    return {
        "left_out": _left_out(trace, fitted, timeline.over_before),
        "malformed_rows": [row._asdict() for row in fitted.malformed],
    }


def _in_words(
    trace: Trace, fitted: Fitted, over_before: int, rest: str = " (--json lists them)"
) -> Iterator[str]:
    """What is not replayed: the counts, then malformed rows, and where to find the rest."""
    counts = _left_out(trace, fitted, over_before)
    parts = [f"{n} {_LEFT_OUT_WORDS[name]}" for name, n in counts.items() if n]
    if parts:
        yield f"Rows left out: {', '.join(parts)}."
    for line, reason in fitted.malformed[:_SHOWN_LINES]:
        yield f"  line {line}: {reason}"
    if len(fitted.malformed) > _SHOWN_LINES:
        yield f"  and {len(fitted.malformed) - _SHOWN_LINES} more{rest}"


def _nothing_left(trace: Trace, fitted: Fitted) -> str:
    why = " ".join(_in_words(trace, fitted, 0, rest="")) or "It has no rows."
    return f"{trace.source} holds no request that can be replayed. {why}"


def _document(
    setting: Row, trace: Trace, fitted: Fitted, timeline: Timeline, results: list[dict[str, object]]
) -> Row:
    return {
        **setting,
        "begin_seconds": float(timeline.begin),
        "measured_seconds": timeline.seconds,
        "preplaced": timeline.preplaced,
        "arrivals": len(timeline.arrivals),
        **not_replayed(trace, fitted, timeline),
        "results": results,
    }


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Columns for CSV: a table within a row becomes columns with dots in their names."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


_COLUMNS = {
    "rejected %": ("rejected_share", 100, 2),
    "of slices": ("rejected_slices_share", 100, 2),
    "util. %": ("utilization_percent", 1, 1),
    "peak": ("peak_utilization_percent", 1, 1),
    "active %": ("active_gpus_percent", 1, 1),
    "F": ("fragmentation", 1, 2),
}
"""By heading: the figure, what to multiply it with, and how many digits to show."""


def _print(
    setting: Row, trace: Trace, fitted: Fitted, timeline: Timeline, results: list[dict[str, object]]
) -> None:
    console = Console(highlight=False, markup=False)
    for line in _summary(setting, timeline):
        console.print(line, soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in (*_COLUMNS, "fragmented"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        cells = [_cell(row[name], factor, digits) for name, factor, digits in _COLUMNS.values()]
        table.add_row(Text(str(row["policy"])), *cells, _fragmented(row))
    print_table(table, console)
    console.print("fragmented: of the rejections, how many although enough slices were free")
    if results[-1]["rejected"] is None:
        console.print(f"{ORACLE}: {results[-1]['oracle_missing']}", soft_wrap=True)
    for row in results:
        if row["preplaced_rejected"]:
            console.print(
                f"{row['policy']}: {row['preplaced_rejected']} of the {timeline.preplaced} to be "
                "placed beforehand found no place",
                soft_wrap=True,
            )
    for line in _in_words(trace, fitted, timeline.over_before):
        console.print(line, soft_wrap=True)


def _summary(setting: Row, timeline: Timeline) -> Iterator[str]:
    """What was replayed, with everything that changes the figures."""
    gpus, each = setting["gpus"], setting["gpus_per_node"]
    assert isinstance(gpus, int)
    assert isinstance(each, int)
    nodes = f", {each} a node" if gpus > each else ""
    on = f"on {gpus} {setting['model']}{nodes}"
    scaled = "" if setting["scale"] is None else f", shares x {setting['scale']:g}"
    yield f"{setting['trace']} ({setting['format']}) {on}{scaled}"
    compress, hours = float(timeline.compress), timeline.seconds / 3600
    before = f" after {timeline.preplaced} placed beforehand" if timeline.preplaced else ""
    faster = "" if compress == 1 else f", arrivals compressed {compress:g} times"
    yield (
        f"{len(timeline.arrivals)} requests in {hours:.4g} hours{before}{faster}; "
        f"offered load {setting['offered_load']:.2f}"
    )


def _fragmented(row: Row) -> str:
    """How many of the rejections; an oracle knows no such difference."""
    reasons = row["rejected_by_reason"]
    assert isinstance(reasons, dict)
    nowhere = row["peak_active_gpus_percent"] is None
    return "-" if nowhere else f"{reasons['fragmented']}/{row['rejected']}"


def _cell(value: object, factor: float, digits: int) -> str:
    return f"{value * factor:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _plot(setting: Row, results: list[dict[str, object]], path: Path) -> None:
    from slicewise.figures.replay import replay_bars
    from slicewise.figures.save import save_as

    save_as(replay_bars(results, setting), path)

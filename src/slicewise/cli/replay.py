"""`slicewise replay`: compare policies on a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.choices import chosen_geometry, chosen_policies
from slicewise.cli.options import AsJson, CsvFile, GeometryFiles, Gpus, ModelName, PlotFile
from slicewise.cli.output import Row, as_csv, as_json, prepare_files, say_written, write_text
from slicewise.cli.tables import print_table, rich_table
from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import ORACLE
from slicewise.lab.library import POLICIES
from slicewise.lab.progress import progress
from slicewise.lab.tables import replay_table
from slicewise.lab.timeline import Timeline
from slicewise.lab.trace import TraceFormat
from slicewise.lab.trace_input import TraceInput, TraceOptions, check_trace_options, load_trace
from slicewise.lab.trace_replay import GPUS_PER_NODE, MAX_GPUS, compare


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
            help="A policy; repeat, or separate by commas (default: those of simulate).",
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
            help="Start of the measurement, in the trace's time; requests that run by then are "
            "placed beforehand (default: alibaba-2023 the dense part, plain the first arrival).",
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
    policies = chosen_policies(policy or list(POLICIES))
    for what, number in (("gpus", gpus), ("gpus per node", gpus_per_node)):
        if not 1 <= number <= MAX_GPUS:
            raise SlicewiseError(f"{what} must be 1 to {MAX_GPUS}, not {number}")
    options = TraceOptions(form, scale, compress, begin, strict)
    check_trace_options(options)
    prepare_files(csv, plot)
    recorded = load_trace(trace, options, chosen)
    timeline = recorded.timeline
    with progress(len(policies) + oracle, "replays") as tick:
        results = compare(timeline, chosen, gpus, policies, tick, gpus_per_node, oracle)

    source = recorded.setting
    setting: Row = {
        "trace": source["trace"],
        "format": source["format"],
        "model": chosen.model,
        "gpus": gpus,
        "gpus_per_node": gpus_per_node,
        "scale": source["scale"],
        "compress": source["compress"],
        "offered_load": timeline.offered_slices / (gpus * chosen.slices),
    }
    if csv is not None:
        write_text(csv, as_csv([dict(_flat({**setting, **row})) for row in results]))
    if plot is not None:
        _plot(setting, results, plot)
    if json:
        typer.echo(as_json(_document(setting, recorded, results)), nl=False)
    else:
        _print(setting, recorded, results)
    say_written(csv, plot)


def _document(setting: Row, recorded: TraceInput, results: list[dict[str, object]]) -> Row:
    timeline = recorded.timeline
    return {
        **setting,
        "begin_seconds": float(timeline.begin),
        "measured_seconds": timeline.seconds,
        "preplaced": timeline.preplaced,
        "arrivals": len(timeline.arrivals),
        **recorded.skipped,
        "results": results,
    }


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Flatten a row for CSV: a nested table becomes columns with dotted names."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _print(setting: Row, recorded: TraceInput, results: list[dict[str, object]]) -> None:
    console = Console(highlight=False, markup=False)
    timeline = recorded.timeline
    for line in _summary(setting, timeline):
        console.print(line, soft_wrap=True)
    print_table(rich_table(replay_table(results)), console)
    console.print("fragmented: of the rejections, how many although enough slices were free")
    if results[-1]["rejected"] is None:
        console.print(f"{ORACLE}: {results[-1]['oracle_missing']}", soft_wrap=True)
    for row in results:
        if row["preplaced_rejected"]:
            console.print(
                f"{row['policy']}: {row['preplaced_rejected']} of the {timeline.preplaced} to be "
                "placed beforehand could not be placed",
                soft_wrap=True,
            )
    for line in recorded.skipped_lines():
        console.print(line, soft_wrap=True)


def _summary(setting: Row, timeline: Timeline) -> Iterator[str]:
    """Describe what was replayed, with every option that changes the figures."""
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


def _plot(setting: Row, results: list[dict[str, object]], path: Path) -> None:
    from slicewise.lab.figures.replay import replay_bars
    from slicewise.lab.figures.save import save_as

    save_as(replay_bars(results, setting), path)

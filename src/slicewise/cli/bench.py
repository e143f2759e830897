"""`slicewise bench`: measure the time of a decision by cluster size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slicewise.catalog import load_geometry
from slicewise.cli.choices import chosen_policies
from slicewise.cli.options import DEFAULT_MODEL, AsJson, PlotFile
from slicewise.cli.output import Row, as_json, prepare_files
from slicewise.cli.tables import print_table
from slicewise.core.errors import SlicewiseError
from slicewise.lab.mix import parse_mix
from slicewise.lab.progress import progress
from slicewise.policies.base import TablePolicy

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
LOAD = 0.85


def bench(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A policy; may be repeated (default: mfi)."),
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N", help="A cluster size; may be repeated (default: 100 to a million)."
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All built-in table policies, and longer measurements.")
    ] = False,
    json: AsJson = False,
    plot: PlotFile = None,
) -> None:
    """Time decisions at 85% sustained load: engine, compiled, and the paper's scan beside them."""
    from slicewise.lab.bench import SlotCounts, benchmark

    names = policy or (_ALL if full else ["mfi"])
    policies = []
    for chosen in chosen_policies(names):
        if not isinstance(chosen, TablePolicy):
            raise SlicewiseError(
                f"policy {chosen.name!r} is not a table policy: nothing to compile"
            )
        policies.append(chosen)
    sizes = sorted(set(gpus or SIZES))
    if not 10 <= sizes[0] <= sizes[-1] <= 10_000_000:
        raise SlicewiseError("gpus must be 10 to 10000000")
    prepare_files(None, plot)
    plan = SlotCounts(140_000, 7_000_000, 1_500_000_000, 150_000_000) if full else SlotCounts()
    mix = parse_mix("uniform", load_geometry(DEFAULT_MODEL))
    with progress(len(sizes) * len(policies), "measurements") as tick:
        decisions, memory = benchmark(mix, policies, sizes, LOAD, plan, tick)
    if plot is not None:
        from slicewise.lab.figures.curves import scaling_curves
        from slicewise.lab.figures.save import save_as

        save_as(scaling_curves(decisions), plot)
    if json:
        typer.echo(as_json({"decisions": decisions, "memory": memory}), nl=False)
    else:
        _print(decisions, memory)


_ALL = [
    "least-lost",
    "least-lost-time",
    "lease-aware",
    "mfi",
    "mfi-overlap",
    "first-fit",
    "first-fit-strict",
    "best-fit",
    "best-fit-strict",
    "worst-fit",
    "worst-fit-strict",
    "round-robin",
    "round-robin-strict",
]


def _print(decisions: Sequence[Row], memory: Sequence[Row]) -> None:
    cells = {(r["policy"], r["path"], r["gpus"]): r for r in decisions}
    scans = {
        (r["path"], r["gpus"]): float(str(r["ns_per_decision"]))
        for r in decisions
        if str(r["path"]).startswith("scan")
    }
    table = Table(box=None, padding=(0, 2, 0, 0), caption=_CAPTION)
    for heading in ("GPUs", "engine", "compiled", "states", "scan", "numpy scan", "engine MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.columns[0].justify = "left"
    sizes = {(r["policy"], r["gpus"]): float(str(r["engine_bytes"])) for r in memory}
    for policy in dict.fromkeys(str(row["policy"]) for row in decisions):
        table.add_row(policy, style="bold")
        for gpus in dict.fromkeys(row["gpus"] for row in decisions):
            engine = cells[policy, "engine", gpus]
            compiled = cells[policy, "compiled", gpus]
            mine = float(str(compiled["ns_per_decision"]))
            table.add_row(
                f"  {gpus:,}",
                _time(engine["ns_per_decision"]),
                _time(mine),
                f"{compiled['states_examined_mean']:.0f}",
                f"{scans['scan-compiled', gpus] / mine:,.0f} x",
                f"{scans['scan-numpy', gpus] / mine:,.0f} x",
                f"{sizes[policy, gpus] / 1e6:.1f}",
            )
    print_table(table, Console(highlight=False))


_CAPTION = (
    "time of a decision and a release at 85% load; states examined per decision (compiled); "
    "the paper's scan of all GPUs as a multiple of the compiled time, in the same run"
)


def _time(nanoseconds: object) -> str:
    value = float(str(nanoseconds))
    return f"{value / 1000:.1f} us" if value >= 1000 else f"{value:.0f} ns"

"""What a sweep leaves behind: Parquet files, the report, JSON, and a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slicewise.cli.output import Row, as_json, runs_of, write_text
from slicewise.cli.tables import print_table
from slicewise.figures.rows import distinct
from slicewise.sim.experiment import ORACLE, Steady
from slicewise.sim.meaning import made_with
from slicewise.sim.runner import Outcome, missing_runs
from slicewise.sim.sweep import Sweep, total_runs

Plan = dict[str, Any]

_ABREAST = 6
"""How many columns of figures fit side by side in a terminal."""


def plan_of(chosen: Sweep, outcomes: Sequence[Outcome]) -> Plan:
    """What a sweep spans, and how much of it is finished."""
    runs, missing = total_runs(outcomes), missing_runs(outcomes)
    return {**_spans(chosen), "runs": runs, "finished": runs - missing, "missing": missing}


def _spans(chosen: Sweep) -> Plan:
    every = chosen.experiments
    entrants = [policy.name for policy in every[0].policies]
    if any(isinstance(experiment, Steady) and experiment.oracle for experiment in every):
        entrants.append(ORACLE)
    return {
        "experiment": chosen.kind,
        "models": list(dict.fromkeys(e.mixes[0].geometry.model for e in every)),
        "gpus": list(dict.fromkeys(e.gpus for e in every)),
        "loads": list(dict.fromkeys(e.load for e in every if isinstance(e, Steady))),
        "seeds": list(dict.fromkeys(e.seed for e in every)),
        "distributions": [mix.name for mix in every[0].mixes],
        "policies": entrants,
        "points": len(every),
        "runs_each": every[0].runs,
    }


def document(chosen: Sweep, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> Plan:
    """The results for `--json`; the same for the same file, however often it was interrupted."""
    missing = missing_runs(outcomes)
    return {
        **_spans(chosen),
        "runs": total_runs(outcomes),
        "missing": missing,
        "interrupted": missing > 0,
        "made_with": made_with(),
        "results": list(rows),
    }


def write_results(
    chosen: Sweep, outcomes: Sequence[Outcome], rows: Sequence[Row], out: Path
) -> None:
    """Write `runs.parquet`, `summary.parquet` and `report.html`."""
    from slicewise.sim.parquet import runs_table, summary_table, write_table

    about = {"experiment": chosen.text, "made_with": as_json(made_with()).strip()}
    write_table(out / "runs.parquet", runs_table(outcomes), about)
    write_table(out / "summary.parquet", summary_table([dict(row) for row in rows]), about)
    write_text(out / "report.html", _report(chosen, outcomes, rows))


def _report(chosen: Sweep, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> str:
    from slicewise.figures.save import svg_text
    from slicewise.figures.sweep import MOST_PANELS, swatch, sweep_groups
    from slicewise.figures.sweep_page import Drawing, DrawingGroup, SweepMeta, render_sweep
    from slicewise.paper.svg import inline_svg

    groups, left_out = sweep_groups(rows)
    numbers = iter(range(1_000_000))

    def drawing(title: str, words: str, figure: Any) -> Drawing:
        name = f"drawing-{next(numbers)}"
        return Drawing(title, inline_svg(name, svg_text(figure, name), words))

    plan = plan_of(chosen, outcomes)
    meta = SweepMeta(
        title=chosen.title or f"Sweep: {chosen.name}",
        file=chosen.name,
        text=chosen.text,
        summary=_in_a_line(plan),
        facts=_facts(plan),
        incomplete=f"{plan['missing']:,} of {plan['runs']:,} runs are not finished; they are run "
        "when the same command is given again."
        if plan["missing"]
        else "",
        left_out=f"{left_out} groups of drawings are left out: a page shows {MOST_PANELS} at most."
        if left_out
        else "",
        legend={
            name: drawing(name, f"the line of {name}", swatch(name)).svg
            for name in distinct(rows, "policy")
        },
    )
    drawn = [
        DrawingGroup(
            group.title,
            tuple(drawing(p.title, p.words, p.figure) for p in group.panels),
            group.needs_legend,
        )
        for group in groups
    ]
    return render_sweep(meta, rows, drawn)


def _in_a_line(plan: Plan) -> str:
    policies = [name for name in plan["policies"] if name != ORACLE]
    limit = " and the oracle" if ORACLE in plan["policies"] else ""
    spans = [
        _count(policies, "policy", "policies") + limit,
        _count(plan["distributions"], "distribution"),
        _count(plan["models"], "model"),
        _count(plan["gpus"], "size"),
        _count(plan["loads"], "load"),
        _count(plan["seeds"], "seed"),
    ]
    return (
        f"{', '.join(filter(None, spans))}; {plan['runs']:,} runs, {plan['runs_each']:,} of each."
    )


def _count(found: list[object], one: str, several: str = "") -> str:
    if not found:
        return ""
    return f"{len(found)} {one if len(found) == 1 else several or one + 's'}"


def _facts(plan: Plan) -> dict[str, str]:
    facts = {
        "Experiment": plan["experiment"],
        "GPU models": ", ".join(plan["models"]),
        "GPUs": ", ".join(f"{gpus:,}" for gpus in plan["gpus"]),
        "Loads": ", ".join(f"{100 * load:g}%" for load in plan["loads"]),
        "Distributions": "; ".join(plan["distributions"]),
        "Policies": ", ".join(plan["policies"]),
        "Seeds": ", ".join(map(str, plan["seeds"])),
        "Runs of each": f"{plan['runs_each']:,}",
        "Made with": ", ".join(f"{name} {number}" for name, number in made_with().items()),
    }
    return {name: fact for name, fact in facts.items() if fact}


_PUBLISHED = {
    "acceptance": ("acceptance_rate", 1, 3),
    "util. %": ("utilization_percent", 1, 1),
    "active %": ("active_gpus_percent", 1, 1),
    "F": ("fragmentation", 1, 2),
}


def print_rows(rows: Sequence[Row]) -> None:
    """Rejections by load in the terminal, or the published figures at 85% demand."""
    steady = "load" in rows[0]
    keys = ("distribution", "gpus", "model", "seed")
    shown = rows if steady else [row for row in rows if row["demand"] == 0.85]
    loads = distinct(rows, "load") if steady else []
    table = Table(box=None, padding=(0, 1, 0, 0))
    # A distribution written out can be long; it must not push the figures off the screen.
    table.add_column("load" if steady else "", no_wrap=True, max_width=40)
    for heading in [f"{load:g}" for load in loads[:_ABREAST]] or _PUBLISHED:
        table.add_column(heading, justify="right", no_wrap=True)
    several_seeds = len(distinct(rows, "seed")) > 1
    for setting in dict.fromkeys(tuple(row[key] for key in keys) for row in shown):
        mix, gpus, model, seed = setting
        of = f"{mix}, {gpus} {model}" + (f", seed {seed}" if several_seeds else "")
        table.add_row(Text(of, "bold"))
        here = [row for row in shown if tuple(row[key] for key in keys) == setting]
        for name in distinct(here, "policy"):
            mine = [row for row in here if row["policy"] == name]
            if steady:
                by_load = {row["load"]: row for row in mine}
                cells = [_cell(by_load.get(x), "rejected_share", 100, 2) for x in loads[:_ABREAST]]
            else:
                cells = [_cell(mine[0], *column) for column in _PUBLISHED.values()]
            table.add_row(Text(f"  {name}"), *cells)
    console = Console(highlight=False)
    print_table(table, console)
    what = "rejected %, by load" if steady else "at 85% demand"
    console.print(f"{what}; ± is a 95% interval over {runs_of(rows)} runs")
    if len(loads) > _ABREAST:
        console.print(f"{len(loads) - _ABREAST} more loads are in the report")


def _cell(row: Row | None, figure: str, factor: float, digits: int) -> str:
    value = None if row is None else row[figure]
    if row is None or not isinstance(value, (int, float)):
        return "-"
    text = f"{value * factor:.{digits}f}"
    ends = row[f"{figure}_ci95"]
    return (
        f"{text}±{(ends[1] - ends[0]) / 2 * factor:.{digits}f}" if isinstance(ends, list) else text
    )

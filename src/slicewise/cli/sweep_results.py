"""The results of a sweep: Parquet files, the report, JSON, and a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from slicewise.cli.output import Row, as_json, write_text
from slicewise.cli.tables import figures_table, print_table
from slicewise.lab.experiment import ORACLE, Steady
from slicewise.lab.figures.rows import distinct
from slicewise.lab.fingerprint import made_with
from slicewise.lab.runner import Outcome, missing_runs
from slicewise.lab.sweep_file import Sweep, total_runs
from slicewise.lab.tables import Columns, figure_cell, runs_of

Plan = dict[str, Any]

_MAX_LOADS = 6
"""Columns of figures that fit side by side in a terminal."""


def plan_of(chosen: Sweep, outcomes: Sequence[Outcome]) -> Plan:
    """Return what a sweep covers, and how much of it is finished."""
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
    """Return the results for `--json`; interruptions do not change them."""
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
    from slicewise.lab.parquet import runs_table, summary_table, write_table

    about = {"experiment": chosen.text, "made_with": as_json(made_with()).strip()}
    write_table(out / "runs.parquet", runs_table(outcomes), about)
    write_table(out / "summary.parquet", summary_table([dict(row) for row in rows]), about)
    write_text(out / "report.html", _report(chosen, outcomes, rows))


def _report(chosen: Sweep, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> str:
    from slicewise.lab.figures.sweep_report import SweepMeta, render_sweep

    plan = plan_of(chosen, outcomes)
    meta = SweepMeta(
        title=chosen.title or f"Sweep: {chosen.name}",
        file=chosen.name,
        text=chosen.text,
        summary=_summary(plan),
        facts=_facts(plan),
        incomplete=f"{plan['missing']:,} of {plan['runs']:,} runs are not finished; run the same "
        "command to resume."
        if plan["missing"]
        else "",
    )
    return render_sweep(meta, rows)


def _summary(plan: Plan) -> str:
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


_PUBLISHED: Columns = {
    "acceptance": ("acceptance_rate", 1, 3),
    "util. %": ("utilization_percent", 1, 1),
    "active %": ("active_gpus_percent", 1, 1),
    "F": ("fragmentation", 1, 2),
}


def print_rows(rows: Sequence[Row]) -> None:
    """Print rejections by load, or the published figures at 85% demand."""
    steady = "load" in rows[0]
    keys = ("distribution", "gpus", "model", "seed")
    shown = rows if steady else [row for row in rows if row["demand"] == 0.85]
    loads = distinct(rows, "load") if steady else []
    headings = [f"{load:g}" for load in loads[:_MAX_LOADS]] or [*_PUBLISHED]
    table = figures_table(headings, first="load" if steady else "", max_width=40)
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
                cells = [
                    figure_cell(by_load.get(x), "rejected_share", 100, 2)
                    for x in loads[:_MAX_LOADS]
                ]
            else:
                cells = [figure_cell(mine[0], *column) for column in _PUBLISHED.values()]
            table.add_row(Text(f"  {name}"), *cells)
    console = Console(highlight=False)
    print_table(table, console)
    what = "rejected %, by load" if steady else "at 85% demand"
    console.print(f"{what}; ± is a 95% interval over {runs_of(rows)} runs")
    if len(loads) > _MAX_LOADS:
        console.print(f"{len(loads) - _MAX_LOADS} more loads are in the report")

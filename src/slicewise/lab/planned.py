"""Plans as results: the smallest cluster for a demand, or for recorded requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import slicewise
from slicewise.core.geometry import Geometry
from slicewise.lab.planning import (
    Count,
    Question,
    Watch,
    curve_rows,
    make_plans,
    percent,
    plan_rows,
    runs_for,
)
from slicewise.lab.result import Result
from slicewise.lab.tables import Row, plan_table
from slicewise.lab.trace_input import TraceInput
from slicewise.lab.trace_planning import (
    TraceQuestion,
    plan_trace,
    trace_curve_rows,
    trace_plan_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def planned(question: Question, runs: int | None, workers: int | None, watch: Watch) -> Result:
    """Answer a question about a demand, with as many runs as asked for or as it needs."""
    question = replace(question, runs=runs_for(question, runs))
    plans = make_plans(question, workers, watch)
    settings: dict[str, object] = {
        "demand_gpus": question.demand,
        **_asked(question, question.mixes[0].geometry),
        "runs": question.runs,
        "seed": question.seed,
        "duration": question.lifetimes,
        "warmup": question.warmup,
    }
    return _plan_result(
        f"Demand of {question.demand:g} {settings['model']}, {_target(question)}",
        settings,
        plan_rows(question, plans),
        curve_rows(plans),
    )


def planned_for_trace(question: TraceQuestion, recorded: TraceInput, watch: Watch) -> Result:
    """Answer a question about recorded requests."""
    timeline = question.timeline
    found, missing = plan_trace(question, watch)
    settings: dict[str, object] = {
        **recorded.setting,
        "begin_seconds": float(timeline.begin),
        "preplaced": timeline.preplaced,
        "arrivals": len(timeline.arrivals),
        "offered_gpus": timeline.offered_slices / question.geometry.slices,
        **recorded.skipped,
        **_asked(question, question.geometry),
    }
    return _plan_result(
        f"{settings['trace']} on {settings['model']}, {_target(question)}",
        settings,
        trace_plan_rows(question, found, missing),
        trace_curve_rows(question, found),
        tuple(recorded.skipped_lines()),
    )


def _plan_result(
    title: str,
    settings: dict[str, object],
    rows: Sequence[Row],
    curve: Sequence[Row],
    notes: tuple[str, ...] = (),
) -> Result:
    share = "rejected_share" if settings["count"] == "requests" else "rejected_slices_share"

    def draw(rows: Sequence[Row]) -> Figure:
        from slicewise.lab.figures.planning import planning_curves

        return planning_curves(rows, curve, {**settings, "title": title})

    return Result(
        title,
        settings,
        tuple(rows),
        slicewise.__version__,
        notes,
        lambda rows: plan_table(rows, share, "trace" in settings),
        draw,
        tuple(curve),
    )


def _asked(question: Question | TraceQuestion, geometry: Geometry) -> dict[str, object]:
    return {
        "model": geometry.model,
        "target_rejected_share": question.target,
        "count": str(question.count),
        "reference": question.reference,
        "step": question.step,
        "gpus_per_node": question.gpus_per_node,
    }


def _target(question: Question | TraceQuestion) -> str:
    of = "requests" if question.count is Count.REQUESTS else "requested slices"
    return f"at most {percent(question.target)} of {of} rejected"

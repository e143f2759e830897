"""Prints a plan: a table with the GPUs each policy needs and the GPUs it saves."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from slicewise.cli.tables import print_table, rich_table
from slicewise.lab.experiment import ORACLE
from slicewise.lab.result import Result
from slicewise.lab.tables import number, percent_of


def print_plan(planned: Result) -> None:
    """Print a plan."""
    console = Console(highlight=False, markup=False)
    recorded = "trace" in planned.settings
    for line in _heading(planned, recorded):
        console.print(line, soft_wrap=True)
    widest = max(len(str(row["policy"])) for row in planned.rows) + 2
    share = "rejected_share" if planned.settings["count"] == "requests" else "rejected_slices_share"
    print_table(rich_table(planned.table(), max_width=max(widest, 24)), console)
    for line in _footing(planned, recorded, share):
        console.print(line, soft_wrap=True)


def _heading(planned: Result, recorded: bool) -> Iterator[str]:
    setting = planned.settings
    step = "" if setting["step"] == 1 else f", in steps of {setting['step']} GPUs"
    yield f"{planned.title}{step}"
    if not recorded:
        yield f"{setting['runs']} runs, the same requests for every cluster"
        return
    compress, scale = setting["compress"], setting["scale"]
    parts = [f"{setting['arrivals']} requests, {number(setting['offered_gpus']):.1f} GPUs' worth"]
    if setting["preplaced"]:
        parts.append(f"{setting['preplaced']} placed beforehand")
    if scale is not None:
        parts.append(f"shares x {scale:g}")
    if compress != 1:
        parts.append(f"arrivals compressed {compress:g} times")
    yield ", ".join(parts)


def _footing(planned: Result, recorded: bool, share: str) -> Iterator[str]:
    rows = planned.rows
    reference = rows[0]["compared_with"]
    if recorded:
        yield (
            "GPUs: this size and every larger one tried meet the target; chance: in this range, "
            f"some do and some do not; saved: beside {reference}"
        )
    else:
        yield (
            f"95%: intervals over the runs; saved: beside {reference}, paired; "
            "above: more than the limit needs"
        )
    for row in rows:
        if row["needed_gpus"] is None:
            tried = [
                point
                for point in planned.curve
                if all(point.get(name) == row.get(name) for name in ("policy", "distribution"))
            ]
            yield (
                f"{row['policy']}: even {tried[-1]['gpus']} GPUs, as many as there are instances "
                f"at most, do not meet the target: it rejects {percent_of(tried[-1][share])}%"
            )
    for missing in dict.fromkeys(row["oracle_missing"] for row in rows):
        if missing is not None:
            yield f"{ORACLE}: {missing}"
    yield from planned.notes

"""Draw the pictures of the documents from runs with fixed seeds.

    .venv/bin/python docs/make_pictures.py [PICTURE ...]

Without arguments it draws all pictures. Those of the tutorial come from the tutorial's own code.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import slicewise
from slicewise import (
    Cluster,
    Instance,
    Rejection,
    Scheduler,
    TablePolicy,
    is_fragmented,
    load_geometry,
)
from slicewise.lab.experiment import Steady
from slicewise.lab.figures.bars import bars_at_demand, fragmentation_bars, steady_bars
from slicewise.lab.figures.curves import demand_curves, scaling_curves
from slicewise.lab.figures.planning import planning_curves
from slicewise.lab.figures.queueing import queueing_bars
from slicewise.lab.figures.replay import replay_bars
from slicewise.lab.figures.slicemap import Block, GpuDrawing, draw_gpus
from slicewise.lab.figures.style import SOFT, house_style, light_grid, policy_style
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.published import published
from slicewise.lab.paper.readings import READINGS, ReadingName
from slicewise.lab.planning import Question, curve_rows, make_plans, plan_rows
from slicewise.lab.queueing import Queueing, queueing_rows
from slicewise.lab.results import Row, mean_fragmentation, published_rows, steady_rows
from slicewise.lab.runner import Outcome, run_experiment
from slicewise.lab.tenants import scenario
from slicewise.lab.timeline import lay_out
from slicewise.lab.trace import fit, read_trace
from slicewise.lab.trace_replay import compare
from slicewise.lab.workload import draw_kinds, longest_lifetime, run_generator
from slicewise.policies.registry import policy

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "pictures"
A100 = load_geometry("A100-80GB")
MIXES = tuple(parse_mix(name, A100) for name in PUBLISHED)
DATA = READINGS[ReadingName.DATA]
"""The reading of the paper that the pictures show."""
COMPARED = ("mfi", "first-fit", "best-fit", "mfi-overlap", "least-lost", "round-robin", "worst-fit")
ARRIVALS = 45
"""Length of the random streams of the small clusters."""
DPI = {"demand-uniform": 100}
"""Pictures with a resolution other than 120 dots per inch."""
LARGEST = 200_000
"""Maximum size of a picture in bytes."""


def same_tenants() -> Figure:
    """Two small clusters with the same tenants; only one of them rejects the next request."""
    spread, rejected = _run_policy("worst-fit", gpus=4, load=0.9, seed=399, slots=15)
    packed, placed = _run_policy("best-fit", gpus=4, load=0.9, seed=399, slots=15)
    assert isinstance(rejected, Rejection)
    assert isinstance(placed, Instance)
    left = _gpu_drawings(spread, "worst-fit", rejected, None)
    right = _gpu_drawings(packed, "best-fit", rejected, placed)
    return draw_gpus([gpu for pair in zip(left, right, strict=True) for gpu in pair], columns=2)


def _run_policy(
    name: str, gpus: int, load: float, seed: int, slots: int
) -> tuple[Cluster, Instance | Rejection]:
    """Return the cluster after some slots of sustained load, and the last request's outcome."""
    mix = parse_mix("uniform", A100)
    rng = run_generator(seed, 0)
    longest = longest_lifetime(mix, gpus, load)
    kinds = draw_kinds(rng, mix, ARRIVALS)
    lifetimes = rng.integers(1, longest, size=ARRIVALS, endpoint=True)
    scheduler = Scheduler(Cluster.of(A100, gpus), name)
    leaving: defaultdict[int, list[Instance]] = defaultdict(list)
    for slot in range(slots):
        for instance in leaving.pop(slot, ()):
            scheduler.release(instance)
        outcome = scheduler.submit(mix.profiles[kinds[slot]].name)
        if isinstance(outcome, Instance):
            leaving[slot + int(lifetimes[slot])].append(outcome)
    return scheduler.cluster, outcome


def _gpu_drawings(
    cluster: Cluster, name: str, rejected: Rejection, placed: Instance | None
) -> list[GpuDrawing]:
    """Return drawings of a cluster's GPUs; free slices are hatched if the request was rejected."""
    wanted = A100.profile(str(rejected.request))
    gpus: list[GpuDrawing] = []
    for gpu in range(cluster.gpus):
        mask = cluster.state(gpu).mask
        blocks = [
            Block(i.profile, i.start, i.size, f"{i.profile}, just placed" if i == placed else "")
            for i in cluster.instances()
            if i.gpu == gpu
        ]
        free = [s for s in range(A100.slices) if not mask >> s & 1]
        stuck = placed is None and is_fragmented(A100, wanted, mask)
        gpus.append(GpuDrawing(A100.slices, blocks, free if stuck else (), f"{name}, GPU {gpu}"))
    verdict = (
        f"{wanted.name} rejected, although {cluster.free_slices} slices are free"
        if placed is None
        else f"{wanted.name} placed, and {cluster.gpus - cluster.active_gpus} GPU is still empty"
    )
    return [*gpus[:-1], replace(gpus[-1], verdict=verdict)]


@cache
def tutorial_names() -> dict[str, Any]:
    """Run the tutorial's Python code and return its namespace."""
    text = (HERE / "tutorial.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    there = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
                exec(block, names)
        finally:
            os.chdir(there)
    return names


def tutorial_figure(variable: str) -> Callable[[], Figure]:
    """Return a function that draws the tutorial's figure of this variable."""

    def draw() -> Figure:
        figure = tutorial_names()[variable]
        assert isinstance(figure, Figure)
        return figure

    return draw


@cache
def published_outcome() -> Outcome:
    """Run the paper's experiment as `slicewise reproduce --runs 500 --seed 1` does."""
    return run_experiment(DATA.experiment(A100, runs=500, seed=1), None, _silent)


@cache
def steady_outcome() -> Outcome:
    """Run the steady experiment as `slicewise simulate --experiment steady --runs 200` does."""
    policies = tuple(policy(name) for name in COMPARED)
    return run_experiment(Steady(MIXES, policies, gpus=100, runs=200, load=0.85), None, _silent)


def scaling() -> Figure:
    """Decision times as `slicewise bench` measures them.

    This is the only picture that depends on the machine.
    """
    from slicewise.lab.bench import SlotCounts, benchmark

    mfi = policy("mfi")
    assert isinstance(mfi, TablePolicy)
    sizes = (100, 1_000, 10_000, 100_000, 1_000_000)
    decisions, _ = benchmark(MIXES[0], [mfi], sizes, 0.85, SlotCounts(), _silent)
    return scaling_curves(decisions)


def replay_example() -> Figure:
    """The example trace on two GPUs, as `slicewise replay --plot` draws it."""
    jobs = fit(read_trace(HERE.parent / "examples" / "trace.csv"), A100).jobs
    timeline = lay_out(jobs, jobs[0].arrival)
    rows = compare(timeline, A100, 2, [policy(name) for name in COMPARED], _silent)
    load = timeline.offered_slices / (2 * A100.slices)
    setting = {"gpus": 2, "model": A100.model, "offered_load": load, "scale": None, "compress": 1}
    return replay_bars(rows, setting)


def planning() -> Figure:
    """The GPUs needed for a demand of 85 GPUs, as `slicewise plan --load 85 --plot` draws them."""
    names = ("least-lost", "peer-parvagpu", "best-fit", "first-fit", "peer-nvidia-dra", "mfi")
    question = Question(MIXES[:1], tuple(policy(name) for name in names), demand=85)
    plans = make_plans(question, None, lambda clusters, units: contextlib.nullcontext(_silent))
    setting = {
        "title": "Demand of 85 A100-80GB, at most 0.1% of requests rejected",
        "target_rejected_share": question.target,
        "count": str(question.count),
    }
    return planning_curves(plan_rows(question, plans), curve_rows(plans), setting)


def kubernetes() -> Figure:
    """The last results of `benchmarks/kube_bench.py`, read from the file next to the document.

    Bars are means over seeds, dots are seeds, dashes are the simulator's forecasts.
    """
    measured = json.loads((HERE / "kubernetes-performance.json").read_text(encoding="utf-8"))
    highest = max(stream["load"] for stream in measured["streams"])
    streams = [stream for stream in measured["streams"] if stream["load"] == highest]
    mixes = [name for name in PUBLISHED if any(stream["mix"] == name for stream in streams)]
    looks = {"stock": policy_style("first-fit"), "slicewise": policy_style("mfi")}
    names = {"stock": "kube-scheduler: first match", "slicewise": "slicewise"}
    rows: dict[str, tuple[str, dict[str, tuple[str, float, str]]]] = {
        "together": (
            "no hurry",
            {
                "running": ("Pods running", 1, "%.0f"),
                "slices_share": ("Slices in use, %", 100, "%.1f"),
                "gave_up_share": ("Pods that gave up, %", 100, "%.1f"),
                "fragmentation": ("Fragmentation F", 1, "%.2f"),
            },
        ),
        "stream": (
            "one pod a second",
            {
                "running": ("Pods running", 1, "%.0f"),
                "slices_share": ("Slices in use, %", 100, "%.1f"),
                "stuck": ("Pods stuck", 1, "%.1f"),
                "fragmentation": ("Fragmentation F", 1, "%.2f"),
            },
        ),
    }
    with house_style():
        figure = Figure(figsize=(13, 6), layout="constrained")
        axes = figure.subplots(len(rows), 4)
        for across, (part, (title, panels)) in zip(axes, rows.items(), strict=True):
            for axis, (column, (label, times, form)) in zip(across, panels.items(), strict=True):
                for number, (side, look) in enumerate(looks.items()):
                    for place, mix in enumerate(mixes):
                        mine = [s for s in streams if s["mix"] == mix and s["side"] == side]
                        found = [times * stream[part][column] for stream in mine]
                        x = place + 0.4 * (number - 0.5)
                        mean = sum(found) / len(found)
                        axis.bar(
                            x, mean, 0.36, color=look.colour, label="" if place else names[side]
                        )
                        if len(found) > 1:
                            axis.plot([x] * len(found), found, ".", color="black", markersize=3)
                        if part == "together":
                            forecast = [times * stream["forecast"][part][column] for stream in mine]
                            found.append(sum(forecast) / len(forecast))
                            axis.plot(
                                [x - 0.18, x + 0.18],
                                [found[-1]] * 2,
                                color="black",
                                lw=1,
                                label="" if place or not number else "as simulated",
                            )
                        axis.annotate(
                            form % mean,
                            (x, max(mean, *found)),
                            (0, 3),
                            textcoords="offset points",
                            ha="center",
                            fontsize=7,
                            color=SOFT,
                        )
                axis.set_title(f"{label}: {title}", fontsize=9.5)
                axis.set_xticks(range(len(mixes)), mixes)
                axis.tick_params(axis="x", length=0, labelsize=8)
                axis.set_ylim(0, max(1e-9, 1.1 * axis.get_ylim()[1]))
                light_grid(axis)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure


def _silent(units: int) -> None:
    pass


def _published_rows() -> list[Row]:
    return published_rows(published_outcome(), DATA.mfi, DATA.schemes)


def _mean_fragmentation() -> list[Row]:
    return mean_fragmentation(published_outcome(), DATA.schemes)


def queueing() -> Figure:
    """The disciplines of waiting in two scenarios, on half as many GPUs as the tables."""
    scenarios = tuple(scenario(name, A100) for name in ("flood", "starving"))
    what = Queueing(
        tuple(each.mix for each in scenarios),
        (policy("least-lost"),),
        gpus=50,
        runs=4,
        load=0.95,
        lifetimes=6,
        warmup=2,
        scenarios=scenarios,
    )
    return queueing_bars(queueing_rows(run_experiment(what, None, lambda units: None)))


PICTURES: dict[str, Callable[[], Figure]] = {
    "same-tenants": same_tenants,
    "arrival": tutorial_figure("arrival"),
    "termination": tutorial_figure("termination"),
    "best-fit-rejection": tutorial_figure("best_fit_rejection"),
    "load-balancing-rejection": tutorial_figure("load_balancing_rejection"),
    "steady": lambda: steady_bars(steady_rows(steady_outcome())),
    "published": lambda: bars_at_demand(_published_rows(), published=published().figures),
    "demand-uniform": lambda: demand_curves(_published_rows(), "uniform"),
    "fragmentation": lambda: fragmentation_bars(
        _mean_fragmentation(), published=published().figures
    ),
    "replay": replay_example,
    "scaling": scaling,
    "planning": planning,
    "kubernetes": kubernetes,
    "queueing": queueing,
}
"""The function that draws each picture, by name."""


def write(name: str) -> Path:
    """Draw a picture and write it as PNG, without a date in its metadata."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.png"
    with house_style():
        PICTURES[name]().savefig(path, dpi=DPI.get(name, 120), metadata={"Software": None})
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path.name} has {path.stat().st_size:,} bytes, more than {LARGEST:,}")
    return path


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        if chosen not in PICTURES:
            sys.exit(f"no picture {chosen!r}; there are {', '.join(PICTURES)}")
        print(f"slicewise {slicewise.__version__}: {write(chosen).relative_to(HERE.parent)}")

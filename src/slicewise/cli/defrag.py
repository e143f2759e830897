"""`slicewise defrag`: plan moves of instances that make room for a request or in general."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slicewise.cli.choices import chosen_policies
from slicewise.cli.cluster_file import ClusterFile, read_cluster
from slicewise.cli.options import AsJson, GeometryFiles
from slicewise.cli.output import as_json
from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.request import Request
from slicewise.engine.defrag import EXACT, Plan, Planner
from slicewise.engine.moves import Move, carry_out
from slicewise.policies.base import AdaptivePolicy, TablePolicy

BUDGET = 8
MAX_BUDGET = 1000


def defrag(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", help="A cluster as JSON; - is standard input.")
    ],
    plan: Annotated[
        bool, typer.Option("--plan", help="Only plan; the default.", show_default=False)
    ] = True,
    wanted: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="PROFILE", help="Make room for this profile (default: in general)."
        ),
    ] = None,
    budget: Annotated[int, typer.Option(metavar="N", help="Maximum number of moves.")] = BUDGET,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --for: the policy that chooses where instances go (default: the placement "
            "that leaves the most room).",
        ),
    ] = None,
    geometry: GeometryFiles = None,
    json: AsJson = False,
) -> None:
    """Plan moves of instances to other GPUs or slices; nothing is moved."""
    if not 0 <= budget <= MAX_BUDGET:
        raise SlicewiseError(f"budget must be 0 to {MAX_BUDGET}, not {budget}")
    ranking = _ranking(policy)
    file = read_cluster(cluster, geometry)
    planner = Planner(file.cluster, ranking, file.pinned)
    found: Plan | None
    if wanted is None:
        found = planner.to_win_room(budget)
    else:
        _check_offered(file, wanted)
        found = planner.to_fit(Request(wanted), budget)
    if json:
        typer.echo(as_json(_document(file, wanted, budget, found)), nl=False)
    else:
        _print(file, wanted, budget, found)


def _ranking(name: str | None) -> TablePolicy | AdaptivePolicy | None:
    if name is None:
        return None
    chosen, *others = chosen_policies([name])
    if others:
        raise SlicewiseError(f"--policy takes one policy, not {name!r}")
    if not isinstance(chosen, (TablePolicy, AdaptivePolicy)):
        raise SlicewiseError(f"policy {name!r} scans GPUs itself and cannot rank their states")
    return chosen


def _check_offered(file: ClusterFile, profile: str) -> None:
    offered = [p.name for model in file.cluster.models for p in model.profiles]
    if profile not in offered:
        raise UnknownNameError("profile in this cluster", profile, dict.fromkeys(offered))


def _document(
    file: ClusterFile, wanted: str | None, budget: int, plan: Plan | None
) -> dict[str, object]:
    return {
        "for": wanted,
        "budget": budget,
        "found": plan is not None,
        "fewest": plan is not None and wanted is not None and len(plan.moves) <= EXACT + 1,
        "moves": [_step(file, *step) for step in _steps(file, plan)] if plan else [],
        "moved_slices": plan.moved_slices if plan else 0,
        "room_before": plan.room_before if plan else None,
        "room_after": plan.room_after if plan else None,
        "fits": _spot(file, plan),
    }


def _step(file: ClusterFile, move: Move, masks: list[tuple[str, str, str]]) -> dict[str, object]:
    instance = move.instance
    return {
        "name": file.names.get(instance.id),
        "profile": instance.profile,
        "from": _at(file, instance.gpu, instance.start),
        "to": _at(file, move.gpu, move.start),
        "masks": [{"gpu": gpu, "before": old, "after": new} for gpu, old, new in masks],
    }


def _at(file: ClusterFile, gpu: int, start: int) -> dict[str, object]:
    node = file.cluster.node_of(gpu)
    return {"node": node.name, "gpu": gpu - node.gpus.start, "start": start}


def _spot(file: ClusterFile, plan: Plan | None) -> dict[str, object] | None:
    if plan is None or plan.gpu is None or plan.placement is None:
        return None
    return _at(file, plan.gpu, plan.placement.start)


def _steps(file: ClusterFile, plan: Plan) -> Iterator[tuple[Move, list[tuple[str, str, str]]]]:
    """Carry out the moves one by one; yield each with the masks of its GPUs before and after."""
    for move in plan.moves:
        gpus = dict.fromkeys((move.instance.gpu, move.gpu))
        before = {gpu: _mask(file, gpu) for gpu in gpus}
        carry_out(file.cluster, [move])
        yield move, [(file.place(gpu), before[gpu], _mask(file, gpu)) for gpu in gpus]


def _mask(file: ClusterFile, gpu: int) -> str:
    state = file.cluster.state(gpu)
    return state.geometry.mask_text(state.mask)


def _print(file: ClusterFile, wanted: str | None, budget: int, plan: Plan | None) -> None:
    console = Console(highlight=False)
    cluster = file.cluster

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)  # names come from the file: never markup

    say(
        f"{cluster.gpus} GPUs, {cluster.instance_count} instances ({len(file.pinned)} pinned), "
        f"{cluster.free_slices} of {cluster.slices} slices free"
    )
    if plan is None:
        say(f"\nNo plan was found that makes {wanted} fit (budget: {budget}).")
        return
    for number, (move, masks) in enumerate(_steps(file, plan), 1):
        instance = move.instance
        name = file.names.get(instance.id)
        who = f"{instance.profile} {name!r}" if name else instance.profile
        say(
            f"\n{number:>2}. {who}: {file.place(instance.gpu)} slice {instance.start} -> "
            f"{file.place(move.gpu)} slice {move.start}"
        )
        for gpu, before, after in masks:
            say(f"      {gpu:<12} {before} -> {after}")
    say("")
    if plan.gpu is not None and plan.placement is not None:
        how = "fits" if plan.moves else "fits already,"
        say(f"{wanted} {how} on {file.place(plan.gpu)} at slice {plan.placement.start}.")
    say(
        f"Moves: {len(plan.moves)}, slices moved: {plan.moved_slices}, "
        f"room: {plan.room_before} -> {plan.room_after}"
    )

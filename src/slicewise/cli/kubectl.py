"""`kubectl slicewise`: a plugin of kubectl that shows what slicewise does in a cluster.

kubectl runs the program `kubectl-slicewise` with the rights of its user; nothing is changed.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slicewise.cli.formatting import print_columns
from slicewise.cli.options import AsJson, command_group
from slicewise.cli.output import as_json
from slicewise.core.errors import SlicewiseError, UnknownNameError

if TYPE_CHECKING:
    from slicewise.kubernetes.api import Pod
    from slicewise.kubernetes.api_client import ApiClient
    from slicewise.kubernetes.snapshot import Snapshot

PROGRAM = "kubectl slicewise"
BUDGET, MAX_BUDGET = 8, 1000
_LETTERS = string.ascii_lowercase

Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The kubeconfig (default: as kubectl).")
]
Context = Annotated[str | None, typer.Option(metavar="NAME", help="The context of the kubeconfig.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NAME", help="The namespace of the pod."),
]

app = command_group()
app.info.name = PROGRAM


@app.callback()
def _root() -> None:
    """Show what slicewise does in a Kubernetes cluster; nothing is changed."""


@app.command()
def why(
    pod: Annotated[str, typer.Argument(metavar="POD", help="The name of a pod.")],
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: AsJson = False,
) -> None:
    """Say why a pod waits and what each node lacks for it, or where its slices are."""
    api = _connect(kubeconfig, context)
    from slicewise.kubernetes.cluster_report import why as why_of
    from slicewise.kubernetes.snapshot import NotVisibleError, read_snapshot

    found = _pod(api, _namespace(namespace, kubeconfig, context), pod)
    unseen = ""
    try:
        snapshot: Snapshot | None = read_snapshot(api)
    except NotVisibleError as error:
        snapshot, unseen = None, str(error)
    document = why_of(found, snapshot) | {"not_visible": unseen}
    if json:
        typer.echo(as_json(document), nl=False)
    else:
        _say_why(document)


@app.command("map")
def slice_map(
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Only this node.")] = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: AsJson = False,
) -> None:
    """Draw every GPU slice by slice, with the pods on it."""
    from slicewise.kubernetes.cluster_report import slice_map as map_of

    nodes = map_of(_snapshot(kubeconfig, context), node)
    if node is not None and not nodes:
        raise SlicewiseError(f"node {node!r} does not exist, or publishes no GPU with slices")
    if json:
        typer.echo(as_json({"nodes": nodes}), nl=False)
        return
    if not nodes:
        typer.echo("No node publishes a GPU with slices.")
    for number, one in enumerate(nodes):
        typer.echo(("\n" if number else "") + _heading(one))
        for gpu in one["gpus"]:
            _draw(gpu)


@app.command()
def top(kubeconfig: Kubeconfig = None, context: Context = None, json: AsJson = False) -> None:
    """Show the use of nodes and namespaces, and the pods that wait."""
    from slicewise.kubernetes.cluster_report import usage

    document = usage(_snapshot(kubeconfig, context))
    if json:
        typer.echo(as_json(document), nl=False)
        return
    print_columns(
        ("NODE", "MODEL", "GPUS", "USED", "SLICES", "INSTANCES", "LARGEST THAT FITS"),
        [
            (
                one["node"],
                one["model"],
                str(one["gpus"]),
                str(one["slices"] - one["free"]),
                str(one["slices"]),
                str(one["instances"]),
                (one["largest_fit"] or "none") + ("" if one["schedulable"] else " (cordoned)"),
            )
            for one in document["nodes"]
        ],
        "No node publishes a GPU with slices.",
    )
    if document["namespaces"]:
        typer.echo()
        print_columns(
            ("NAMESPACE", "SLICES", "QUOTA", "INSTANCES", "WAITING"),
            [
                (
                    one["namespace"],
                    str(one["memory_slices"]),
                    _quota(one["quota"]["memory_slices"]),
                    str(one["instances"]),
                    str(one["waiting"]),
                )
                for one in document["namespaces"]
            ],
        )
    if document["waiting"]:
        typer.echo()
        print_columns(
            ("WAITING POD", "ASKS FOR", "REASON", "MESSAGE"),
            [
                (one["pod"], ", ".join(one["asks_for"]), one["reason"] or "-", one["message"])
                for one in document["waiting"]
            ],
        )
    for kind in document["hidden"]:
        typer.echo(f"You may not list {kind}: what follows from them is missing here.", err=True)


@app.command()
def plan(
    pod: Annotated[
        str | None,
        typer.Argument(metavar="POD", help="A waiting pod (default: all of them)."),
    ] = None,
    wanted: Annotated[
        str | None,
        typer.Option("--for", metavar="PROFILE", help="Make room for this profile instead."),
    ] = None,
    budget: Annotated[int, typer.Option(metavar="N", help="Maximum number of moves.")] = BUDGET,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    json: AsJson = False,
) -> None:
    """Plan which pods would have to move so that waiting pods fit; nothing is moved."""
    if not 0 <= budget <= MAX_BUDGET:
        raise SlicewiseError(f"budget must be 0 to {MAX_BUDGET}, not {budget}")
    if pod is not None and wanted is not None:
        raise SlicewiseError("name a pod, or a profile with --for, not both")
    api = _connect(kubeconfig, context)
    from slicewise.core.request import Request
    from slicewise.kubernetes.cluster_report import plans
    from slicewise.kubernetes.snapshot import read_snapshot

    snapshot = read_snapshot(api)
    target: Any = None
    if wanted is not None:
        offered = [
            profile.name
            for model in snapshot.cache.state.cluster.models
            for profile in model.profiles
        ]
        if wanted not in offered:
            raise UnknownNameError("profile in this cluster", wanted, dict.fromkeys(offered))
        target = Request(wanted)
    elif pod is not None:
        found = _pod(api, _namespace(namespace, kubeconfig, context), pod)
        target = snapshot.pending.pending_pod(found.metadata.key)
        if target is None:
            raise SlicewiseError(
                f"pod {found.metadata.key} does not wait for slices: see {PROGRAM} why {pod}"
            )
        if len(target.requests) > 1:
            raise SlicewiseError(
                f"pod {found.metadata.key} asks for {len(target.requests)} devices, and there are "
                "plans for one device only"
            )
    document = plans(snapshot, budget, target)
    if json:
        typer.echo(as_json({"budget": budget, "plans": document}), nl=False)
    else:
        _say_plans(document, budget)


# Reading


def _connect(kubeconfig: Path | None, context: str | None) -> ApiClient:
    try:
        from slicewise.kubernetes.api_client import ApiClient
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"Kubernetes needs the extra packages of slicewise[k8s] ({error.name} is missing)"
        ) from None
    api = ApiClient.open(kubeconfig, context)
    api.check()
    return api


def _snapshot(kubeconfig: Path | None, context: str | None) -> Snapshot:
    api = _connect(kubeconfig, context)
    from slicewise.kubernetes.snapshot import read_snapshot

    return read_snapshot(api)


def _namespace(given: str | None, kubeconfig: Path | None, context: str | None) -> str:
    from slicewise.kubernetes.api_client import namespace_of

    return given or namespace_of(kubeconfig, context)


def _pod(api: ApiClient, namespace: str, name: str) -> Pod:
    from slicewise.kubernetes.api import Pod
    from slicewise.kubernetes.api_client import NotFoundError

    if not name or not set(name) <= set(string.ascii_lowercase + string.digits + "-."):
        raise SlicewiseError(f"{name!r} is no name of a pod")
    try:
        return api.get(f"/api/v1/namespaces/{namespace}/pods/{name}", Pod)
    except NotFoundError:
        raise SlicewiseError(f"there is no pod {name!r} in namespace {namespace!r}") from None


# Printing


def _heading(node: dict[str, Any]) -> str:
    gpus = len(node["gpus"])
    count = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    return f"{node['node']}: {count}, {node['model']}" + (
        "" if node["schedulable"] else ", cordoned"
    )


def _draw(gpu: dict[str, Any]) -> None:
    """A line with the slices of a GPU, and one for each instance."""
    cells = ["."] * gpu["slices"]
    for number, one in enumerate(gpu["instances"]):
        for at in range(one["start"], one["start"] + one["size"]):
            cells[at] = _LETTERS[number % len(_LETTERS)]
    closed = "" if gpu["takes_instances"] else "  takes no more instances"
    typer.echo(f"  GPU {gpu['gpu']}  {''.join(cells)}{closed}")
    for number, one in enumerate(gpu["instances"]):
        who = ", ".join(one["pods"]) or one["claim"] or "unknown"
        stock = "" if one["of_slicewise"] else "  (not allocated by slicewise)"
        typer.echo(f"         {_LETTERS[number % len(_LETTERS)]}  {one['profile']}  {who}{stock}")


def _quota(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _at(place: dict[str, Any]) -> str:
    return f"{place['node']} GPU {place['gpu']} slice {place['start']}"


_STATES = {
    "waits": "waits for slices",
    "runs": "is bound to its node",
    "placed": "has its slices",
    "none": "needs no slices",
    "ended": "has ended",
    "not ready": "cannot be placed yet",
    "unknown": "is not bound",
}


def _say_why(found: dict[str, Any]) -> None:
    typer.echo(f"Pod {found['pod']} {_STATES[found['state']]}.")
    if found["reason"] and found["state"] != "runs":
        typer.echo(f"slicewise says: {found['reason']}: {found['message']}")
    if found["text"]:
        typer.echo(f"{found['text'][0].upper()}{found['text'][1:]}.")
    if found["asks_for"]:
        typer.echo(f"It asks for: {', '.join(found['asks_for'])}.")
    for one in found["devices"]:
        typer.echo(f"  {one['profile']} on {_at(one)}")
    for group in found["nodes"]:
        nodes = group["nodes"]
        shown = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
        typer.echo(f"  {shown}: {group['why']}")
    if found["not_visible"]:
        typer.echo(found["not_visible"], err=True)


def _say_plans(found: list[dict[str, Any]], budget: int) -> None:
    if not found:
        typer.echo("No pod waits for a single device.")
    for number, one in enumerate(found):
        pods = f" ({', '.join(one['pods'])})" if one["pods"] else ""
        typer.echo(("\n" if number else "") + f"{one['for']}{pods}:")
        if not one["found"]:
            typer.echo(f"  no plan was found with at most {budget} moves")
            continue
        for step, move in enumerate(one["moves"], 1):
            who = ", ".join(move["pods"])
            typer.echo(
                f"  {step}. {who}, {move['profile']}: {_at(move['from'])} -> {_at(move['to'])}"
            )
        already = "" if one["moves"] else " already"
        typer.echo(f"  fits{already} on {_at(one['fits'])}")


def run() -> None:
    """Run the plugin and exit, as `slicewise` does."""
    from slicewise.cli.main import run as run_command

    run_command(sys.argv[1:], typer.main.get_command(app), PROGRAM)

"""`slicewise nodes`: nodes, their agents, and foreign instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.cli import completion
from slicewise.cli.allocations import Label, parse_labels
from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import (
    facts,
    holds_of,
    pairs,
    place,
    print_columns,
    print_result,
    show_json,
)
from slicewise.cli.options import AsJson, command_group, without_subcommand

if TYPE_CHECKING:
    from slicewise.api.nodes import NodeDetail

nodes = command_group()

NewName = Annotated[str, typer.Argument(metavar="NAME")]
NodeName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.nodes)]
ForeignName = Annotated[
    str, typer.Argument(metavar="UUID", help="The instance, as `nodes foreign` names it.")
]


@nodes.callback(invoke_without_command=True)
def _list_nodes(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List nodes; or show, add, cordon, drain and remove them."""
    if not without_subcommand(context):
        return
    with connect(server, token_file) as client:
        found = list(client.nodes())
    if json:
        show_json(found)
        return
    rows = [
        (
            node.name,
            node.model,
            str(node.gpus),
            node.state,
            str(node.instances),
            f"{node.free_slices}/{node.slices}",
            str(node.foreign or ""),
            holds_of(node),
            pairs(node.labels),
        )
        for node in found
    ]
    header = (
        "Node",
        "Model",
        "GPUs",
        "State",
        "Instances",
        "Free slices",
        "Foreign",
        "Held",
        "Labels",
    )
    print_columns(header, rows, "no nodes")


@nodes.command("add")
def _add_node(
    name: NewName,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="GPU model.", autocompletion=completion.models)
    ],
    gpus: Annotated[int, typer.Option(metavar="N", help="How many GPUs it has.")],
    label: Label = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Register a node."""
    labels = parse_labels(label)
    with connect(server, token_file) as client:
        node = client.add_node(name, model, gpus, labels=labels)
    print_result(node, json, f"{node.name}: {node.gpus} x {node.model}, {node.state}")


@nodes.command("cordon")
def _cordon(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Stop placing new instances on a node; running ones stay."""
    with connect(server, token_file) as client:
        node = client.cordon(name)
    print_result(node, json, f"{node.name}: {node.state}")


@nodes.command("uncordon")
def _uncordon(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Allow new instances on a node again."""
    with connect(server, token_file) as client:
        node = client.uncordon(name)
    print_result(node, json, f"{node.name}: {node.state}")


@nodes.command("drain")
def _drain(
    name: NodeName,
    evict: Annotated[
        bool, typer.Option("--evict", help="Release its allocations instead of waiting.")
    ] = False,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Drain a node: no new instances; it is drained when the last one ends."""
    with connect(server, token_file) as client:
        node = client.drain(name, evict=evict)
    left = {0: "", 1: ", 1 instance left"}.get(node.instances, f", {node.instances} instances left")
    print_result(node, json, f"{node.name}: {node.state}{left}")


@nodes.command("rm")
def _remove_node(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Remove an empty node."""
    with connect(server, token_file) as client:
        node = client.remove_node(name)
    print_result(node, json, f"{node.name}: removed")


@nodes.command("show")
def _show(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show a node: its agent, and its GPUs slice by slice."""
    with connect(server, token_file) as client:
        node = client.node(name)
    if json:
        show_json(node)
        return
    typer.echo(facts(_facts(node)) + "\n")
    rows = [
        (
            str(gpu.gpu),
            gpu.mask,
            " ".join(f"{one.profile}@{one.start}{_phase(one.phase)}" for one in gpu.instances),
            "" if gpu.temperature is None else f"{gpu.temperature:g} C",
            gpu.uuid or "",
            "; ".join(gpu.holds.values()),
        )
        for gpu in node.devices
    ]
    print_columns(("GPU", "Slices", "Instances", "Temp", "UUID", "Held"), rows)


def _facts(node: NodeDetail) -> Iterator[tuple[str, str]]:
    """Yield the fields of a node."""
    yield "node", node.name
    yield "model", f"{node.gpus} x {node.model}"
    yield "state", node.state
    yield "labels", pairs(node.labels)
    yield "slices", f"{node.free_slices} of {node.slices} free"
    agent = node.agent
    if agent is not None:
        yield "agent", f"{agent.version}, since {agent.since}"
        yield "driver", agent.driver
        last = f", last contact {agent.last_contact}" if agent.last_contact else ""
        yield "reachable", f"{'yes' if agent.reachable else 'no'}{last}"
    for name, why in node.holds.items():
        yield "held", f"{name}: {why}"


def _phase(phase: str | None) -> str:
    return "" if phase in (None, "active") else f"({phase})"


@nodes.command("accept")
def _accept(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Accept a node whose driver reports another geometry than the catalog."""
    with connect(server, token_file) as client:
        node = client.accept(name)
    print_result(
        node, json, f"{node.name}: {node.model} accepted, {node.state}{_still_held(node.holds)}"
    )


def _still_held(holds: dict[str, str]) -> str:
    return "".join(f", held: {why}" for why in holds.values())


@nodes.command("foreign")
def _foreign(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List foreign instances on a node: those without an allocation, to adopt or evict."""
    with connect(server, token_file) as client:
        found = [one for gpu in client.node(name).devices for one in gpu.foreign]
    if json:
        show_json(found)
        return
    rows = [
        (
            one.name,
            str(one.gpu),
            one.profile or "unknown",
            str(one.start),
            str(one.size),
            one.why,
            "evicting" if one.evicting else "blocked" if one.blocks else "GPU held",
        )
        for one in found
    ]
    header = ("Instance", "GPU", "Profile", "Start", "Slices", "Kind", "State")
    print_columns(header, rows, "no foreign instances")


@nodes.command("adopt")
def _adopt(
    name: NodeName,
    foreign: ForeignName,
    tenant: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The tenant that gets it.", autocompletion=completion.tenants
        ),
    ],
    label: Label = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Turn a foreign instance into an allocation of a tenant, in place."""
    labels = parse_labels(label)
    with connect(server, token_file) as client:
        one = client.adopt(name, foreign, tenant, labels=labels)
    print_result(one, json, f"{one.id} {place(one.instances[0])}")


@nodes.command("evict")
def _evict(
    name: NodeName,
    foreign: ForeignName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Have the agent destroy a foreign instance, even if it is in use."""
    with connect(server, token_file) as client:
        one = client.evict(name, foreign)
    print_result(one, json, f"{one.name}: evicting")

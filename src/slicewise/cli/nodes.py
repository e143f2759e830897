"""`slicewise nodes`: what a service runs on, and what the agents there found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slicewise.cli import completion
from slicewise.cli.allocations import Label, parse_labels
from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.options import AsJson
from slicewise.cli.telling import (
    clean,
    fold,
    holds_of,
    pairs,
    place,
    print_columns,
    say,
    show_json,
)
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.control.reports import NodeDetail

_CONTEXT: Any = {"help_option_names": ["-h", "--help"]}
nodes = typer.Typer(context_settings=_CONTEXT, rich_markup_mode=None, add_completion=False)

NewName = Annotated[str, typer.Argument(metavar="NAME")]
NodeName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.nodes)]
ForeignName = Annotated[
    str, typer.Argument(metavar="UUID", help="The instance, as `nodes foreign` names it.")
]


def lists(context: typer.Context) -> bool:
    """Whether the group stands alone, to list; options between it and a command would be lost."""
    command = context.invoked_subcommand
    if command is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise SlicewiseError(f"give {option} behind {command!r}, not before it")
    return False


@nodes.callback(invoke_without_command=True)
def _list_nodes(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List the nodes of a service; or look at one, add, cordon, drain and remove them."""
    if not lists(context):
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
    say(node, json, f"{node.name}: {node.gpus} x {node.model}, {node.state}")


@nodes.command("cordon")
def _cordon(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a node take no new instances; what runs there stays."""
    with connect(server, token_file) as client:
        node = client.cordon(name)
    say(node, json, f"{node.name}: {node.state}")


@nodes.command("uncordon")
def _uncordon(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a node take new instances again."""
    with connect(server, token_file) as client:
        node = client.uncordon(name)
    say(node, json, f"{node.name}: {node.state}")


@nodes.command("drain")
def _drain(
    name: NodeName,
    evict: Annotated[bool, typer.Option("--evict", help="End what is on it; do not wait.")] = False,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a node become empty: no new instances, and it is drained when the last one ends."""
    with connect(server, token_file) as client:
        node = client.drain(name, evict=evict)
    left = {0: "", 1: ", 1 instance left"}.get(node.instances, f", {node.instances} instances left")
    say(node, json, f"{node.name}: {node.state}{left}")


@nodes.command("rm")
def _remove_node(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Remove a node that is empty."""
    with connect(server, token_file) as client:
        node = client.remove_node(name)
    say(node, json, f"{node.name}: removed")


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
    for fact, value in _facts(node):
        typer.echo(fold(f"{fact:<11}{clean(value)}", 11))
    typer.echo()
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
    print_columns(("GPU", "Slices", "Instances", "At", "UUID", "Held"), rows)


def _facts(node: NodeDetail) -> Iterator[tuple[str, str]]:
    """What there is to say about a node; what is empty goes unsaid."""
    yield "node", node.name
    yield "model", f"{node.gpus} x {node.model}"
    yield "state", node.state
    if node.labels:
        yield "labels", pairs(node.labels)
    yield "slices", f"{node.free_slices} of {node.slices} free"
    agent = node.agent
    if agent is not None:
        yield "agent", f"{agent.version}, since {agent.since}"
        yield "driver", agent.driver
        last = f", last heard of at {agent.last_contact}" if agent.last_contact else ""
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
    """Use a node although its driver tells another geometry than the catalog."""
    with connect(server, token_file) as client:
        node = client.accept(name)
    say(node, json, f"{node.name}: {node.model} accepted, {node.state}{_still_held(node.holds)}")


def _still_held(holds: dict[str, str]) -> str:
    return "".join(f", held: {why}" for why in holds.values())


@nodes.command("foreign")
def _foreign(
    name: NodeName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List the instances on a node that are no allocation's, to be adopted or evicted."""
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
            "to be destroyed" if one.evicting else "blocked" if one.blocks else "GPU held",
        )
        for one in found
    ]
    header = ("Instance", "GPU", "Profile", "At", "Slices", "Is", "State")
    print_columns(header, rows, "no instances that are nobody's")


@nodes.command("adopt")
def _adopt(
    name: NodeName,
    foreign: ForeignName,
    tenant: Annotated[
        str,
        typer.Option(metavar="NAME", help="Whose it will be.", autocompletion=completion.tenants),
    ],
    label: Label = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Make an instance that is nobody's an allocation of a tenant, where it is."""
    labels = parse_labels(label)
    with connect(server, token_file) as client:
        one = client.adopt(name, foreign, tenant, labels=labels)
    say(one, json, f"{one.id} {place(one.instances[0])}")


@nodes.command("evict")
def _evict(
    name: NodeName,
    foreign: ForeignName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Have the agent destroy an instance that is nobody's, whoever uses it."""
    with connect(server, token_file) as client:
        one = client.evict(name, foreign)
    say(one, json, f"{one.name}: to be destroyed")

"""The commands on allocations: `slicewise submit`, `release`, `extend`, `ls`, `show`, `explain`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.cli import completion
from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import (
    ending,
    facts,
    pairs,
    place,
    print_columns,
    print_result,
    short,
    show_json,
    wanted,
)
from slicewise.cli.options import AsJson
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Need

if TYPE_CHECKING:
    from slicewise.api.allocations import AllocationView, Cost, DryRun

Want = Annotated[
    str | None,
    typer.Argument(
        metavar="PROFILE",
        help="The profile, such as 3g.40gb; or give a need.",
        autocompletion=completion.profiles,
    ),
]
Compute = Annotated[
    int | None, typer.Option(metavar="N", help="Need: minimum number of compute slices.")
]
Memory = Annotated[float | None, typer.Option(metavar="GB", help="Need: minimum memory.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="On this GPU model; may be repeated.",
        autocompletion=completion.models,
    ),
]
Count = Annotated[int, typer.Option(metavar="N", help="Number of instances, all or none.")]
ForTenant = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="For this tenant; a tenant's token implies it.",
        autocompletion=completion.tenants,
    ),
]
Label = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label; may be repeated.")
]


class StateName(StrEnum):
    """The states of an allocation by name."""

    QUEUED = "queued"
    PLACED = "placed"
    CREATING = "creating"
    ACTIVE = "active"
    RELEASING = "releasing"
    RELEASED = "released"
    FAILED = "failed"
    CANCELLED = "cancelled"


def submit(
    profile: Want = None,
    compute: Compute = None,
    memory: Memory = None,
    model: Models = None,
    count: Count = 1,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait in the queue.")
    ] = 0,
    until_placed: Annotated[
        bool, typer.Option("--until-placed", help="Block until it leaves the queue.")
    ] = False,
    until_active: Annotated[
        bool, typer.Option("--until-active", help="Block until it can be used.")
    ] = False,
    lease: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Release automatically after this time.")
    ] = None,
    preemptible: Annotated[
        bool,
        typer.Option("--preemptible", help="It may end early for another tenant's guarantee."),
    ] = False,
    expected_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long it will be in use, as a hint."),
    ] = None,
    priority: Annotated[int, typer.Option(metavar="N", help="In the queue: higher first.")] = 0,
    label: Label = None,
    tenant: ForTenant = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Idempotency key: the same key returns the same allocation."
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Request an instance; exit with 1 if the request is rejected."""
    want, labels = _want(profile, compute, memory), parse_labels(label)
    with connect(server, token_file) as client:
        from slicewise.client import RejectedError

        try:
            allocation = client.allocate(
                want,
                models=model or (),
                count=count,
                wait_seconds=wait,
                lease_seconds=lease,
                preemptible=preemptible,
                expected_seconds=expected_seconds,
                priority=priority,
                labels=labels,
                tenant=tenant,
                idempotency_key=key,
            )
        except RejectedError as rejection:
            if json:
                show_json(rejection.problem)
            else:
                typer.echo(f"rejected ({rejection.reason}): {rejection}", err=True)
            raise typer.Exit(1) from None
        if until_placed and allocation.state == "queued":
            allocation = client.wait_until_placed(allocation.id)
        if until_active:
            allocation = client.wait_until_active(allocation.id)
    print_result(allocation, json, "\n".join(_outcome(allocation)))
    if allocation.state in ("cancelled", "failed"):
        raise typer.Exit(1)


def _outcome(one: AllocationView) -> Iterator[str]:
    """Yield the outcome of a request: one line, or one per instance."""
    if one.waiting is not None:
        yield f"{one.id} is number {one.waiting.position} in its line: {one.waiting.detail}"
    elif one.ended_at is None:
        for part in one.instances:
            yield f"{one.id} {place(part)}{f', {part.env}' if part.env else ''}"
    else:
        yield f"{one.id} {ending(one)}{f': {one.detail}' if one.detail else ''}"


def release(
    identity: Annotated[
        list[str],
        typer.Argument(
            metavar="ID...", help="The allocations.", autocompletion=completion.allocations
        ),
    ],
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Release allocations, or remove them from the queue."""
    ended: list[AllocationView] = []
    problems: list[str] = []
    try:
        with connect(server, token_file) as client:
            from slicewise.client import ApiError

            for one in identity:
                try:
                    ended.append(client.release(one))
                except ApiError as error:
                    if error.status != 404:
                        raise
                    problems.append(str(error))
    finally:  # report what was released even if a later one failed
        if json:
            show_json(ended)
        else:
            for allocation in ended:
                typer.echo(f"{allocation.id} {ending(allocation)}")
    if problems:
        raise SlicewiseError("; ".join(problems))


def extend(
    identity: Annotated[
        str,
        typer.Argument(metavar="ID", help="The allocation.", autocompletion=completion.allocations),
    ],
    seconds: Annotated[
        float, typer.Argument(metavar="SECONDS", help="Time from now until the lease ends.")
    ],
    key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Idempotency key: the same key extends it once."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Extend the lease of an allocation; it never gets shorter."""
    with connect(server, token_file) as client:
        one = client.extend(identity, seconds, idempotency_key=key)
    print_result(one, json, f"{one.id}: its lease ends at {one.ends_at}")


def ls(
    state: Annotated[StateName | None, typer.Option(help="In this state.")] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this profile.", autocompletion=completion.profiles),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="On this node.", autocompletion=completion.nodes),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="On this GPU model.", autocompletion=completion.models),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Of this tenant.", autocompletion=completion.tenants),
    ] = None,
    label: Label = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number to list.")] = 1000,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List allocations: the live ones, unless --state is given."""
    if limit < 1:
        raise SlicewiseError(f"limit must be at least 1, not {limit}")
    labels = parse_labels(label)
    with connect(server, token_file) as client:
        found = client.allocations(
            labels=labels, state=state, profile=profile, node=node, model=model, tenant=tenant
        )
        shown = list(islice(found, limit))
        more = next(found, None) is not None
    if json:
        show_json(shown)
    else:
        print_columns(
            ("Allocation", "State", "Tenant", "Profile", "Node", "GPU", "Start", "Since"),
            [row for one in shown for row in _rows(one)],
            "no allocations",
        )
    if more:
        typer.echo(f"there are more than {limit}: --limit N shows them", err=True)


def _rows(one: AllocationView) -> Iterator[tuple[str, ...]]:
    since = short(one.ended_at or one.placed_at or one.requested_at)
    head = one.id, one.state, one.tenant
    for part in one.instances:
        yield (*head, part.profile, part.node, str(part.gpu), str(part.start), since)
    if not one.instances:
        yield (*head, wanted(one), "", "", "", since)


def show(
    identity: Annotated[
        str,
        typer.Argument(metavar="ID", help="The allocation.", autocompletion=completion.allocations),
    ],
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show one allocation, live or ended."""
    with connect(server, token_file) as client:
        one = client.allocation(identity)
    print_result(one, json, facts(_facts(one)))


def _facts(one: AllocationView) -> Iterator[tuple[str, str | None]]:
    """Yield the fields of an allocation."""
    yield "allocation", one.id
    yield "state", ending(one)
    yield "tenant", one.tenant
    yield "request", wanted(one)
    yield "priority", str(one.priority) if one.priority else None
    yield "terms", "preemptible" if one.preemptible else None
    yield "in place of", one.replaces
    yield "expected", _seconds(one.expected_seconds)
    yield "labels", pairs(one.labels)
    yield "requested", one.requested_at
    if one.waiting is not None:
        yield "waiting", f"number {one.waiting.position} in its line"
        yield "why", f"{one.waiting.reason}: {one.waiting.detail}"
        yield "place at", one.waiting.expected_at
        yield "until", one.waiting.deadline
    yield "placed", one.placed_at
    for part in one.instances:
        phase = "" if part.phase is None else f", {part.phase}"
        tried = f", tried {part.attempts} times" if part.attempts else ""
        why = f": {part.detail}" if part.detail else ""
        yield "instance", f"{place(part)} ({part.model}){phase}{tried}{why}"
        yield "use with", part.env
        yield "CDI device", part.cdi
    yield "lease", None if one.ends_at else _seconds(one.lease_seconds)
    yield "lease ends", one.ends_at
    yield "reclaimed at", one.reclaimed_at
    yield "ended", one.ended_at
    yield "reason", one.detail


def _seconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds:g} seconds"


def explain(
    profile: Want = None,
    compute: Compute = None,
    memory: Memory = None,
    model: Models = None,
    count: Count = 1,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also show this policy's choice; may be repeated.",
            autocompletion=completion.policies,
        ),
    ] = None,
    tenant: ForTenant = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Explain where a request would be placed, at what cost, and why not elsewhere."""
    want = _want(profile, compute, memory)
    with connect(server, token_file) as client:
        found = client.dry_run(
            want,
            policies=policy or (),
            models=model or (),
            count=count,
            tenant=tenant,
            plan=True,
        )
    if json:
        show_json(found)
    else:
        _print_dry_run(found)


def _print_dry_run(found: DryRun) -> None:
    reason = f" ({found.reason})" if found.reason else ""
    typer.echo(f"{found.outcome}{reason}: {found.detail}")
    if len(found.instances) > 1:
        for part in found.instances:
            typer.echo(f"  {place(part)}")
    if found.cost is not None:
        by = f"{found.policy} (table {found.table})" if found.table else found.policy
        typer.echo(f"  by {by}, at the cost of {_cost(found.cost)}")
    if found.repack is not None:
        typer.echo(f"  {found.repack.detail}")
    if found.ahead:
        wait = "request waits" if found.ahead == 1 else "requests wait"
        typer.echo(f"  {found.ahead} {wait} for the same already")
    if found.alternatives:
        rows = [
            (
                f"{other.node} GPU {other.gpu}",
                other.mask,
                str(other.start),
                f"{other.cost.fragmentation.partial:+g}",
                str(other.cost.placements_lost),
                str(other.alike),
                other.why,
            )
            for other in found.alternatives
        ]
        typer.echo()
        header = ("Alternative", "Slices", "Start", "F", "Lost", "Alike", "Why not")
        print_columns(header, rows)
    if found.policies:
        typer.echo()
        print_columns(
            ("Policy", "Placement"),
            [
                (
                    choice.policy,
                    f"{choice.spot.node} GPU {choice.spot.gpu} at slice {choice.spot.start}, "
                    f"{_cost(choice.cost)}"
                    if choice.spot is not None and choice.cost is not None
                    else f"none: {choice.detail}",
                )
                for choice in found.policies
            ],
        )


def _cost(cost: Cost) -> str:
    return f"F {cost.fragmentation.partial:+g} and {cost.placements_lost} open placements"


def _want(profile: str | None, compute: int | None, memory: float | None) -> str | Need:
    if profile is not None:
        if compute is not None or memory is not None:
            raise SlicewiseError("a profile or a need (--compute, --memory), not both")
        return profile
    if compute is None and memory is None:
        raise SlicewiseError("name a profile, or a need with --compute and --memory")
    return Need(compute or 0, memory or 0.0)


def parse_labels(given: list[str] | None) -> dict[str, str]:
    """Parse labels of the form KEY=VALUE."""
    labels: dict[str, str] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SlicewiseError(f"label {text!r} is not KEY=VALUE")
        if key in labels:
            raise SlicewiseError(f"label {key!r} is given twice")
        labels[key] = value
    return labels

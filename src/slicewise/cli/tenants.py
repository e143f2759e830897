"""`slicewise tenants` and `tokens`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from slicewise.cli import completion
from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import print_columns, print_result, short, show_json
from slicewise.cli.options import AsJson, command_group, without_subcommand
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.api.tenants import NewTokenView, Quota, TenantView

tenants = command_group()
tokens = command_group()

NewName = Annotated[str, typer.Argument(metavar="NAME")]
TenantName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=completion.tenants)]
MemorySlices = Annotated[
    str | None, typer.Option(metavar="N", help="Memory slices held at a time.")
]
ComputeSlices = Annotated[
    str | None, typer.Option(metavar="N", help="Compute slices held at a time.")
]
Instances = Annotated[str | None, typer.Option(metavar="N", help="Instances held at a time.")]
Rate = Annotated[str | None, typer.Option(metavar="N", help="Requests a second.")]
MaxPriority = Annotated[
    str | None,
    typer.Option(metavar="N", help="Priorities up to this one count against other tenants."),
]
Weight = Annotated[
    str | None, typer.Option(metavar="N", help="Share when several tenants wait; 1 by default.")
]
Guarantee = Annotated[
    str | None, typer.Option(metavar="N", help="Memory slices within which its requests are first.")
]
DefaultLease = Annotated[
    str | None, typer.Option(metavar="SECONDS", help="Lease of a request that asks for none.")
]
MaxLease = Annotated[str | None, typer.Option(metavar="SECONDS", help="The longest lease.")]


class RoleName(StrEnum):
    """The roles of tokens by name."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"
    AGENT = "agent"
    READ_ONLY = "read-only"


# Tenants


@tenants.callback(invoke_without_command=True)
def _list_tenants(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List tenants with their usage and quotas; or add, change and remove them."""
    if not without_subcommand(context):
        return
    with connect(server, token_file) as client:
        found = list(client.tenants())
    if json:
        show_json(found)
        return
    print_columns(_HEADER, [_row(tenant) for tenant in found], "no tenants")


_HEADER = (
    "Tenant", "Memory", "Compute", "Instances", "Waiting",
    "Weight", "Guarantee", "Priority", "Rate", "Lease",
)  # fmt: skip


def _row(tenant: TenantView) -> tuple[str, ...]:
    def share(used: int, limit: int | None) -> str:
        return f"{used}" if limit is None else f"{used}/{limit}"

    usage, quota = tenant.usage, tenant.quota
    rate = quota.requests_per_second
    return (
        tenant.name,
        share(usage.memory_slices, quota.memory_slices),
        share(usage.compute_slices, quota.compute_slices),
        share(usage.instances, quota.instances),
        str(usage.waiting),
        f"{quota.weight:g}",
        str(quota.guarantee),
        str(quota.max_priority),
        "" if rate is None else f"{rate:g}/s",
        _lease(quota),
    )


def _lease(quota: Quota) -> str:
    """Return the default lease and the longest one, as far as they are set."""
    default, longest = quota.default_lease_seconds, quota.max_lease_seconds
    limits = [] if default is None else [f"{default:g} s"]
    return ", ".join(limits if longest is None else [*limits, f"at most {longest:g} s"])


_FRACTIONS = frozenset(
    {"requests_per_second", "weight", "default_lease_seconds", "max_lease_seconds"}
)
"""Terms that need not be whole numbers."""
_NEVER_NONE = frozenset({"max_priority", "weight", "guarantee"})


def _terms(**given: str | None) -> dict[str, Any]:
    """Parse the given terms; `none` removes a limit."""
    return {name: _number(name, text) for name, text in given.items() if text is not None}


def _number(name: str, text: str) -> float | None:
    optional, whole = name not in _NEVER_NONE, name not in _FRACTIONS
    if optional and text == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or (whole and number != int(number)):
        option = "--" + name.removesuffix("_lease_seconds").replace("_", "-")
        option += "-lease" if name.endswith("_lease_seconds") else ""
        kind = "a whole number" if whole else "a number"
        other = " or none" if optional else ""
        raise SlicewiseError(f"{option} must be {kind}{other}, not {text!r}")
    return int(number) if whole else number


@tenants.command("add")
def _add_tenant(
    name: NewName,
    memory_slices: MemorySlices = None,
    compute_slices: ComputeSlices = None,
    instances: Instances = None,
    requests_per_second: Rate = None,
    max_priority: MaxPriority = None,
    weight: Weight = None,
    guarantee: Guarantee = None,
    default_lease: DefaultLease = None,
    max_lease: MaxLease = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Create a tenant, optionally with limits and a share."""
    terms = _terms(
        memory_slices=memory_slices,
        compute_slices=compute_slices,
        instances=instances,
        requests_per_second=requests_per_second,
        max_priority=max_priority,
        weight=weight,
        guarantee=guarantee,
        default_lease_seconds=default_lease,
        max_lease_seconds=max_lease,
    )
    with connect(server, token_file) as client:
        from slicewise.client import Quota

        tenant = client.add_tenant(name, Quota(**terms))
    print_result(tenant, json, f"{tenant.name}: created")


@tenants.command("quota")
def _quota(
    name: TenantName,
    memory_slices: MemorySlices = None,
    compute_slices: ComputeSlices = None,
    instances: Instances = None,
    requests_per_second: Rate = None,
    max_priority: MaxPriority = None,
    weight: Weight = None,
    guarantee: Guarantee = None,
    default_lease: DefaultLease = None,
    max_lease: MaxLease = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Change a tenant's limits and share; `none` removes a limit."""
    terms = _terms(
        memory_slices=memory_slices,
        compute_slices=compute_slices,
        instances=instances,
        requests_per_second=requests_per_second,
        max_priority=max_priority,
        weight=weight,
        guarantee=guarantee,
        default_lease_seconds=default_lease,
        max_lease_seconds=max_lease,
    )
    if not terms:
        raise SlicewiseError("name at least one term to change, such as --instances 10")
    with connect(server, token_file) as client:
        tenant = client.change_quota(name, **terms)
    print_result(tenant, json, f"{tenant.name}: changed")


@tenants.command("rm")
def _remove_tenant(
    name: TenantName,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Remove a tenant without allocations, and revoke its tokens."""
    with connect(server, token_file) as client:
        tenant = client.remove_tenant(name)
    print_result(tenant, json, f"{tenant.name}: removed")


# Tokens


@tokens.callback(invoke_without_command=True)
def _list_tokens(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List tokens, without their secrets; or issue, rotate and revoke them."""
    if not without_subcommand(context):
        return
    with connect(server, token_file) as client:
        found = list(client.tokens())
    if json:
        show_json(found)
        return
    rows = [
        (t.id, t.role, t.tenant or t.node or "", short(t.expires_at) or "never", t.note)
        for t in found
    ]
    print_columns(("Token", "Role", "For", "Expires", "Note"), rows, "no tokens")


@tokens.command("issue")
def _issue(
    role: Annotated[RoleName, typer.Argument(help="The role of the token.")],
    tenant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For this tenant.", autocompletion=completion.tenants),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An agent's node.", autocompletion=completion.nodes),
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="A note to recognize it by.")] = "",
    expires_in: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Expire after this time.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the secret to this new file, readable by its owner only."
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Issue a token; its secret is shown only once."""
    with _secret_file(out) as file, connect(server, token_file) as client:
        issued = client.issue_token(
            role, tenant=tenant, node=node, note=note, expires_in_seconds=expires_in
        )
        if file is not None:
            file.write(issued.token + "\n")
    _show_secret(issued, out, json)


def _show_secret(issued: NewTokenView, out: Path | None, json: bool) -> None:
    """Print an issued token, with its secret unless it went to a file."""
    if json:
        import msgspec

        show_json(msgspec.structs.replace(issued, token="") if out is not None else issued)
    elif out is not None:
        typer.echo(f"{issued.id} {issued.role}, in {out}")
    else:
        typer.echo(f"{issued.id} {issued.role}\n{issued.token}")


@contextmanager
def _secret_file(path: Path | None) -> Iterator[IO[str] | None]:
    """Create a file that only its owner can read, before a secret is issued."""
    if path is None:
        yield None
        return
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SlicewiseError(
            f"{str(path)!r} already exists: name a new file for the token"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SlicewiseError(f"{str(path)!r} cannot be written: {why}") from None
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@tokens.command("rotate")
def _rotate(
    identity: Annotated[str, typer.Argument(metavar="ID", autocompletion=completion.tokens)],
    overlap: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long the old token stays valid.")
    ] = 3600,
    expires_in: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Expire the new token after this time (default: when the old one would).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the secret to this new file, readable by its owner only."
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Replace a token by one with the same rights; the old one expires after the overlap."""
    with _secret_file(out) as file, connect(server, token_file) as client:
        issued = client.rotate_token(
            identity, overlap_seconds=overlap, expires_in_seconds=expires_in
        )
        if file is not None:
            file.write(issued.token + "\n")
    _show_secret(issued, out, json)


@tokens.command("revoke")
def _revoke(
    identity: Annotated[str, typer.Argument(metavar="ID", autocompletion=completion.tokens)],
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Revoke a token."""
    with connect(server, token_file) as client:
        gone = client.revoke_token(identity)
    print_result(gone, json, f"{gone.id}: revoked")

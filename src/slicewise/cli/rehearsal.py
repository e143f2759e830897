"""`slicewise rehearsal`: the table that places requests, and what the last rehearsal found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import facts, print_columns, short, show_json, want_text
from slicewise.cli.options import AsJson
from slicewise.core.request import Need

if TYPE_CHECKING:
    from slicewise.api.policy import CandidateView, DemandView, Estimate, PolicyStatus

_HEADER = ("Table", "Rejected %", "95% interval", "Slices %", "Fewer by", "Runs", "")
_ACTIVITIES = {
    "off": "off",
    "elsewhere": "the leader rehearses",
    "learning": "waiting until enough is known of the demand",
    "running": "running",
    "waiting": "waiting until the demand changes or the next one is due",
}


def rehearsal(
    server: Server = DEFAULT_SERVER, token_file: TokenFile = None, json: AsJson = False
) -> None:
    """Show which table places requests, why, and what the last rehearsal found."""
    with connect(server, token_file) as client:
        status = client.policy()
    if json:
        show_json(status)
        return
    typer.echo(_summary(status))
    if status.rehearsal is not None:
        typer.echo()
        print_columns(_HEADER, [_row(candidate) for candidate in status.rehearsal.candidates])


def _summary(status: PolicyStatus) -> str:
    rehearsed = None
    if status.rehearsal is not None:
        known = status.rehearsal
        rehearsed = f"{short(known.at)} at a load of {known.load:.0%}"
    rehearsals = None
    if status.rehearsals is not None:
        rehearsals = _ACTIVITIES[status.rehearsals.activity]
        if status.rehearsals.detail:
            rehearsals += f": {status.rehearsals.detail}"
    pairs = [
        ("policy", status.policy),
        ("table", f"{status.table}: {status.words}" if status.table else status.words),
        ("since", _since(status)),
        ("why", status.why),
        ("seen", _seen(status)),
        ("demand", _demand(status.demand)),
        ("asked for", _shares(status.demand)),
        ("rehearsed", rehearsed),
        ("rehearsal", rehearsals),
    ]
    return facts(pairs)


def _since(status: PolicyStatus) -> str | None:
    if status.table is None:
        return None
    if status.since is None:
        return "the beginning"
    if status.switches is None:
        return short(status.since)
    return f"{short(status.since)}, {_times(status.switches, 'change')} in all"


def _seen(status: PolicyStatus) -> str | None:
    seen = status.seen
    if seen is None or not seen.requests:
        return None
    return f"{seen.rejected / seen.requests:.2%} of {seen.requests:,} requests rejected since then"


def _demand(demand: DemandView | None) -> str | None:
    if demand is None or not demand.requests:
        return None
    parts = [_times(demand.requests, "request"), f"{demand.requests_per_hour:,.0f} an hour"]
    if demand.mean_lifetime is not None:
        parts.append(f"mean lifetime {demand.mean_lifetime:,.0f} s")
    parts.append(f"{demand.stated:.0%} of lifetimes announced")
    if demand.changes:
        parts.append(
            f"changed {_times(demand.changes, 'time')}, last {demand.steady_for:,} requests ago"
        )
    return ", ".join(parts)


def _shares(demand: DemandView | None) -> str | None:
    if demand is None:
        return None
    texts = []
    for each in demand.shares:
        wanted, need = each.wanted, each.wanted.need
        want = Need(need.compute, need.memory_gb) if need is not None else wanted.profile or ""
        texts.append(f"{want_text(want, wanted.models, 1)} {each.share:.1%}")
    return ", ".join(texts)


def _row(candidate: CandidateView) -> tuple[str, ...]:
    return (
        candidate.table,
        f"{100 * candidate.rejected.value:.3f}",
        _interval(candidate.rejected),
        f"{100 * candidate.rejected_slices.value:.3f}",
        _interval(candidate.fewer) if candidate.table != "least-lost" else "",
        str(candidate.runs),
        "in use" if candidate.in_use else "",
    )


def _interval(estimate: Estimate) -> str:
    return f"{100 * estimate.low:.3f} to {100 * estimate.high:.3f}"


def _times(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"

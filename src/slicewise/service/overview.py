"""The cluster as a whole, and the models and policies there are."""

from __future__ import annotations

from functools import partial

from slicewise.control.answers import said
from slicewise.control.reports import ModelList, ModelView, PolicyList, PolicyView, ProfileView
from slicewise.core.geometry import Geometry
from slicewise.policies.registry import DEFAULT, policy_class, policy_names
from slicewise.service.http import ASKED_AGAIN, Query, Reply, Request, reply
from slicewise.service.site import Site


class ClusterQuery(Query, frozen=True):
    """What to say about the cluster."""

    gpus: bool = False


_VARY = (b"vary", b"authorization")


async def cluster(site: Site, request: Request) -> Reply:
    """Totals, models and nodes; every GPU where asked for."""
    query, caller = request.query(ClusterQuery), request.caller
    tag = site.tag(site.state.seq, caller)
    if request.knows(tag):
        return Reply(304, b"", [(b"etag", tag), _VARY], caching=ASKED_AGAIN)
    pace = partial(site.turns.take, request.share)
    seq, (head, *pieces) = await site.snapshots.whole(caller, query.gpus, pace)
    headers = [(b"etag", site.tag(seq, caller)), _VARY]
    return Reply(200, head, headers, more=pieces, caching=ASKED_AGAIN)


async def models(site: Site, request: Request) -> Reply:
    """The GPU models known, and which of them are in use."""
    in_use = {node.geometry.model for node in site.state.nodes.values()}
    views = []
    for entry in site.catalog.entries():
        geometry = site.state.geometries.get(entry.model) or entry.geometry
        views.append(
            ModelView(
                name=entry.model,
                aliases=entry.aliases,
                memory_gb=entry.memory_gb,
                slices=entry.memory_slices,
                compute_slices=entry.compute_slices,
                in_use=entry.model in in_use,
                refusal=entry.refusal,
                profiles=_profiles(geometry) if geometry is not None else (),
                budgets={b.name: b.total for b in geometry.budgets} if geometry else {},
            )
        )
    return reply(said(200, ModelList(models=tuple(views))))


def _profiles(geometry: Geometry) -> tuple[ProfileView, ...]:
    return tuple(
        ProfileView(
            name=profile.name,
            size=profile.size,
            compute=profile.compute,
            memory_gb=profile.memory_gb,
            starts=profile.starts,
            variant_of=profile.variant_of,
            uses=dict(profile.uses),
        )
        for profile in geometry.profiles
    )


async def policies(site: Site, request: Request) -> Reply:
    """The policies known, and which of them places here."""
    used = site.settings.policy
    used = DEFAULT if used == "default" else used
    views = tuple(
        PolicyView(name=name, summary=policy_class(name).summary, in_use=name == used)
        for name in policy_names()
    )
    return reply(said(200, PolicyList(policies=views)))

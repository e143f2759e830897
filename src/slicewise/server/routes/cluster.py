"""The cluster, and the available GPU models and policies."""

from __future__ import annotations

from functools import partial

from slicewise.api.cluster import ModelList, ModelView, PolicyList, PolicyView, ProfileView
from slicewise.control.answers import json_answer
from slicewise.core.geometry import Geometry
from slicewise.policies.registry import DEFAULT, policy_class, policy_names
from slicewise.server.context import AppContext
from slicewise.server.requests import REVALIDATE, HttpRequest, Query, Reply, reply


class ClusterQuery(Query, frozen=True):
    """Parameters of the cluster view."""

    gpus: bool = False


_VARY = (b"vary", b"authorization")


async def cluster(context: AppContext, request: HttpRequest) -> Reply:
    """Totals, models and nodes; with `gpus=true`, every GPU."""
    query, caller = request.query(ClusterQuery), request.caller
    tag = context.tag(context.state.seq, caller)
    if request.has_current(tag):
        return Reply(304, b"", [(b"etag", tag), _VARY], caching=REVALIDATE)
    pace = partial(context.turns.take, request.share)
    seq, (head, *pieces) = await context.cluster_json.document(caller, query.gpus, pace)
    headers = [(b"etag", context.tag(seq, caller)), _VARY]
    return Reply(200, head, headers, more=pieces, caching=REVALIDATE)


async def models(context: AppContext, request: HttpRequest) -> Reply:
    """The known GPU models, and whether they are in use."""
    in_use = {node.geometry.model for node in context.state.nodes.values()}
    views = []
    for entry in context.catalog.entries():
        geometry = context.state.geometries.get(entry.model) or entry.geometry
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
    return reply(json_answer(200, ModelList(models=tuple(views))))


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


async def policies(context: AppContext, request: HttpRequest) -> Reply:
    """The available policies, and which one is in use."""
    used = context.settings.policy
    used = DEFAULT if used == "default" else used
    views = tuple(
        PolicyView(name=name, summary=policy_class(name).summary, in_use=name == used)
        for name in policy_names()
    )
    return reply(json_answer(200, PolicyList(policies=views)))

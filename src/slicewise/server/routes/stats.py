"""Recent statistics: placements, rejections, capacity and queue over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated

from msgspec import Meta

from slicewise.api.base import moment
from slicewise.api.stats import PointView, RejectionView, StatsView
from slicewise.control.answers import json_answer
from slicewise.control.state import request_of
from slicewise.journal.entries import Rejected, Row, TenantRef
from slicewise.server.context import AppContext
from slicewise.server.recent_stats import STEP_SECONDS, Counts, Sample
from slicewise.server.requests import HttpRequest, Query, Reply, reply

MAX_POINTS = 360


class StatsQuery(Query, frozen=True):
    """Length of the interval, and number of rejections."""

    seconds: Annotated[int, Meta(ge=60, le=86400)] = 3600
    rejections: Annotated[int, Meta(ge=0, le=500)] = 50


async def recent(context: AppContext, request: HttpRequest) -> Reply:
    """Statistics of this process. A tenant gets its own decisions only."""
    query = request.query(StatsQuery)
    history, tenant = context.recent_stats, request.caller.tenant
    await history.update()
    step = STEP_SECONDS * ceil(query.seconds / MAX_POINTS / STEP_SECONDS)
    points = _points(history.samples(query.seconds), step, tenant)
    view = StatsView(
        seq=context.state.seq,
        since=moment(history.since) or "",
        step=step,
        points=points,
        rejections=tuple(map(_rejection, history.rejections(tenant, query.rejections))),
    )
    return reply(json_answer(200, view))


def _points(
    samples: Sequence[Sample], step: float, tenant: TenantRef | None
) -> tuple[PointView, ...]:
    """Merge samples into points of ``step`` seconds."""
    merged: dict[int, tuple[Counts, Sample]] = {}
    for sample in samples:
        place = int(sample.start // step)
        counts, _ = merged.get(place, (Counts(), sample))
        counts.add(sample.of(tenant))
        merged[place] = counts, sample
    return tuple(_point(counts, sample, tenant) for counts, sample in merged.values())


def _point(counts: Counts, sample: Sample, tenant: TenantRef | None) -> PointView:
    cluster = sample.cluster
    return PointView(
        at=moment(sample.at) or "",
        accepted=counts.accepted,
        queued=counts.queued,
        ended=counts.ended,
        rejected=counts.rejected,
        waited=counts.waited,
        mean_wait=counts.wait_seconds / counts.waited if counts.waited else None,
        longest_wait=counts.longest_wait if counts.waited else None,
        waiting=sample.waiting_of(tenant),
        instances=cluster.instances,
        slices=cluster.slices,
        free_slices=cluster.free_slices,
        fragmentation=cluster.fragmentation,
        placements=cluster.placements,
    )


def _rejection(row: Row) -> RejectionView:
    entry = row.entry
    assert isinstance(entry, Rejected)
    return RejectionView(
        seq=row.seq,
        at=moment(row.at) or "",
        tenant=entry.tenant.name,
        wanted=str(request_of(entry.want)),
        count=entry.count,
        reason=entry.reason,
        detail=entry.detail,
    )

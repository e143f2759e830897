"""What has happened lately: acceptance, rejections, room and waiting, over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated

from msgspec import Meta

from slicewise.control.answers import said
from slicewise.control.entries import Rejected, Row
from slicewise.control.lately import LatelyView, PointView, RejectionView
from slicewise.control.lives import of_one_life, since
from slicewise.control.state import request_of
from slicewise.control.wire import moment
from slicewise.service.history import STEP_SECONDS, Sample, Tally
from slicewise.service.http import Query, Reply, Request, reply
from slicewise.service.site import Site

MAX_POINTS = 360


class LatelyQuery(Query, frozen=True):
    """How far to look back."""

    seconds: Annotated[int, Meta(ge=60, le=86400)] = 3600
    rejections: Annotated[int, Meta(ge=0, le=500)] = 50


async def lately(site: Site, request: Request) -> Reply:
    """What this process has seen lately; a tenant is told its own decisions only."""
    query = request.query(LatelyQuery)
    history, tenant = site.history, request.caller.tenant
    await history.look()
    step = STEP_SECONDS * ceil(query.seconds / MAX_POINTS / STEP_SECONDS)
    points = _points(history.samples(query.seconds), step, tenant)
    rejected, first = history.rejections(tenant, query.rejections), since(site.state, tenant)
    view = LatelyView(
        seq=site.state.seq,
        since=moment(history.since) or "",
        step=step,
        points=points,
        rejections=tuple(_rejection(row) for row in of_one_life(rejected, first)),
    )
    return reply(said(200, view))


def _points(samples: Sequence[Sample], step: float, tenant: str | None) -> tuple[PointView, ...]:
    """Samples put together, so that there are not too many."""
    together: dict[int, tuple[Tally, Sample]] = {}
    for sample in samples:
        place = int(sample.begun // step)
        tally, _ = together.get(place, (Tally(), sample))
        tally.add(sample.of(tenant))
        together[place] = tally, sample
    return tuple(_point(tally, sample) for tally, sample in together.values())


def _point(tally: Tally, sample: Sample) -> PointView:
    standing = sample.standing
    return PointView(
        at=moment(sample.at) or "",
        accepted=tally.accepted,
        queued=tally.queued,
        ended=tally.ended,
        rejected=tally.rejected,
        waited=tally.waited,
        mean_wait=tally.wait_seconds / tally.waited if tally.waited else None,
        longest_wait=tally.longest_wait if tally.waited else None,
        waiting=standing.waiting,
        instances=standing.instances,
        slices=standing.slices,
        free_slices=standing.free_slices,
        fragmentation=standing.fragmentation,
        placements=standing.placements,
    )


def _rejection(row: Row) -> RejectionView:
    entry = row.entry
    assert isinstance(entry, Rejected)
    return RejectionView(
        seq=row.seq,
        at=moment(row.at) or "",
        tenant=entry.tenant,
        wanted=str(request_of(entry.want)),
        count=entry.count,
        reason=entry.reason,
        detail=entry.detail,
    )

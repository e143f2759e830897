"""The comparison of two policies, in pages: computed on the engine, drawn in the browser."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from msgspec import Meta

from slicewise.control.answers import RefusedError, said
from slicewise.control.wire import View
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.dashboard.duel import MAX_STEPS, Duel, Step, Terms
from slicewise.policies.registry import DEFAULT, policy_class
from slicewise.service.auth import EVERYONE
from slicewise.service.http import Query, Reply, Request, reply
from slicewise.service.routes import Route
from slicewise.service.site import Site
from slicewise.sim.mix import PUBLISHED, parse_mix

MAX_GPUS = 64
MAX_PAGE = 500
_KEPT = 16
"""Runs kept at hand, so that the next page of one is no work from its beginning."""

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class CompareQuery(Query, frozen=True):
    """Which two policies, on what, and which part of the run."""

    a: Name = "worst-fit"
    b: Name = "default"
    mix: Annotated[
        str, Meta(min_length=1, max_length=32, description="What tenants ask for, by name.")
    ] = "uniform"
    model: Name = "A100-80GB"
    gpus: Annotated[int, Meta(ge=1, le=MAX_GPUS)] = 16
    load: Annotated[
        int, Meta(ge=10, le=200, description="Sustained demand, in percent of the cluster.")
    ] = 90
    seed: Annotated[int, Meta(ge=0, le=2**31)] = 1
    begin: Annotated[int, Meta(ge=0, le=MAX_STEPS)] = 0
    steps: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 250


class SideView(View, frozen=True):
    """What became of an arrival on one side, and how that side stands after it."""

    gpu: int | None
    start: int | None
    reason: str | None
    detail: str | None
    accepted: int
    occupied: int
    stranded: int
    fragmentation: int


class StepView(View, frozen=True):
    """One slot: who arrived, for how many slots, and what became of it on both sides."""

    profile: str
    lifetime: int
    a: SideView
    b: SideView


class CompareView(View, frozen=True):
    """Part of a run: the same terms always give the same one."""

    a: str
    b: str
    mix: str
    model: str
    gpus: int
    load: int
    seed: int
    begin: int
    end: int
    """How many steps a run has in all."""
    mixes: tuple[str, ...]
    """The distributions there are for this model."""
    steps: tuple[StepView, ...]


class Comparisons:
    """The runs that were asked for last, and whoever asks for more of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Terms, Duel] = OrderedDict()

    async def compare(self, site: Site, request: Request) -> Reply:
        """Two policies on the same arrivals, step by step, on clusters that do not exist."""
        query = request.query(CompareQuery)
        terms = Terms(
            (_policy(query.a, "a"), _policy(query.b, "b")),
            _geometry(site, query.model),
            query.mix,
            query.gpus,
            query.load / 100,
            query.seed,
        )

        def work() -> tuple[Duel, list[Step]]:
            duel = self.run(terms)
            return duel, list(duel.steps(query.begin, query.begin + query.steps))

        async with site.computing.hold(request.share):
            try:
                duel, steps = await site.plant.in_thread(work)
            except SlicewiseError as error:
                raise RefusedError(400, str(error), field="mix") from None
        return reply(said(200, _view(duel, query, steps)))

    def run(self, terms: Terms) -> Duel:
        """The run on these terms, as far as it has gone."""
        duel = self._kept.get(terms)
        if duel is None:
            duel = self._kept[terms] = Duel(terms)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(terms)
        return duel


def _policy(name: str, field: str) -> str:
    try:
        return policy_class(DEFAULT if name == "default" else name).name
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field=field) from None


def _geometry(site: Site, model: str) -> Geometry:
    try:
        return site.state.geometries.get(model) or site.catalog.find(model).require()
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field="model") from None


def _mixes(geometry: Geometry) -> tuple[str, ...]:
    """The published distributions are over the six profiles of an A100 and its like."""
    found = []
    for name in PUBLISHED:
        try:
            parse_mix(name, geometry)
        except SlicewiseError:
            continue
        found.append(name)
    return tuple(found)


def _view(duel: Duel, query: CompareQuery, steps: list[Step]) -> CompareView:
    terms, geometry = duel.terms, duel.terms.geometry
    names = [profile.name for profile in duel.mix.profiles]
    first, second = terms.policies
    return CompareView(
        a=first,
        b=second,
        mix=terms.mix,
        model=geometry.model,
        gpus=terms.gpus,
        load=query.load,
        seed=terms.seed,
        begin=query.begin,
        end=MAX_STEPS,
        mixes=_mixes(geometry),
        steps=tuple(
            StepView(
                profile=names[step.profile],
                lifetime=step.lifetime,
                a=SideView(**step.sides[0]._asdict()),
                b=SideView(**step.sides[1]._asdict()),
            )
            for step in steps
        ),
    )


def routes() -> tuple[Route, ...]:
    """What the dashboard brings along, for one service."""
    made = Comparisons()
    return (
        Route(
            "GET",
            "/v1/compare",
            "compare",
            "Compare two policies on the same arrivals",
            made.compare,
            EVERYONE,
            {200: CompareView},
            query=CompareQuery,
            tag="cluster",
        ),
    )

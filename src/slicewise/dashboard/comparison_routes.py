"""The route of the policy comparison: computed on the engine, drawn in the browser."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from msgspec import Meta

from slicewise.api.base import View
from slicewise.control.answers import RefusedError, json_answer
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.dashboard.comparison import (
    MAX_STEPS,
    ComparisonStep,
    ComparisonTerms,
    PolicyComparison,
)
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.policies.registry import DEFAULT, policy_class
from slicewise.server.app import Route
from slicewise.server.auth import EVERYONE
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Query, Reply, reply

MAX_GPUS = 64
MAX_PAGE = 500
_KEPT = 16
"""Number of cached runs, so that the next page need not start over."""

Name = Annotated[str, Meta(min_length=1, max_length=64)]


class CompareQuery(Query, frozen=True):
    """The two policies, the cluster, and the part of the run."""

    a: Name = "worst-fit"
    b: Name = "least-lost"
    mix: Annotated[
        str, Meta(min_length=1, max_length=32, description="Distribution of profiles, by name.")
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
    """The outcome of an arrival on one side, and the totals of that side after it."""

    gpu: int | None
    start: int | None
    reason: str | None
    detail: str | None
    accepted: int
    occupied: int
    stranded: int
    fragmentation: int


class StepView(View, frozen=True):
    """One slot: the arrival and its outcome on both sides."""

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
    """Number of steps of the whole run."""
    mixes: tuple[str, ...]
    """The distributions available for this model."""
    steps: tuple[StepView, ...]


class Comparisons:
    """A cache of the most recent runs, and their route."""

    def __init__(self) -> None:
        self._kept: OrderedDict[ComparisonTerms, PolicyComparison] = OrderedDict()

    async def compare(self, context: AppContext, request: HttpRequest) -> Reply:
        """Compare two policies on the same arrivals, step by step, on simulated clusters."""
        query = request.query(CompareQuery)
        terms = ComparisonTerms(
            (_policy(query.a, "a"), _policy(query.b, "b")),
            _geometry(context, query.model),
            query.mix,
            query.gpus,
            query.load / 100,
            query.seed,
        )

        def work() -> tuple[PolicyComparison, list[ComparisonStep]]:
            comparison = self.run(terms)
            return comparison, list(comparison.steps(query.begin, query.begin + query.steps))

        async with context.computing.hold(request.share):
            try:
                comparison, steps = await context.runtime.in_thread(work)
            except SlicewiseError as error:
                raise RefusedError(400, str(error), field="mix") from None
        return reply(json_answer(200, _view(comparison, query, steps)))

    def run(self, terms: ComparisonTerms) -> PolicyComparison:
        """The run on these terms, as far as it has gone."""
        comparison = self._kept.get(terms)
        if comparison is None:
            comparison = self._kept[terms] = PolicyComparison(terms)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(terms)
        return comparison


def _policy(name: str, field: str) -> str:
    try:
        return policy_class(DEFAULT if name == "default" else name).name
    except SlicewiseError as error:
        raise RefusedError(400, str(error), field=field) from None


def _geometry(context: AppContext, model: str) -> Geometry:
    try:
        return context.state.geometries.get(model) or context.catalog.find(model).require()
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


def _view(
    comparison: PolicyComparison, query: CompareQuery, steps: list[ComparisonStep]
) -> CompareView:
    terms, geometry = comparison.terms, comparison.terms.geometry
    names = [profile.name for profile in comparison.mix.profiles]
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
    """The routes of the dashboard, for one service."""
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

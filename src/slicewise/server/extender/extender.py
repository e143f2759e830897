"""The scheduler extender: filters and scores nodes for a pod, and binds it.

kube-scheduler calls the extender while it schedules a pod that requests MIG instances. *filter*
returns the nodes with room for all of them, *prioritize* scores those nodes by the policy, and
*bind* places the instances durably before it binds the pod. The types are those of
k8s.io/kube-scheduler/extender/v1, with the field names of Go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slicewise.api.base import View
from slicewise.config.settings import Settings
from slicewise.control.answers import Answer, RefusedError
from slicewise.control.pods import Pod, Pods
from slicewise.control.quota import excess
from slicewise.control.state import NodeStatus, State, TenantStatus, request_of
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Request
from slicewise.engine.offers import Offers
from slicewise.journal.entries import NodePhase, Part
from slicewise.server.app import Route
from slicewise.server.auth import STAFF
from slicewise.server.context import AppContext
from slicewise.server.extender.binding import Binder, holders
from slicewise.server.extender.pod_requests import wants_of
from slicewise.server.extender.pod_watch import PodWatch
from slicewise.server.requests import HttpRequest, Reply, reply

BODY_BYTES = 8 << 20
"""A pod may have 1.5 MiB; the names of all nodes come with it."""
BEST = 10
"""The maximum score."""

_Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$(?!\n)")]


class _Said(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", gc=False):
    """Base class of request bodies. Unknown fields are ignored."""


class ExtenderArgs(_Said, frozen=True):
    """A pod and its candidate nodes."""

    pod: Pod
    node_names: tuple[str, ...] | None
    """Sent with nodeCacheCapable: true."""
    nodes: Any = None
    """Complete nodes, sent without nodeCacheCapable."""


class ExtenderBindingArgs(_Said, frozen=True):
    """A pod, and the node to bind it to."""

    pod_name: _Name
    pod_namespace: _Name
    pod_uid: Annotated[str, Meta(min_length=1, max_length=128)] = msgspec.field(name="PodUID")
    node: Annotated[str, Meta(min_length=1, max_length=253)]


class ExtenderFilterResult(View, frozen=True, rename="pascal"):
    """Feasible nodes, and the reasons against the others."""

    node_names: tuple[str, ...] | None = None
    failed_nodes: dict[str, str] = msgspec.field(default_factory=dict)
    """Nodes without room, or beyond the tenant's quota."""
    failed_and_unresolvable_nodes: dict[str, str] = msgspec.field(default_factory=dict)
    """Nodes that preemption would not make feasible."""
    error: str = ""


class HostPriority(View, frozen=True, rename="pascal"):
    """The score of a node."""

    host: str
    score: Annotated[int, Meta(ge=0, le=BEST)]


class ExtenderBindingResult(View, frozen=True, rename="pascal"):
    """The result of a binding; it succeeded if there is no error."""

    error: str = ""


@dataclass(slots=True)
class Verdict:
    """The feasibility of nodes for a pod."""

    feasible: list[str] = field(default_factory=list)
    """In the order of the policy, best first."""
    full: dict[str, str] = field(default_factory=dict)
    """Reasons of nodes without room, or beyond the tenant's quota."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Reasons of nodes that are infeasible whatever is running there."""


class Extender:
    """Answers kube-scheduler, and releases instances when their pods end."""

    def __init__(self, pods: Pods, settings: Settings) -> None:
        # Refuse a policy that cannot rank nodes now, not with the first pod.
        Offers(State(settings.policy).scheduler)
        self.binder = Binder(pods)
        self.pod_watch = PodWatch(pods, self.binder, judge)

    def routes(self) -> tuple[Route, ...]:
        """The routes of the extender."""
        return (
            Route(
                "POST", "/v1/extender/filter", "extenderFilter",
                "Filter the nodes for a pod",
                self.filter, STAFF, {200: ExtenderFilterResult}, body=ExtenderArgs,
                certificate=True, tag="extender",
            ),
            Route(
                "POST", "/v1/extender/prioritize", "extenderPrioritize",
                "Score the nodes for a pod",
                self.prioritize, STAFF, {200: list[HostPriority]}, body=ExtenderArgs,
                certificate=True, tag="extender",
            ),
            Route(
                "POST", "/v1/extender/bind", "extenderBind",
                "Place a pod's instances and bind it",
                self.bind, STAFF, {200: ExtenderBindingResult}, body=ExtenderBindingArgs,
                certificate=True, writes=True, tag="extender",
            ),
        )  # fmt: skip

    async def run(self, context: AppContext) -> None:
        """Watch the pods of the cluster as long as the service runs."""
        await self.pod_watch.run(context)

    async def filter(self, context: AppContext, request: HttpRequest) -> Reply:
        """The nodes with room for all instances of a pod, and the reasons against the others."""
        pod, names = await _read(request)
        try:
            verdict = judge(context, pod, names)
        except RefusedError as refusal:
            return _reply(ExtenderFilterResult(error=str(refusal)))
        if verdict.feasible:
            self.pod_watch.forget(pod.uid)
        else:
            self.pod_watch.remember(pod, frozenset(names))
        return _reply(
            ExtenderFilterResult(
                node_names=tuple(verdict.feasible),
                failed_nodes=verdict.full,
                failed_and_unresolvable_nodes=verdict.unfit,
            )
        )

    async def prioritize(self, context: AppContext, request: HttpRequest) -> Reply:
        """The rank of each node by the policy: 10 for the best, 9 for the next, down to 0."""
        pod, names = await _read(request)
        order = judge(context, pod, names).feasible
        scores = dict.fromkeys(names, 0)
        if wants_of(pod, context.state.geometries.values()):
            scores |= {name: max(0, BEST - place) for place, name in enumerate(order)}
        return _reply([HostPriority(host=name, score=score) for name, score in scores.items()])

    async def bind(self, context: AppContext, request: HttpRequest) -> Reply:
        """Place the instances of a pod durably, then bind the pod. Idempotent."""
        args = await request.body(ExtenderBindingArgs)
        context.check(request.caller)
        self.pod_watch.forget(args.pod_uid)
        error = await self.binder.bind(
            context,
            request.caller.actor,
            args.pod_namespace,
            args.pod_name,
            args.pod_uid,
            args.node,
        )
        return _reply(ExtenderBindingResult(error=error))


def _reply(result: View | list[HostPriority]) -> Reply:
    return reply(Answer(200, msgspec.json.encode(result)))


async def _read(request: HttpRequest) -> tuple[Pod, tuple[str, ...]]:
    request.allow(BODY_BYTES)
    args = await request.body(ExtenderArgs)
    if args.node_names is None:
        raise RefusedError(
            400,
            "NodeNames is missing: the extender needs nodeCacheCapable: true",
            field="NodeNames",
        )
    return args.pod, tuple(dict.fromkeys(args.node_names))


def judge(context: AppContext, pod: Pod, names: tuple[str, ...] | frozenset[str]) -> Verdict:
    """Judge which of these nodes are feasible for a pod now."""
    state = context.state
    wants = wants_of(pod, state.geometries.values())
    verdict = Verdict()
    if not wants:
        verdict.feasible = list(names)
        return verdict
    namespace = pod.metadata.namespace
    tenant = state.tenants_by_name.get(namespace)
    if tenant is None and not context.settings.extender_creates_tenants:
        verdict.unfit = dict.fromkeys(names, no_tenant(namespace))
        return verdict
    on = {part.node for record in holders(tenant, state, pod.uid) for part in record.parts}
    if len(on) == 1 and on <= set(names):  # an earlier bind has placed them
        verdict.feasible = list(on)
        others = f"{pod} has its instances on node {verdict.feasible[0]!r} already"
        verdict.unfit = {name: others for name in names if name not in on}
        return verdict
    asked = [request_of(want) for want, count in wants for _ in range(count)]
    quota = _QuotaCheck(tenant, asked)
    open_nodes = set()
    for name in names:
        node = state.nodes.get(name)
        if (closed := _closed(node)) is not None:
            verdict.unfit[name] = closed
        elif (excessive := quota.excess(node)) is not None:
            verdict.full[name] = excessive
        else:
            open_nodes.add(name)
    offers = Offers(state.scheduler)
    now, expected = context.runtime.clock(), pod.expected_seconds
    ends = math.inf if expected is None else now + expected
    verdict.feasible = offers.nodes(asked, open_nodes, now=now, ends=ends)
    for name in open_nodes.difference(verdict.feasible):
        why = offers.why_not(name, asked)
        kind = verdict.unfit if why.reason is Reason.UNKNOWN_PROFILE else verdict.full
        kind[name] = why.detail
    return verdict


def no_tenant(namespace: str) -> str:
    """The reason against pods of a namespace that is not a tenant."""
    return (
        f"namespace {namespace!r} is not a tenant: create one of that name with slicewise "
        "tenants add, or set extender.tenants to create"
    )


def _closed(node: NodeStatus | None) -> str | None:
    """Why a node accepts no instances, if so. Schedulers count nodes by equal reasons."""
    if node is None:
        return "the node is unknown to slicewise"
    if node.phase is not NodePhase.READY:
        return f"the node is {node.phase} in slicewise"
    for reason in node.holds.values():
        return f"the node accepts no new instances: {reason}"
    return None


class _QuotaCheck:
    """Checks a request against the quota of a tenant, once for each GPU model."""

    def __init__(self, tenant: TenantStatus | None, asked: list[Request]) -> None:
        self._tenant = tenant
        self._asked = asked
        self._known: dict[Geometry, str | None] = {}

    def excess(self, node: NodeStatus | None) -> str | None:
        """How the instances would exceed the quota on this node, or None."""
        if self._tenant is None or node is None:
            return None
        geometry = node.geometry
        if geometry not in self._known:
            parts = [
                Part(
                    node=node.name,
                    gpu=0,
                    model=geometry.model,
                    profile=profile.name,
                    start=0,
                    size=profile.size,
                    compute=profile.compute,
                    memory_gb=profile.memory_gb,
                )
                for request in self._asked
                for _, profile in request.candidates(geometry)
            ]
            self._known[geometry] = excess(self._tenant, parts)
        return self._known[geometry]

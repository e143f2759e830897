"""The extender of a Kubernetes scheduler: which nodes would do for a pod, and binding it to one.

kube-scheduler asks over HTTP while it schedules a pod that wants MIG instances: *filter* says which
nodes have room for all of them together, *prioritize* which of those the policy likes best, and
*bind* places them, for good, before the pod is bound. Its types are those of
k8s.io/kube-scheduler/extender/v1, whose fields go by their names in Go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from slicewise.control.answers import Answer, RefusedError
from slicewise.control.entries import NodePhase, Part
from slicewise.control.pods import Pod, Pods
from slicewise.control.quota import excess
from slicewise.control.state import NodeStanding, State, TenantStanding, request_of
from slicewise.control.wire import View
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason
from slicewise.core.request import Request as Asked
from slicewise.engine.on_node import NodeOffers
from slicewise.service.auth import STAFF
from slicewise.service.binding import Binder, holders
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pod_keeper import PodKeeper
from slicewise.service.pod_wants import wants_of
from slicewise.service.routes import Route
from slicewise.service.settings import Settings
from slicewise.service.site import Site

BODY_BYTES = 8 << 20
"""A pod may have 1.5 MiB, and come with the names of all nodes."""
BEST = 10
"""The highest score."""

_Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$(?!\n)")]


class _Said(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", gc=False):
    """What a scheduler says; what is unknown here is not looked at."""


class ExtenderArgs(_Said, frozen=True):
    """A pod, and the nodes on which it could be."""

    pod: Pod
    node_names: tuple[str, ...] | None
    """Sent where nodeCacheCapable is set."""
    nodes: Any = None
    """Nodes in full: sent where it is not."""


class ExtenderBindingArgs(_Said, frozen=True):
    """A pod, and the node it is to be bound to."""

    pod_name: _Name
    pod_namespace: _Name
    pod_uid: Annotated[str, Meta(min_length=1, max_length=128)] = msgspec.field(name="PodUID")
    node: Annotated[str, Meta(min_length=1, max_length=253)]


class ExtenderFilterResult(View, frozen=True, rename="pascal"):
    """Nodes that would do, and why the others would not."""

    node_names: tuple[str, ...] | None = None
    failed_nodes: dict[str, str] = msgspec.field(default_factory=dict)
    """No room at the moment, or more than the tenant may have."""
    failed_and_unresolvable_nodes: dict[str, str] = msgspec.field(default_factory=dict)
    """Whoever ends there, it will not do."""
    error: str = ""


class HostPriority(View, frozen=True, rename="pascal"):
    """How much a node is liked."""

    host: str
    score: Annotated[int, Meta(ge=0, le=BEST)]


class ExtenderBindingResult(View, frozen=True, rename="pascal"):
    """Whether a pod was bound: it was unless there is an error."""

    error: str = ""


@dataclass(slots=True)
class Verdict:
    """Which nodes would do for a pod."""

    roomy: list[str] = field(default_factory=list)
    """The policy's first choice first."""
    full: dict[str, str] = field(default_factory=dict)
    """No room at the moment, or more than the tenant may have; with the reason."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Not a matter of room."""


class Extender:
    """Answers a scheduler, and sees to it that instances end with their pods."""

    def __init__(self, pods: Pods, settings: Settings) -> None:
        # A policy that cannot rank nodes is found out now, not when a pod comes.
        NodeOffers(State(settings.policy).scheduler)
        self.binder = Binder(pods)
        self.keeper = PodKeeper(pods, self.binder, judge)

    def routes(self) -> tuple[Route, ...]:
        """What a scheduler can ask."""
        return (
            Route(
                "POST", "/v1/extender/filter", "extenderFilter",
                "Which nodes have room for a pod",
                self.filter, STAFF, {200: ExtenderFilterResult}, body=ExtenderArgs,
                certificate=True, tag="extender",
            ),
            Route(
                "POST", "/v1/extender/prioritize", "extenderPrioritize",
                "How much the policy likes each node for a pod",
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

    async def run(self, site: Site) -> None:
        """Follow the pods of the cluster for as long as the service runs."""
        await self.keeper.run(site)

    async def filter(self, site: Site, request: Request) -> Reply:
        """Which nodes have room for all that a pod asks for together, and why others have not."""
        pod, names = await _asked(request)
        try:
            verdict = judge(site, pod, names)
        except RefusedError as refusal:
            return _said(ExtenderFilterResult(error=str(refusal)))
        if verdict.roomy:
            self.keeper.forget(pod.uid)
        else:
            self.keeper.remember(pod, frozenset(names))
        return _said(
            ExtenderFilterResult(
                node_names=tuple(verdict.roomy),
                failed_nodes=verdict.full,
                failed_and_unresolvable_nodes=verdict.unfit,
            )
        )

    async def prioritize(self, site: Site, request: Request) -> Reply:
        """How much the policy likes each node: the best has 10, the next 9, and so on down to 0."""
        pod, names = await _asked(request)
        order = judge(site, pod, names).roomy
        scores = dict.fromkeys(names, 0)
        if wants_of(pod, site.state.geometries.values()):
            scores |= {name: max(0, BEST - place) for place, name in enumerate(order)}
        return _said([HostPriority(host=name, score=score) for name, score in scores.items()])

    async def bind(self, site: Site, request: Request) -> Reply:
        """Place what a pod asks for on a node, durably, then bind the pod; again is the same."""
        args = await request.body(ExtenderBindingArgs)
        site.check(request.caller)
        self.keeper.forget(args.pod_uid)
        error = await self.binder.bind(
            site, request.caller.actor, args.pod_namespace, args.pod_name, args.pod_uid, args.node
        )
        return _said(ExtenderBindingResult(error=error))


def _said(what: View | list[HostPriority]) -> Reply:
    return reply(Answer(200, msgspec.json.encode(what)))


async def _asked(request: Request) -> tuple[Pod, tuple[str, ...]]:
    request.allow(BODY_BYTES)
    args = await request.body(ExtenderArgs)
    if args.node_names is None:
        raise RefusedError(
            400,
            "NodeNames is missing: the extender needs nodeCacheCapable: true",
            field="NodeNames",
        )
    return args.pod, tuple(dict.fromkeys(args.node_names))


def judge(site: Site, pod: Pod, names: tuple[str, ...] | frozenset[str]) -> Verdict:
    """Which of these nodes would do for a pod now."""
    state = site.state
    wants = wants_of(pod, state.geometries.values())
    verdict = Verdict()
    if not wants:
        verdict.roomy = list(names)
        return verdict
    namespace = pod.metadata.namespace
    tenant = state.tenants.get(namespace)
    if tenant is None and not site.settings.extender_creates_tenants:
        verdict.unfit = dict.fromkeys(names, no_tenant(namespace))
        return verdict
    on = {part.node for record in holders(tenant, state, pod.uid) for part in record.parts}
    if len(on) == 1 and on <= set(names):  # an earlier bind went so far
        verdict.roomy = list(on)
        others = f"{pod} has its instances on node {verdict.roomy[0]!r} already"
        verdict.unfit = {name: others for name in names if name not in on}
        return verdict
    asked = [request_of(want) for want, count in wants for _ in range(count)]
    allowance = _Allowance(tenant, asked)
    open_nodes = set()
    for name in names:
        node = state.nodes.get(name)
        if (closed := _closed(node)) is not None:
            verdict.unfit[name] = closed
        elif (excessive := allowance.too_much(node)) is not None:
            verdict.full[name] = excessive
        else:
            open_nodes.add(name)
    offers = NodeOffers(state.scheduler)
    verdict.roomy = offers.nodes(asked, open_nodes)
    for name in open_nodes.difference(verdict.roomy):
        why = offers.why_not(name, asked)
        kind = verdict.unfit if why.reason is Reason.UNKNOWN_PROFILE else verdict.full
        kind[name] = why.detail
    return verdict


def no_tenant(namespace: str) -> str:
    """What is said where pods of a namespace are nobody's."""
    return (
        f"namespace {namespace!r} is no tenant here: create one of that name with slicewise "
        "tenants add, or set extender.tenants to create"
    )


def _closed(node: NodeStanding | None) -> str | None:
    """Why a node takes nothing new, if so; schedulers count nodes of which the same is said."""
    if node is None:
        return "slicewise does not know the node"
    if node.phase is not NodePhase.READY:
        return f"the node is {node.phase} in slicewise"
    for sentence in node.holds.values():
        return f"the node takes nothing new: {sentence}"
    return None


class _Allowance:
    """Whether a tenant may have so much, by GPU model."""

    def __init__(self, tenant: TenantStanding | None, asked: list[Asked]) -> None:
        self._tenant = tenant
        self._asked = asked
        self._known: dict[Geometry, str | None] = {}

    def too_much(self, node: NodeStanding | None) -> str | None:
        """What would be too much on such a node, or None."""
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

"""Binding pods: what a pod asks for is placed and durable first, then the pod is bound.

Nobody may know whether a binding that failed took place after all. Before anything is given back,
the pod is touched: a binding still on its way was meant for the pod as it was before, and is
refused from then on. What the pod says then is certain.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from slicewise.control.actors import Actor, internal
from slicewise.control.answers import RefusedError
from slicewise.control.commands import CreateOn, Release, SetTenant, Terms
from slicewise.control.entries import AllocationRecord, Cause, QuotaRecord, Seconds
from slicewise.control.hardware import Phase
from slicewise.control.pods import Pod, Pods, PodsError
from slicewise.control.ports import StoreError
from slicewise.control.state import State, TenantStanding
from slicewise.control.wire import BatchView, Problem
from slicewise.service.logs import logger
from slicewise.service.pod_wants import notes_for, wants_of
from slicewise.service.site import Site

log = logger()

ACTOR = internal("extender")
"""Gives back what was placed for a pod, whatever became of the token of the one who asked."""

POD, NAMESPACE, UID = "k8s/pod", "k8s/namespace", "k8s/uid"
"""The labels of an allocation that a pod has."""
RETURNED = "slicewise.dev/returned"
"""What a pod is annotated with when a binding is given up."""
_LOOK_SECONDS = 0.05
_batch = msgspec.json.Decoder(BatchView).decode
_problem = msgspec.json.Decoder(Problem).decode


@dataclass(frozen=True, slots=True)
class Held:
    """What a pod holds."""

    pod: Pod
    """Which pod; no more than its names is known of it."""
    node: str
    allocations: tuple[str, ...]
    since: Seconds


def holders(tenant: TenantStanding | None, state: State, uid: str) -> list[AllocationRecord]:
    """The living allocations of a pod."""
    if tenant is None:
        return []
    records = (state.allocations[identity] for identity in tenant.allocations)
    return [record for record in records if record.labels.get(UID) == uid]


def everything_held(state: State) -> dict[str, Held]:
    """By UID: what pods hold."""
    found: dict[str, Held] = {}
    for record in state.allocations.values():
        labels = record.labels
        # A pod's namespace is its tenant: whatever else bears such labels is not ours to end.
        if UID in labels and POD in labels and labels.get(NAMESPACE) == record.tenant:
            before = found.get(labels[UID])
            mine = (record.id,) if before is None else (*before.allocations, record.id)
            pod = a_pod(record.tenant, labels[POD], labels[UID])
            node = record.parts[0].node if record.parts else ""
            found[pod.uid] = Held(pod, node, mine, record.placed or record.requested)
    return found


def a_pod(namespace: str, name: str, uid: str) -> Pod:
    """A pod of which no more is known."""
    meta = msgspec.structs.replace(Pod().metadata, namespace=namespace, name=name, uid=uid)
    return Pod(metadata=meta)


class Binder:
    """Binds pods, each once."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._locks: dict[str, asyncio.Lock] = {}
        self.busy: Counter[str] = Counter()
        """By UID: bindings that are under way."""
        self.held: dict[str, Held] = {}
        """By UID: what pods hold, as far as this process has seen."""
        self.bound: set[str] = set()
        """The pods that are known to be bound to where their instances are."""

    async def bind(
        self, site: Site, actor: Actor, namespace: str, name: str, uid: str, node: str
    ) -> str:
        """Place what a pod asks for on a node, and bind it; returns what went wrong, if so."""
        async with self.alone(uid):
            try:
                pod = await site.plant.in_thread(self._pods.get, namespace, name)
                if pod is None or pod.uid != uid:
                    return f"pod {namespace}/{name} is gone"
                return await self._bind(site, actor, pod, node)
            except (RefusedError, PodsError) as error:
                return str(error)
            except StoreError as error:
                log.error("database failed", problem=str(error))
                return "the database does not answer"

    @asynccontextmanager
    async def alone(self, uid: str) -> AsyncIterator[None]:
        """One at a time for each pod: a scheduler that lost patience asks again."""
        lock = self._locks.setdefault(uid, asyncio.Lock())
        self.busy[uid] += 1
        try:
            async with lock:
                yield
        finally:
            self.busy[uid] -= 1
            if not self.busy[uid]:
                del self.busy[uid], self._locks[uid]

    async def _bind(self, site: Site, actor: Actor, pod: Pod, node: str) -> str:
        state = site.state
        namespace = pod.metadata.namespace
        wants = wants_of(pod, state.geometries.values())
        before = holders(state.tenants.get(namespace), state, pod.uid)
        if pod.node:
            if pod.node == node and {p.node for r in before for p in r.parts} <= {node}:
                return "" if before or not wants else f"{pod} is bound without instances"
            return f"{pod} is bound to node {pod.node!r} already"
        if pod.over:
            return f"{pod} is over"
        if not wants:
            await site.plant.in_thread(self._pods.bind, pod, node, {})
            return ""
        if any(part.node != node for record in before for part in record.parts):
            old = before[0].parts[0].node
            problem = await self.give_back(site, actor, pod, [record.id for record in before], old)
            if problem is not None:
                return problem or f"{pod} is bound to node {old!r} already"
            pod = await site.plant.in_thread(self._again, pod)
        await self._ensure_tenant(site, actor, namespace)
        labels = {POD: pod.metadata.name, NAMESPACE: namespace, UID: pod.uid}
        terms = tuple(Terms(want, count, labels=labels) for want, count in wants)
        told = await site.plant.ask(CreateOn(namespace, node, terms, UID), actor)
        if told.answer.status not in (200, 201):
            return _problem(told.answer.body).detail
        ids = tuple(view.id for view in _batch(told.answer.body).allocations)
        mine = a_pod(namespace, pod.metadata.name, pod.uid)
        self.held[pod.uid] = Held(mine, node, ids, site.plant.clock())
        try:
            records = await self._active(site, ids)
            parts = [part for record in records for part in record.parts]
            notes = notes_for(pod, ids, parts, state.geometries.values())
            await site.plant.in_thread(self._pods.bind, pod, node, notes)
        except (RefusedError, PodsError) as error:
            problem = await self.give_back(site, ACTOR, pod, ids, node)
            if problem == "":  # it is bound, whatever the answer was
                return ""
            return str(error) if problem is None else f"{error}; {problem}"
        self.bound.add(pod.uid)
        return ""

    def _again(self, pod: Pod) -> Pod:
        now = self._pods.get(pod.metadata.namespace, pod.metadata.name)
        if now is None or now.uid != pod.uid:
            raise PodsError(f"pod {pod} is gone")
        return now

    async def _ensure_tenant(self, site: Site, actor: Actor, namespace: str) -> None:
        if namespace in site.state.tenants:
            return
        if not site.settings.extender_creates_tenants:
            raise RefusedError(404, f"namespace {namespace!r} is no tenant here")
        # Somebody else may be faster, which is as good.
        await site.plant.ask(SetTenant(namespace, QuotaRecord(), new=True), actor)

    async def _active(self, site: Site, ids: tuple[str, ...]) -> list[AllocationRecord]:
        """The allocations once their instances can be used; refused where that takes too long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + site.settings.extender_active_seconds
        while True:
            state = site.state
            records = []
            for identity in ids:
                record = state.allocations.get(identity)
                if record is None:
                    raise RefusedError(409, _why_ended(state, identity))
                records.append(record)
            phases = {part.phase for record in records for part in record.parts}
            if phases <= {None, Phase.ACTIVE}:
                return records
            if loop.time() >= until:
                seconds = site.settings.extender_active_seconds
                details = {part.detail for r in records for part in r.parts if part.detail}
                why = f": {'; '.join(sorted(details))}" if details else ""
                raise RefusedError(409, f"its instances were not active in {seconds:g} s{why}")
            await asyncio.sleep(_LOOK_SECONDS)

    async def give_back(
        self, site: Site, actor: Actor, pod: Pod, ids: list[str] | tuple[str, ...], node: str
    ) -> str | None:
        """End a pod's allocations unless it is bound to their node.

        None when they were ended, nothing when it is bound, otherwise what keeps it from being
        known: then they stay, and are looked at later.
        """
        try:
            now = await site.plant.in_thread(
                self._pods.touch, pod, RETURNED, f"{site.plant.clock():.3f}"
            )
        except PodsError as error:
            return f"whether it is bound is not known: {error}"
        if now is not None and now.node and now.node == node:
            self.bound.add(pod.uid)
            return ""
        for identity in ids:
            told = await site.plant.ask(Release(identity), actor)
            if told.answer.status not in (200, 404):
                return _problem(told.answer.body).detail
        self.held.pop(pod.uid, None)
        self.bound.discard(pod.uid)
        return None


def _why_ended(state: State, identity: str) -> str:
    gone = state.leaving.get(identity)
    if gone is not None and gone.cause is Cause.FAILED and gone.detail:
        return gone.detail
    return "its allocation was ended before it was bound"

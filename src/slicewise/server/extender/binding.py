"""Binding of pods: allocations are durable before the pod is bound.

The outcome of a failed binding is unknown. Before allocations are released, the pod is annotated:
that changes its resource version, so a binding in flight fails from then on, and the pod that the
annotation returned shows for certain whether it is bound.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from slicewise.api.allocations import BatchView
from slicewise.api.base import Problem
from slicewise.config.logs import logger
from slicewise.control.actors import Actor, internal
from slicewise.control.answers import RefusedError
from slicewise.control.commands import CreateOn, Release, SetTenant, Terms
from slicewise.control.pods import Pod, Pods, PodsError
from slicewise.control.ports import StoreError
from slicewise.control.state import State, TenantStatus
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import AllocationRecord, Cause, QuotaRecord, Seconds
from slicewise.server.context import AppContext
from slicewise.server.extender.pod_requests import annotations_for, wants_of

log = logger()

ACTOR = internal("extender")
"""Releases the allocations of a pod, even if the token of the binding has been revoked."""

POD, NAMESPACE, UID = "k8s/pod", "k8s/namespace", "k8s/uid"
"""Labels of an allocation that belongs to a pod."""
RETURNED = "slicewise.dev/returned"
"""Annotation of a pod whose binding was abandoned."""
_POLL_SECONDS = 0.05
_batch = msgspec.json.Decoder(BatchView).decode
_problem = msgspec.json.Decoder(Problem).decode


@dataclass(frozen=True, slots=True)
class PodAllocations:
    """The allocations of a pod."""

    pod: Pod
    """The pod; only its names and UID are set."""
    node: str
    allocations: tuple[str, ...]
    since: Seconds


def holders(tenant: TenantStatus | None, state: State, uid: str) -> list[AllocationRecord]:
    """The allocations of a pod that have not ended."""
    if tenant is None:
        return []
    records = (state.allocations[identity] for identity in tenant.allocations)
    return [record for record in records if record.labels.get(UID) == uid]


def allocations_by_pod(state: State) -> dict[str, PodAllocations]:
    """The allocations of all pods, by UID."""
    found: dict[str, PodAllocations] = {}
    for record in state.allocations.values():
        labels = record.labels
        # The tenant of a pod is its namespace. Others may use the same labels.
        if UID in labels and POD in labels and labels.get(NAMESPACE) == record.tenant.name:
            earlier = found.get(labels[UID])
            ids = (record.id,) if earlier is None else (*earlier.allocations, record.id)
            pod = bare_pod(record.tenant.name, labels[POD], labels[UID])
            node = record.parts[0].node if record.parts else ""
            found[pod.uid] = PodAllocations(pod, node, ids, record.placed or record.requested)
    return found


def bare_pod(namespace: str, name: str, uid: str) -> Pod:
    """A pod with nothing but its names and UID."""
    meta = msgspec.structs.replace(Pod().metadata, namespace=namespace, name=name, uid=uid)
    return Pod(metadata=meta)


class Binder:
    """Places the instances of pods and binds the pods."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._locks: dict[str, asyncio.Lock] = {}
        self.busy: Counter[str] = Counter()
        """Bindings in progress, by UID."""
        self.held: dict[str, PodAllocations] = {}
        """Allocations of pods by UID, as far as this process knows."""
        self.bound: set[str] = set()
        """UIDs of pods that are bound to the node of their instances."""

    async def bind(
        self, context: AppContext, actor: Actor, namespace: str, name: str, uid: str, node: str
    ) -> str:
        """Place the instances of a pod on a node and bind it; return an error, or an empty text."""
        async with self.lock(uid):
            try:
                pod = await context.runtime.in_thread(self._pods.get, namespace, name)
                if pod is None or pod.uid != uid:
                    return f"pod {namespace}/{name} is gone"
                return await self._bind(context, actor, pod, node)
            except (RefusedError, PodsError) as error:
                return str(error)
            except StoreError as error:
                log.error("database failed", problem=str(error))
                return "the database does not answer"

    @asynccontextmanager
    async def lock(self, uid: str) -> AsyncIterator[None]:
        """Serialize the work on a pod: a scheduler repeats a bind after its timeout."""
        pod_lock = self._locks.setdefault(uid, asyncio.Lock())
        self.busy[uid] += 1
        try:
            async with pod_lock:
                yield
        finally:
            self.busy[uid] -= 1
            if not self.busy[uid]:
                del self.busy[uid], self._locks[uid]

    async def _bind(self, context: AppContext, actor: Actor, pod: Pod, node: str) -> str:
        state = context.state
        namespace = pod.metadata.namespace
        wants = wants_of(pod, state.geometries.values())
        before = holders(state.tenants_by_name.get(namespace), state, pod.uid)
        if pod.node:
            if pod.node == node and {p.node for r in before for p in r.parts} <= {node}:
                return "" if before or not wants else f"{pod} is bound without instances"
            return f"{pod} is bound to node {pod.node!r} already"
        if pod.over:
            return f"{pod} is over"
        if not wants:
            await context.runtime.in_thread(self._pods.bind, pod, node, {})
            return ""
        if any(part.node != node for record in before for part in record.parts):
            old = before[0].parts[0].node
            problem = await self.release(context, actor, pod, [record.id for record in before], old)
            if problem is not None:
                return problem or f"{pod} is bound to node {old!r} already"
            pod = await context.runtime.in_thread(self._reload, pod)
        await self._ensure_tenant(context, actor, namespace)
        labels = {POD: pod.metadata.name, NAMESPACE: namespace, UID: pod.uid}
        terms = tuple(
            Terms(want, count, labels=labels, expected_seconds=pod.expected_seconds)
            for want, count in wants
        )
        outcome = await context.runtime.submit(CreateOn(namespace, node, terms, UID), actor)
        if outcome.answer.status not in (200, 201):
            return _problem(outcome.answer.body).detail
        ids = tuple(view.id for view in _batch(outcome.answer.body).allocations)
        bare = bare_pod(namespace, pod.metadata.name, pod.uid)
        self.held[pod.uid] = PodAllocations(bare, node, ids, context.runtime.clock())
        try:
            records = await self._wait_active(context, ids)
            parts = [part for record in records for part in record.parts]
            annotations = annotations_for(pod, ids, parts, state.geometries.values())
            await context.runtime.in_thread(self._pods.bind, pod, node, annotations)
        except (RefusedError, PodsError) as error:
            problem = await self.release(context, ACTOR, pod, ids, node)
            if problem == "":  # the pod is bound although the call failed
                return ""
            return str(error) if problem is None else f"{error}; {problem}"
        self.bound.add(pod.uid)
        return ""

    def _reload(self, pod: Pod) -> Pod:
        now = self._pods.get(pod.metadata.namespace, pod.metadata.name)
        if now is None or now.uid != pod.uid:
            raise PodsError(f"pod {pod} is gone")
        return now

    async def _ensure_tenant(self, context: AppContext, actor: Actor, namespace: str) -> None:
        if namespace in context.state.tenants_by_name:
            return
        if not context.settings.extender_creates_tenants:
            raise RefusedError(404, f"namespace {namespace!r} is not a tenant")
        # A conflict with a concurrent creation is harmless.
        await context.runtime.submit(SetTenant(namespace, QuotaRecord(), new=True), actor)

    async def _wait_active(self, context: AppContext, ids: Sequence[str]) -> list[AllocationRecord]:
        """Wait until the instances are active; refuse after the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + context.settings.extender_active_seconds
        while True:
            state = context.state
            records = []
            for identity in ids:
                record = state.allocations.get(identity)
                if record is None:
                    raise RefusedError(409, _why_ended(state, identity))
                records.append(record)
            phases = {part.phase for record in records for part in record.parts}
            if phases <= {None, Phase.ACTIVE}:
                return records
            if loop.time() >= deadline:
                seconds = context.settings.extender_active_seconds
                details = {part.detail for r in records for part in r.parts if part.detail}
                why = f": {'; '.join(sorted(details))}" if details else ""
                raise RefusedError(409, f"its instances were not active in {seconds:g} s{why}")
            await asyncio.sleep(_POLL_SECONDS)

    async def release(
        self,
        context: AppContext,
        actor: Actor,
        pod: Pod,
        ids: Sequence[str],
        node: str,
    ) -> str | None:
        """Release a pod's allocations unless the pod is bound to their node.

        Return None if they were released, an empty text if the pod is bound, and otherwise the
        error that hides its state. The allocations are then kept, and the pod is checked later.
        """
        try:
            now = await context.runtime.in_thread(
                self._pods.touch, pod, RETURNED, f"{context.runtime.clock():.3f}"
            )
        except PodsError as error:
            return f"whether it is bound is not known: {error}"
        if now is not None and now.node and now.node == node:
            self.bound.add(pod.uid)
            return ""
        for identity in ids:
            outcome = await context.runtime.submit(Release(identity), actor)
            if outcome.answer.status not in (200, 404):
                return _problem(outcome.answer.body).detail
        self.held.pop(pod.uid, None)
        self.bound.discard(pod.uid)
        return None


def _why_ended(state: State, identity: str) -> str:
    ended = state.leaving.get(identity)
    if ended is not None and ended.cause is Cause.FAILED and ended.detail:
        return ended.detail
    return "its allocation ended before it was bound"

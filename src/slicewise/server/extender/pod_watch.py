"""Watches pods: releases the allocations of pods that ended, and retries pods without room.

Only the leader watches. The latest state in the API decides; if it is in doubt, the pod is read by
name.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from slicewise.config.logs import logger
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Release
from slicewise.control.pods import (
    EveryPod,
    Pod,
    PodGone,
    PodNews,
    Pods,
    PodSeen,
    PodsError,
    PodsUnknown,
)
from slicewise.server.context import AppContext
from slicewise.server.extender.binding import ACTOR, Binder, PodAllocations, allocations_by_pod

log = logger()

ROOM = "slicewise.dev/room"
"""Annotation of a pod that may fit now; the change makes its scheduler try again."""
_TICK_SECONDS = 0.5
_SPARE_SECONDS = 30.0
"""Time beyond the timeout of a binding after which an unbound pod is checked."""
_TICKS_PER_SCAN = 60
_MAX_WAITING = 4096
_PODS_PER_TICK = 8
"""Pods checked in one tick, to keep ticks short."""


class _Verdict(Protocol):
    feasible: list[str]


class _Waiting(NamedTuple):
    """A pod without room, and its candidate nodes."""

    pod: Pod
    names: frozenset[str]
    checked: int = -1
    """The journal entry at which it last had no room."""


class PodWatch:
    """Keeps allocations consistent with the pods that hold them."""

    def __init__(
        self,
        pods: Pods,
        binder: Binder,
        judge: Callable[[AppContext, Pod, frozenset[str]], _Verdict],
    ) -> None:
        self._pods = pods
        self._binder = binder
        self._judge = judge
        self._ended: set[str] = set()
        """UIDs of pods that ended or were deleted, and still hold allocations."""
        self._unconfirmed: dict[str, None] = {}
        """UIDs of pods that may not be bound to their node, in the order to check them."""
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._ticks = 0
        self._news = asyncio.Event()

    # Pods without room

    def remember(self, pod: Pod, names: frozenset[str]) -> None:
        """Remember a pod that has no room on these nodes."""
        self._waiting[pod.uid] = _Waiting(pod, names)
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)

    def forget(self, uid: str) -> None:
        """Forget a pod that no longer waits for room."""
        self._waiting.pop(uid, None)

    async def _retry_waiting(self, context: AppContext) -> None:
        """Annotate pods that have room now, so that their scheduler tries again."""
        seq = context.state.seq
        due = [uid for uid, waiting in self._waiting.items() if waiting.checked != seq]
        for uid in due[:_PODS_PER_TICK]:
            waiting = self._waiting.get(uid)
            if waiting is None:
                continue  # forgotten while another pod was annotated
            pod, names, _ = waiting
            if not self._judge(context, pod, names).feasible:
                self._waiting[uid] = _Waiting(pod, names, seq)
                self._waiting.move_to_end(uid)
                continue
            self.forget(uid)
            try:
                await context.runtime.in_thread(self._pods.touch, pod, ROOM, str(seq))
            except PodsError:
                self._waiting.setdefault(uid, waiting)  # retry after the others
                raise

    # Pods with allocations

    async def run(self, context: AppContext) -> None:
        """Watch the pods of the cluster while this process leads."""
        while True:
            if context.runtime.leads:
                await self._lead(context)
            await asyncio.sleep(_TICK_SECONDS)

    async def _lead(self, context: AppContext) -> None:
        loop, binder = asyncio.get_running_loop(), self._binder
        binder.held = allocations_by_pod(context.state)
        binder.bound.clear()
        self._ended.clear()
        self._unconfirmed.clear()

        def receive(news: PodNews) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take, context, news)

        stop = self._pods.follow(receive)
        try:
            while context.runtime.leads and not context.runtime.stopping:
                try:
                    await self._tick(context)
                except (PodsError, RefusedError) as error:
                    log.warning("check of pods failed", problem=str(error))
                except Exception:  # keep watching: allocations must end with their pods
                    log.exception("check of pods failed")
                try:
                    await asyncio.wait_for(self._news.wait(), _TICK_SECONDS)
                except TimeoutError:
                    continue
                self._news.clear()
        finally:
            stop()

    def _take(self, context: AppContext, news: PodNews) -> None:
        """Handle a change of pods, on the event loop and in order."""
        binder = self._binder
        match news:
            case EveryPod(pods):
                binder.held = allocations_by_pod(context.state)
                for uid, held in binder.held.items():
                    pod = pods.get(uid)
                    if pod is None:
                        self._unconfirmed[uid] = None  # the pod may be newer than the list
                    else:
                        self._note(pod, held)
            case PodSeen(pod):
                if pod.uid in binder.held:
                    self._note(pod, binder.held[pod.uid])
            case PodGone(pod):
                self.forget(pod.uid)
                if pod.uid in binder.held:
                    self._ended.add(pod.uid)
                    self._news.set()
            case PodsUnknown(why):
                if why:
                    log.warning("watch of pods failed", problem=why)
                else:
                    log.info("watch of pods started")

    def _note(self, pod: Pod, held: PodAllocations) -> None:
        if pod.over:
            self._ended.add(pod.uid)
            self._news.set()
        elif pod.node == held.node:
            self._binder.bound.add(pod.uid)

    async def _tick(self, context: AppContext) -> None:
        """Release, confirm and retry pods that are due."""
        binder = self._binder
        for uid in list(self._ended):
            await self._end(context, uid)
        self._ticks += 1
        if self._ticks % _TICKS_PER_SCAN == 0:  # finds allocations that were missed
            for uid, held in allocations_by_pod(context.state).items():
                binder.held.setdefault(uid, held)
        now = context.runtime.clock()
        late = now - context.settings.extender_active_seconds - _SPARE_SECONDS
        for uid, held in list(binder.held.items()):
            if uid not in binder.bound and not late <= held.since <= now:
                self._unconfirmed.setdefault(uid)
        for uid in [uid for uid in self._unconfirmed if not binder.busy[uid]][:_PODS_PER_TICK]:
            del self._unconfirmed[uid]
            try:
                async with binder.lock(uid):
                    await self._confirm(context, uid)
            except PodsError as error:  # check the others first next time
                self._unconfirmed[uid] = None
                log.warning("check of pod failed", uid=uid, problem=str(error))
                break
        await self._retry_waiting(context)

    async def _confirm(self, context: AppContext, uid: str) -> None:
        """Read a pod that should be bound, and release its allocations if it is not."""
        held = self._binder.held.get(uid)
        if held is None:
            return
        meta = held.pod.metadata
        pod = await context.runtime.in_thread(self._pods.get, meta.namespace, meta.name)
        if pod is None or pod.uid != uid or pod.over:
            await self._end(context, uid)
        elif pod.node == held.node:
            self._binder.bound.add(uid)
        else:
            problem = await self._binder.release(context, ACTOR, pod, held.allocations, held.node)
            if problem:
                raise PodsError(f"{pod}: {problem}")
            if problem is None:
                log.info("binding abandoned", pod=str(pod), node=held.node)

    async def _end(self, context: AppContext, uid: str) -> None:
        """Release the allocations of a pod that ended."""
        held = self._binder.held.get(uid)
        if held is not None:
            for identity in held.allocations:
                outcome = await context.runtime.submit(Release(identity), ACTOR)
                if outcome.answer.status not in (200, 404):
                    return  # retried at the next tick
            log.info("pod ended", pod=str(held.pod), node=held.node)
            self._binder.held.pop(uid, None)
        self._binder.bound.discard(uid)
        self._ended.discard(uid)

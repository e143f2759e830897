"""Ends allocations when their pods are gone, and lets pods that wait be looked at again.

Only the leader does so. It follows all pods. What the API tells last decides, whatever was seen
before; where there is doubt, the pod is asked for by name.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

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
from slicewise.service.binding import ACTOR, Binder, Held, everything_held
from slicewise.service.logs import logger
from slicewise.service.site import Site

log = logger()

ROOM = "slicewise.dev/room"
"""What a pod is annotated with when there may be room for it, so that its scheduler tries again."""
_TICK_SECONDS = 0.5
_SPARE_SECONDS = 30.0
"""How much longer than a binding may take, until one that is not there is looked into."""
_TICKS_A_SCAN = 60
_MOST_WAITING = 4096
_A_TICK = 8
"""Pods that are looked at in one tick, so that nobody else waits long."""


class _Roomy(Protocol):
    roomy: list[str]


class _Waiting(NamedTuple):
    """A pod for which there was no room, and the nodes that would have done otherwise."""

    pod: Pod
    names: frozenset[str]
    looked: int = -1
    """The entry of the journal up to which there was no room for it."""


class PodKeeper:
    """Keeps what pods hold in step with the pods."""

    def __init__(
        self,
        pods: Pods,
        binder: Binder,
        judge: Callable[[Site, Pod, frozenset[str]], _Roomy],
    ) -> None:
        self._pods = pods
        self._binder = binder
        self._judge = judge
        self._doomed: set[str] = set()
        """Pods that are gone, or over, and still hold something."""
        self._doubtful: dict[str, None] = {}
        """Pods of which it is not known whether they are bound as they should be, in order."""
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._ticks = 0
        self._news = asyncio.Event()

    # Pods without room

    def remember(self, pod: Pod, names: frozenset[str]) -> None:
        """A pod found no room on these nodes."""
        self._waiting[pod.uid] = _Waiting(pod, names)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)

    def forget(self, uid: str) -> None:
        """A pod does not wait for room any more."""
        self._waiting.pop(uid, None)

    async def _nudge(self, site: Site) -> None:
        """Touch pods for which there is room now: their scheduler does not know of it."""
        seq = site.state.seq
        due = [uid for uid, waiting in self._waiting.items() if waiting.looked != seq]
        for uid in due[:_A_TICK]:
            waiting = self._waiting.get(uid)
            if waiting is None:
                continue  # it was found a node while another was touched
            pod, names, _ = waiting
            if not self._judge(site, pod, names).roomy:
                self._waiting[uid] = _Waiting(pod, names, seq)
                self._waiting.move_to_end(uid)
                continue
            self.forget(uid)
            try:
                await site.plant.in_thread(self._pods.touch, pod, ROOM, str(seq))
            except PodsError:
                self._waiting.setdefault(uid, waiting)  # once more, behind the others
                raise

    # Pods that hold something

    async def run(self, site: Site) -> None:
        """Follow the pods of the cluster whenever this process leads."""
        while True:
            if site.plant.leads:
                await self._lead(site)
            await asyncio.sleep(_TICK_SECONDS)

    async def _lead(self, site: Site) -> None:
        loop, binder = asyncio.get_running_loop(), self._binder
        binder.held = everything_held(site.state)
        binder.bound.clear()
        self._doomed.clear()
        self._doubtful.clear()

        def tell(news: PodNews) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take, site, news)

        stop = self._pods.follow(tell)
        try:
            while site.plant.leads and not site.plant.stopping:
                try:
                    await self._look(site)
                except (PodsError, RefusedError) as error:
                    log.warning("pods not kept", problem=str(error))
                except Exception:  # whatever it is, what pods hold must end with them
                    log.exception("pods not kept")
                try:
                    await asyncio.wait_for(self._news.wait(), _TICK_SECONDS)
                except TimeoutError:
                    continue
                self._news.clear()
        finally:
            stop()

    def _take(self, site: Site, news: PodNews) -> None:
        """Take in what the API tells; called on the loop, in order."""
        binder = self._binder
        match news:
            case EveryPod(pods):
                binder.held = everything_held(site.state)
                for uid, held in binder.held.items():
                    pod = pods.get(uid)
                    if pod is None:
                        self._doubtful[uid] = None  # it may be newer than the list
                    else:
                        self._note(pod, held)
            case PodSeen(pod):
                if pod.uid in binder.held:
                    self._note(pod, binder.held[pod.uid])
            case PodGone(pod):
                self.forget(pod.uid)
                if pod.uid in binder.held:
                    self._doomed.add(pod.uid)
                    self._news.set()
            case PodsUnknown(why):
                if why:
                    log.warning("pods cannot be followed", problem=why)
                else:
                    log.info("pods are followed")

    def _note(self, pod: Pod, held: Held) -> None:
        if pod.over:
            self._doomed.add(pod.uid)
            self._news.set()
        elif pod.node == held.node:
            self._binder.bound.add(pod.uid)

    async def _look(self, site: Site) -> None:
        """Do what is to be done now."""
        binder = self._binder
        for uid in list(self._doomed):
            await self._end(site, uid)
        self._ticks += 1
        if self._ticks % _TICKS_A_SCAN == 0:  # what nobody was told about, if there is any
            for uid, held in everything_held(site.state).items():
                binder.held.setdefault(uid, held)
        now = site.plant.clock()
        late = now - site.settings.extender_active_seconds - _SPARE_SECONDS
        for uid, held in list(binder.held.items()):
            if uid not in binder.bound and not late <= held.since <= now:
                self._doubtful.setdefault(uid)
        for uid in [uid for uid in self._doubtful if not binder.busy[uid]][:_A_TICK]:
            del self._doubtful[uid]
            try:
                async with binder.alone(uid):
                    await self._ask(site, uid)
            except PodsError as error:  # about all pods, or this one alone: others come first
                self._doubtful[uid] = None
                log.warning("pod not kept", uid=uid, problem=str(error))
                break
        await self._nudge(site)

    async def _ask(self, site: Site, uid: str) -> None:
        """Find out about a pod that should be bound."""
        held = self._binder.held.get(uid)
        if held is None:
            return
        meta = held.pod.metadata
        pod = await site.plant.in_thread(self._pods.get, meta.namespace, meta.name)
        if pod is None or pod.uid != uid or pod.over:
            await self._end(site, uid)
        elif pod.node == held.node:
            self._binder.bound.add(uid)
        else:
            problem = await self._binder.give_back(site, ACTOR, pod, held.allocations, held.node)
            if problem:
                raise PodsError(f"{pod}: {problem}")
            if problem is None:
                log.info("binding given up", pod=str(pod), node=held.node)

    async def _end(self, site: Site, uid: str) -> None:
        """A pod is gone, so what it holds ends."""
        held = self._binder.held.get(uid)
        if held is not None:
            for identity in held.allocations:
                told = await site.plant.ask(Release(identity), ACTOR)
                if told.answer.status not in (200, 404):
                    return  # once more, at the next tick
            log.info("pod gone", pod=str(held.pod), node=held.node)
            self._binder.held.pop(uid, None)
        self._binder.bound.discard(uid)
        self._doomed.discard(uid)

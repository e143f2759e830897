"""Contacts: when agents were last heard of, who waits for news, and figures nobody keeps.

All of it is in the memory of the process that leads. A new leader knows nothing of it, and begins
to count anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from slicewise.control.actors import internal
from slicewise.control.agent_wire import ReportBody
from slicewise.control.agents import UNKNOWN
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Heard, Lost
from slicewise.control.entries import Seconds
from slicewise.service.plant import Plant

ACTOR = internal("service")


class GpuFigures(NamedTuple):
    """What a GPU shows at the moment."""

    temperature: float | None
    memory_used: int | None


class Contacts:
    """Knows which agents are there."""

    def __init__(self, plant: Plant, lost_seconds: Seconds) -> None:
        self._plant = plant
        self._lost = lost_seconds
        self._last: dict[str, Seconds] = {}
        """By node, in steady time: a step of the clock that is accepted loses no agent."""
        self._polls: dict[str, set[asyncio.Event]] = {}
        self._gpus: dict[str, dict[str, GpuFigures]] = {}
        self._memory: dict[str, dict[tuple[str, int], int]] = {}

    def begin(self) -> None:
        """Begin to lead: whoever was there when the last leader looked has its time once more."""
        now = self._plant.steady()
        self._gpus.clear()
        self._memory.clear()
        self._last = {
            node.name: now
            for node in self._plant.state.nodes.values()
            if node.agent is not None and UNKNOWN not in node.holds
        }

    def touch(self, node: str) -> None:
        """An agent was heard of."""
        self._last[node] = self._plant.steady()

    def last(self, node: str) -> Seconds | None:
        """When an agent was last heard of, in service time, if that is known here."""
        last = self._heard(node)
        return None if last is None else last + self._plant.state.accepted

    def _heard(self, node: str) -> Seconds | None:
        return self._plant.steady() if self._polls.get(node) else self._last.get(node)

    def reachable(self, node: str) -> bool:
        """Whether an agent has been heard of lately."""
        last = self._heard(node)
        return last is not None and self._plant.steady() - last <= self._lost

    @property
    def waiting(self) -> int:
        """How many polls are open."""
        return sum(map(len, self._polls.values()))

    @contextmanager
    def poll(self, node: str) -> Iterator[asyncio.Event]:
        """A poll is open: the event is set when there may be something to tell."""
        event = asyncio.Event()
        self._polls.setdefault(node, set()).add(event)
        try:
            yield event
        finally:
            self._polls[node].remove(event)
            if not self._polls[node]:
                del self._polls[node]
            self.touch(node)

    def look(self) -> None:
        """Wake those for whom something has changed; everybody where this process leads no more."""
        plant, state = self._plant, self._plant.state
        if plant.stopping or not plant.leads:
            awake = set(self._polls)
        elif state.stirred:
            awake, state.stirred = state.stirred, set()
        else:
            return
        for name in awake:
            for event in self._polls.get(name, ()):
                event.set()

    def watch(self) -> None:
        """Have nodes held whose agents were lost, and let go of those that are there again."""
        plant = self._plant
        if plant.stopping or not plant.leads:
            return
        for node in plant.state.nodes.values():
            if node.agent is None:
                continue
            held = UNKNOWN in node.holds
            if not held:
                self._last.setdefault(node.name, plant.steady())
            there = self.reachable(node.name)
            if there != held:
                continue
            command = Heard(node.name) if held else self._lost_since(node.name, node.agent.session)
            try:
                plant.ask(command, ACTOR)
            except RefusedError:
                return  # too much to write at the moment, or no leader any more

    def _lost_since(self, node: str, session: str) -> Lost:
        return Lost(node, session, self._last[node] + self._plant.state.accepted)

    # Figures

    def note(self, node: str, report: ReportBody) -> None:
        """Remember what a report says beyond what is written down."""
        self._gpus[node] = {
            gpu.uuid: GpuFigures(gpu.temperature, gpu.memory_used) for gpu in report.gpus
        }
        self._memory[node] = {
            (one.allocation, one.index): one.memory_used
            for one in report.instances
            if one.memory_used is not None
        }

    def figures(self, node: str, gpu: str) -> GpuFigures:
        """What a GPU showed last."""
        return self._gpus.get(node, {}).get(gpu, GpuFigures(None, None))

    def memory(self, node: str, allocation: str, index: int) -> int | None:
        """How much memory an instance used when its agent last said so."""
        return self._memory.get(node, {}).get((allocation, index))

    def temperatures(self) -> Iterator[tuple[str, str, float]]:
        """By node and GPU: how warm it is, where that is known."""
        for node, gpus in self._gpus.items():
            for uuid, figures in gpus.items():
                if figures.temperature is not None:
                    yield node, uuid, figures.temperature

"""Agent liveness: last contacts, open polls, and the latest measurements of agents.

All of it is in the memory of the leader only. A new leader starts without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from slicewise.api.agents import ReportBody
from slicewise.control.actors import internal
from slicewise.control.agents import UNKNOWN
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Heard, Lost
from slicewise.journal.entries import Seconds
from slicewise.runtime.runtime import Runtime

ACTOR = internal("service")


class GpuFigures(NamedTuple):
    """The latest measurements of a GPU."""

    temperature: float | None
    memory_used: int | None


class AgentLiveness:
    """Tracks which agents are reachable."""

    def __init__(self, runtime: Runtime, lost_seconds: Seconds) -> None:
        self._runtime = runtime
        self._lost = lost_seconds
        self._last: dict[str, Seconds] = {}
        """The last contact of each node, in steady time: an accepted clock step loses no agent."""
        self._polls: dict[str, set[asyncio.Event]] = {}
        self._gpus: dict[str, dict[str, GpuFigures]] = {}
        self._memory: dict[str, dict[tuple[str, int], int]] = {}

    def begin(self) -> None:
        """Start to lead: agents that the previous leader did not mark as lost get a full period."""
        now = self._runtime.steady()
        self._gpus.clear()
        self._memory.clear()
        self._last = {
            node.name: now
            for node in self._runtime.state.nodes.values()
            if node.agent is not None and UNKNOWN not in node.holds
        }

    def touch(self, node: str) -> None:
        """Record a contact of an agent."""
        self._last[node] = self._runtime.steady()

    def last(self, node: str) -> Seconds | None:
        """The last contact of an agent, in service time; None if this process had none."""
        last = self._last_contact(node)
        return None if last is None else last + self._runtime.state.clock_offset

    def _last_contact(self, node: str) -> Seconds | None:
        return self._runtime.steady() if self._polls.get(node) else self._last.get(node)

    def reachable(self, node: str) -> bool:
        """Whether the last contact of an agent is recent enough."""
        last = self._last_contact(node)
        return last is not None and self._runtime.steady() - last <= self._lost

    @property
    def waiting(self) -> int:
        """The number of open polls."""
        return sum(map(len, self._polls.values()))

    @contextmanager
    def poll(self, node: str) -> Iterator[asyncio.Event]:
        """Open a poll; its event is set when the node's desired state may have changed."""
        event = asyncio.Event()
        self._polls.setdefault(node, set()).add(event)
        try:
            yield event
        finally:
            self._polls[node].remove(event)
            if not self._polls[node]:
                del self._polls[node]
            self.touch(node)

    def notify_polls(self) -> None:
        """Notify the polls of changed nodes, or all polls if this process no longer leads."""
        runtime, state = self._runtime, self._runtime.state
        if runtime.stopping or not runtime.leads:
            changed = set(self._polls)
        elif state.nodes_to_notify:
            changed, state.nodes_to_notify = state.nodes_to_notify, set()
        else:
            return
        for name in changed:
            for event in self._polls.get(name, ()):
                event.set()

    def check_agents(self) -> None:
        """Submit a command for each agent that was lost or has come back; forget removed nodes."""
        runtime = self._runtime
        if runtime.stopping or not runtime.leads:
            return
        for known in (self._last, self._gpus, self._memory):
            for name in known.keys() - runtime.state.nodes.keys():
                del known[name]
        for node in runtime.state.nodes.values():
            if node.agent is None:
                continue
            held = UNKNOWN in node.holds
            if not held:
                self._last.setdefault(node.name, runtime.steady())
            if self.reachable(node.name) != held:
                continue
            command = Heard(node.name) if held else self._lost_since(node.name, node.agent.session)
            try:
                runtime.submit(command, ACTOR)
            except RefusedError:
                return  # overloaded, or no longer the leader; the next check tries again

    def _lost_since(self, node: str, session: str) -> Lost:
        return Lost(node, session, self._last[node] + self._runtime.state.clock_offset)

    # Measurements, which are not in the journal

    def record(self, node: str, report: ReportBody) -> None:
        """Keep the measurements of a report."""
        self._gpus[node] = {
            gpu.uuid: GpuFigures(gpu.temperature, gpu.memory_used) for gpu in report.gpus
        }
        self._memory[node] = {
            (one.allocation, one.index): one.memory_used
            for one in report.instances
            if one.memory_used is not None
        }

    def figures(self, node: str, gpu: str) -> GpuFigures:
        """The latest measurements of a GPU."""
        return self._gpus.get(node, {}).get(gpu, GpuFigures(None, None))

    def memory(self, node: str, allocation: str, index: int) -> int | None:
        """The memory use of an instance in its agent's last report."""
        return self._memory.get(node, {}).get((allocation, index))

    def temperatures(self) -> Iterator[tuple[str, str, float]]:
        """Node, GPU and temperature of every GPU that reported one to this leader."""
        if not self._runtime.leads:
            return
        for node, gpus in self._gpus.items():
            for uuid, figures in gpus.items():
                if figures.temperature is not None:
                    yield node, uuid, figures.temperature

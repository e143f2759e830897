"""The cluster as JSON, kept in pieces: only what changed since the last time is encoded again.

Every node is a piece of text that stays good as long as the node's version. What callers see of a
GPU depends on whose instances they may know, so pieces are kept per scope: one for all who see
everything, and one for each tenant that asked recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from slicewise.control.reports import ClusterView, Fragmentation
from slicewise.control.state import NodeStanding, State
from slicewise.control.views import node_view
from slicewise.control.wire import encode
from slicewise.core.fragmentation import Reading
from slicewise.service.auth import Caller
from slicewise.service.capacity import Capacity
from slicewise.service.devices import gpu_views

SCOPES = 16
"""Scopes kept: a cluster of 10,000 GPUs takes 3 MB in each."""
TOGETHER = 128
"""GPUs whose text is kept in one piece, and encoded before other requests get their turn."""

_END = b'"nodes":[],"devices":null}'
"""How a view without nodes and GPUs ends."""


def cluster_view(state: State, capacity: Capacity, history: str = "") -> ClusterView:
    """The cluster without its nodes and GPUs."""
    whole = state.cluster
    return ClusterView(
        seq=state.seq,
        history=history,
        policy=state.scheduler.policy.name,
        gpus=whole.gpus,
        active_gpus=whole.active_gpus,
        slices=whole.slices,
        free_slices=whole.free_slices,
        instances=sum(node.instances for node in state.nodes.values()),
        waiting=len(state.waiting),
        fragmentation=Fragmentation(
            partial=whole.fragmentation(Reading.PARTIAL),
            overlap=whole.fragmentation(Reading.OVERLAP),
        ),
        models=capacity.models(),
        nodes=(),
        devices=None,
    )


_Whole = tuple[int, list[bytes]]
"""The last entry that a text reflects, and its pieces."""


class _Group:
    """Some nodes, and their text in a scope as it was last encoded."""

    __slots__ = ("_before", "_texts", "_versions", "nodes", "text")

    def __init__(self, nodes: Sequence[NodeStanding], before: bytes) -> None:
        """``before`` separates the text from that of the group in front of it."""
        self.nodes = nodes
        self.text = b""
        self._before = before
        self._versions = [-1] * len(nodes)
        self._texts = [b""] * len(nodes)

    def refresh(self, encoded: Callable[[NodeStanding], bytes]) -> bool:
        """Encode the nodes that have changed; says whether any had."""
        stale = False
        for at, node in enumerate(self.nodes):
            if node.version != self._versions[at]:
                self._versions[at] = node.version
                self._texts[at] = encoded(node)
                stale = True
        if stale:
            self.text = self._before + b",".join(self._texts)
        return stale


class _Pieces:
    """The texts of all nodes, by name, in one scope."""

    def __init__(self, state: State, encoded: Callable[[NodeStanding], bytes]) -> None:
        self._state = state
        self._encoded = encoded
        self._layout = -1
        self._groups: list[_Group] = []
        self.last: _Whole = -1, []
        """The last whole that was made with them."""

    async def prepare(self, pace: Callable[[], Awaitable[None]]) -> None:
        """Encode most of what has changed, with pauses for other requests."""
        self._arrange()
        groups = self._groups
        for group in groups:
            if group.refresh(self._encoded):
                await pace()

    def all(self) -> list[bytes]:
        """The texts as they are now, without a pause."""
        self._arrange()
        for group in self._groups:
            group.refresh(self._encoded)
        return [group.text for group in self._groups]

    def _arrange(self) -> None:
        """Put the nodes in groups, once more if nodes have joined or left."""
        if self._layout != self._state.layout:
            self._layout = self._state.layout
            self._groups = []
            some: list[NodeStanding] = []
            for node in sorted(self._state.nodes.values(), key=lambda node: node.name):
                if some and sum(len(one.gpus) for one in some) + len(node.gpus) > TOGETHER:
                    self._add(some)
                    some = []
                some.append(node)
            if some:
                self._add(some)

    def _add(self, nodes: Sequence[NodeStanding]) -> None:
        self._groups.append(_Group(nodes, b"," if self._groups else b""))


class Snapshots:
    """Encodes the cluster for whoever asks, each version once."""

    def __init__(self, state: State, capacity: Capacity, history: str = "") -> None:
        self._state = state
        self._history = history
        self._capacity = capacity
        self._nodes = _Pieces(state, lambda node: encode(node_view(state, node)))
        self._devices: OrderedDict[str | None, _Pieces] = OrderedDict()
        self._plain: _Whole = -1, []
        """The last one without GPUs."""
        self._head: tuple[int, bytes] = -1, b""

    async def whole(
        self, caller: Caller, devices: bool, pace: Callable[[], Awaitable[None]]
    ) -> _Whole:
        """The last entry it reflects, and the text of a `ClusterView` in pieces."""
        gpus = self._scope(caller) if devices else None
        last = self._plain if gpus is None else gpus.last
        if last[0] == self._state.seq:
            return last
        await self._nodes.prepare(pace)
        if gpus is not None:
            await gpus.prepare(pace)
        # From here on nothing else runs: all pieces are of one moment.
        pieces = [self._beginning(), *self._nodes.all()]
        if gpus is None:
            self._plain = self._state.seq, [*pieces, b'],"devices":null}']
            return self._plain
        gpus.last = self._state.seq, [*pieces, b'],"devices":[', *gpus.all(), b"]}"]
        return gpus.last

    def _scope(self, caller: Caller) -> _Pieces:
        tenant, state = caller.tenant, self._state
        found = self._devices.get(tenant)
        if found is None:
            found = _Pieces(state, lambda node: encode(gpu_views(state, node, caller))[1:-1])
            self._devices[tenant] = found
            if len(self._devices) > SCOPES:
                self._devices.popitem(last=False)
        self._devices.move_to_end(tenant)
        return found

    def _beginning(self) -> bytes:
        """Everything in front of the nodes."""
        seq, text = self._head
        if seq != self._state.seq:
            text = encode(cluster_view(self._state, self._capacity, self._history))
            assert text.endswith(_END)
            text = text[: -len(_END)] + b'"nodes":['
            self._head = self._state.seq, text
        return text

"""Agents: who speaks for a node, and whether what its driver says is what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slicewise.control.agent_wire import GpuFound, HelloBody, SessionView
from slicewise.control.answers import Answer, RefusedError, said
from slicewise.control.commands import Accept, Heard, Hello, Lost
from slicewise.control.entries import (
    Cause,
    GeometryRecord,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    Seconds,
)
from slicewise.control.foreign import Strangers
from slicewise.control.geometries import distinct, named, record_of, same_layout
from slicewise.control.hardware import AgentJoined, GeometryAccepted, GpuHeld, NodeHeld, PartTurned
from slicewise.control.hardware import Phase as PartPhase
from slicewise.control.ledger import Ledger
from slicewise.control.models import Models
from slicewise.control.placing import Placing
from slicewise.control.standings import AgentStanding
from slicewise.control.state import NodeStanding, State
from slicewise.control.views import node_view
from slicewise.control.wire import moment

GEOMETRY, UNKNOWN, UNREPORTED = "geometry", "unknown", "unreported"
"""Why a whole node may be held."""
MIG, PROBLEM, MISSING, FOREIGN = "mig", "problem", "missing", "foreign"
"""Why a GPU may be held."""


class Agents:
    """Begins sessions, and holds what must not be used."""

    def __init__(
        self, ledger: Ledger, placing: Placing, strangers: Strangers, models: Models
    ) -> None:
        self._models = models
        self._ledger = ledger
        self._state = ledger.state
        self._placing = placing
        self._strangers = strangers

    # Sessions

    def hello(self, command: Hello) -> Answer:
        """Register the node, or check it against what is known, and begin a session.

        What somebody else made there is known with the session's first report: until then nothing
        new is placed on the node, or it might meet that.
        """
        body = command.said
        uuids = _uuids(body)
        if len(set(uuids)) != len(uuids):
            raise RefusedError(400, "two GPUs have the same UUID", field="gpus")
        geometry, quarrel = geometry_told(self._state, body, command.catalog)
        node = self._state.nodes.get(command.node)
        if node is None:
            self._models.check(geometry)
            node = self._register(command.node, geometry, len(uuids), {})
        else:
            self._empty(node, body.boot)
            matched = self._checked(node, geometry, uuids)
            if matched is None:
                node = self._anew(node, geometry, len(uuids))
            uuids = matched or uuids
        self._begin(command, node, uuids)
        agent = node.agent
        assert agent is not None  # it has just joined
        quarrel = (*body.disagreements, *quarrel)
        holds = {GEOMETRY: "; ".join(quarrel)} if quarrel and not agent.accepted else {}
        self.hold_node(node, holds | {UNREPORTED: "its agent has not said yet what is there"})
        self.hold_gpus(node, agent, body.gpus)
        return said(200, SessionView(session=agent.session, node=node.name))

    def _empty(self, node: NodeStanding, boot: str) -> None:
        """Nothing is left on a node that was restarted when all that was there was leaving.

        Its agent might not get to say so: a node with instances that has become another one is
        refused, and has to be drained.
        """
        left = list(self._state.on_node(node))
        restarted = node.agent is not None and node.agent.boot != boot
        if restarted and all(self._state.record(one).ended is not None for one, _ in left):
            for identity, index in left:
                self.vacate(identity, index, f"node {node.name} was restarted")

    def _begin(self, command: Hello, node: NodeStanding, uuids: tuple[str, ...]) -> None:
        body, old = command.said, node.agent
        rebooted = old is not None and old.boot != body.boot
        self._ledger.enter(
            AgentJoined(
                node.name,
                _session(self._ledger.new_id("s"), self._ledger.now, body.life),
                body.boot,
                body.driver,
                body.agent,
                self._ledger.now,
                uuids,
                rebooted,
            )
        )
        if not rebooted:
            return
        present = set(_uuids(body))
        for identity, index in list(self._state.on_node(node)):
            record = self._state.record(identity)
            part = record.parts[index]
            if record.ended is not None:
                if part.gpu_uuid not in present:
                    # No instance outlives a restart, and nobody is left to say so of this one.
                    self.vacate(identity, index, f"GPU {part.gpu} is not there any more")
            elif command.fail_after_reboot:
                self._placing.end(record, Cause.FAILED, f"node {node.name} was restarted")

    def session(self, name: str, session: str) -> tuple[NodeStanding, AgentStanding]:
        """The node an agent speaks for; refused unless its session is the last one."""
        return checked_session(self._state.nodes, name, session)

    # Geometry

    def _checked(
        self, node: NodeStanding, geometry: GeometryRecord, uuids: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        """The UUIDs of a known node's GPUs by index; None if it is to be registered anew."""
        same = same_layout(record_of(node.geometry), geometry)
        if same and node.agent is not None and set(uuids) <= set(node.agent.gpus):
            return node.agent.gpus  # in whatever order: one that is missing may come back
        if not node.instances:
            return uuids if same and len(uuids) == len(node.gpus) else None
        if not same:
            raise RefusedError(
                409,
                f"the driver of node {node.name!r} tells another geometry than before, and "
                f"{node.instances} instances are there: drain it first",
                reason="changed",
            )
        if len(uuids) > len(node.gpus):
            raise RefusedError(
                409,
                f"node {node.name!r} had {len(node.gpus)} GPUs and has {len(uuids)}, and "
                f"{node.instances} instances are there: drain it first",
                reason="changed",
            )
        if node.agent is None:
            if len(uuids) < len(node.gpus):
                raise RefusedError(
                    409,
                    f"node {node.name!r} was registered with {len(node.gpus)} GPUs and has "
                    f"{len(uuids)}: drain it first",
                    reason="changed",
                )
            return uuids
        return self._matched(node, node.agent.gpus, uuids)

    def _matched(
        self, node: NodeStanding, old: tuple[str, ...], new: tuple[str, ...]
    ) -> tuple[str, ...]:
        """GPUs stay where they were; one that is empty may be replaced by another."""
        matched = list(old)
        for index, uuid in enumerate(old):
            other = new[index] if len(new) == len(old) else uuid
            empty = not self._state.cluster.instances_on(node.gpus[index])
            if uuid not in new and other not in old and empty:
                matched[index] = other
        return tuple(matched)

    def _register(
        self, name: str, geometry: GeometryRecord, gpus: int, labels: dict[str, str]
    ) -> NodeStanding:
        state = self._state
        self._models.enter(geometry)
        first = state.cluster.next_gpus(gpus)
        self._ledger.enter(NodeAdded(name, geometry.model, gpus, first, labels))
        self._ledger.room_appeared = True
        return state.nodes[name]

    def _anew(self, node: NodeStanding, geometry: GeometryRecord, gpus: int) -> NodeStanding:
        """Register an empty node once more, since it is another one by now."""
        self._models.check(geometry, node.geometry)
        self._ledger.enter(NodeRemoved(node.name))
        if node.geometry.model != geometry.model:
            self._models.forget(node.geometry)
        made = self._register(node.name, geometry, gpus, node.labels)
        if node.phase is not NodePhase.READY:
            self._ledger.enter(NodeTurned(node.name, node.phase))
        return made

    def accept(self, command: Accept) -> Answer:
        """Use a node although its driver does not agree with the catalog."""
        node = self._ledger.node(command.node)
        if node.agent is None or (GEOMETRY not in node.holds and not node.agent.accepted):
            raise RefusedError(
                409,
                f"nothing about the geometry of node {node.name!r} is to be accepted",
                reason="agreed",
            )
        if not node.agent.accepted:
            self._ledger.enter(GeometryAccepted(node.name))
        self._lift(node, GEOMETRY)
        return said(200, node_view(self._state, node))

    # Holds

    def heard(self, command: Heard) -> Answer:
        """An agent is there again."""
        node = self._ledger.node(command.node)
        self._lift(node, UNKNOWN)
        return said(200, node_view(self._state, node))

    def reported(self, node: NodeStanding) -> None:
        """The node's agent was heard of, and what it said is there has been entered."""
        self._lift(node, UNKNOWN, UNREPORTED)

    def _lift(self, node: NodeStanding, *gone: str) -> None:
        self.hold_node(node, {k: v for k, v in node.holds.items() if k not in gone})

    def lost(self, command: Lost) -> Answer:
        """Nobody knows how a node is doing: it takes nothing new, and nothing there is freed."""
        node, _ = self.session(command.node, command.session)
        if UNKNOWN not in node.holds:
            sentence = f"its agent has not been heard of since {moment(command.since)}"
            self.hold_node(node, node.holds | {UNKNOWN: sentence})
        return said(200, node_view(self._state, node))

    def hold_node(self, node: NodeStanding, reasons: dict[str, str]) -> None:
        """Let these be all the reasons why a node takes nothing new."""
        if reasons != node.holds:
            self._ledger.room_appeared |= not reasons
            self._ledger.enter(NodeHeld(node.name, reasons))

    def hold_gpus(
        self, node: NodeStanding, agent: AgentStanding, found: Sequence[GpuFound]
    ) -> None:
        """Let GPUs take nothing new, or something again, as they were found."""
        by_uuid: Mapping[str, GpuFound] = {gpu.uuid: gpu for gpu in found}
        foreign = self._strangers.reasons(agent)
        for index, uuid in enumerate(agent.gpus):
            reasons: dict[str, str] = {}
            gpu = by_uuid.get(uuid)
            if gpu is None:
                reasons[MISSING] = f"{uuid} is not there"
            else:
                if not gpu.mig:
                    reasons[MIG] = "MIG mode is off"
                if gpu.problem:
                    reasons[PROBLEM] = gpu.problem
            if index in foreign:
                reasons[FOREIGN] = foreign[index]
            if reasons != agent.gpu_holds.get(index, {}):
                self._ledger.room_appeared |= not reasons
                self._ledger.enter(GpuHeld(node.name, index, reasons))

    def vacate(self, identity: str, index: int, detail: str = "") -> None:
        """An instance that was leaving is gone."""
        record = self._state.leaving[identity]
        name = record.parts[index].node
        self._ledger.enter(
            PartTurned(identity, record.tenant, index, name, PartPhase.GONE, detail=detail)
        )
        self._ledger.room_appeared = True
        self._ledger.finish_draining(name)


def geometry_told(
    state: State, body: HelloBody, catalog: GeometryRecord | None
) -> tuple[GeometryRecord, tuple[str, ...]]:
    """The model that a node's GPUs are, and where the service disagrees about that.

    ``catalog`` is what the catalog knows under the model's name.
    """
    driver = named(body.geometry, catalog.model if catalog else body.model)
    own = state.geometries.get(driver.model)
    known = catalog if own is None else record_of(own)
    if known is None or same_layout(known, driver):
        return known or driver, ()
    sentence = f"the service knows another geometry by the name of {driver.model}"
    return distinct(driver), (sentence,) if not body.disagreements else ()


def _uuids(body: HelloBody) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in body.gpus)


def checked_session(
    nodes: Mapping[str, NodeStanding], name: str, session: str
) -> tuple[NodeStanding, AgentStanding]:
    """The node an agent speaks for; refused unless its session is the last one."""
    node = nodes.get(name)
    if node is None or node.agent is None:
        raise RefusedError(409, f"node {name!r} has no agent: say hello first", reason="unknown")
    if node.agent.session != session:
        if _may_begin_anew(session, node.agent.session):
            raise RefusedError(409, "this session is over: say hello again", reason="unknown")
        raise RefusedError(
            409, f"another agent speaks for node {name!r} by now", reason="superseded"
        )
    return node, node.agent


def _session(identity: str, now: Seconds, life: str) -> str:
    """A name for a session that tells when it began, and whose it is."""
    return f"{identity}.{now * 1000:.0f}.{life}"


def _may_begin_anew(session: str, last: str) -> bool:
    """Whether a session is over, but not because another agent has come since.

    A hello of the same agent may have arrived late, or twice; or the service was restored from a
    backup that is older than the session.
    """
    begun, life = _told(session)
    last_begun, last_life = _told(last)
    return (life == last_life != "") or begun > last_begun


def _told(session: str) -> tuple[int, str]:
    _, _, rest = session.partition(".")
    begun, _, life = rest.partition(".")
    return (int(begun) if begun.isdecimal() and begun.isascii() else 0), life

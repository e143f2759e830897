"""Agents: sessions, checks of the node's hardware, holds, and reports.

Reports may be late, repeated, or about something that has changed since. They can therefore only
advance an instance on the path that was decided for it: a desired instance is created or fails, an
undesired one goes. A report never frees an instance that is still desired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slicewise.api.agents import GpuFound, HelloBody, InstanceReport, ReportView, SessionView
from slicewise.api.base import moment
from slicewise.control.allocations import Allocations
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import Accept, Heard, Hello, Lost, Report
from slicewise.control.foreign_instances import ForeignInstances
from slicewise.control.geometries import distinct, named, record_of, same_layout
from slicewise.control.gpu_models import GpuModels
from slicewise.control.state import NodeStatus, State
from slicewise.control.status import AgentStatus
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import node_view
from slicewise.journal.agent_entries import (
    AgentJoined,
    GeometryAccepted,
    GpuHeld,
    NodeHeld,
    PartTurned,
    Phase,
)
from slicewise.journal.entries import (
    AllocationRecord,
    Cause,
    GeometryRecord,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    Part,
    Seconds,
)

GEOMETRY, UNKNOWN, UNREPORTED = "geometry", "unknown", "unreported"
"""Reasons to hold a node."""
MIG, PROBLEM, MISSING, FOREIGN = "mig", "problem", "missing", "foreign"
"""Reasons to hold a GPU."""

_DESIRED = {"creating": Phase.CREATING, "active": Phase.ACTIVE}
_UNDESIRED = {"releasing": Phase.RELEASING, "quarantined": Phase.QUARANTINED}


class Agents:
    """Begins sessions, applies reports, and holds nodes and GPUs that must not be used."""

    def __init__(
        self,
        work: UnitOfWork,
        allocations: Allocations,
        foreign: ForeignInstances,
        models: GpuModels,
    ) -> None:
        self._models = models
        self._work = work
        self._state = work.state
        self._allocations = allocations
        self._foreign = foreign

    # Sessions

    def hello(self, command: Hello) -> Answer:
        """Add the node, or check it against the known one, and begin a session.

        The node is held until the session's first report: foreign instances are unknown before,
        and a placement could collide with one.
        """
        body = command.body
        uuids = _uuids(body)
        if len(set(uuids)) != len(uuids):
            raise RefusedError(400, "two GPUs have the same UUID", field="gpus")
        geometry, disagreement = geometry_told(self._state, body, command.catalog)
        node = self._state.nodes.get(command.node)
        if node is None:
            self._models.check(geometry)
            node = self._add_node(command.node, geometry, len(uuids), {})
        else:
            self._vacate_rebooted(node, body.boot)
            matched = self._match(node, geometry, uuids)
            if matched is None:
                node = self._replace_node(node, geometry, len(uuids))
            uuids = matched or uuids
        self._begin_session(command, node, uuids)
        agent = node.agent
        assert agent is not None  # set by the entry above
        disagreements = (*body.disagreements, *disagreement)
        holds = {UNREPORTED: "its agent has not sent its first report"}
        if disagreements and not agent.accepted:
            holds = {GEOMETRY: "; ".join(disagreements)} | holds
        self._hold_node(node, holds)
        self._hold_gpus(node, agent, body.gpus)
        return json_answer(200, SessionView(session=agent.session, node=node.name))

    def _vacate_rebooted(self, node: NodeStatus, boot: str) -> None:
        """Free all slices of a rebooted node if all allocations on it have ended.

        A reboot destroys every instance. The agent may never report that: a node with instances
        whose hardware has changed is refused until it is drained.
        """
        left = list(self._state.on_node(node))
        rebooted = node.agent is not None and node.agent.boot != boot
        if rebooted and all(self._state.record(one).ended is not None for one, _ in left):
            for identity, index in left:
                self._vacate(identity, index, f"node {node.name} was restarted")

    def _begin_session(self, command: Hello, node: NodeStatus, uuids: tuple[str, ...]) -> None:
        body, old = command.body, node.agent
        rebooted = old is not None and old.boot != body.boot
        self._work.enter(
            AgentJoined(
                node.name,
                _session_name(self._work.new_id("s"), self._work.now, body.life),
                body.boot,
                body.driver,
                body.agent,
                self._work.now,
                uuids,
                rebooted,
            )
        )
        if not rebooted:
            return
        present = set(_uuids(body))
        for identity, index in list(self._state.on_node(node)):
            record = self._state.allocations.get(identity)
            if record is not None and command.fail_after_reboot:
                self._allocations.end(record, Cause.FAILED, f"node {node.name} was restarted")
            leaving = self._state.leaving.get(identity)
            if leaving is not None and leaving.parts[index].gpu_uuid not in present:
                # The reboot destroyed it, and no report will mention its missing GPU.
                self._vacate(identity, index, f"GPU {leaving.parts[index].gpu} is missing")

    # Hardware

    def _match(
        self, node: NodeStatus, geometry: GeometryRecord, uuids: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        """Return the UUIDs of a known node's GPUs by index; None if the node must be replaced."""
        same = same_layout(record_of(node.geometry), geometry)
        if same and node.agent is not None and set(uuids) <= set(node.agent.gpus):
            return node.agent.gpus  # in any order; a missing GPU may come back
        if not node.instances:
            return uuids if same and len(uuids) == len(node.gpus) else None
        if not same:
            raise RefusedError(
                409,
                f"the driver of node {node.name!r} reports another geometry than before, and "
                f"{node.instances} instances are on it: drain it first",
                reason="changed",
            )
        if len(uuids) > len(node.gpus):
            raise RefusedError(
                409,
                f"node {node.name!r} had {len(node.gpus)} GPUs and now has {len(uuids)}, and "
                f"{node.instances} instances are on it: drain it first",
                reason="changed",
            )
        if node.agent is None:
            if len(uuids) < len(node.gpus):
                raise RefusedError(
                    409,
                    f"node {node.name!r} was added with {len(node.gpus)} GPUs and now has "
                    f"{len(uuids)}: drain it first",
                    reason="changed",
                )
            return uuids
        return self._match_uuids(node, node.agent.gpus, uuids)

    def _match_uuids(
        self, node: NodeStatus, old: tuple[str, ...], new: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Keep known GPUs at their index; a new one may replace a missing one that was empty."""
        matched = list(old)
        for index, uuid in enumerate(old):
            other = new[index] if len(new) == len(old) else uuid
            empty = not self._state.cluster.instances_on(node.gpus[index])
            if uuid not in new and other not in old and empty:
                matched[index] = other
        return tuple(matched)

    def _add_node(
        self, name: str, geometry: GeometryRecord, gpus: int, labels: dict[str, str]
    ) -> NodeStatus:
        state = self._state
        self._models.enter(geometry)
        first = state.cluster.next_gpus(gpus)
        self._work.enter(NodeAdded(name, geometry.model, gpus, first, labels))
        self._work.room_appeared = True
        return state.nodes[name]

    def _replace_node(self, node: NodeStatus, geometry: GeometryRecord, gpus: int) -> NodeStatus:
        """Remove an empty node and add it again, because its hardware has changed."""
        self._models.check(geometry, node.geometry)
        self._allocations.dispatcher.removed(node.gpus)
        self._work.enter(NodeRemoved(node.name))
        if node.geometry.model != geometry.model:
            self._models.forget(node.geometry)
        added = self._add_node(node.name, geometry, gpus, node.labels)
        if node.phase is not NodePhase.READY:
            self._work.enter(NodeTurned(node.name, node.phase))
        return added

    def accept(self, command: Accept) -> Answer:
        """Use a node although its driver disagrees with the catalog."""
        node = self._work.node(command.node)
        if node.agent is None or (GEOMETRY not in node.holds and not node.agent.accepted):
            raise RefusedError(
                409,
                f"node {node.name!r} agrees with the catalog: there is nothing to accept",
                reason="agreed",
            )
        if not node.agent.accepted:
            self._work.enter(GeometryAccepted(node.name))
        self._lift(node, GEOMETRY)
        return json_answer(200, node_view(self._state, node))

    # Reports

    def report(self, command: Report) -> Answer:
        """Apply an agent's report: only differences from the state become entries."""
        body = command.body
        node, agent = checked_session(self._state.nodes, command.node, body.session)
        self._foreign.check(node, body.foreign)  # refuses before anything is entered
        for instance in body.instances:
            self._report_instance(node.name, instance)
        self._foreign.report(node, agent, body)
        self._hold_gpus(node, agent, body.gpus)
        # Last: a reader that follows row by row must not see room before all else is entered.
        self._lift(node, UNKNOWN, UNREPORTED)
        return json_answer(200, ReportView(seq=self._state.seq))

    def _report_instance(self, node: str, report: InstanceReport) -> None:
        state = self._state
        record = state.allocations.get(report.allocation) or state.leaving.get(report.allocation)
        if record is None or report.index >= len(record.parts):
            return
        part = record.parts[report.index]
        if part.node != node or part.phase in (None, Phase.GONE):
            return
        if record.ended is None:
            if report.phase == "failed":
                what = f"{part.profile} on {node} GPU {part.gpu} at slice {part.start}"
                why = report.detail or "no reason was given"
                self._allocations.end(record, Cause.FAILED, f"{what} could not be created: {why}")
            elif report.phase in _DESIRED:
                self._set_phase(record, part, report, _DESIRED[report.phase])
        elif report.phase == "gone":
            self._vacate(record.id, report.index)
        elif report.phase in _UNDESIRED:
            self._set_phase(record, part, report, _UNDESIRED[report.phase])

    def _set_phase(
        self, record: AllocationRecord, part: Part, report: InstanceReport, phase: Phase
    ) -> None:
        uuid = report.uuid or (part.uuid if phase is not Phase.CREATING else "")
        news = phase, uuid, report.detail
        # Attempts go on for ever in quarantine, so they are not worth an entry each.
        tried = phase is not Phase.QUARANTINED and report.attempts != part.attempts
        if news == (part.phase, part.uuid, part.detail) and not tried:
            return
        self._work.enter(
            PartTurned(
                record.id, record.tenant, report.index, part.node, *news, attempts=report.attempts
            )
        )

    def _vacate(self, identity: str, index: int, detail: str = "") -> None:
        """Record that a leaving instance is gone, which frees its slices."""
        record = self._state.leaving[identity]
        name = record.parts[index].node
        self._allocations.note_freed([record.parts[index]])
        self._work.enter(
            PartTurned(identity, record.tenant, index, name, Phase.GONE, detail=detail)
        )
        self._work.room_appeared = True
        self._work.finish_draining(name)

    # Holds

    def heard(self, command: Heard) -> Answer:
        """Lift the hold on a node whose agent is reachable again."""
        node = self._work.node(command.node)
        self._lift(node, UNKNOWN)
        return json_answer(200, node_view(self._state, node))

    def lost(self, command: Lost) -> Answer:
        """Hold a node whose agent is unreachable. Nothing on it is freed: it may still run."""
        node, _ = checked_session(self._state.nodes, command.node, command.session)
        if UNKNOWN not in node.holds:
            sentence = f"its agent has been unreachable since {moment(command.since)}"
            self._hold_node(node, node.holds | {UNKNOWN: sentence})
        return json_answer(200, node_view(self._state, node))

    def _lift(self, node: NodeStatus, *reasons: str) -> None:
        self._hold_node(node, {k: v for k, v in node.holds.items() if k not in reasons})

    def _hold_node(self, node: NodeStatus, reasons: dict[str, str]) -> None:
        """Set all reasons why a node takes no new instances."""
        if reasons != node.holds:
            self._work.room_appeared = True  # or a reservation is lost, which makes room, too
            self._work.enter(NodeHeld(node.name, reasons))

    def _hold_gpus(self, node: NodeStatus, agent: AgentStatus, found: Sequence[GpuFound]) -> None:
        """Hold the GPUs that cannot be used, and lift the holds of the others."""
        by_uuid: Mapping[str, GpuFound] = {gpu.uuid: gpu for gpu in found}
        foreign = self._foreign.reasons(agent)
        for index, uuid in enumerate(agent.gpus):
            reasons: dict[str, str] = {}
            gpu = by_uuid.get(uuid)
            if gpu is None:
                reasons[MISSING] = f"{uuid} is missing"
            else:
                if not gpu.mig:
                    reasons[MIG] = "MIG mode is off"
                if gpu.problem:
                    reasons[PROBLEM] = gpu.problem
            if index in foreign:
                reasons[FOREIGN] = foreign[index]
            if reasons != agent.gpu_holds.get(index, {}):
                self._work.room_appeared = True
                self._work.enter(GpuHeld(node.name, index, reasons))


def geometry_told(
    state: State, body: HelloBody, catalog: GeometryRecord | None
) -> tuple[GeometryRecord, tuple[str, ...]]:
    """Return the model of a node's GPUs, and the disagreement with the service's model, if any.

    ``catalog`` is the catalog's geometry for the model that the agent names.
    """
    driver = named(body.geometry, catalog.model if catalog else body.model)
    own = state.geometries.get(driver.model)
    known = catalog if own is None else record_of(own)
    if known is None or same_layout(known, driver):
        return known or driver, ()
    sentence = f"the service has another geometry named {driver.model}"
    return distinct(driver), (sentence,) if not body.disagreements else ()


def _uuids(body: HelloBody) -> tuple[str, ...]:
    return tuple(gpu.uuid for gpu in body.gpus)


def checked_session(
    nodes: Mapping[str, NodeStatus], name: str, session: str
) -> tuple[NodeStatus, AgentStatus]:
    """Return an agent and its node; refuse a session that is not the current one."""
    node = nodes.get(name)
    if node is None or node.agent is None:
        raise RefusedError(409, f"node {name!r} has no agent: say hello first", reason="unknown")
    if node.agent.session != session:
        if _may_begin_again(session, node.agent.session):
            raise RefusedError(409, "this session is over: say hello again", reason="unknown")
        raise RefusedError(409, f"another agent has taken over node {name!r}", reason="superseded")
    return node, node.agent


def _session_name(identity: str, now: Seconds, life: str) -> str:
    """Return a session's name, which holds its start and its agent process (``life``)."""
    return f"{identity}.{now * 1000:.0f}.{life}"


def _may_begin_again(session: str, last: str) -> bool:
    """Return whether a session ended without being superseded by another agent.

    A hello of the same agent may have arrived late or twice; or the service was restored from a
    backup that is older than the session.
    """
    begun, life = _parse_session(session)
    last_begun, last_life = _parse_session(last)
    return (life == last_life != "") or begun > last_begun


def _parse_session(session: str) -> tuple[int, str]:
    _, _, rest = session.partition(".")
    begun, _, life = rest.partition(".")
    return (int(begun) if begun.isdecimal() and begun.isascii() else 0), life

"""A cluster with tenants, leases, quotas and a queue, driven step by step, for property tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Reason, Rejection, Request
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.shares import Entitlement, Shares


@dataclass
class Running:
    """A placed request."""

    ticket: Ticket
    instances: tuple[Instance, ...]
    placed: float
    ends: float | None


@dataclass
class ClusterInUse:
    """Everything a dispatcher needs, with the records that the service would keep."""

    nodes: Iterable[tuple[Geometry, int]]
    policy: str = "least-lost"
    rules: ReservationRules = field(default_factory=lambda: ReservationRules(after=3.0))
    quotas: dict[str, int] = field(default_factory=dict)
    """Memory slices by tenant."""
    kinds: tuple[type[Queue], type[Dispatcher]] = (Queue, Dispatcher)

    def __post_init__(self) -> None:
        self.cluster = Cluster()
        self.shares = Shares()
        for number, (geometry, gpus) in enumerate(self.nodes):
            self.cluster.add_node(f"node-{number}", geometry, gpus)
            self.shares.add_gpus(geometry, gpus)
        self.scheduler = Scheduler(self.cluster, self.policy)
        kind_of_queue, kind_of_dispatcher = self.kinds
        self.queue = kind_of_queue(self.shares)
        self.reservations = Reservations(self.cluster)
        self.dispatcher = kind_of_dispatcher(
            self.scheduler, self.queue, self.reservations, self, self.rules
        )
        self.now = 0.0
        self.running: dict[int, Running] = {}
        self.owner: dict[int, int] = {}
        self.served: list[int] = []
        self.promises: dict[LineKey, list[float]] = {}
        self._number = 0

    # What the dispatcher asks and tells

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        quota = self.quotas.get(ticket.tenant)
        if quota is None:
            return None
        more = self.shares.size(ticket.request) * ticket.count
        if self.shares.slices(ticket.tenant) + more <= quota:
            return None
        return Rejection(ticket.request, Reason.QUOTA, "beyond the quota")

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        self._run(ticket, instances)
        self.served.append(ticket.number)
        if ticket.number % 2:  # the dispatcher withdraws the others
            self.queue.withdraw(ticket.number)
        return None

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        self.reservations.set(line, windows)

    def ends(self, instance: Instance) -> float | None:
        return self.running[self.owner[instance.id]].ends

    # What happens to it

    def entitle(self, tenant: str, entitlement: Entitlement) -> None:
        self.shares.entitle(tenant, entitlement)

    def ask(
        self,
        tenant: str,
        want: str | Request,
        count: int = 1,
        lease: float | None = None,
        priority: int = 0,
    ) -> int:
        """Ask for instances, and wait for them if there is no room; returns the number."""
        self._number += 1
        request = Request(want) if isinstance(want, str) else want
        ticket = Ticket(self._number, request, count, tenant, priority, self.now, None, lease)
        outcome = self.dispatcher.place(ticket, self.now)
        if isinstance(outcome, Rejection):
            self.queue.enter(ticket)
        else:
            self._run(ticket, outcome)
        return ticket.number

    def end(self, number: int) -> None:
        """A placed request ends, or a waiting one gives up; then the queue is served."""
        self.release(number)
        self.settle()

    def release(self, number: int) -> None:
        """A placed request ends, or a waiting one gives up; nothing is served yet."""
        if number in self.queue:
            position = self.queue.position(number)
            ticket = self.queue.withdraw(number)
            self.dispatcher.ticket_left(ticket, position)
            return
        gone = self.running.pop(number)
        for instance in gone.instances:
            self.scheduler.release(instance)
            del self.owner[instance.id]
            self._charge(gone.ticket.tenant, instance, -1)
            self.dispatcher.freed(instance.gpu)
        self.dispatcher.room_appeared()

    def settle(self) -> None:
        """Serve the queue and grant reservations, as the service does after every change."""
        self.dispatcher.serve(self.now)
        while self.dispatcher.grant(self.now):
            pass

    def advance(self, to: float) -> None:
        """Let time pass; leases end."""
        while True:
            due = [(run.ends, n) for n, run in self.running.items() if run.ends is not None]
            if not due or min(due)[0] > to:
                break
            self.now, number = min(due)
            self.end(number)
        self.now = to
        self.settle()

    def _run(self, ticket: Ticket, instances: tuple[Instance, ...]) -> None:
        ends = None if ticket.lease is None else self.now + ticket.lease
        self.running[ticket.number] = Running(ticket, instances, self.now, ends)
        for instance in instances:
            self.owner[instance.id] = ticket.number
            self._charge(ticket.tenant, instance, 1)
            self.queue.placed(self.cluster.node_of(instance.gpu).geometry, ticket.entered)

    def _charge(self, tenant: str, instance: Instance, sign: int) -> None:
        geometry = self.cluster.node_of(instance.gpu).geometry
        profile = geometry.profile(instance.profile)
        self.shares.charge(tenant, geometry, sign * profile.size, sign * profile.compute)

    # What must hold

    def check_reservations(self) -> None:
        """Caps hold, windows never overlap, and who left holds none (I6)."""
        by_model: Counter[Geometry] = Counter()
        by_tenant: Counter[tuple[str, Geometry]] = Counter()
        gpus = Counter(self.cluster.node_of(g).geometry for g in range(self.cluster.gpus))
        seen: set[int] = set()
        for line, pool in self.reservations:
            waiting = self.queue.line(line)
            assert waiting is not None
            assert len(pool) % line.instances == 0
            assert len(pool) // line.instances <= len(list(waiting))
            for window in pool:
                assert window.gpu not in seen
                seen.add(window.gpu)
                assert self.cluster.reserved(window.gpu) == window.placement
                geometry = self.cluster.state(window.gpu).geometry
                by_model[geometry] += 1
                by_tenant[line.tenant, geometry] += 1
        for geometry, count in by_model.items():
            assert count <= self.rules.most(gpus[geometry])
        for (_, geometry), count in by_tenant.items():
            assert count <= max(1, self.rules.most(gpus[geometry]) // 2)

    def open_to(self, ticket: Ticket) -> bool:
        """Whether a ticket finds room outside the reservations that bind it, GPU by GPU."""
        if self.over_quota(ticket) is not None:
            return False
        bound = {
            window.gpu: window
            for line, pool in self.reservations
            if line != ticket.line
            for window in pool
            if ticket.lease is None
            or window.opens is None
            or self.now + ticket.lease > window.opens
        }
        mine = {window.gpu for window in self.reservations.of(ticket.line)}
        if mine and self.queue.position(ticket.number) > 0:
            bound |= {w.gpu: w for w in self.reservations.of(ticket.line)}
        for gpu in range(self.cluster.gpus):
            state = self.cluster.state(gpu)
            window = bound.get(gpu)
            if window is not None:
                cleared = self.cluster.once_cleared(gpu, window.placement)
                if cleared < 0:
                    continue
                shown = self.cluster.states[cleared]
                if state.mask & ~shown.mask or any(
                    a > b for a, b in zip(state.used, shown.used, strict=True)
                ):
                    continue
                state = shown
            for _, profile in ticket.request.candidates(state.geometry):
                if state.feasible_starts(profile) and self.cluster.takes_instances(gpu):
                    return True
        return False

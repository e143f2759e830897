"""The queue, its shares and its dispatcher, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.engine.cluster_in_use import ClusterInUse

from slicewise.catalog import load_geometry
from slicewise.core.errors import PlacementError, SlicewiseError
from slicewise.core.request import Need, Reason, Rejection, Request
from slicewise.engine import dispatcher as dispatcher_module
from slicewise.engine import shares as shares_module
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Window
from slicewise.engine.shares import Entitlement, Shares

A100, A30 = (load_geometry(name) for name in ("A100-80GB", "A30-24GB"))
WHOLE = Request("7g.80gb")


def queue() -> Queue:
    """A queue for one A100."""
    shares = Shares()
    shares.add_gpus(A100, 1)
    return Queue(shares)


# The queue


def test_tickets_are_checked() -> None:
    with pytest.raises(SlicewiseError, match="asks for 0 instances"):
        Ticket(1, WHOLE, 0)
    with pytest.raises(SlicewiseError, match="leave it out to wait for ever"):
        Ticket(1, WHOLE, deadline=math.inf)
    waiting = queue()
    waiting.enter(Ticket(1, WHOLE))
    with pytest.raises(SlicewiseError, match="ticket 1 is waiting already"):
        waiting.enter(Ticket(1, WHOLE))
    with pytest.raises(SlicewiseError, match="no ticket 2 is waiting"):
        waiting.withdraw(2)


def test_deadlines_pass_in_the_order_of_the_line() -> None:
    waiting = queue()
    assert waiting.next_deadline is None
    assert waiting.oldest is None
    for number, priority, deadline in ((1, 0, 5.0), (2, 3, 5.0), (3, 0, 9.0), (4, 0, None)):
        waiting.enter(Ticket(number, WHOLE, priority=priority, deadline=deadline, entered=number))
    assert waiting.next_deadline == 5.0
    assert waiting.due(4.9) == []
    assert [ticket.number for ticket in waiting.due(5.0)] == [2, 1]
    oldest = waiting.oldest
    assert oldest is not None
    assert oldest.number == 1
    for number in (1, 2, 3):
        waiting.withdraw(number)
    assert waiting.next_deadline is None
    assert [ticket.number for ticket in waiting] == [4]


def test_a_line_is_ordered_by_priority_and_number() -> None:
    waiting = queue()
    for number, priority in ((1, 0), (2, 1), (3, 1)):
        waiting.enter(Ticket(number, WHOLE, tenant="ana", priority=priority))
    (line,) = waiting.lines()
    assert (list(line), len(line)) == ([2, 3, 1], 3)
    assert [line.at(position) for position in range(4)] == [2, 3, 1, None]
    assert [waiting.position(number) for number in (1, 2, 3)] == [2, 0, 1]
    assert waiting.line(LineKey("ana", WHOLE, 1)) is line
    assert waiting.line(LineKey("bob", WHOLE, 1)) is None
    assert (waiting.lines_of("ana"), waiting.lines_of("bob")) == (1, 0)
    assert (waiting.shapes, waiting.line_count, 2 in waiting, 9 in waiting) == (1, 1, True, False)


def test_tickets_are_listed_by_number() -> None:
    waiting = queue()
    for number, tenant in ((7, "a"), (-2, "b"), (3, "a"), (5, "b")):
        waiting.enter(Ticket(number, WHOLE, tenant=tenant, priority=number))
    assert list(waiting.numbers()) == [-2, 3, 5, 7]
    assert list(waiting.numbers(after=-2)) == list(waiting.numbers(after=2)) == [3, 5, 7]
    assert list(waiting.numbers("a")) == [3, 7]
    assert list(waiting.numbers("b", -2)) == [5]
    assert list(waiting.numbers("b", 5)) == list(waiting.numbers("c")) == []


def test_requests_that_become_equal_join_a_line() -> None:
    waiting = queue()
    for number, memory in ((1, 15.0), (2, 15.5)):
        waiting.enter(Ticket(number, Request(Need(1, memory)), tenant="ana"))
    assert waiting.line_count == 2
    waiting.rename(lambda ticket: Request(Need(1, 20.0)))
    (line,) = waiting.lines()
    assert list(line) == [1, 2]


def test_a_guarantee_counts_more_than_priority_and_that_more_than_the_share() -> None:
    waiting = queue()
    waiting.shares.entitle("ana", Entitlement(max_priority=5))
    waiting.shares.entitle("bob", Entitlement(guarantee=8))
    waiting.shares.charge("ana", A100, 4, 4)
    for number, (tenant, priority) in enumerate((("cem", 9), ("ana", 9), ("bob", 0)), start=1):
        waiting.enter(Ticket(number, WHOLE, tenant=tenant, priority=priority))
    assert [line.key.tenant for line in waiting.lines()] == ["bob", "ana", "cem"]


def test_a_ticket_that_is_held_is_passed_over() -> None:
    cluster = ClusterInUse([(A100, 1)])
    first = cluster.ask("ana", "7g.80gb")
    held, second = cluster.ask("bob", "7g.80gb"), cluster.ask("bob", "7g.80gb")
    cluster.queue.hold(held, 10.0)
    cluster.end(first)
    assert second in cluster.running
    cluster.end(second)
    assert held in cluster.queue
    cluster.now = 10.0
    cluster.settle()
    assert held in cluster.running


def test_a_shortest_lease_that_is_held_is_not_tried() -> None:
    cluster, _, _ = reserved()
    short = Ticket(99, Request("1g.10gb"), 1, "cem", lease=5.0, held_until=math.inf)
    cluster.queue.enter(short)
    cluster.settle()
    assert 99 in cluster.queue
    cluster.queue.hold(99, None)
    cluster.dispatcher.room_appeared()
    cluster.settle()
    assert 99 in cluster.running


def test_models_that_are_gone_are_forgotten() -> None:
    waiting = queue()
    waiting.placed(A100, 7.0)
    waiting.placed(A100, 3.0)
    assert waiting.latest == {A100: 7.0}
    assert waiting.was_overtaken(Ticket(1, WHOLE, entered=6.0))
    assert not waiting.was_overtaken(Ticket(1, WHOLE, entered=7.0))
    waiting.forget(A100)
    assert waiting.latest == {}


# Shares


def test_a_share_is_the_larger_part_by_weight() -> None:
    shares = Shares()
    shares.add_gpus(A100, 2)
    request = Request("1g.10gb")
    assert shares.of("ana", request) == 0.0
    shares.charge("ana", A100, memory=4, compute=3)
    assert shares.of("ana", request) == 4 / 16
    shares.charge("ana", A100, memory=1, compute=4)
    assert shares.of("ana", request) == 7 / 14
    shares.entitle("ana", Entitlement(weight=2.0))
    assert shares.of("ana", request) == 7 / 28
    shares.charge("ana", A100, memory=-5, compute=-7)
    shares.charge("ana", A100, memory=8, compute=7, price=50)
    assert shares.of("ana", request) == 0.125
    assert shares.of("ana", Request("9g.9gb")) == 0.0
    assert shares.size(Request("9g.9gb")) == 0
    shares.forget("ana")
    assert (shares.of("ana", request), shares.slices("ana")) == (0.0, 0)
    shares.add_gpus(A100, -2)
    assert shares.models(request) == ()


def test_what_is_remembered_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_module, "_REMEMBERED_REQUESTS", 2)
    monkeypatch.setattr(dispatcher_module, "_REMEMBERED_REQUESTS", 2)
    cluster = ClusterInUse([(A100, 1)])
    cluster.ask("ana", "7g.80gb")
    for profile in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "1g.20gb"):
        cluster.ask("bob", profile)
        assert cluster.shares.size(Request(profile)) == A100.profile(profile).size
    assert cluster.dispatcher.refuses(Request("1g.20gb"), 1)
    assert cluster.dispatcher.refusal(Request("1g.20gb")) is not None
    assert cluster.dispatcher.refusal(Request("1g.10gb")) is None


def test_rules_are_checked() -> None:
    for wrong in (math.nan, -1.0):
        with pytest.raises(SlicewiseError, match="must not be negative"):
            ReservationRules(after=wrong)
    with pytest.raises(SlicewiseError, match="must be 0 to 1"):
        ReservationRules(share=1.5)
    assert [ReservationRules().most(gpus) for gpus in (0, 1, 10, 40)] == [0, 1, 1, 4]
    assert ReservationRules(share=0).most(100) == 0


def test_when_the_instances_of_a_ticket_end() -> None:
    """A lease and a known end are certain, and the sooner counts; a hint is not."""
    ticket = Ticket(1, WHOLE)
    assert (ticket.over_by(5.0), ticket.ends_by(5.0)) == (math.inf, math.inf)
    ticket = replace(ticket, expected=30.0)
    assert (ticket.over_by(5.0), ticket.ends_by(5.0)) == (math.inf, 35.0)
    ticket = replace(ticket, until=20.0)
    assert (ticket.over_by(5.0), ticket.ends_by(5.0)) == (20.0, 20.0)
    ticket = replace(ticket, lease=10.0)
    assert (ticket.over_by(5.0), ticket.over_by(15.0)) == (15.0, 20.0)
    assert replace(ticket, expected=3.0).ends_by(5.0) == 8.0


# Reasons


def reserved() -> tuple[ClusterInUse, int, int]:
    """A cluster with a window reserved on its one GPU; the holder and what is in its way."""
    cluster = ClusterInUse([(A100, 1)], rules=ReservationRules(after=2.0))
    blocker = cluster.ask("bob", "3g.40gb", lease=20.0)
    holder = cluster.ask("ana", "7g.80gb")
    cluster.now = 1.0
    cluster.ask("bob", "1g.10gb", lease=1.0)
    cluster.advance(2.0)
    assert len(cluster.reservations) == 1
    return cluster, holder, blocker


def test_why_a_request_waits() -> None:
    cluster, holder, blocker = reserved()
    late = cluster.ask("cem", "1g.10gb", lease=30.0)
    ticket = cluster.queue.ticket(late)
    why = cluster.dispatcher.why(ticket, cluster.now)
    assert why is not None
    assert why.reason is Reason.RESERVED
    own = cluster.dispatcher.why(cluster.queue.ticket(holder), cluster.now)
    assert own is not None
    assert (own.reason, own.detail) == (Reason.OWN_RESERVATION, "a window is reserved for it")
    assert cluster.dispatcher.others_ahead(cluster.queue.ticket(holder)) is False
    cluster.quotas["cem"] = 0
    over = cluster.dispatcher.why(ticket, cluster.now)
    assert over is not None
    assert over.reason is Reason.QUOTA
    del cluster.quotas["cem"]
    # A request for several instances is told what it lacks; one with a short lease may go in.
    several = cluster.dispatcher.place(replace(ticket, count=2), cluster.now)
    assert isinstance(several, Rejection)
    assert several.reason is not Reason.RESERVED
    short = cluster.dispatcher.why(replace(ticket, lease=1.0), cluster.now)
    assert short is None
    assert not cluster.cluster.instances_on(0)[1:], "nothing was placed"
    cluster.end(blocker)
    assert holder in cluster.running


def test_who_is_ahead() -> None:
    cluster = ClusterInUse([(A100, 1)])
    cluster.ask("bob", "7g.80gb")
    behind, ahead = cluster.ask("bob", "3g.40gb"), cluster.ask("ana", "3g.40gb")
    tickets = [cluster.queue.ticket(number) for number in (behind, ahead)]
    assert [cluster.dispatcher.others_ahead(ticket) for ticket in tickets] == [True, False]


def test_a_tenant_at_its_quota_loses_its_reservation() -> None:
    cluster, holder, blocker = reserved()
    cluster.quotas["ana"] = 0
    cluster.end(blocker)
    assert holder in cluster.queue
    assert len(cluster.reservations) == 0
    assert cluster.ask("cem", "7g.80gb") in cluster.running


def test_an_acceptance_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterInUse([(A100, 1)])
    first, second = cluster.ask("ana", "7g.80gb"), cluster.ask("bob", "7g.80gb")
    monkeypatch.setattr(
        cluster, "accept", lambda ticket, instances: Rejection(WHOLE, Reason.QUOTA, "too much")
    )
    cluster.end(first)
    assert second in cluster.queue
    assert cluster.cluster.instance_count == 0


def test_a_ticket_that_is_held_holds_no_window() -> None:
    cluster = ClusterInUse([(A100, 2)], rules=ReservationRules(after=1.0, share=1.0))
    first = cluster.ask("ana", "7g.80gb", lease=8.0)
    cluster.ask("ana", "4g.40gb")
    held, second = cluster.ask("bob", "7g.80gb"), cluster.ask("bob", "7g.80gb")
    cluster.queue.hold(held, 100.0)
    cluster.now = 0.5
    cluster.ask("ana", "1g.10gb")  # it overtakes
    cluster.advance(5.0)
    held_ticket, ticket = cluster.queue.ticket(held), cluster.queue.ticket(second)
    assert cluster.dispatcher.windows_for(held_ticket) == ()
    (window,) = cluster.dispatcher.windows_for(ticket)
    assert window.opens == 8.0
    why = cluster.dispatcher.why(ticket, cluster.now)
    assert why is not None
    assert why.reason is Reason.OWN_RESERVATION
    line = cluster.queue.line(ticket.line)
    assert line is not None
    assert (list(line), list(line.ready), line.held) == ([held, second], [second], 1)
    assert (cluster.queue.position(held), cluster.queue.position(second)) == (0, 0)
    cluster.advance(8.0)
    assert second in cluster.running
    assert first not in cluster.running
    assert list(cluster.reservations) == []
    third = cluster.ask("bob", "7g.80gb")
    cluster.now = 8.5
    cluster.ask("ana", "1g.10gb")
    cluster.advance(9.5)
    (window,) = cluster.dispatcher.windows_for(cluster.queue.ticket(third))
    cluster.end(held)  # it held no window, so the line keeps what it has
    assert cluster.dispatcher.windows_for(cluster.queue.ticket(third)) == (window,)


# Reservations


def test_reservations_end_with_their_gpus() -> None:
    cluster, holder, _ = reserved()
    cluster.dispatcher.freed(0)
    cluster.dispatcher.removed([0])
    assert len(cluster.reservations) == 0
    assert cluster.reservations.on(0) is None
    assert holder in cluster.queue


def test_reservations_follow_the_names_of_requests() -> None:
    cluster, _, _ = reserved()
    ((line, pool),) = cluster.reservations
    renamed = line._replace(request=Request("7g.80gb", ("A100-80GB",)))
    cluster.reservations.rename({line: [renamed]})
    assert list(cluster.reservations) == [(renamed, pool)]
    on = cluster.reservations.on(0)
    assert on is not None
    assert on[0] == renamed


def test_windows_go_with_their_holders_when_a_line_is_split_or_joined() -> None:
    cluster = ClusterInUse([(A100, 3)])
    number = A100.placement("7g.80gb", 0)
    assert number is not None
    line, other = (LineKey("ana", Request(Need(compute, 40.0)), 1) for compute in (4, 7))
    windows = [Window(gpu, number.number, opens) for gpu, opens in ((0, 5.0), (1, 6.0), (2, None))]
    cluster.reservations.set(line, windows)
    cluster.reservations.rename({line: [other, line, other]})
    assert cluster.reservations.of(other) == (windows[0], windows[2])
    assert cluster.reservations.of(line) == (windows[1],)
    cluster.reservations.rename({line: [line], other: [line, line]})
    assert list(cluster.reservations) == [(line, tuple(windows))]
    assert [cluster.reservations.on(gpu) for gpu in range(3)] == [(line, one) for one in windows]


def test_only_the_reservations_on_a_gpu_that_leaves_end() -> None:
    cluster = ClusterInUse([(A100, 3)])
    lines = [LineKey(tenant, WHOLE, 1) for tenant in ("ana", "bob")]
    number = A100.placement("7g.80gb", 0)
    assert number is not None
    for gpu, line in enumerate(lines):
        cluster.reservations.set(line, [Window(gpu, number.number, None)])
    cluster.reservations.drop([1])
    assert [line for line, _ in cluster.reservations] == lines[:1]


def test_a_policy_that_scans_gets_no_reservations() -> None:
    cluster = ClusterInUse([(A100, 1)], policy="peer-volcano", rules=ReservationRules(after=0.0))
    assert cluster.scheduler.scans
    assert cluster.scheduler.has_room(WHOLE)
    assert not cluster.scheduler.fits_on(0, WHOLE)
    cluster.ask("bob", "1g.10gb")
    cluster.ask("ana", "7g.80gb")
    cluster.now = 1.0
    cluster.ask("bob", "1g.10gb")
    cluster.settle()
    assert len(cluster.reservations) == 0


def test_too_few_gpus_for_all_windows() -> None:
    cluster = ClusterInUse([(A100, 2)])
    assert cluster.reservations.find(WHOLE, 2, {A100: 1}, cluster.ends, 0.0) is None
    assert cluster.reservations.find(WHOLE, 3, {A100: 3}, cluster.ends, 0.0) is None
    found = cluster.reservations.find(WHOLE, 2, {A100: 2}, cluster.ends, 0.0)
    assert found is not None
    assert [window.gpu for window in found] == [0, 1]
    assert cluster.reservations.best_on(0, Request("1g.6gb"), cluster.ends, 0.0) is None


def test_a_gpu_has_one_reserved_window() -> None:
    cluster = ClusterInUse([(A100, 1), (A30, 1)])
    cluster.cluster.reserve(0, 0)
    with pytest.raises(PlacementError, match="has a reserved window already"):
        cluster.cluster.reserve(0, 1)
    assert cluster.cluster.is_open(0, 0)
    cluster.cluster.unreserve(1)
    cluster.cluster.unreserve(0)
    assert cluster.cluster.reserved(0) is None


def test_states_are_renumbered_under_a_reservation() -> None:
    cluster = ClusterInUse([(A100, 1), (A30, 1)]).cluster
    cluster.reserve(1, 0)
    before, shown = cluster.state(1), cluster.states[cluster.state_of[1]]
    assert before != shown
    cluster.remove_node("node-0")
    cluster.forget(A100)
    assert (cluster.state(1), cluster.states[cluster.state_of[1]]) == (before, shown)


def test_a_window_whose_budget_is_taken_by_others_hides_its_gpu() -> None:
    """The media extension is in use beside the window that needs it."""
    cluster = ClusterInUse([(A100, 1)]).cluster
    extended = A100.placement("1g.10gb+me", 0)
    other = A100.placement("1g.10gb+me", 2)
    assert extended is not None
    assert other is not None
    cluster.put(0, extended.number)
    cluster.reserve(0, other.number)
    assert 0 not in cluster.schedulable
    cluster.unreserve(0)
    assert 0 in cluster.schedulable


def test_an_unknown_window_has_no_opening() -> None:
    cluster, _, blocker = reserved()
    ((line, (window,)),) = cluster.reservations
    cluster.running[blocker].ends = None
    assert cluster.reservations.earlier(0, cluster.ends, cluster.now) is None
    assert cluster.reservations.of(line) == (window,)
    assert cluster.reservations.of(LineKey("cem", WHOLE, 1)) == ()
    assert isinstance(window, Window)

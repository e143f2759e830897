"""Why queued requests wait, as of now: the reasons that the API shows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice

import msgspec

from slicewise.api.allocations import AllocationView, LineView, WaitView, WindowView
from slicewise.api.base import moment
from slicewise.control.feasibility import as_capacity
from slicewise.control.quota import QuotaCheck
from slicewise.control.state import State
from slicewise.control.views import allocation_view, want_view
from slicewise.core.request import Reason, Rejection
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Line, Ticket
from slicewise.engine.reservations import LineKey, Window
from slicewise.journal.entries import AllocationRecord, Seconds

MAX_LINES = 100
"""The most lines of the queue in one answer."""
MAX_KEPT_FROM = 4
"""The most reserved windows that are named as the reason why a request waits."""


class Waiting:
    """Explains what the queue of a state waits for. Reasons are kept until the state changes."""

    def __init__(self, state: State, decides: bool = True) -> None:
        """``decides``: whether the service itself decides; if not, its records have the reasons."""
        self._state = state
        self._decides = decides
        self.quota_check = QuotaCheck(state)
        self.dispatcher = Dispatcher(
            state.scheduler, state.waiting, state.reservations, self.quota_check
        )
        self._seq = -1
        self._known: dict[tuple[LineKey, bool], Rejection | None] = {}

    def view(self, record: AllocationRecord, now: Seconds) -> AllocationView:
        """Return the view of an allocation; for a queued one, with the reason why it waits."""
        view = allocation_view(self._state, record)
        number = self._state.tickets.get(record.id)
        if number is None or view.waiting is None or not self._decides:
            return view
        return msgspec.structs.replace(view, waiting=self._waits(number, record, now))

    def lines(self, tenant: str | None, now: Seconds) -> tuple[LineView, ...]:
        """Return the lines of a tenant, or of all, in fair order."""
        queue = self._state.waiting
        lines = [line for line in queue.each_line() if tenant in (None, line.key.tenant)]
        return tuple(
            self._line(line, now) for line in nsmallest(MAX_LINES, lines, key=queue.order_of)
        )

    def others_ahead(self, record: AllocationRecord) -> bool:
        """Return whether requests of other tenants come before a queued one."""
        return self.dispatcher.others_ahead(self._ticket(record))

    def kept_from(self, record: AllocationRecord) -> list[int]:
        """Return the GPUs with a window that is open to a queued request but reserved."""
        request = self._ticket(record).request
        reservations, scheduler = self._state.reservations, self._state.scheduler
        gpus = (window.gpu for _, pool in reservations for window in pool)
        return list(islice((gpu for gpu in gpus if scheduler.fits_on(gpu, request)), MAX_KEPT_FROM))

    def _ticket(self, record: AllocationRecord) -> Ticket:
        return self._state.waiting.ticket(self._state.tickets[record.id])

    def _waits(self, number: int, record: AllocationRecord, now: Seconds) -> WaitView:
        ticket = self._state.waiting.ticket(number)
        windows = self.dispatcher.windows_for(ticket)
        reason, detail = self._reason(ticket, windows, now)
        return WaitView(
            position=self._state.waiting.position(number) + 1,
            reason=reason,
            detail=detail,
            deadline=moment(record.deadline),
            reserved=self._windows(windows),
            expected_at=moment(_last_opening(windows)),
        )

    def _line(self, line: Line, now: Seconds) -> LineView:
        state = self._state
        assert line.head is not None  # a line without tickets is dropped
        ticket = state.waiting.ticket(line.head)
        record = state.allocations[state.by_ticket[ticket.number]]
        pool = state.reservations.of(line.key)
        windows = self.dispatcher.windows_for(ticket)
        reason, detail = record.reason, record.detail
        if self._decides:
            reason, detail = self._reason(ticket, windows, now)
        shares = state.shares
        return LineView(
            tenant=record.tenant.name,
            wanted=want_view(record.want),
            count=record.count,
            waiting=len(line),
            oldest=moment(record.requested) or "",
            first=record.id,
            reason=reason,
            detail=detail,
            share=shares.of(ticket.tenant, ticket.request),
            within_guarantee=shares.within_guarantee(ticket.tenant, ticket.request, ticket.count),
            reserved=self._windows(pool),
            expected_at=moment(_last_opening(windows)),
        )

    def _reason(self, ticket: Ticket, windows: tuple[Window, ...], now: Seconds) -> tuple[str, str]:
        """Return the reason why a ticket waits, as a keyword and as a sentence."""
        if ticket.held_until is not None:
            if math.isinf(ticket.held_until):
                rest = "the tenant that claimed them comes first"
            else:
                rest = f"it may be placed again from {moment(ticket.held_until)}"
            return Reason.HELD, f"its slices were reclaimed; {rest}"
        if self._seq != self._state.seq:
            self._seq = self._state.seq
            self._known.clear()
            self.dispatcher.room_appeared()
        key = ticket.line, bool(windows)
        if key not in self._known:
            turn = self._state.scheduler.turn
            why = self.dispatcher.why(ticket, now)
            self._state.scheduler.turn = turn
            self._known[key] = why if why is None else as_capacity(why)
        why = self._known[key]
        if why is None:
            return Reason.CAPACITY, "it is being placed"
        if why.reason is Reason.OWN_RESERVATION:
            return why.reason, self._own(windows)
        return why.reason, why.detail

    def _own(self, windows: tuple[Window, ...]) -> str:
        """Return what keeps the windows that are reserved for a request from opening."""
        first = windows[0]
        record = self._state.window_records([first])[0]
        where = f"GPU {record.gpu} of {record.node!r} from slice {record.start}"
        if len(windows) > 1:
            where += f" and {len(windows) - 1} more"
        blockers = sum(len(self._state.reservations.blockers(window)) for window in windows)
        instances = "1 instance has" if blockers == 1 else f"{blockers} instances have"
        known = "" if _last_opening(windows) is not None else ", at a time that is not known"
        return f"reserved on {where}, where {instances} to end first{known}"

    def _windows(self, windows: Iterable[Window]) -> tuple[WindowView, ...]:
        state = self._state
        return tuple(
            WindowView(
                node=record.node,
                gpu=record.gpu,
                profile=record.profile,
                start=record.start,
                opens_at=moment(record.opens),
                blockers=len(state.reservations.blockers(window)),
            )
            for window, record in ((one, state.window_records([one])[0]) for one in windows)
        )


def _last_opening(windows: Iterable[Window]) -> Seconds | None:
    """Return when the last of several windows opens, if that is known of all."""
    times = [window.opens for window in windows]
    known = [time for time in times if time is not None]
    return max(known) if known and len(known) == len(times) else None

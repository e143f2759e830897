"""The scheduler: decides where requests go and applies the decisions to a cluster.

A request passes through numbered phases: admit, choose, check, commit, publish. The lab and the
service run the same code; differences between them are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import PlacementError, SlicewiseError
from slicewise.core.idset import NONE
from slicewise.core.request import Rejection, Request
from slicewise.engine.moves import Move, Moved, carry_out
from slicewise.engine.reasons import Reasons
from slicewise.policies.base import AdaptivePolicy, Policy, ScanPolicy, TablePolicy
from slicewise.policies.ranking import PICKED_ONLY, Ranking
from slicewise.policies.registry import policy as policy_named

_REMEMBERED_NAMES = 1024
"""The limit on cached requests: clients choose the profile names, so memory must be bounded."""


class Placed(NamedTuple):
    """An instance was created."""

    instance: Instance


class Released(NamedTuple):
    """An instance ended."""

    instance: Instance


Event = Placed | Released | Moved | Rejection

_Choice = tuple[int, int] | Rejection
"""A GPU and the number of a placement on it, or a rejection."""


class PolicyError(SlicewiseError):
    """A policy chose a placement that is not legal; the cluster is unchanged."""


class Scheduler:
    """Places requests on a cluster with a policy, which is passed as an object or by name."""

    def __init__(self, cluster: Cluster, policy: Policy | str = "default") -> None:
        self.cluster = cluster
        self.policy = policy_named(policy) if isinstance(policy, str) else policy
        self.reasons = Reasons(cluster)
        """Explains why a request cannot be placed."""
        self._listeners: list[Callable[[Event], None]] = []
        self._named: dict[str, Request] = {}
        self._table: _TableChooser | None = None
        self.scans = False
        """Whether the policy scans GPU by GPU, which is slow."""
        match self.policy:
            case TablePolicy() | AdaptivePolicy():
                self._table = _TableChooser(self.policy, cluster, self.reasons)
                self._choose = self._table.choose
            case ScanPolicy():
                self._choose = _ScanChooser(self.policy, cluster, self.reasons).choose
                self.scans = True
            case _:
                raise PolicyError(
                    f"policy {self.policy!r} is neither a table, an adaptive nor a scan policy"
                )

    @property
    def turn(self) -> int:
        """The GPU at which a rotating policy starts its next search: its only state."""
        return self._table.ranking.turn if self._table else 0

    @turn.setter
    def turn(self, gpu: int) -> None:
        if self._table:
            self._table.ranking.turn = gpu

    @property
    def ranking(self) -> Ranking | None:
        """The policy's ranking of GPU states; None for a policy that scans GPUs instead."""
        return self._table.ranking if self._table else None

    def has_room(self, request: Request) -> bool:
        """Whether the policy might find a place; True if only asking it can tell."""
        return self._table is None or self._table.ranking.has_room(request)

    def fits_on(self, gpu: int, request: Request) -> bool:
        """Whether a request could be placed on a GPU now, without regard to reservations."""
        if self._table is None:
            return False
        placement = self._table.ranking.row(request).placement
        return placement[self.cluster.actual_state(gpu)] >= 0

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every event, after it has happened."""
        self._listeners.append(listener)

    def submit(
        self, want: Request | str, *, now: float = 0.0, ends: float = math.inf
    ) -> Instance | Rejection:
        """Place a request, or return the rejection.

        ``now`` and ``ends``, when the instance will leave if that is known, are on any one clock.
        """
        # 1. Admit.
        request = self._admit(want) if isinstance(want, str) else want
        # 2. to 4. Choose, check and commit.
        outcome = self._decide(request, now, ends)
        # 5. Publish.
        self._publish(outcome if isinstance(outcome, Rejection) else Placed(outcome))
        return outcome

    def submit_all(
        self,
        want: Request | str,
        count: int,
        *,
        waits: bool = False,
        now: float = 0.0,
        ends: float = math.inf,
    ) -> tuple[Instance, ...] | Rejection:
        """Place ``count`` instances of a request, or none and return the rejection.

        The instances are published once all of them are placed. With ``waits``, a rejection is not
        published, because the request will be tried again.
        """
        if count < 1:
            raise SlicewiseError(f"cannot place {count} instances of {want}; the least is 1")
        request = self._admit(want) if isinstance(want, str) else want
        placed: list[Instance] = []
        try:
            while len(placed) < count:
                outcome = self._decide(request, now, ends)
                if isinstance(outcome, Rejection):
                    self._undo(placed)
                    if placed:
                        outcome = _short_of(outcome, len(placed), count)
                    if not waits:
                        self._publish(outcome)
                    return outcome
                placed.append(outcome)
        except BaseException:  # a third-party policy may raise anything
            self._undo(placed)
            raise
        for instance in placed:
            self._publish(Placed(instance))
        return tuple(placed)

    def release(self, instance: Instance | int) -> Instance:
        """End an instance."""
        gone = self.cluster.release(instance)
        self._publish(Released(gone))
        return gone

    def move(self, moves: Sequence[Move]) -> tuple[Instance, ...]:
        """Carry out planned moves in order, all or none, and return the new instances."""
        made = carry_out(self.cluster, moves)
        for move, new in zip(moves, made, strict=True):
            self._publish(Moved(move.instance, new))
        return made

    def _decide(self, request: Request, now: float, ends: float) -> Instance | Rejection:
        """Place a request without publishing an event."""
        # 2. Choose.
        choice = self._choose(request, now, ends)
        if isinstance(choice, Rejection):
            return choice
        # 3. and 4. Check and commit: the cluster refuses illegal placements.
        try:
            return self.cluster.put(*choice, ends)
        except PlacementError as error:
            raise PolicyError(
                f"policy {self.policy.name!r} made an illegal choice: {error}"
            ) from error

    def _undo(self, placed: list[Instance]) -> None:
        """Undo placements, the latest first.

        The turn of a rotating policy is not reset, as after any rejection.
        """
        for instance in reversed(placed):
            self.cluster.undo_place(instance)

    def _admit(self, profile: str) -> Request:
        request = self._named.get(profile)
        if request is None:
            request = Request(profile)
            if len(self._named) < _REMEMBERED_NAMES:
                self._named[profile] = request
        return request

    def _publish(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


def _short_of(rejection: Rejection, placed: int, count: int) -> Rejection:
    """A rejection after some instances fit; its detail describes the cluster with these placed."""
    return Rejection(
        rejection.request,
        rejection.reason,
        f"only {placed} of {count} can be placed; with {'it' if placed == 1 else 'them'}, "
        f"{rejection.detail}",
    )


class _TableChooser:
    """Chooses from the index in constant time."""

    def __init__(
        self, policy: TablePolicy | AdaptivePolicy, cluster: Cluster, reasons: Reasons
    ) -> None:
        self._reasons = reasons
        self.ranking = Ranking(policy, cluster)

    def choose(self, request: Request, now: float, ends: float) -> _Choice:
        gpu, placement = self.ranking.choose(request, now, ends)
        if gpu == NONE:
            return self._reasons.for_cluster(request)
        if placement == PICKED_ONLY:
            return self._reasons.for_gpu(request, gpu)
        return gpu, placement


class _ScanChooser:
    """Lets the policy scan the cluster, and checks its choice."""

    def __init__(self, policy: ScanPolicy, cluster: Cluster, reasons: Reasons) -> None:
        self._policy = policy
        self._cluster = cluster
        self._reasons = reasons

    def choose(self, request: Request, now: float, ends: float) -> _Choice:
        spot = self._policy.choose(self._cluster, request)
        if spot is None:
            return self._reasons.for_cluster(request)
        gpu, placement = spot
        if gpu not in self._cluster.schedulable:
            raise PolicyError(
                f"policy {self._policy.name!r} chose GPU {gpu}, which is not schedulable"
            )
        if placement not in self._cluster.state(gpu).geometry.placements:
            raise PolicyError(
                f"policy {self._policy.name!r} chose {placement.profile.name}, which is not a "
                f"placement of GPU {gpu}'s model"
            )
        return gpu, placement.number

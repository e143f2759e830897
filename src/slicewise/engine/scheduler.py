"""The scheduler: the one place that decides and changes a cluster.

A request walks through numbered phases: admit, choose, check, commit, publish. The laboratory
and the service run this same code; what differs between them is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import PlacementError, SlicewiseError
from slicewise.core.idset import NONE
from slicewise.core.request import Rejection, Request
from slicewise.engine.reasons import Reasons
from slicewise.policies.base import AdaptivePolicy, Policy, ScanPolicy, TablePolicy
from slicewise.policies.ranking import PICKED_ONLY, Ranking
from slicewise.policies.registry import policy as policy_named

_REMEMBERED_NAMES = 1024
"""Profile names come from outside, so only this many are kept ready as requests."""


class Placed(NamedTuple):
    """An instance was created."""

    instance: Instance


class Released(NamedTuple):
    """An instance ended."""

    instance: Instance


Event = Placed | Released | Rejection

_Choice = tuple[int, int] | Rejection
"""A GPU and the number of a placement on it, or a rejection."""


class PolicyError(SlicewiseError):
    """A policy chose what the hardware would refuse; nothing was changed."""


class Scheduler:
    """Places requests on a cluster by a policy, given or named."""

    def __init__(self, cluster: Cluster, policy: Policy | str = "default") -> None:
        self.cluster = cluster
        self.policy = policy_named(policy) if isinstance(policy, str) else policy
        self._reasons = Reasons(cluster)
        self._listeners: list[Callable[[Event], None]] = []
        self._named: dict[str, Request] = {}
        self.scans = False
        """Whether decisions take the slow path, GPU by GPU."""
        match self.policy:
            case TablePolicy() | AdaptivePolicy():
                self._choose = _TableChooser(self.policy, cluster, self._reasons).choose
            case ScanPolicy():
                self._choose = _ScanChooser(self.policy, cluster, self._reasons).choose
                self.scans = True
            case _:
                raise PolicyError(
                    f"policy {self.policy!r} is neither a table, an adaptive nor a scan policy"
                )

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Have ``listener`` called with every event, once it has happened."""
        self._listeners.append(listener)

    def submit(self, want: Request | str) -> Instance | Rejection:
        """Place a request, or say why not."""
        # 1. Admit.
        request = self._admit(want) if isinstance(want, str) else want
        # 2. Choose.
        choice = self._choose(request)
        if isinstance(choice, Rejection):
            self._publish(choice)
            return choice
        # 3. and 4. Check and commit: the cluster refuses what is not legal.
        try:
            instance = self.cluster.put(*choice)
        except PlacementError as error:
            raise PolicyError(f"policy {self.policy.name!r} chose badly: {error}") from error
        # 5. Publish.
        self._publish(Placed(instance))
        return instance

    def release(self, instance: Instance | int) -> Instance:
        """End an instance."""
        gone = self.cluster.release(instance)
        self._publish(Released(gone))
        return gone

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


class _TableChooser:
    """Chooses by the index: constant time."""

    def __init__(
        self, policy: TablePolicy | AdaptivePolicy, cluster: Cluster, reasons: Reasons
    ) -> None:
        self._reasons = reasons
        self._ranking = Ranking(policy, cluster)

    def choose(self, request: Request) -> _Choice:
        gpu, placement = self._ranking.choose(request)
        if gpu == NONE:
            return self._reasons.nowhere(request)
        if placement == PICKED_ONLY:
            return self._reasons.on_gpu(request, gpu)
        return gpu, placement


class _ScanChooser:
    """Lets the policy look for itself, and checks that what it chose can be."""

    def __init__(self, policy: ScanPolicy, cluster: Cluster, reasons: Reasons) -> None:
        self._policy = policy
        self._cluster = cluster
        self._reasons = reasons

    def choose(self, request: Request) -> _Choice:
        spot = self._policy.choose(self._cluster, request)
        if spot is None:
            return self._reasons.nowhere(request)
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

"""A run of the steady or the published experiment under `lease-aware`, on the compiled loop."""

from __future__ import annotations

import numpy as np

from slicewise.lab import compiled_loops as loops
from slicewise.lab import kernel, lease_loops
from slicewise.lab.kernel import Tables
from slicewise.lab.lease_loops import LeaseTables
from slicewise.lab.workload import Arrivals, SmallInts


class LeaseRun:
    """A cluster of empty GPUs of one model, and its departures."""

    def __init__(
        self, tables: Tables, leases: LeaseTables, gpus: int, mean_lifetime: float, longest: int
    ) -> None:
        self._tables = tables
        self._leases = lease_loops.with_times(leases, mean_lifetime, longest)
        self._gpus = kernel.new_gpus(np.zeros(gpus, np.int64), len(leases.model_of))
        self._ends = lease_loops.new_ends(gpus)
        self._departures = loops.new_departures(longest)

    def advance(self, arrivals: Arrivals, begin: int, trace: SmallInts) -> None:
        """Run the slots from ``begin`` and fill in the trace."""
        kinds, lifetimes, stated = arrivals
        if stated is None:
            stated = np.zeros_like(lifetimes)
        lease_loops.advance(
            self._tables,
            self._gpus,
            self._leases,
            self._ends,
            self._departures,
            kinds,
            lifetimes,
            stated,
            begin,
            trace,
        )

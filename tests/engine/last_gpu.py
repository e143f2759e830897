"""A scan policy for tests: it looks at the cluster itself, GPU by GPU."""

from __future__ import annotations

from slicewise import Cluster, Request, ScanPolicy, Spot


class LastGpu(ScanPolicy):
    """A scan policy that takes the highest feasible GPU id."""

    name = "last-gpu"
    summary = "Highest GPU id with an open window."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        for gpu in sorted(cluster.schedulable, reverse=True):
            state = cluster.state(gpu)
            for _, profile in request.candidates(state.geometry):
                for start in state.feasible_starts(profile):
                    placement = state.geometry.placement(profile.name, start)
                    assert placement is not None
                    return Spot(gpu, placement)
        return None

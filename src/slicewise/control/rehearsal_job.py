"""What a rehearsal needs of the state, and its result, as bytes for another process."""

from __future__ import annotations

import msgspec

from slicewise.control.geometries import geometry_of, record_of
from slicewise.control.state import State
from slicewise.core.geometry import Geometry
from slicewise.engine.demand import DemandData, DemandEstimate
from slicewise.engine.rehearsal import Rehearsal
from slicewise.journal.entries import GeometryRecord, NodePhase
from slicewise.policies.rehearsed import Choice


class RehearsalJob(msgspec.Struct, frozen=True):
    """The demand, the cluster and the choice in force."""

    demand: DemandData
    models: tuple[tuple[GeometryRecord, int], ...]
    """GPU models, and how many GPUs of each take new instances."""
    in_force: Choice

    @property
    def estimate(self) -> DemandEstimate:
        """The estimate of the demand."""
        return DemandEstimate.of(self.demand)

    @property
    def cluster(self) -> tuple[tuple[Geometry, int], ...]:
        """The GPU models with their numbers of GPUs."""
        return tuple((geometry_of(record), gpus) for record, gpus in self.models)


def job_of(state: State) -> bytes:
    """Return the job for a state, encoded."""
    gpus = dict.fromkeys(state.geometries, 0)
    for node in state.nodes.values():
        if node.phase is NodePhase.READY:
            gpus[node.geometry.model] += len(node.gpus)
    models = tuple((record_of(state.geometries[model]), gpus[model]) for model in gpus)
    return _encode(RehearsalJob(state.demand.estimate.data(), models, state.policy.standing.choice))


def encode_result(rehearsal: Rehearsal | None) -> bytes:
    """Encode a rehearsal; None means that too little is known of the demand."""
    return _encode(rehearsal)


_encode = msgspec.json.Encoder().encode
decode_job = msgspec.json.Decoder(RehearsalJob).decode
decode_result = msgspec.json.Decoder(Rehearsal | None).decode

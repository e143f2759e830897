"""GPU models to and from their records in the journal."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from slicewise.control.entries import GeometryRecord, ProfileRecord
from slicewise.core.geometry import Budget, Geometry, Profile


def record_of(geometry: Geometry) -> GeometryRecord:
    """A model as it is written down."""
    return GeometryRecord(
        model=geometry.model,
        slices=geometry.slices,
        compute=geometry.compute,
        memory_gb=geometry.memory_gb,
        budgets={budget.name: budget.total for budget in geometry.budgets},
        profiles=tuple(
            ProfileRecord(
                name=profile.name,
                size=profile.size,
                compute=profile.compute,
                memory_gb=profile.memory_gb,
                starts=profile.starts,
                preferred=profile.preferred,
                uses=dict(profile.uses),
                variant_of=profile.variant_of,
            )
            for profile in geometry.profiles
        ),
    )


def geometry_of(record: GeometryRecord) -> Geometry:
    """The model that was written down, checked as any other.

    Equal records give the same object, so that the tables made from it are made once.
    """
    return _build(msgspec.json.encode(record))


@lru_cache(maxsize=64)
def _build(data: bytes) -> Geometry:
    record = msgspec.json.decode(data, type=GeometryRecord)
    return Geometry(
        model=record.model,
        slices=record.slices,
        compute=record.compute,
        memory_gb=record.memory_gb,
        budgets=tuple(Budget(name, total) for name, total in record.budgets.items()),
        profiles=tuple(
            Profile(
                name=profile.name,
                size=profile.size,
                compute=profile.compute,
                memory_gb=profile.memory_gb,
                starts=profile.starts,
                preferred=profile.preferred,
                uses=profile.uses,
                variant_of=profile.variant_of,
            )
            for profile in record.profiles
        ),
    )

"""GPU models to and from their records in the journal."""

from __future__ import annotations

import hashlib
import re

import msgspec

from slicewise.control.entries import GeometryRecord, ProfileRecord
from slicewise.core.geometry import Budget, Geometry, Profile
from slicewise.core.states import empty_state
from slicewise.core.tables import kept

MAX_STATES = 20_000
"""A model with more states would keep the writer busy for too long."""
_MAX_NAME = 57


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


@kept(64)
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


def same_layout(one: GeometryRecord, other: GeometryRecord) -> bool:
    """Whether two models are alike but for their names and the order of their profiles."""
    return _layout(one) == _layout(other)


def _layout(record: GeometryRecord) -> object:
    profiles = {
        profile.name: (profile.size, profile.compute, profile.starts, profile.uses)
        for profile in record.profiles
    }
    return record.slices, record.compute, record.budgets, profiles


def named(record: GeometryRecord, name: str) -> GeometryRecord:
    """The same model by another name, in letters that a name may have."""
    clean = re.sub(r"[^A-Za-z0-9.+_~-]+", "-", name).strip("-.+_~")
    return msgspec.structs.replace(record, model=clean[:_MAX_NAME] or "GPU")


def distinct(record: GeometryRecord) -> GeometryRecord:
    """The same model by a name that no other model has: with its own digest behind it."""
    bare = msgspec.json.encode(msgspec.structs.replace(record, model=""))
    digest = hashlib.sha256(bare).hexdigest()[:6]
    return msgspec.structs.replace(record, model=f"{record.model}~{digest}")


@kept(64)
def too_many_states(geometry: Geometry, most: int = MAX_STATES) -> bool:
    """Whether a GPU of this model can be in more states than that."""
    found = {empty_state(geometry)}
    frontier = list(found)
    while frontier and len(found) <= most:
        state = frontier.pop()
        for placement in geometry.placements:
            if not placement.window & state.mask and state.within_budgets(placement.profile):
                after = state.after(placement)
                if after not in found:
                    found.add(after)
                    frontier.append(after)
    return len(found) > most

"""Conversion between GPU models and their journal records, and comparison of models."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

import msgspec

from slicewise.core.geometry import Budget, Geometry, Profile
from slicewise.core.states import empty_state
from slicewise.core.tables import cached
from slicewise.journal.entries import GeometryRecord, ProfileRecord

MAX_STATES = 20_000
"""Default limit on the states of one model: building larger tables would block decisions."""
_MAX_NAME = 57


def record_of(geometry: Geometry) -> GeometryRecord:
    """Return the journal record of a model."""
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
    """Return the model of a journal record, after validating it.

    Equal records return the same object, so its tables are built only once.
    """
    return _build(msgspec.json.encode(record))


@lru_cache(64)
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
    """Return whether two models differ only in their names and the order of their profiles."""
    return _layout(one) == _layout(other)


def _layout(record: GeometryRecord) -> object:
    profiles = {
        profile.name: (profile.size, profile.compute, profile.starts, profile.uses)
        for profile in record.profiles
    }
    return record.slices, record.compute, record.budgets, profiles


def named(record: GeometryRecord, name: str) -> GeometryRecord:
    """Return a model under another name, without the characters that names may not have."""
    clean = re.sub(r"[^A-Za-z0-9.+_~-]+", "-", name).strip("-.+_~")
    return msgspec.structs.replace(record, model=clean[:_MAX_NAME] or "GPU")


def distinct(record: GeometryRecord) -> GeometryRecord:
    """Return a model under a unique name: its own, and a digest of its layout."""
    bare = msgspec.json.encode(msgspec.structs.replace(record, model=""))
    digest = hashlib.sha256(bare).hexdigest()[:6]
    return msgspec.structs.replace(record, model=f"{record.model}~{digest}")


@cached(64)
def too_many_states(geometry: Geometry, limit: int = MAX_STATES) -> bool:
    """Return whether a GPU of this model has more reachable states than ``limit``."""
    found = {empty_state(geometry)}
    frontier = list(found)
    while frontier and len(found) <= limit:
        state = frontier.pop()
        for placement in geometry.placements:
            if not placement.window & state.mask and state.within_budgets(placement.profile):
                after = state.after(placement)
                if after not in found:
                    found.add(after)
                    frontier.append(after)
    return len(found) > limit

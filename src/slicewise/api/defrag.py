"""Defragmentation: plans and moves."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from slicewise.api.base import MAX_GPUS, Body, Name, ProfileName, Spot, View

MAX_MOVES = 200
"""Moves of one request."""


class MoveBody(Body, frozen=True, kw_only=True):
    """A move of one instance of an allocation from its placement to another."""

    allocation: Annotated[str, Meta(min_length=1, max_length=64)]
    index: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The instance of the allocation, counted from 0."""
    profile: ProfileName
    node: Name
    gpu: Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
    start: Annotated[int, Meta(ge=0, le=64)]
    to_node: Name
    to_gpu: Annotated[int, Meta(ge=0, lt=MAX_GPUS)]
    to_start: Annotated[int, Meta(ge=0, le=64)]


class MovesBody(Body, frozen=True):
    """The moves of a plan, in order; all are made or none."""

    moves: Annotated[tuple[MoveBody, ...], Meta(min_length=1, max_length=MAX_MOVES)]


class MovesView(View, frozen=True):
    """The number of moves made."""

    moves: int


class PlanView(View, frozen=True):
    """A plan of moves; POST its moves to apply it."""

    wanted: str | None
    """The profile to make room for; null for general compaction."""
    budget: int
    found: bool
    fewest: bool
    """Whether no shorter plan exists."""
    moves: tuple[MoveBody, ...]
    moved_slices: int
    room_before: int | None
    room_after: int | None
    fits: Spot | None
    seq: int

"""Tables made for GPU models, kept for as long as the models are in use.

Whatever is worked out for a model once, such as its states, is worth keeping. In a process that
meets new models for as long as it runs it must also be dropped: a model may have tables of many
megabytes, and an agent can tell of any number of models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import TypeVar

T = TypeVar("T")

_drop: list[Callable[[], None]] = []


def kept(most: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Keep what a function returns, of so many calls, until `drop_tables`."""

    def decorate(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        cached = lru_cache(maxsize=most)(function)
        _drop.append(cached.cache_clear)
        return cached

    return decorate


def drop_tables() -> None:
    """Drop all tables; those still needed are made again when they are asked for."""
    for drop in _drop:
        drop()

"""A cache for tables of GPU models, such as their states.

The tables are computed once for each model. A long-running process must be able to drop them:
a model's tables may take many megabytes, and agents may report any number of models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import TypeVar

T = TypeVar("T")

_drop: list[Callable[[], None]] = []


def cached(most: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Cache the results of a function, like `functools.lru_cache`, until `drop_tables`."""

    def decorate(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        cached = lru_cache(maxsize=most)(function)
        _drop.append(cached.cache_clear)
        return cached

    return decorate


def drop_tables() -> None:
    """Drop all tables; the next use computes them again."""
    for drop in _drop:
        drop()

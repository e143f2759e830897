"""A cache for tables of GPU models, such as their states.

The tables are computed once for each model. A long-running process must be able to drop those of a
model: they may take many megabytes, and agents may report any number of models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from slicewise.core.geometry import Geometry

P = ParamSpec("P")
T = TypeVar("T")

MOST_MODELS = 256
"""The models whose tables are kept; beyond it, those of the model that came first are dropped."""

_kept: list[OrderedDict[Geometry, Callable[..., Any]]] = []
"""For each function and model: the function with a cache of its results."""


def cached(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Cache the results of a function until `drop_tables`, at most so many for each model.

    The first argument of the function is a model, or a state of one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        kept: OrderedDict[Geometry, Callable[..., T]] = OrderedDict()
        _kept.append(kept)

        @wraps(function)
        def look_up(*args: P.args, **options: P.kwargs) -> T:
            first: Any = args[0]
            model = first if isinstance(first, Geometry) else first.geometry
            of_model = kept.get(model)
            if of_model is None:
                of_model = kept.setdefault(model, lru_cache(maxsize=most)(function))
                if len(kept) > MOST_MODELS:
                    kept.popitem(last=False)
            return of_model(*args, **options)

        return look_up

    return decorate


def drop_tables(model: Geometry | None = None) -> None:
    """Drop the tables of a model, or of all; the next use computes them again."""
    for kept in _kept:
        if model is None:
            kept.clear()
        else:
            kept.pop(model, None)

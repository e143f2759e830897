"""What a result depends on, as a digest: two results with the same digest can be put together.

A digest covers the experiment with its size, load and seed, the GPU model, the probabilities, the
rule by which a policy decides, and the versions that could change a number. It does not cover how
many runs there are, nor who else takes part: more of either leaves the results there are as they
were.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from dataclasses import fields
from functools import cache, lru_cache
from importlib.metadata import version

import numpy as np

from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.policies.base import Policy, TablePolicy
from slicewise.sim.experiment import ORACLE, Experiment
from slicewise.sim.mix import Mix
from slicewise.sim.tables import Models, compile_tables

Meaning = dict[str, object]

_WITHOUT_EFFECT = ("mixes", "policies", "runs", "oracle")
"""Fields of an experiment that do not change a run: who takes part is told apart below."""


def made_with() -> dict[str, str]:
    """The versions that could change a number: NumPy may draw otherwise in another one."""
    return {"slicewise": _own_version(), "numpy": np.__version__}


@cache
def _own_version() -> str:
    return version("slicewise")  # looked up on disk


def digest(experiment: Experiment, mix: int, entrant: int) -> str:
    """The digest of everything that one entrant's runs with one mix depend on."""
    return _digest(json.dumps(meaning(experiment, mix, entrant), sort_keys=True))


def meaning(experiment: Experiment, mix: int, entrant: int) -> Meaning:
    """The same in words, for people who wonder why something is run again."""
    chosen = experiment.mixes[mix]
    # Every field counts unless it is named above: one that is added cannot be forgotten.
    settings = {
        field.name: getattr(experiment, field.name)
        for field in fields(experiment)
        if field.compare and field.name not in _WITHOUT_EFFECT
    }
    if entrant < len(experiment.policies):
        policy = experiment.policies[entrant]
        name, rule = policy.name, _rule(chosen, policy)
    else:
        name, rule = ORACLE, _source("slicewise.sim.oracle")
    return {
        "experiment": type(experiment).__name__.lower(),
        **settings,
        "model": chosen.geometry.model,
        "geometry": _geometry(chosen.geometry),
        "profiles": [profile.name for profile in chosen.profiles],
        "probabilities": list(chosen.probabilities),
        "policy": name,
        "rule": rule,
        **made_with(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=256)
def _geometry(geometry: Geometry) -> str:
    profiles = [
        (p.name, p.size, p.compute, p.starts, p.start_order, sorted(p.uses.items()), p.variant_of)
        for p in geometry.profiles
    ]
    budgets = [(budget.name, budget.total) for budget in geometry.budgets]
    return _digest(json.dumps([geometry.slices, geometry.compute, profiles, budgets]))


@lru_cache(maxsize=1024)
def _rule(mix: Mix, policy: Policy) -> str:
    """How a policy decides: its tables where it has some, its source where not."""
    if not isinstance(policy, TablePolicy):
        return _source(type(policy).__module__)
    models = Models([mix.geometry], [Request(profile.name) for profile in mix.profiles])
    parts = hashlib.sha256()
    for table in compile_tables(models, policy):
        array = np.asarray(table)
        parts.update(f"{array.dtype}{array.shape}".encode())
        parts.update(array.tobytes())
    return parts.hexdigest()[:32]


@lru_cache(maxsize=256)
def _source(module: str) -> str:
    """The digest of a module's source; without one there is only its name to go by."""
    try:
        return _digest(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError, ImportError):
        return module

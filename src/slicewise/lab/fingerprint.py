"""The fingerprint of a result: everything that its numbers depend on.

Results with the same digest can be combined. The fingerprint covers the experiment with its size,
load and seed, the GPU model, the probabilities, the policy's decisions, and the package versions
that could change a number. It leaves out the number of runs and the other policies, because
neither changes the results of a run.
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
from slicewise.lab.experiment import ORACLE, Experiment
from slicewise.lab.mix import Mix
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.policies.base import Policy, TablePolicy

Fingerprint = dict[str, object]

_WITHOUT_EFFECT = ("mixes", "policies", "runs", "oracle")
"""Fields of an experiment that do not change a run; mix and policy are added separately."""


def made_with() -> dict[str, str]:
    """Return the package versions that could change a number, such as NumPy's random streams."""
    return {"slicewise": _own_version(), "numpy": np.__version__}


@cache
def _own_version() -> str:
    return version("slicewise")  # reads the package metadata from disk


def digest(experiment: Experiment, mix: int, entrant: int) -> str:
    """Return the digest of the fingerprint of one entrant's runs with one mix."""
    return _digest(json.dumps(fingerprint(experiment, mix, entrant), sort_keys=True, default=repr))


def fingerprint(experiment: Experiment, mix: int, entrant: int) -> Fingerprint:
    """Return the fingerprint in readable form, to find out why a run is repeated."""
    chosen = experiment.mixes[mix]
    # Every field counts unless it is excluded by name, so a new field cannot be forgotten.
    settings = {
        field.name: getattr(experiment, field.name)
        for field in fields(experiment)
        if field.compare and field.name not in _WITHOUT_EFFECT
    }
    if entrant < len(experiment.policies):
        policy = experiment.policies[entrant]
        name, rule = policy.name, _rule(chosen, policy)
    else:
        name, rule = ORACLE, _source("slicewise.lab.oracle")
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
    """Return a digest of the policy's decisions: of its tables, or of its source if it has none."""
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
    """Return the digest of a module's source, or the module's name if there is no source."""
    try:
        return _digest(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError, ImportError):
        return module

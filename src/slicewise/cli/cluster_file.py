"""A cluster as a JSON file: nodes with their GPUs, and the instances on them.

    {"nodes": [{"name": "a", "model": "A100-80GB", "gpus": 2}],
     "instances": [{"node": "a", "gpu": 0, "profile": "1g.10gb", "start": 6, "pinned": true}]}

GPUs are counted from 0 on each node. A node may be ``"drained": true``; an instance may have a
``"name"``. An error is one line with its position in the document.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from slicewise.cli.choices import chosen_entry
from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry

MAX_GPUS = 10_000_000
"""A larger number is a mistake, and would not fit in memory."""

_Kind = TypeVar("_Kind", str, int, bool)


@dataclass
class ClusterFile:
    """A cluster, with the pinned instances and the names of instances, by instance id."""

    cluster: Cluster = field(default_factory=Cluster)
    pinned: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)

    def place(self, gpu: int) -> str:
        """The name of a GPU: its node and its index there."""
        node = self.cluster.node_of(gpu)
        return f"{node.name}/{gpu - node.gpus.start}"


def read_cluster(source: Path, geometries: list[Path] | None) -> ClusterFile:
    """Read a cluster from a file, or from standard input for ``-``."""
    label = "standard input" if str(source) == "-" else str(source)
    if str(source) == "-" and sys.stdin is None:
        raise SlicewiseError(f"{label}: cannot be read: it is closed")
    try:
        # utf-8-sig removes the byte order mark that some editors write.
        text = sys.stdin.read() if str(source) == "-" else source.read_text(encoding="utf-8-sig")
        document = json.loads(text, object_pairs_hook=_Pairs)
    except OSError as error:
        raise SlicewiseError(f"{label}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise SlicewiseError(f"{label}: not JSON: {error}") from None
    try:
        return _Reader(geometries).read(document)
    except SlicewiseError as error:
        raise SlicewiseError(f"{label}: {error}") from None


class _Pairs(dict[str, object]):
    """A JSON object that records a duplicate key; the json module silently uses the last."""

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        written = Counter(key for key, _ in pairs)
        self.twice = next((key for key, times in written.items() if times > 1), None)


class _Reader:
    """Builds a cluster from a document."""

    def __init__(self, geometries: list[Path] | None) -> None:
        self._files = geometries
        self._models: dict[str, Geometry] = {}
        self._read = ClusterFile()

    def read(self, document: object) -> ClusterFile:
        """Read the whole document."""
        top = _object(document, "the document", {"nodes", "instances"})
        drained = [self._node(*entry) for entry in _entries(top, "nodes")]
        for where, entry in _entries(top, "instances"):
            try:
                self._instance(where, entry)
            except SlicewiseError as error:
                known = str(error).startswith(where)
                raise SlicewiseError(str(error) if known else f"{where}: {error}") from None
        for name in filter(None, drained):
            self._read.cluster.drain(name)  # last: a drained node accepts no instances
        return self._read

    def _node(self, where: str, entry: object) -> str | None:
        """Add a node; return its name if it must be drained."""
        node = _object(entry, where, {"name", "model", "gpus", "drained"})
        name = _value(node, where, "name", str)
        model = _value(node, where, "model", str)
        gpus = _value(node, where, "gpus", int)
        if not 1 <= gpus <= MAX_GPUS - self._read.cluster.gpus:
            raise SlicewiseError(f"{where}.gpus: {gpus} is not in 1..{MAX_GPUS} in all")
        if model not in self._models:
            self._models[model] = chosen_entry(model, self._files).require()
        # Aliases of a model share one geometry.
        geometry = self._models[model]
        same = next((g for g in self._read.cluster.models if g.model == geometry.model), geometry)
        self._read.cluster.add_node(name, same, gpus)
        return name if _value(node, where, "drained", bool, False) else None

    def _instance(self, where: str, entry: object) -> None:
        """Place an instance."""
        keys = {"node", "gpu", "profile", "start", "pinned", "name"}
        instance = _object(entry, where, keys)
        node = self._read.cluster.node(_value(instance, where, "node", str))
        gpu = _value(instance, where, "gpu", int)
        if not 0 <= gpu < len(node.gpus):
            raise SlicewiseError(
                f"{where}.gpu: node {node.name!r} has GPUs 0 to {len(node.gpus) - 1}, not {gpu}"
            )
        made = self._read.cluster.place(
            node.gpus[gpu],
            _value(instance, where, "profile", str),
            _value(instance, where, "start", int),
        )
        if _value(instance, where, "pinned", bool, False):
            self._read.pinned.add(made.id)
        name = _value(instance, where, "name", str, "")
        if name:
            self._read.names[made.id] = name


def _entries(top: dict[str, object], key: str) -> list[tuple[str, object]]:
    """The entries of a list, each with its position in the document."""
    found = top.get(key, [])
    if not isinstance(found, list):
        raise SlicewiseError(f"{key}: must be a list")
    return [(f"{key}[{number}]", entry) for number, entry in enumerate(found)]


def _object(value: object, where: str, keys: set[str]) -> dict[str, object]:
    """Check that a value is an object with only these keys."""
    if not isinstance(value, _Pairs):
        raise SlicewiseError(f"{where}: must be an object")
    if value.twice is not None:
        raise SlicewiseError(f"{where}: the key {value.twice!r} is written twice")
    for key in value:
        if key not in keys:
            raise SlicewiseError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(keys))}")
    return value


def _value(
    entry: dict[str, object], where: str, key: str, kind: type[_Kind], default: _Kind | None = None
) -> _Kind:
    """The value of a key, of this type; a key without a default is required."""
    value = entry.get(key, default)
    if value is None:
        raise SlicewiseError(f"{where}: {key!r} is missing")
    # A bool is an int in Python, but not in JSON.
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        words = {str: "text", int: "a whole number", bool: "true or false"}
        raise SlicewiseError(f"{where}.{key}: must be {words[kind]}, not {json.dumps(value)}")
    return value

"""Namespaces as tenants: their terms, and what an operator is told if they cannot be read."""

from __future__ import annotations

import logging

from slicewise.journal.entries import TenantRef
from slicewise.kubernetes.api import Namespace
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.event_recorder import UNREADABLE, EventRecorder
from slicewise.kubernetes.event_series import Regarding
from slicewise.kubernetes.namespace_annotations import Unreadable, read_annotations
from slicewise.kubernetes.stats import Stats

log = logging.getLogger("slicewise.kubernetes")


class Namespaces:
    """Applies changes of namespaces to the cache."""

    def __init__(
        self, cache: ClusterCache, recorder: EventRecorder, stats: Stats, unreadable: Unreadable
    ) -> None:
        self._cache = cache
        self._recorder = recorder
        self._stats = stats
        self._instead = unreadable
        self._limits: dict[str, tuple[str, dict[str, int]]] = {}
        """By namespace: its uid, and the limits that were readable last."""
        self._unreadable: dict[str, tuple[str, ...]] = {}
        """By namespace: what is wrong with its annotations."""

    def changed(self, namespace: Namespace) -> None:
        """Add or update a namespace."""
        meta = namespace.metadata
        uid, known = self._limits.get(meta.name, ("", {}))
        terms = read_annotations(namespace, known if uid == meta.uid else {}, self._instead)
        self._limits[meta.name] = meta.uid, terms.known
        self._cache.set_tenant(TenantRef(meta.uid, meta.name), terms.quota)
        if not terms.problems:
            self._unreadable.pop(meta.name, None)
        elif self._unreadable.get(meta.name) != terms.problems:
            self._unreadable[meta.name] = terms.problems
            text = "; ".join(terms.problems)
            log.warning("namespace %s: %s", meta.name, text)
            about = Regarding("Namespace", meta.name, meta.uid)
            self._recorder.report_event(about, UNREADABLE, "Reading", text)
        self._stats.unreadable = len(self._unreadable)

    def deleted(self, name: str) -> None:
        """Remove a namespace."""
        self._cache.drop_tenant(name)
        self._limits.pop(name, None)
        self._unreadable.pop(name, None)
        self._stats.unreadable = len(self._unreadable)

"""Whether a pod would exceed the quota of its namespace."""

from __future__ import annotations

from collections.abc import Collection

from slicewise.control.quota import excess, has_limits
from slicewise.core.request import Reason, Rejection, Request
from slicewise.journal.entries import Part
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.pod_request import PodRequest


class NamespaceQuota:
    """Compares pods with the quotas of their namespaces."""

    def __init__(self, cache: ClusterCache) -> None:
        self._cache = cache

    def least_excess(self, namespace: str, request: PodRequest) -> Rejection | None:
        """How a pod exceeds the quota wherever it is placed; None if it might not."""
        return self.excess(namespace, request, [self._least(one) for one in request.devices])

    def excess(self, namespace: str, request: Request, parts: Collection[Part]) -> Rejection | None:
        """How these devices of a pod exceed the quota; None if they do not."""
        tenant = self._cache.tenant(namespace)
        text = excess(tenant, parts) if has_limits(tenant) else None
        if text is None:
            return None
        return Rejection(request, Reason.QUOTA, text.replace("tenant", "namespace", 1))

    def _least(self, device: Request) -> Part:
        """The least that a device takes."""
        models = self._cache.state.shares.models(device)
        profiles = [profile for model in models for _, profile in device.candidates(model)]
        size = min((profile.size for profile in profiles), default=0)
        compute = min((profile.compute for profile in profiles), default=0)
        return Part("", 0, "", "", 0, size, compute, 0.0)

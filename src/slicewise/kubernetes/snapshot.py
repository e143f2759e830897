"""A look at a cluster, for commands that only read: all objects are listed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api_client import ApiClient, KubernetesApiError, NotFoundError
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.controller import Controller, ControllerOptions
from slicewise.kubernetes.informer import CLAIMS, EVENTS, KINDS, NODES, SLICES, Kind, Listed
from slicewise.kubernetes.node_resources import NodeResources
from slicewise.kubernetes.pending_claims import PendingClaims

_NEEDED = (SLICES, CLAIMS, NODES)
"""Without these nothing can be said about a cluster."""
_FORBIDDEN = 403


class NotVisibleError(SlicewiseError):
    """Raised when the user may not list what the cluster is read from."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster as it was read."""

    cache: ClusterCache
    pending: PendingClaims
    node_resources: NodeResources
    hidden: tuple[str, ...]
    """The kinds of objects that the user may not list."""


def read_snapshot(api: ApiClient, policy: str = "default") -> Snapshot:
    """Read a cluster; raises `NotVisibleError` if the user may not list what is needed."""
    controller = Controller(api, ControllerOptions(policy=policy))
    hidden = []
    for kind in KINDS:
        if kind is EVENTS:
            continue
        try:
            pages = list(_pages(api, kind))
        except NotFoundError:  # the cluster does not serve it
            pages = []
        except KubernetesApiError as error:
            if error.status != _FORBIDDEN:
                raise
            if kind in _NEEDED:
                raise NotVisibleError(
                    f"you may not list the {kind.name} of the cluster, which this needs: "
                    f"{error.message}"
                ) from None
            hidden.append(kind.name)
            pages = []
        controller.show(pages or [Listed(kind, [], True, True)])
    return Snapshot(controller.cache, controller.pending, controller.node_resources, (*hidden,))


def _pages(api: ApiClient, kind: Kind) -> Iterator[Listed]:
    first = True
    for page in api.pages(kind.path, msgspec.Raw, kind.fields):
        version, last = page.metadata.resource_version, not page.metadata.continue_
        yield Listed(kind, [kind.read(item) for item in page.items], first, last, version)
        first = False

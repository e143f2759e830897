"""Reads, watches and binds pods for the service as a scheduler extender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from slicewise.control.pods import EveryPod, Pod, PodGone, PodNews, PodSeen, PodsError, PodsUnknown
from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api_client import MERGE, ApiClient, NotFoundError
from slicewise.kubernetes.informer import (
    Changed,
    Deleted,
    Kind,
    Listed,
    Watch,
    WatchError,
    WatchNotification,
)

_decode = msgspec.json.Decoder(Pod).decode
PODS = Kind("Pods", "/api/v1/pods", _decode)


class ClusterPods:
    """The pods of a cluster."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    @classmethod
    def open(cls, kubeconfig: Path | None) -> ClusterPods:
        """Connect with a kubeconfig, or with the service account of the pod inside a cluster."""
        return cls(ApiClient.open(kubeconfig))

    def get(self, namespace: str, name: str) -> Pod | None:
        """Read a pod; None if it does not exist."""
        try:
            return self._api.get(_path(namespace, name), Pod)
        except NotFoundError:
            return None
        except SlicewiseError as error:
            raise PodsError(str(error)) from None

    def bind(self, pod: Pod, node: str, annotations: Mapping[str, str]) -> None:
        """Bind a pod to a node and annotate it, in one write; fails if the pod has changed."""
        meta = pod.metadata
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
                "annotations": dict(annotations),
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        try:
            self._api.write("POST", f"{_path(meta.namespace, meta.name)}/binding", body)
        except SlicewiseError as error:
            raise PodsError(str(error)) from None

    def touch(self, pod: Pod, annotation: str, value: str) -> Pod | None:
        """Annotate a pod and return its new version; None if it was deleted."""
        meta = pod.metadata
        # The UID makes the patch fail for another pod of the same name.
        body = {"metadata": {"uid": meta.uid, "annotations": {annotation: value}}}
        try:
            return _decode(self._api.write("PATCH", _path(meta.namespace, meta.name), body, MERGE))
        except NotFoundError:
            return None
        except SlicewiseError as error:
            now = self.get(meta.namespace, meta.name)
            if now is None or now.uid != meta.uid:
                return None
            raise PodsError(str(error)) from None

    def follow(self, tell: Callable[[PodNews], None]) -> Callable[[], None]:
        """Report all pods, then changes, from another thread; returns a function that stops it."""
        watch = Watch(self._api, PODS, _Converter(tell))
        watch.start()
        return watch.stop


class _Converter:
    """Converts the notifications of a watch."""

    def __init__(self, tell: Callable[[PodNews], None]) -> None:
        self._tell = tell
        self._pages: dict[str, Pod] = {}

    def __call__(self, news: WatchNotification) -> None:
        match news:
            case Listed(objects=objects, first=first, last=last):
                if first:
                    self._pages = {}
                self._pages |= {pod.uid: pod for pod in objects}
                if last:
                    self._tell(EveryPod(self._pages))
            case Changed(object=pod):
                self._tell(PodSeen(pod))
            case Deleted(object=pod):
                self._tell(PodGone(pod))
            case WatchError(text=text):
                self._tell(PodsUnknown(text))


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"

"""The pods of a cluster, for a service that binds them as the scheduler's extender."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from slicewise.control.pods import EveryPod, Pod, PodGone, PodNews, PodSeen, PodsError, PodsUnknown
from slicewise.core.errors import SlicewiseError
from slicewise.k8s.link import MERGE, Link, MissingError
from slicewise.k8s.watching import Changed, Gone, Kind, Listed, News, Trouble, Watch

_decode = msgspec.json.Decoder(Pod).decode
PODS = Kind("Pods", "/api/v1/pods", _decode)


class ClusterPods:
    """Reads, binds and follows pods over a link to the API."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    def open(cls, kubeconfig: Path | None) -> ClusterPods:
        """Connect as a kubeconfig says, or as the pod's service account inside a cluster."""
        return cls(Link.open(kubeconfig))

    def get(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name as it is now, if there is one."""
        try:
            return self._link.get(_path(namespace, name), Pod)
        except MissingError:
            return None
        except SlicewiseError as error:
            raise PodsError(str(error)) from None

    def bind(self, pod: Pod, node: str, annotations: Mapping[str, str]) -> None:
        """Bind a pod to a node and annotate it, in one step; only if it is as given."""
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
            self._link.write("POST", f"{_path(meta.namespace, meta.name)}/binding", body)
        except SlicewiseError as error:
            raise PodsError(str(error)) from None

    def touch(self, pod: Pod, annotation: str, value: str) -> Pod | None:
        """Annotate a pod and return it as it is then; None if it is gone."""
        meta = pod.metadata
        # With its UID in it, a patch is refused where another pod has taken the name.
        body = {"metadata": {"uid": meta.uid, "annotations": {annotation: value}}}
        try:
            return _decode(self._link.write("PATCH", _path(meta.namespace, meta.name), body, MERGE))
        except MissingError:
            return None
        except SlicewiseError as error:
            now = self.get(meta.namespace, meta.name)
            if now is None or now.uid != meta.uid:
                return None
            raise PodsError(str(error)) from None

    def follow(self, tell: Callable[[PodNews], None]) -> Callable[[], None]:
        """Have every pod told, then whatever changes, from other threads; returns how to stop."""
        watch = Watch(self._link, PODS, _Teller(tell))
        watch.start()
        return watch.stop


class _Teller:
    """Makes what a watch reports into news of pods."""

    def __init__(self, tell: Callable[[PodNews], None]) -> None:
        self._tell = tell
        self._pages: dict[str, Pod] = {}

    def __call__(self, news: News) -> None:
        match news:
            case Listed(objects=objects, first=first, last=last):
                if first:
                    self._pages = {}
                self._pages |= {pod.uid: pod for pod in objects}
                if last:
                    self._tell(EveryPod(self._pages))
            case Changed(object=pod):
                self._tell(PodSeen(pod))
            case Gone(object=pod):
                self._tell(PodGone(pod))
            case Trouble(text=text):
                self._tell(PodsUnknown(text))


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"

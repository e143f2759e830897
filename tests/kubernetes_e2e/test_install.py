"""deploy/kubernetes: it runs with exactly these rights, and can be uninstalled."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import CORE, RBAC, Api, Json, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claim,
    claims_in,
    claims_of,
    device_request,
    make_classes,
    namespace,
    node,
    pod,
    pods_in,
    publish,
    template,
    templates_in,
    unscheduled_because,
    until_running,
    withdraw,
)
from tests.kubernetes_e2e.nvidia import DRIVER, MIG_CLASS
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica, running, wants

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.allocations import DeviceId
from slicewise.kubernetes.api import DeviceClass, Pod, ResourceClaim
from slicewise.kubernetes.api_client import ApiClient, KubernetesApiError
from slicewise.kubernetes.claim_client import ClaimClient, Decision, Grant, claim_path
from slicewise.kubernetes.event_recorder import CONDITION, EventRecorder, PlacementMessage
from slicewise.kubernetes.informer import KINDS
from slicewise.kubernetes.leader_election import LeaderElector
from slicewise.kubernetes.stats import Stats

MANIFESTS = Path(__file__).parents[2] / "deploy" / "kubernetes"
ACCOUNT = "slicewise/slicewise"
WATCHED = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "users": ["system:serviceaccount:slicewise:slicewise"]},
        {"level": "None"},
    ],
}
"""The audit policy: all requests of the controller, and no others."""
EVENTS = "/apis/events.k8s.io/v1"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/slicewise/leases/slicewise"


def manifests() -> list[Json]:
    """The objects that are installed."""
    return [
        found
        for file in sorted(MANIFESTS.glob("*.yaml"))
        for found in yaml.safe_load_all(file.read_text())
    ]


def manifest(kind: str, name: str = "slicewise") -> Json:
    """One of them."""
    [found] = [
        one for one in manifests() if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return copy.deepcopy(found)


class Watched(Plane):
    """A control plane with an audit log of the controller's requests."""

    def __init__(self, folder: Path) -> None:
        self.audit = folder / "audit.log"
        (folder / "policy.yaml").write_text(json.dumps(WATCHED))
        flags = [
            f"--audit-policy-file={folder / 'policy.yaml'}",
            f"--audit-log-path={self.audit}",
            "--audit-log-mode=blocking",
        ]
        super().__init__(flags={"apiserver": flags})

    def asked(self) -> list[Json]:
        """The controller's requests so far."""
        lines = self.audit.read_text().splitlines() if self.audit.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A separate control plane, with all manifests applied."""
    try:
        watched = Watched(tmp_path_factory.mktemp("audit"))
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with watched:
        make_classes(watched.api)
        watched.kubectl("apply", "-f", str(MANIFESTS))
        yield watched


def as_installed(listen: str = "127.0.0.1:0", token: str = "token") -> list[str]:
    """The flags of the Deployment, where they can stay as they are."""
    [container] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "k8s"
    here = {
        "--listen=0.0.0.0:8080": f"--listen={listen}",
        "--token-file=/etc/slicewise/token/token": f"--token-file={token}",
        "--identity=$(POD_NAME)": "--identity=one-of-two",
        "--namespace=$(POD_NAMESPACE)": "--namespace=slicewise",
    }
    assert set(here) <= set(container["args"])
    return [here.get(flag, flag) for flag in container["args"]]


def make_template(plane: Plane, space: str, name: str, count: int = 1, **what: object) -> None:
    plane.api.create(
        templates_in(space),
        template(name, device_request(OUR_CLASS, count=count), config=[wants(**what)]),
    )


def told(plane: Plane, space: str, name: str) -> Json | None:
    """The messages of slicewise to a pod."""
    conditions = plane.api.get(f"{pods_in(space)}/{name}")["status"].get("conditions", [])
    return next((one for one in conditions if one["type"] == CONDITION), None)


@contextmanager
def gpus(plane: Plane, *names: str) -> Iterator[None]:
    """Nodes with one A100 each."""
    publish(plane.api, [node(name) for name in names], "A100-80GB", 1)
    try:
        yield
    finally:
        withdraw(plane.api, names)


# Rights


class Right(NamedTuple):
    """One verb on one kind of object, in a role."""

    role: str
    group: str
    resource: str
    verb: str

    @property
    def name(self) -> str:
        """As tests are called."""
        return f"{self.verb} {self.resource}"


def rights(role: str) -> list[Right]:
    """What a role allows, one by one."""
    return [
        Right(role, group, resource, verb)
        for rule in manifest(role)["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


RIGHTS = [*rights("ClusterRole"), *rights("Role")]
NOT_SEEN = {("patch", "resourceclaims/binding"), ("arbitrary-node:patch", "resourceclaims/driver")}
"""Rights that the server asks about while it answers something else."""
SELDOM = {
    ("get", "resourceclaims"),
    ("patch", "events"),
    ("list", "devicetaintrules"),
    ("watch", "devicetaintrules"),
}
"""Used after an answer got lost, for an event that is repeated later, and where it is served."""


def role_path(role: str) -> str:
    scope = "/namespaces/slicewise" if role == "Role" else ""
    return f"{RBAC}{scope}/{role.lower()}s/slicewise"


def without(right: Right) -> Json:
    """The role without one right."""
    changed = manifest(right.role)
    rules = []
    for rule in changed["rules"]:
        for resource in rule["resources"]:
            verbs = [
                verb for verb in rule["verbs"] if (resource, verb) != (right.resource, right.verb)
            ]
            if verbs:
                rules.append(rule | {"resources": [resource], "verbs": verbs})
    return changed | {"rules": rules}


def allowed(api: Api, right: Right) -> bool:
    """Whether the caller has a right, according to the server."""
    resource, _, part = right.resource.partition("/")
    attributes = {"group": right.group, "resource": resource, "verb": right.verb}
    if part:
        attributes["subresource"] = part
    if part == "driver":
        attributes["name"] = DRIVER
    if right.role == "Role":
        attributes |= {"namespace": "slicewise", "name": "slicewise"}
    answer = api.create(
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {"spec": {"resourceAttributes": attributes}},
    )
    return bool(answer["status"]["allowed"])


class Noting(ApiClient):
    """A client that records forbidden requests."""

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)
        self.forbidden: list[str] = []

    def _note(self, error: KubernetesApiError) -> None:
        if error.status == 403 or "orbidden" in error.message:
            self.forbidden.append(error.message)

    def _ask(self, *arguments: Any, **more: Any) -> bytes:
        try:
            return super()._ask(*arguments, **more)
        except KubernetesApiError as error:
            self._note(error)
            raise

    @contextmanager
    def watch(self, path: str, version: str, seconds: int, fields: str = "") -> Iterator[Any]:
        try:
            with super().watch(path, version, seconds, fields) as happenings:
                yield happenings
        except KubernetesApiError as error:
            self._note(error)
            raise


def do_everything(plane: Plane, space: str) -> list[str]:
    """Do all that the controller does, with its own code; returns what it was forbidden."""
    link, admin = Noting.open(plane.kubeconfig_for(ACCOUNT)), ApiClient.open(plane.kubeconfig)
    assert isinstance(link, Noting)
    for kind in KINDS:
        with suppress(SlicewiseError):
            list(link.pages(kind.path, msgspec.Raw))
        with suppress(SlicewiseError), link.watch(kind.path, "0", 5):
            pass
    _lead(plane, link)
    _allocate(plane, link, admin, space)
    _tell(plane, link, admin, space)
    return link.forbidden


def _lead(plane: Plane, link: ApiClient) -> None:
    plane.api.delete(LEASE)
    leadership = LeaderElector(
        link, "slicewise", "slicewise", "me", lambda leads: None, seconds=1.0
    )
    leadership.start()
    until("it leads or knows why not", lambda: leadership.leads or leadership.trouble or None)
    leadership.stop()


def _allocate(plane: Plane, link: Noting, admin: ApiClient, space: str) -> None:
    config = [wants(profile="1g.10gb")]
    plane.api.create(claims_in(space), claim("c", device_request(OUR_CLASS), config=config))
    path = f"{claims_in(space)}/c"
    classes: dict[str, DeviceClass] = {}
    seats = (DeviceId(DRIVER, "nowhere", "gpu-0-mig-1g10gb-19-0"),)
    clients = [ClaimClient(one, lambda: True, lambda seconds: None) for one in (link, admin)]
    try:
        with suppress(SlicewiseError):
            clients[0].list_claims()
        # What is forbidden is done by an admin, so that the rest can be tried.
        for client in clients:
            fresh = admin.get(path, ResourceClaim)
            if fresh.status.allocation is None:
                grant = Grant(fresh, ("slice",), seats)
                with suppress(SlicewiseError):
                    client.allocate(Decision("p", "nowhere", (grant,), True, classes))
        given = admin.get(path, ResourceClaim)
        assert given.status.allocation is not None
        with suppress(SlicewiseError):
            clients[0].confirm(given, True, "no other claim has these slices")
        with suppress(SlicewiseError):
            clients[0].deallocate(admin.get(path, ResourceClaim))
        with suppress(SlicewiseError):
            link.get(claim_path(given), ResourceClaim)
    finally:
        clients[1].deallocate(admin.get(path, ResourceClaim))
        plane.api.patch(path, {"metadata": {"finalizers": []}})
        plane.api.delete(path)


def _tell(plane: Plane, link: Noting, admin: ApiClient, space: str) -> None:
    gated = pod("p", schedulingGates=[{"name": "slicewise.dev/never"}])
    plane.api.create(pods_in(space), gated)
    now, before = [0.0], len(link.forbidden)
    teller = EventRecorder(link, "me", Stats(), lambda: now[0])
    events = f"{EVENTS}/namespaces/{space}/events"
    for text in ("no room for 1g.10gb", "still no room"):
        waits = PlacementMessage(False, "Capacity", text)
        assert teller.report(admin.get(f"{pods_in(space)}/p", Pod), waits)
        until(
            "the pod was told, or not",
            lambda: len(link.forbidden) > before or plane.api.items(events) or None,
        )
        now[0] += 60.0
    if len(link.forbidden) == before:
        until(
            "it is a series, or not",
            lambda: len(link.forbidden) > before or plane.api.items(events)[0].get("series"),
        )
    teller.stop()
    plane.api.call("DELETE", events)
    plane.api.delete(f"{pods_in(space)}/p")
    until("it is gone", lambda: not plane.api.items(pods_in(space)) or None)


def test_all_rights_together_are_enough(installed: Plane) -> None:
    with namespace(installed.api) as space:
        assert do_everything(installed, space) == []


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: right.name)
def test_no_right_can_be_left_out(installed: Plane, right: Right) -> None:
    with namespace(installed.api) as space, installed.api_for(ACCOUNT) as account:
        installed.api.put(role_path(right.role), without(right))
        try:
            until("the right is gone", lambda: not allowed(account, right) or None)
            forbidden = do_everything(installed, space)
            assert forbidden, f"{right.name} is not needed"
            what = right.resource.partition("/")[2] or right.resource
            assert any(what in text for text in forbidden), forbidden
        finally:
            installed.api.put(role_path(right.role), manifest(right.role))
            until("the right is back", lambda: allowed(account, right) or None)


# Running


def test_the_namespace_admits_the_deployment(installed: Plane) -> None:
    """Its pods are admitted under the restricted standard, each on a node of its own."""
    names = ["plain-0", "plain-1"]
    for name in names:
        installed.api.create(f"{CORE}/nodes", node(name))
    path = "/apis/apps/v1/namespaces/slicewise/deployments/slicewise"
    until(
        "both replicas are there",
        lambda: installed.api.get(path)["status"].get("availableReplicas") == 2 or None,
    )
    pods = installed.api.items(pods_in("slicewise"))
    assert {one["spec"]["nodeName"] for one in pods} == set(names)
    for one in pods:
        [container] = one["spec"]["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["spec"]["securityContext"]["runAsNonRoot"] is True
    withdraw(installed.api, names)


def test_the_controller_runs_with_these_rights_and_uses_all_of_them(
    installed: Watched, tmp_path: Path
) -> None:
    plane, kubeconfig = installed, installed.kubeconfig_for(ACCOUNT)
    flags = [*as_installed(token=str(tmp_path / "token")), "--lease-seconds=1"]
    flags += ["--settle-seconds=0.2"]
    before = len(plane.asked())
    plane.api.delete(LEASE)
    with namespace(plane.api) as space, gpus(plane, "gpu-a", "gpu-b"):
        make_template(plane, space, "small", profile="1g.10gb")
        make_template(plane, space, "need", count=2, compute=2, memoryGB=15)
        make_template(plane, space, "whole", profile="7g.80gb")
        with running(kubeconfig, tmp_path, *flags, name="first") as first:
            plane.api.create(pods_in(space), pod("a", templates=["small"]))
            plane.api.create(pods_in(space), pod("b", templates=["need"]))
            until_running(plane.api, space, "a")
            until_running(plane.api, space, "b")
            plane.api.create(pods_in(space), pod("c", templates=["whole", "whole"]))
            until("c is told why it waits", lambda: told(plane, space, "c"))
            assert first.stop() == 0
        # A claim of the stock class that may get devices at any moment: pods are held back for it.
        plane.api.create(claims_in(space), claim("rival", device_request(MIG_CLASS)))
        with running(kubeconfig, tmp_path, *flags, name="second") as second:
            plane.api.create(pods_in(space), pod("d", templates=["small"]))
            until_running(plane.api, space, "d")
            [mine] = claims_of(plane.api, space, "d")
            status = plane.api.get(f"{claims_in(space)}/{mine}")["status"]
            [device] = status["devices"]
            assert [one["type"] for one in device["conditions"]] == ["slicewise.dev/confirmed"]
            assert second.stop() == 0
        said = first.log.read_text() + second.log.read_text()
        assert not re.search(r"\b403\b", said), said  # nor in the fraction of a second
        assert "orbidden" not in said, said
    requests = plane.asked()[before:]
    refused = [one for one in requests if one["responseStatus"]["code"] not in (200, 201, 404, 409)]
    assert not refused, refused[:3]
    used = {
        (one["verb"], "/".join(filter(None, (ref["resource"], ref.get("subresource")))))
        for one in requests
        if (ref := one.get("objectRef"))
    }
    granted = {(right.verb, right.resource) for right in RIGHTS}
    assert used - SELDOM == granted - NOT_SEEN - SELDOM


def test_the_controller_runs_on_a_read_only_file_system(installed: Plane, tmp_path: Path) -> None:
    """The whole file system is read-only, as in the Deployment; not even a token can be made."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed, so no file system is read-only")
    script = (
        'mount --bind / / && mount -o remount,bind,ro / && cd / && ! touch "$0" 2>/dev/null'
        ' && exec "$@"'
    )
    outside = tmp_path / "not-to-be-written"
    replica = Replica(
        installed.kubeconfig_for(ACCOUNT), tmp_path, *as_installed(token=str(outside))
    )
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(outside)]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system can be made read-only here: {error.stderr.decode()}")
    replica._command[:0] = prefix
    with namespace(installed.api) as space, gpus(installed, "gpu-ro"):
        make_template(installed, space, "small", profile="1g.10gb")
        replica.start()
        try:
            installed.api.create(pods_in(space), pod("a", templates=["small"]))
            until_running(installed.api, space, "a")
            until("it says who can look", lambda: "disabled: " in replica.log.read_text())
            assert "Read-only file system" in replica.log.read_text()
        finally:
            replica.kill()
    assert not outside.exists()


# Removal


def test_uninstalling_affects_no_running_pod(installed: Plane, tmp_path: Path) -> None:
    plane, kubeconfig = installed, installed.kubeconfig_for(ACCOUNT)
    with namespace(plane.api) as space, gpus(plane, "gpu-c"):
        make_template(plane, space, "half", profile="3g.40gb")
        make_template(plane, space, "whole", profile="7g.80gb")
        with running(kubeconfig, tmp_path, *as_installed(token=str(tmp_path / "token"))) as one:
            plane.api.create(pods_in(space), pod("runs", templates=["half"]))
            plane.api.create(pods_in(space), pod("ends", templates=["half"]))
            until_running(plane.api, space, "runs")
            until_running(plane.api, space, "ends")
            plane.api.create(pods_in(space), pod("waits", templates=["whole"]))
            until("it is told why it waits", lambda: told(plane, space, "waits"))
            assert one.stop() == 0
        before = allocated(plane.api, space, "runs")
        plane.kubectl("delete", "--wait=false", "-f", str(MANIFESTS))
        until("its rights are gone", lambda: plane.api.find(role_path("ClusterRole")) is None)
        # A pod that ends gives its devices back: that is Kubernetes' own work.
        plane.api.delete(f"{pods_in(space)}/ends")
        until("its claim is gone", lambda: len(plane.api.items(claims_in(space))) == 2 or None)
        assert until_running(plane.api, space, "runs")["status"]["phase"] == "Running"
        assert allocated(plane.api, space, "runs") == before
        # Waiting pods keep waiting, and can be recreated with a template of the stock class.
        assert f"class {OUR_CLASS} does not exist" in unscheduled_because(plane.api, space, "waits")
        plane.api.create(
            templates_in(space), template("stock", device_request(MIG_CLASS, profile="3g.40gb"))
        )
        plane.api.delete(f"{pods_in(space)}/waits")
        until("it is gone", lambda: plane.api.find(f"{pods_in(space)}/waits") is None or None)
        plane.api.create(pods_in(space), pod("waits", templates=["stock"]))
        until_running(plane.api, space, "waits")
        assert allocated(plane.api, space, "waits") != before
    until(
        "the namespace is gone",
        lambda: plane.api.find(f"{CORE}/namespaces/slicewise") is None or None,
    )
    plane.kubectl("apply", "-f", str(MANIFESTS))  # and come back


def test_waiting_pods_are_placed_after_a_new_installation(installed: Plane, tmp_path: Path) -> None:
    plane, kubeconfig = installed, installed.kubeconfig_for(ACCOUNT)
    with namespace(plane.api) as space, gpus(plane, "gpu-d"):
        make_template(plane, space, "half", profile="3g.40gb")
        plane.api.create(pods_in(space), pod("waits", templates=["half"]))
        until("the scheduler tried", lambda: unscheduled_because(plane.api, space, "waits"))
        with running(kubeconfig, tmp_path, *as_installed(token=str(tmp_path / "token"))):
            until_running(plane.api, space, "waits")


def namespaces_of(objects: Sequence[Json]) -> set[str]:
    """Where objects are."""
    return {one["metadata"].get("namespace", "") for one in objects}


def test_nothing_is_installed_outside_its_namespace() -> None:
    everywhere = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
    assert namespaces_of([one for one in manifests() if one["kind"] not in everywhere]) == {
        "slicewise"
    }

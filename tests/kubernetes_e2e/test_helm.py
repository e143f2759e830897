"""The chart in deploy/helm: it renders deploy/kubernetes, and applies its values."""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import CORE, RBAC, RESOURCE, Json, until
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.programs import KUBERNETES, require_helm

from slicewise.kubernetes.api import DeviceClass
from slicewise.kubernetes.claim_parameters import is_ours

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "slicewise"


@pytest.fixture(scope="module")
def helm() -> Path:
    """The program; tests are skipped if it cannot be built, except in CI."""
    try:
        return require_helm()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def call(helm: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm, which keeps what it remembers in ``home``."""
    return subprocess.run(
        [helm, *arguments],
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


def rendered(helm: Path, home: Path, **values: Any) -> list[Json]:
    """The objects of the chart with these values."""
    file = home / "values.json"
    file.write_text(json.dumps(values))
    done = call(
        helm, home, "template", "slicewise", str(CHART), "--namespace", "slicewise",
        "--kube-version", KUBERNETES, "--values", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def by_name(objects: list[Json]) -> dict[str, Json]:
    return {f"{one['kind']} {one['metadata']['name']}": one for one in objects}


def deployment(objects: list[Json]) -> Json:
    """The pods that a chart makes."""
    [found] = [one for one in objects if one["kind"] == "Deployment"]
    spec: Json = found["spec"]["template"]
    return spec


def test_the_chart_renders_the_manifests(helm: Path, tmp_path: Path) -> None:
    plain = [
        one
        for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
        if one["kind"] != "Namespace"  # helm install makes it, with --create-namespace
    ]
    chart = rendered(helm, tmp_path)
    assert by_name(chart).keys() == by_name(plain).keys()
    for name, one in by_name(plain).items():
        assert by_name(chart)[name] == one, name


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("unmodified-pods", {"unmodifiedPods": {"enabled": True}}),
        ("preemption", {"preemption": {"classes": ["urgent"]}}),
    ],
)
def test_the_chart_renders_the_optional_manifests(
    helm: Path, tmp_path: Path, folder: str, values: Json
) -> None:
    plain = [
        one
        for file in sorted((DEPLOY / "kubernetes" / folder).glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
    ]
    without = by_name(rendered(helm, tmp_path))
    chart = by_name(rendered(helm, tmp_path, **values))
    assert chart.keys() - without.keys() == by_name(plain).keys()
    for name, one in by_name(plain).items():
        assert chart[name] == one, name


def test_the_chart_passes_lint(helm: Path, tmp_path: Path) -> None:
    done = call(helm, tmp_path, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_further_classes_with_a_profile_or_a_need(helm: Path, tmp_path: Path) -> None:
    classes: dict[str, Json] = {
        "mig-3g-40gb.slicewise.dev": {"profile": "3g.40gb"},
        "mig-small.slicewise.dev": {"compute": 1, "memoryGB": 10},
    }
    found = by_name(rendered(helm, tmp_path, profileClasses=classes))
    assert {name for name in found if name.startswith("DeviceClass")} == {
        f"DeviceClass {name}" for name in classes
    }
    for name, parameters in classes.items():
        spec = found[f"DeviceClass {name}"]["spec"]
        assert spec["selectors"] == [{"cel": {"expression": "false"}}]
        read = {name: msgspec.convert(found[f"DeviceClass {name}"], DeviceClass)}
        assert is_ours(name, read)
        [config] = spec["config"]
        assert config["opaque"]["driver"] == "slicewise.dev"
        assert config["opaque"]["parameters"] == {
            "apiVersion": "slicewise.dev/v1",
            "kind": "Slices",
            **parameters,
        }


def test_a_class_with_a_foreign_name_is_refused(helm: Path, tmp_path: Path) -> None:
    done = call(
        helm, tmp_path, "template", "slicewise", str(CHART), "--kube-version", KUBERNETES,
        "--set", "profileClasses.mine.profile=3g.40gb",
    )  # fmt: skip
    assert done.returncode != 0
    assert "mine does not end in .slicewise.dev" in done.stderr


def test_values_are_applied(helm: Path, tmp_path: Path) -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    objects = rendered(
        helm,
        tmp_path,
        image={"repository": "registry.example/slicewise", "tag": "7", "pullSecrets": ["pull"]},
        replicas=3,
        policy="best-fit",
        extraArgs=["--reserve-after=10m"],
        resources={"limits": {"memory": "8Gi"}},
        tolerations=[toleration],
        nodeSelector={"role": "control"},
        priorityClassName="system-cluster-critical",
        metrics={"open": False, "scrapeAnnotations": False},
        tls={"secretName": "certificate"},
        drivers=["gpu.nvidia.com", "other.example"],
        port=8443,
        podDisruptionBudget={"create": False},
        preemption={"classes": ["urgent", "critical"]},
    )
    names = by_name(objects)
    assert names["Deployment slicewise"]["spec"]["replicas"] == 3
    assert "PodDisruptionBudget slicewise" not in names
    pods = deployment(objects)
    assert "annotations" not in pods["metadata"]
    spec = pods["spec"]
    assert spec["tolerations"] == [toleration]
    assert spec["nodeSelector"] == {"role": "control"}
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    [container] = spec["containers"]
    assert container["image"] == "registry.example/slicewise:7"
    assert container["resources"]["limits"]["memory"] == "8Gi"
    assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert {"--preempt-for=urgent", "--preempt-for=critical"} <= set(container["args"])
    flags = {"--policy=best-fit", "--reserve-after=10m", "--listen=0.0.0.0:8443"}
    assert flags <= set(container["args"])
    assert "--tls-cert=/etc/slicewise/tls/tls.crt" in container["args"]
    assert not {"--open-metrics", "--listen-without-tls"} & set(container["args"])
    assert names["Service slicewise"]["spec"]["ports"][0]["port"] == 8443
    [driver] = [
        rule
        for rule in names["ClusterRole slicewise"]["rules"]
        if rule["resources"] == ["resourceclaims/driver"]
    ]
    assert driver["resourceNames"] == ["gpu.nvidia.com", "other.example"]


def test_a_token_creates_a_secret_and_restarts_pods(helm: Path, tmp_path: Path) -> None:
    digests = set()
    for token in ("sw_first", "sw_second"):
        objects = rendered(helm, tmp_path, token={"value": token})
        secret = by_name(objects)["Secret slicewise-token"]
        assert secret["stringData"] == {"token": token}
        annotations = deployment(objects)["metadata"]["annotations"]
        assert token not in annotations.values()
        digests.add(annotations["slicewise.dev/token-digest"])
    assert len(digests) == 2


def gone(plane: Plane, path: str) -> bool:
    return plane.api.find(path) is None


def test_install_and_uninstall(helm: Path, plane: Plane, tmp_path: Path) -> None:
    at = ["--kubeconfig", str(plane.kubeconfig), "--namespace", "slicewise-chart"]
    done = call(
        helm, tmp_path, "install", "slicewise", str(CHART), *at, "--create-namespace",
        "--set", "token.value=sw_secret",
        "--set", r"profileClasses.mig-1g\.slicewise\.dev.profile=1g.10gb",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "port-forward" in done.stdout
    space = f"{CORE}/namespaces/slicewise-chart"
    try:
        assert plane.api.find(f"{RESOURCE}/deviceclasses/mig-1g.slicewise.dev") is not None
        subject = plane.api.get(f"{RBAC}/clusterrolebindings/slicewise")["subjects"][0]
        assert subject["namespace"] == "slicewise-chart"
        deployments = "/apis/apps/v1/namespaces/slicewise-chart/deployments"
        [made] = plane.api.items(deployments)
        assert made["spec"]["template"]["spec"]["serviceAccountName"] == "slicewise"
        assert plane.api.find(f"{space}/secrets/slicewise-token") is not None
    finally:
        done = call(helm, tmp_path, "uninstall", "slicewise", *at)
    assert done.returncode == 0, done.stderr
    for path in (
        f"{RESOURCE}/deviceclasses/mig-1g.slicewise.dev",
        f"{RBAC}/clusterroles/slicewise",
        f"{RBAC}/clusterrolebindings/slicewise",
        f"{space}/services/slicewise",
        f"{space}/serviceaccounts/slicewise",
        f"{space}/secrets/slicewise-token",
    ):
        until(f"{path} is gone", partial(gone, plane, path))
    plane.api.delete(space)

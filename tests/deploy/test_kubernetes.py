"""The Kubernetes manifests and the chart agree with the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import slicewise
from slicewise.cli.commands import commands

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "slicewise"


def objects(kind: str) -> list[Any]:
    return [
        one
        for file in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text(encoding="utf-8"))
        if one["kind"] == kind
    ]


def container() -> Any:
    [deployment] = objects("Deployment")
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return found


def test_versions_are_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == slicewise.__version__
    assert container()["image"] == f"slicewise:{slicewise.__version__}"


def test_the_container_runs_an_existing_command() -> None:
    command = container()["command"]
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert command[0] in image
    assert command[1:] == ["k8s"]
    [k8s] = (command for command in commands() if command.name == "k8s")
    parameters = k8s.loaded.params
    known = {option for parameter in parameters for option in parameter.opts}
    flags = {argument.partition("=")[0] for argument in container()["args"]}
    assert flags <= known
    chart = (CHART / "templates" / "controller.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"- (--[a-z-]+)", chart)) <= known


def test_the_container_has_minimal_privileges() -> None:
    [deployment] = objects("Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    user = str(spec["securityContext"]["runAsUser"])
    assert f"USER {user}" in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container()["resources"].keys() == {"requests", "limits"}
    assert not any(key in spec for key in ("hostNetwork", "hostPID", "hostIPC"))
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_no_rule_has_wildcards() -> None:
    for role in (*objects("ClusterRole"), *objects("Role")):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]

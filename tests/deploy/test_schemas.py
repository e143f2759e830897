"""Manifests, the chart's output and the documents' examples match the schemas of Kubernetes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.programs import require_helm

ROOT = Path(__file__).parents[2]
SUPPORTED = ("1.36", "1.37")
NOT_OF_THE_API = {"KubeSchedulerConfiguration"}
"""Files of programs in the same form, which have no schema there."""
VALUES: tuple[tuple[str, ...], ...] = (
    (),
    (
        "profileClasses.small\\.slicewise\\.dev.compute=1",
        "token.value=secret",
        "tls.secretName=certificate",
        "nodeSelector.role=control",
        "podAnnotations.team=gpu",
        "priorityClassName=system-cluster-critical",
        "unmodifiedPods.enabled=true",
        "preemption.classes={urgent}",
    ),
)


def documents(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """The objects in a YAML text, with a name for each."""
    for number, one in enumerate(yaml.safe_load_all(text)):
        if isinstance(one, dict) and one.get("kind") not in (None, *NOT_OF_THE_API):
            yield f"{name}:{one['kind']}:{number}", one


def shipped() -> Iterator[tuple[str, Any]]:
    """The objects in the manifests and in the documents."""
    for file in sorted((ROOT / "deploy" / "kubernetes").rglob("*.yaml")):
        yield from documents(file.read_text(encoding="utf-8"), file.name)
    for page in sorted((ROOT / "docs").glob("kubernetes*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield from documents(block, page.name)


def check(objects: list[tuple[str, Any]], version: str) -> None:
    """Raise with the name of the first object that does not match."""
    assert objects
    for name, one in objects:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except (
            kubernetes_validate.ValidationError,
            kubernetes_validate.SchemaNotFoundError,
        ) as error:
            pytest.fail(f"{name} with Kubernetes {version}: {error}")


@pytest.mark.parametrize("version", SUPPORTED)
def test_manifests_and_examples_match(version: str) -> None:
    check(list(shipped()), version)


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("values", VALUES, ids=["defaults", "options"])
def test_the_chart_matches(version: str, values: tuple[str, ...]) -> None:
    try:
        helm = require_helm()
    except MissingServiceError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    chart = ROOT / "deploy" / "helm" / "slicewise"
    options = [option for value in values for option in ("--set", value)]
    for command in (["lint", "--strict"], ["template", "slicewise"]):
        done = subprocess.run(
            [helm, *command, chart, *options],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    check(list(documents(done.stdout, "chart")), version)


def test_a_wrong_field_is_found() -> None:
    for _, one in shipped():
        if one["kind"] == "Deployment":
            wrong = {**one, "spec": {**one["spec"], "replica": 2}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(wrong, SUPPORTED[0], strict=True)
            return
    pytest.fail("there is no Deployment")

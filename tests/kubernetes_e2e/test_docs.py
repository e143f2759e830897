"""Runs the examples of docs/kubernetes.md in order.

Its YAML is applied, or given to the chart where it holds values; its ``kubectl`` commands are run
and their output is compared as in tests/docs, regardless of the width of columns. The
controller is started when the document installs it, with the rights of its account, and ends when
the document removes it.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError
from tests.docs.test_examples import Fence, Placeholders, commands, compare, fences
from tests.kubernetes_e2e.api import until
from tests.kubernetes_e2e.cluster import allocated, make_classes, node, publish, until_running
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import running
from tests.kubernetes_e2e.test_helm import by_name, rendered
from tests.kubernetes_e2e.test_install import ACCOUNT, LEASE, as_installed
from tests.kubernetes_e2e.test_unmodified_pods import until_in_force

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "kubernetes.md"
INSTALL = "kubectl apply -f deploy/kubernetes/"
REWRITE = "kubectl apply -f deploy/kubernetes/unmodified-pods/"
LOOKS = 50
LEAVE = "kubectl delete --wait=false -f deploy/kubernetes/"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Plane]:
    """The initial state: two nodes of two GPUs, and the driver's classes."""
    try:
        plane = Plane()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with plane:
        make_classes(plane.api)
        publish(plane.api, [node("gpu-node-1"), node("gpu-node-2")], "A100-80GB", 2)
        yield plane


class Reader:
    """Runs the document on a cluster."""

    def __init__(self, plane: Plane, helm: Path | None, folder: Path, stack: ExitStack) -> None:
        self.plane = plane
        self.helm = helm
        self.folder = folder
        self.stack = stack
        self.controllers: list[ExitStack] = []
        self.applied = self.ran = 0

    def read(self, blocks: list[Fence]) -> None:
        for block in blocks:
            where = f"kubernetes.md, line {block.line}"
            if block.language == "yaml":
                self._apply(block.content, where)
            elif block.language == "console":
                for command in commands(block.content):
                    self._run(command.line, command.output, where)

    def _apply(self, content: str, where: str) -> None:
        self.applied += 1
        found = list(yaml.safe_load_all(content))
        if "apiVersion" not in found[0]:
            if self.helm is not None:
                values = by_name(rendered(self.helm, self.folder, **found[0]))
                assert "Deployment slicewise" in values, where
            return
        said = self._apply_when_admitted(content)
        assert len(said.splitlines()) == len(found), f"{where}: {said}"
        assert all(line.endswith(" created") for line in said.splitlines()), f"{where}: {said}"

    def _apply_when_admitted(self, content: str) -> str:
        """Apply YAML; repeat while the API server has not seen a new PriorityClass yet."""
        for _ in range(LOOKS):
            try:
                return self.plane.kubectl("apply", "-f", "-", input=content)
            except RuntimeError as error:
                if "no PriorityClass with name" not in str(error):
                    raise
            time.sleep(0.2)
        return self.plane.kubectl("apply", "-f", "-", input=content)

    def _say(self, words: list[str], expected: str) -> str:
        """The output of a command; one that only reads is repeated until its output matches."""
        if words[0] == "slicewise":
            return self.plane.plugin(*words[1:])
        said = self.plane.kubectl(*words)
        looks = not {"get", "describe"}.isdisjoint(words)
        for _ in range(LOOKS if looks else 0):
            if Placeholders(of_service=False).matches(_in_columns(expected), _in_columns(said)):
                break
            time.sleep(0.2)
            said = self.plane.kubectl(*words)
        return said

    def _run(self, line: str, expected: str, where: str) -> None:
        words = shlex.split(line)
        assert words[0] == "kubectl", f"{where}: {line}"
        self.ran += 1
        if line == LEAVE:
            self.controllers.pop().close()
        said = self._say(words[1:], expected)
        if line == INSTALL:
            controller = ExitStack()
            flags = [*as_installed(token=str(self.folder / "token")), "--identity=slicewise-0"]
            account = self.plane.kubeconfig_for(ACCOUNT)
            controller.enter_context(running(account, self.folder, *flags))
            self.controllers.append(self.stack.enter_context(controller))
            until("it leads", lambda: self.plane.api.find(LEASE))
        if line == REWRITE:
            until_in_force(self.plane)
        told = _in_columns(expected), _in_columns(said)
        compare(f"{where}, {line}", *told, Placeholders(of_service=False))


def _in_columns(text: str) -> str:
    """Set columns two blanks apart; otherwise they depend on the longest word."""
    return "".join(f"{re.sub(' {2,}', '  ', line.strip())}\n" for line in text.splitlines())


def test_the_document_works(
    cluster: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = fences(DOCUMENT.read_text(encoding="utf-8"))
    with ExitStack() as stack:
        reader = Reader(cluster, _helm(), tmp_path, stack)
        reader.read(blocks)
    assert reader.applied >= 8
    assert reader.ran >= 12
    # Statements in the text.
    api = cluster.api
    for name in ("train", "pipeline", "reader", "writer", "hasty"):
        until_running(api, "vision", name)
    assert allocated(api, "vision", "reader") == allocated(api, "vision", "writer")
    pipeline = allocated(api, "vision", "pipeline")
    assert len({where for where, _ in pipeline}) == 1
    assert sorted(device.split("-")[3] for _, device in pipeline) == [
        "1g10gb",
        "1g10gb",
        "1g20gb",
        "4g40gb",
    ]


def _helm() -> Path | None:
    """The program that renders charts; the chart's own tests report if it is missing."""
    from tests.kubernetes_e2e.programs import require_helm

    try:
        return require_helm()
    except MissingServiceError:
        return None


def test_named_values_exist() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "slicewise" / "values.yaml").read_text())
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "`tls.secretName`" in text
    assert "secretName" in values["tls"]
    for block in fences(text):
        if block.language == "yaml":
            first = next(yaml.safe_load_all(block.content))
            assert "apiVersion" in first or first.keys() <= values.keys()

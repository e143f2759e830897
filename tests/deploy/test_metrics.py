"""Documentation, dashboard and alerts name existing metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.kubernetes.test_controller import Closed
from tests.server.harness import Harness

from slicewise.kubernetes.controller import Controller, ControllerOptions
from slicewise.kubernetes.metrics import ControllerMetrics

ROOT = Path(__file__).parents[2]


def families(text: str) -> set[str]:
    """Return the names of the metrics in a Prometheus response."""
    return set(re.findall(r"^# TYPE (slicewise_\w+) ", text, re.MULTILINE))


@pytest.fixture
def of_service(tmp_path: Path) -> set[str]:
    """The metrics of a running service."""
    harness = Harness(tmp_path)
    found = families(harness.get("/metrics").text)
    harness.close()
    return found


@pytest.fixture
def of_controller() -> set[str]:
    """The metrics of a controller that has not started."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ControllerMetrics(Controller(Closed(), ControllerOptions())))  # type: ignore[arg-type]
    return families(generate_latest(registry).decode())


def documented(page: str) -> set[str]:
    """Return the metrics in the tables of a document."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`slicewise_[^|]*)\|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_metric_of_the_service_is_documented(of_service: set[str]) -> None:
    assert documented("api.md") == of_service


def test_every_metric_of_the_controller_is_documented(of_controller: set[str]) -> None:
    assert documented("kubernetes.md") == of_controller


@pytest.mark.parametrize("file", ["grafana/slicewise.json", "prometheus/slicewise.rules.yml"])
def test_dashboard_and_alerts_query_existing_metrics(
    file: str, of_service: set[str], of_controller: set[str]
) -> None:
    text = (ROOT / "deploy" / file).read_text(encoding="utf-8")
    asked = set(re.findall(r"\bslicewise_[a-z0-9_]+", text))
    known = of_service | of_controller
    # Queries use the series of a histogram.
    series = {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    assert len(asked) > 4
    assert asked - series <= known

"""The alerts, evaluated by Prometheus's own tool: each fires when it should, and only then."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError, require_program

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "slicewise.rules.yml"
HOURS = 4
"""Long enough for every alert's window and delay."""


class Case(NamedTuple):
    """Series that trigger an alert, and such that do not; values in promtool's notation."""

    firing: dict[str, str]
    quiet: dict[str, str]


def level(name: str, firing: float, quiet: float) -> Case:
    """A metric that stays at a value."""
    return Case({name: f"{firing}x500"}, {name: f"{quiet}x500"})


def growth(name: str, firing: float, quiet: float) -> Case:
    """A counter that grows by so much a minute."""
    return Case({name: f"0+{firing}x500"}, {name: f"0+{quiet}x500"})


CASES = {
    "SlicewiseNoLeader": level("slicewise_is_leader", 0, 1),
    "SlicewiseTwoLeaders": Case(
        {
            'slicewise_is_leader{instance="a"}': "1x500",
            'slicewise_is_leader{instance="b"}': "1x500",
        },
        {
            'slicewise_is_leader{instance="a"}': "1x500",
            'slicewise_is_leader{instance="b"}': "0x500",
        },
    ),
    "SlicewiseProviderKeysOld": level("slicewise_provider_keys_age_seconds", 4000, 300),
    "SlicewiseDatabaseTrouble": level("slicewise_database_trouble", 1, 0),
    "SlicewiseClockHeld": level("slicewise_clock_step_seconds", -90, 0),
    "SlicewiseClockStepped": growth("slicewise_clock_steps_total", 1, 0),
    "SlicewiseFragmented": Case(
        {
            'slicewise_requests_rejected_total{reason="fragmented"}': "0+5x500",
            "slicewise_instances_placed_total": "0+95x500",
        },
        {
            'slicewise_requests_rejected_total{reason="fragmented"}': "0+5x500",
            'slicewise_requests_rejected_total{reason="quota"}': "0+1000x500",
            "slicewise_instances_placed_total": "0+1000x500",
        },
    ),
    "SlicewiseRehearsalsFail": Case(
        {
            'slicewise_rehearsals_total{result="failed"}': "0+1x500",
            'slicewise_rehearsals_total{result="finished"}': "7x500",
        },
        {
            'slicewise_rehearsals_total{result="failed"}': "0+1x500",
            'slicewise_rehearsals_total{result="finished"}': "0+1x500",
        },
    ),
    "SlicewiseQueueGrows": Case(
        {"slicewise_queue_depth": "0+10x500"}, {"slicewise_queue_depth": "500x500"}
    ),
    "SlicewiseGuessedTokens": growth("slicewise_authentication_failures_total", 90, 30),
    "SlicewiseMalformedRequests": growth("slicewise_malformed_requests_total", 90, 30),
    "SlicewiseDamage": level("slicewise_snapshots_damaged", 1, 0),
    "SlicewiseAgentLost": Case(
        {'slicewise_agents{state="unknown"}': "1x500"},
        {'slicewise_agents{state="unknown"}': "0x500", 'slicewise_agents{state="ready"}': "5x500"},
    ),
    "SlicewiseQuarantined": level('slicewise_managed_instances{phase="quarantined"}', 1, 0),
    "SlicewiseSickGpu": Case(
        {'slicewise_gpus_held{reason="problem"}': "1x500"},
        {'slicewise_gpus_held{reason="operator"}': "1x500"},
    ),
    "SlicewiseKubernetesUnknown": level("slicewise_k8s_ready", 0, 1),
    "SlicewiseKubernetesNotAllocating": level("slicewise_k8s_allocating", 0, 1),
    "SlicewiseKubernetesQuarantine": level("slicewise_k8s_claims_quarantined", 1, 0),
    "SlicewiseKubernetesPrepareFails": level("slicewise_k8s_prepares_failing", 1, 0),
    "SlicewiseKubernetesUnreadable": level("slicewise_k8s_namespaces_unreadable", 1, 0),
    "SlicewiseKubernetesReturns": Case(
        {
            "slicewise_k8s_allocations_returned_total": "0+20x500",
            "slicewise_k8s_claims_allocated_total": "0+100x500",
        },
        {
            "slicewise_k8s_allocations_returned_total": "0+5x500",
            "slicewise_k8s_claims_allocated_total": "0+100x500",
        },
    ),
    "SlicewiseKubernetesConflicts": growth("slicewise_k8s_conflicts_total", 1, 0.1),
}


def alerts() -> dict[str, dict[str, object]]:
    """The alerts in the rules by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def promtool() -> Path:
    """Prometheus's tool, installed if need be."""
    try:
        return require_program("promtool", package="prometheus")
    except MissingServiceError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


def test_every_alert_has_a_case() -> None:
    assert CASES.keys() == alerts().keys()


@pytest.mark.parametrize("fires", [True, False])
def test_alerts_fire_when_they_should(fires: bool, tmp_path: Path) -> None:
    tests = []
    for name, rule in alerts().items():
        case = CASES[name]
        series = case.firing if fires else case.quiet
        fired = {
            "exp_labels": rule["labels"],
            "exp_annotations": rule["annotations"],
        }
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "alert_rule_test": [
                    {
                        "eval_time": f"{HOURS}h",
                        "alertname": name,
                        "exp_alerts": [fired] if fires else [],
                    }
                ],
            }
        )
    file = tmp_path / "rules.test.yml"
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(json.dumps(content), encoding="utf-8")
    done = subprocess.run(
        [promtool(), "test", "rules", file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [promtool(), "check", "rules", RULES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(alerts())} rules found" in done.stdout

"""Writes slicewise.json, the dashboard for Grafana, beside this file."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

Panel = dict[str, Any]

_PLACED = "sum(rate(slicewise_instances_placed_total[$__rate_interval]))"
_REJECTED = "sum(rate(slicewise_requests_rejected_total[$__rate_interval]))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """The usual percentiles of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", f"p{round(100 * q)}") for q in (0.5, 0.9, 0.99)]


ROWS: list[list[tuple[str, str, list[tuple[str, str]]]]] = [
    [
        ("Accepted share", "percentunit", [(f"{_PLACED} / ({_PLACED} + {_REJECTED})", "accepted")]),
        (
            "Rejected a second, by reason",
            "reqps",
            [
                (
                    "sum by (reason) (rate(slicewise_requests_rejected_total[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
        ),
        (
            "Rejected a second, by profile",
            "reqps",
            [
                (
                    "sum by (profile) (rate(slicewise_requests_rejected_total[$__rate_interval]))",
                    "{{profile}}",
                )
            ],
        ),
    ],
    [
        ("Utilization", "percentunit", [("max by (model) (slicewise_utilization)", "{{model}}")]),
        (
            "Fragmentation, mean F",
            "none",
            [("max by (reading) (slicewise_fragmentation)", "{{reading}}")],
        ),
        (
            "GPUs that could take a profile",
            "none",
            [("max by (model, profile) (slicewise_gpus_with_room)", "{{model}} {{profile}}")],
        ),
    ],
    [
        (
            "Waiting",
            "none",
            [
                ("max(slicewise_queue_depth)", "requests"),
                ("max(slicewise_queue_lines)", "lines"),
                ("max(slicewise_reserved_windows)", "reserved windows"),
            ],
        ),
        ("Wait until placed", "s", quantiles("slicewise_queue_wait_seconds")),
        (
            "Placed a second, by profile",
            "reqps",
            [
                (
                    "sum by (profile) (rate(slicewise_instances_placed_total[$__rate_interval]))",
                    "{{profile}}",
                )
            ],
        ),
    ],
    [
        (
            "Share of requests rejected, and expected by table",
            "percentunit",
            [
                (
                    "sum(rate(slicewise_demand_rejected_total[$__rate_interval]))"
                    " / sum(rate(slicewise_demand_requests_total[$__rate_interval]))",
                    "seen",
                ),
                ("max by (table) (slicewise_rejections_expected)", "{{table}} expected"),
            ],
        ),
        (
            "Table that places requests",
            "none",
            [("max by (table) (slicewise_policy_table)", "{{table}}")],
        ),
        (
            "Rehearsals: share of a core",
            "percentunit",
            [("sum(rate(slicewise_rehearsal_seconds_total[$__rate_interval]))", "rehearsing")],
        ),
    ],
    [
        ("Time to decide a batch", "s", quantiles("slicewise_decide_seconds")),
        ("Time to commit a batch", "s", quantiles("slicewise_commit_seconds")),
        ("Requests that share a commit", "none", quantiles("slicewise_batch_size")),
    ],
    [
        (
            "Requests a second, by status",
            "reqps",
            [
                (
                    "sum by (status) (rate(slicewise_http_requests_total[$__rate_interval]))",
                    "{{status}}",
                )
            ],
        ),
        ("Time to answer", "s", quantiles("slicewise_http_seconds")),
        (
            "Who leads, and trouble",
            "none",
            [
                ("slicewise_is_leader", "{{instance}} leads"),
                ("slicewise_database_trouble", "{{instance}} database trouble"),
            ],
        ),
    ],
    [
        (
            "Kubernetes: pods that wait, and who leads",
            "none",
            [
                ("max(slicewise_k8s_pods_waiting)", "pods"),
                ("slicewise_k8s_leading", "{{pod}} leads"),
                ("slicewise_k8s_watches_down", "{{pod}} watches down"),
            ],
        ),
        (
            "Kubernetes: claims a second",
            "ops",
            [
                (f"sum(rate(slicewise_k8s_{name}_total[$__rate_interval]))", words)
                for name, words in (
                    ("claims_allocated", "allocated"),
                    ("decisions_failed", "came too late"),
                    ("allocations_returned", "returned by the scheduler"),
                    ("allocations_taken_back", "taken back"),
                    ("conflicts", "gave way to others"),
                )
            ],
        ),
        (
            "Kubernetes: share of time spent choosing",
            "percentunit",
            [("sum(rate(slicewise_k8s_deciding_seconds_total[$__rate_interval]))", "choosing")],
        ),
    ],
]


def dashboard() -> Panel:
    """The dashboard as Grafana imports it."""
    ids = count(1)
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels: list[Panel] = []
    for y, row in enumerate(ROWS):
        for x, (title, unit, queries) in enumerate(row):
            panels.append(
                {
                    "id": next(ids),
                    "type": "timeseries",
                    "title": title,
                    "datasource": source,
                    "gridPos": {"h": 8, "w": 8, "x": 8 * x, "y": 8 * y},
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [
                        {
                            "refId": chr(ord("A") + number),
                            "expr": expression,
                            "legendFormat": legend,
                            "datasource": source,
                        }
                        for number, (expression, legend) in enumerate(queries)
                    ],
                }
            )
    return {
        "title": "slicewise",
        "uid": "slicewise",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def text() -> str:
    """The dashboard as JSON."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("slicewise.json").write_text(text(), encoding="utf-8")

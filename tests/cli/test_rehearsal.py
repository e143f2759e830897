"""`slicewise rehearsal` and the table in `slicewise top`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from rich.console import Console

from slicewise.api.cluster import ClusterView
from slicewise.api.policy import PolicyStatus
from slicewise.cli import rehearsal as module
from slicewise.cli.main import exit_status
from slicewise.cli.top_screen import screen


def figure(percent: float) -> dict[str, float]:
    """A figure with an interval around it."""
    return {"value": percent / 100, "low": percent / 110, "high": percent / 90}


def candidate(table: str, percent: float, fewer: float, in_use: bool = False) -> dict[str, Any]:
    """A candidate of a rehearsal."""
    return {
        "table": table, "words": "does something", "leases": "+" in table, "in_use": in_use,
        "runs": 48, "rejected": figure(percent), "rejected_slices": figure(2 * percent),
        "fewer": figure(fewer),
    }  # fmt: skip


STATUS: dict[str, Any] = {
    "seq": 7, "policy": "rehearsed", "table": "time+leases", "words": "keeps places open",
    "since": "2026-11-19T17:00:00.000Z", "switches": 3,
    "rehearsals": {
        "activity": "waiting", "detail": "", "share": 0.05, "finished": 4, "failed": 0,
        "seconds": 12.5,
    },
    "why": "it is better", "asked_for": ["1g.10gb"],
    "demand": {
        "requests": 41310, "steady_for": 1200, "changes": 1, "requests_per_hour": 412.4,
        "mean_lifetime": 5281.0, "stated": 0.876,
        "shares": [
            {"wanted": {"profile": "1g.10gb", "need": None, "models": []}, "share": 0.9},
            {
                "wanted": {
                    "profile": None, "need": {"compute": 2, "memory_gb": 20}, "models": ["A30"]
                },
                "share": 0.1,
            },
        ],
    },
    "seen": {"requests": 6204, "rejected": 30},
    "rehearsal": {
        "at": "2026-11-19T18:00:00.000Z", "load": 0.851,
        "candidates": [
            candidate("least-lost", 1.0, 0), candidate("time", 0.7, 0.3),
            candidate("time+leases", 0.5, 0.5, in_use=True), candidate("time-roots", 0.9, 0.1),
            candidate("time-shares", 2.0, -1.0),
        ],
    },
}  # fmt: skip


def status_with(**changes: Any) -> PolicyStatus:
    """A status with some other fields."""
    return msgspec.convert({**STATUS, **changes}, PolicyStatus)


def told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: PolicyStatus,
    *options: str,
) -> str:
    """What the command prints if the service answers with a status."""

    class Answers:
        def policy(self) -> PolicyStatus:
            return status

    @contextmanager
    def connect(*arguments: object) -> Iterator[Answers]:
        yield Answers()

    monkeypatch.setattr(module, "connect", connect)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert exit_status(("rehearsal", *options)) == 0
    return capsys.readouterr().out


def test_the_command_shows_the_table_the_demand_and_every_candidate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(monkeypatch, capsys, status_with(since="2020-01-01T17:00:00.000Z"))
    lines = text.splitlines()
    assert lines[:9] == [
        "policy     rehearsed",
        "table      time+leases: keeps places open",
        "since      2020-01-01, 3 changes in all",
        "why        it is better",
        "seen       0.48% of 6,204 requests rejected since then",
        "demand     41,310 requests, 412 an hour, mean lifetime 5,281 s, 88% of lifetimes "
        "announced, changed 1 time, last 1,200 requests ago",
        "asked for  1g.10gb 90.0%, 2 compute slices and 20 GB on A30 10.0%",
        lines[7],
        "rehearsal  waiting until the demand changes or the next one is due",
    ]
    assert lines[7].endswith("at a load of 85%")
    assert lines[10].split() == [
        *("Table", "Rejected", "%", "95%", "interval", "Slices", "%", "Fewer", "by", "Runs"),
    ]
    assert [line.split()[0] for line in lines[11:]] == [
        *("least-lost", "time", "time+leases", "time-roots", "time-shares"),
    ]
    assert lines[13].split() == [
        *("time+leases", "0.500", "0.455", "to", "0.556", "1.000"),
        *("0.455", "to", "0.556", "48", "in", "use"),
    ]


def test_a_tenant_sees_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hidden = dict.fromkeys(("why", "asked_for", "demand", "seen", "rehearsal"))
    assert told(monkeypatch, capsys, status_with(since=None, **hidden)).splitlines() == [
        "policy     rehearsed",
        "table      time+leases: keeps places open",
        "since      the beginning",
        "rehearsal  waiting until the demand changes or the next one is due",
    ]


def test_another_policy_and_the_reason_why_nothing_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    off = STATUS["rehearsals"] | {"activity": "off", "detail": "the policy is set to mfi"}
    nothing: dict[str, Any] = {
        "requests": 0,
        "steady_for": 0,
        "changes": 0,
        "requests_per_hour": 0.0,
    }
    nothing |= {"mean_lifetime": None, "stated": 0.0, "shares": []}
    other = status_with(
        policy="mfi", table=None, words="As in the paper.", since=None, why=None,
        rehearsals=off, rehearsal=None, demand=nothing, seen={"requests": 0, "rejected": 0},
    )  # fmt: skip
    assert told(monkeypatch, capsys, other).splitlines() == [
        "policy     mfi",
        "table      As in the paper.",
        "rehearsal  off: the policy is set to mfi",
    ]


def test_json_is_the_answer_of_the_service(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(told(monkeypatch, capsys, status_with(), "--json")) == STATUS


def test_top_shows_the_table_and_what_the_best_ones_are_expected_to_reject() -> None:
    cluster = msgspec.convert(
        {
            "seq": 7, "history": "h", "policy": "rehearsed", "gpus": 0, "active_gpus": 0,
            "slices": 0, "free_slices": 0, "instances": 0, "waiting": 0,
            "fragmentation": {"partial": 0, "overlap": 0}, "models": [], "nodes": [],
            "devices": None,
        },
        ClusterView,
    )  # fmt: skip

    def drawn(policy: PolicyStatus | None) -> str:
        console = Console(file=io.StringIO(), width=100, highlight=False)
        with console.capture() as capture:
            console.print(screen(cluster, console, policy=policy))
        return capture.get()

    text = drawn(status_with(since="2020-01-01T17:00:00.000Z"))
    assert "by rehearsed   table time+leases since 2020-01-01   0.48% rejected since then" in text
    rows = [line.split() for line in text.splitlines() if "% to " in line]
    assert [row[0] for row in rows] == ["time+leases", "time", "least-lost"]
    assert rows[0][-2:] == ["in", "use"]
    assert "table" not in drawn(None)
    assert "table" not in drawn(status_with(table=None, rehearsal=None))

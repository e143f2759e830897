"""The queueing experiment and moves on the command line: what is printed, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from slicewise.cli.main import exit_status

COMMAND = ["simulate", "--gpus", "8", "--runs", "2", "--duration", "5", "--workers", "1"]
QUEUEING = [*COMMAND, "--experiment", "queueing", "--load", "1"]
STEADY = [
    *COMMAND, "--experiment", "steady", "--load", "0.95", "--policy", "mfi,least-lost",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], command: list[str], *more: str) -> str:
    assert exit_status([*command, *more]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_disciplines_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    more = ["--scenario", "even", "--scenario", "starving", "--discipline", "fifo,fair",
            "--patience", "0.5", "--reserve-after", "0.2", "--reserve-share", "0.3"]  # fmt: skip
    text = printed(capsys, QUEUEING, *more, "--json", "--csv", str(out), "--plot", str(plot))
    document = json.loads(text)
    rows = document["results"]
    assert document["experiment"] == "queueing"
    seen = [row["scenario"] + " " + row["discipline"] for row in rows if row["group"] == "all"]
    assert seen == ["even fifo", "even fair", "starving fifo", "starving fair"]
    assert {row["policy"] for row in rows} == {"least-lost"}
    settings = ("patience_lifetimes", "reserve_after_lifetimes", "reserve_share")
    assert [rows[0][name] for name in settings] == [0.5, 0.2, 0.3]
    assert rows[0]["gave_up_share"] > 0
    assert {row["name"] for row in rows if row["group"] == "profile"} >= {"1g.10gb", "7g.80gb"}
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert float(table[0]["mean_wait_lifetimes"]) == rows[0]["mean_wait_lifetimes"]
    assert table[1]["utilization_percent"] == ""
    assert plot.read_text().startswith("<?xml")


def test_the_table_has_a_column_for_each_discipline(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--scenario", "starving", "--discipline", "fifo", "--discipline", "fair-exact"]
    text = printed(capsys, QUEUEING, *more)
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert text.split()[:2] == ["fifo", "fair-exact"]
    assert "starving, least-lost" in lines
    for label in ("mean wait", "gave up %", "false waits %", "Jain's index", "attempts a pass"):
        assert lines[label].count("±") + lines[label].count(" to ") == 2
    assert "0.0±0.0" in lines["false waits %"]
    assert "  cem " in text
    assert "8 GPUs at load 1, 2 runs, patience 1; waits in % of the mean lifetime" in " ".join(
        text.split()
    )
    forever = ["--patience", "inf", "--load", "0.6", "--discipline", "fair"]
    assert "waiting for ever" in " ".join(printed(capsys, QUEUEING, *forever).split())


@pytest.mark.parametrize(
    ("command", "arguments", "problem"),
    [
        (STEADY, ["--patience", "3"], "--patience needs tenants that wait: add --experiment queu"),
        (STEADY, ["--scenario", "even"], "--scenario needs tenants that wait"),
        (STEADY, ["--reserve-after", "1"], "--reserve-after needs tenants that wait"),
        (QUEUEING, ["--scenario", "flod"], "unknown scenario 'flod'; did you mean flood?"),
        (QUEUEING, ["--scenario", "even", "--scenario", "even"], "scenario 'even' is named twice"),
        (QUEUEING, ["--discipline", "fifo,fare"], "unknown discipline 'fare'; did you mean fair"),
        (QUEUEING, ["--discipline", "fair,fair"], "discipline 'fair' is named twice"),
        (QUEUEING, ["--distribution", "uniform"], "choose with --scenario"),
        (QUEUEING, ["--migrate", "0.02"], "--migrate needs --experiment steady"),
        (QUEUEING, ["--patience", "nan"], "patience nan is not in 0..1000000"),
        (QUEUEING, ["--patience", "inf"], "a queue grows forever"),
        (QUEUEING, ["--reserve-share", "2"], "share of reserved GPUs must be 0 to 1, not 2.0"),
        (QUEUEING, ["--reserve-after", "-1"], "must not be negative"),
        (COMMAND, ["--migrate", "0.02"], "--migrate needs --experiment steady"),
    ],
)
def test_what_cannot_be_costs_one_line(
    command: list[str], arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status([*command, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    assert problem in err


def test_moves_are_measured_beside_rejection(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, STEADY, "--migrate", "0.02", "--json")
    rows = {row["policy"]: row for row in json.loads(text)["results"]}
    assert 0 < rows["mfi"]["migrated_share"] <= 0.02
    assert rows["oracle"]["migrated_share"] is None
    still = {row["policy"]: row for row in json.loads(printed(capsys, STEADY, "--json"))["results"]}
    assert rows["mfi"]["rejected_share"] < still["mfi"]["rejected_share"]
    assert "moves %" in printed(capsys, STEADY, "--migrate", "0.02")

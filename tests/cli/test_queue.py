"""A queue on the command line: its options, what is printed, and what is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from slicewise.cli.main import exit_status

COMMAND = [
    "simulate", "--experiment", "steady", "--load", "0.95", "--policy", "mfi,least-lost", "--gpus",
    "10", "--runs", "3", "--duration", "10", "--workers", "1",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_status([*COMMAND, *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_waiting_is_measured_beside_rejection(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    queue = ["--queue", "backfill", "--backfill", "8", "--overtakes", "5", "--patience", "0.5",
             "--priority-share", "0.2"]  # fmt: skip
    text = printed(capsys, *queue, "--json", "--csv", str(out), "--plot", str(plot))
    rows = json.loads(text)["results"]
    assert [row["policy"] for row in rows] == ["mfi", "least-lost"], "no oracle beside a queue"
    row = rows[0]
    assert [row[name] for name in ("backfill", "overtakes", "patience_lifetimes")] == [8, 5, 0.5]
    assert row["rejected_share"] > 0
    assert row["waited_share"] > 0
    assert row["wait_p99_lifetimes"] <= 0.55
    assert set(row["by_priority"]) == {"0", "1"}
    assert "7g.80gb" in row["by_profile"]
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert float(table[1]["mean_wait_lifetimes"]) == rows[1]["mean_wait_lifetimes"]
    assert "by_profile" not in table[0]
    assert plot.read_text().startswith("<?xml")


def test_the_table_says_how_the_queue_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    fifo = " ".join(printed(capsys, "--queue", "fifo").split())
    assert "fifo, patience 1 mean lifetimes; waits in % of the mean lifetime" in fifo
    assert "rejected % waited % mean wait 95% 99% util. %" in fifo
    filled = " ".join(printed(capsys, "--queue", "backfill", "--patience", "inf").split())
    assert "backfill 16, 16 overtakes, waiting for ever" in filled
    assert "left: still waiting at the end" in filled
    assert "rejected" not in filled
    first = " ".join(printed(capsys, "--queue", "fifo", "--priority-share", "0.25").split())
    assert "first: of the 25% with priority" in first


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--backfill", "3"], "--backfill needs a queue: add --queue fifo or --queue backfill"),
        (["--patience", "3"], "--patience needs a queue"),
        (["--priority-share", "0"], "--priority-share needs a queue"),
        (["--queue", "fifo", "--overtakes", "3"], "--overtakes: fifo has no backfill"),
        (["--queue", "fifo", "--experiment", "published"], "add --experiment steady"),
        (["--queue", "lifo"], "'lifo' is not one of"),
        (["--queue", "backfill", "--backfill", "-1"], "backfill must be 0 to 1000000, not -1"),
        (["--queue", "backfill", "--overtakes", "-1"], "overtakes must be 0 to 1000000"),
        (["--queue", "fifo", "--patience", "nan"], "patience nan is not in 0..1000000"),
        (["--queue", "fifo", "--patience", "inf", "--load", "1"], "a queue grows forever"),
        (["--queue", "fifo", "--priority-share", "2"], "priority share 2.0 is not in 0..1"),
    ],
)
def test_what_cannot_be_costs_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status([*COMMAND, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    assert problem in err


def test_moves_are_measured_beside_rejection(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--migrate", "0.02", "--json")
    rows = {row["policy"]: row for row in json.loads(text)["results"]}
    assert 0 < rows["mfi"]["migrated_share"] <= 0.02
    assert rows["oracle"]["migrated_share"] is None
    still = {row["policy"]: row for row in json.loads(printed(capsys, "--json"))["results"]}
    assert rows["mfi"]["rejected_share"] < still["mfi"]["rejected_share"]
    assert "moves %" in printed(capsys, "--migrate", "0.02")


@pytest.mark.parametrize("more", [["--queue", "fifo"], ["--experiment", "published"]])
def test_moves_need_the_steady_experiment_and_no_queue(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert exit_status([*COMMAND, "--migrate", "0.02", *more]) == 2
    assert "--migrate needs" in capsys.readouterr().err

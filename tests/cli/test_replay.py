"""`slicewise replay` as typed in a shell, and its error messages."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from slicewise.cli.main import exit_status

PODS_HEADER = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time"
)


@pytest.fixture
def pods(tmp_path: Path) -> Path:
    """A made-up trace in the published form: a thin head, a dense part, some broken rows."""
    rows = ["old-0,1,1,1,1000,,LS,Running,0,900000,0", "old-1,1,1,1,460,,LS,Failed,5,20,5"]
    for i in range(300):
        begin = 500_000 + 100 * i
        gpus = 2 if i % 40 == 7 else int(i % 11 != 3)
        milli = (1000, 810, 470, 320, 230, 110)[i % 6] if gpus == 1 else 1000 * min(gpus, 1)
        end = begin + 100 * (i * 7 % 13)
        rows.append(f"pod-{i},1,1,{gpus},{milli},,BE,Failed,{begin},{end},{begin}")
    rows += ["broken,1,1,1,1000,,LS,Running,soon,900000,0", "short,1"]
    file = tmp_path / "pods.csv"
    file.write_text("\n".join([PODS_HEADER, *rows]) + "\n")
    return file


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert exit_status(["replay", *arguments, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_everything_is_said_and_counted(
    capsys: pytest.CaptureFixture[str], pods: Path, tmp_path: Path
) -> None:
    table, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    options = (
        str(pods), "--gpus", "4", "--policy", "mfi,first-fit", "--policy", "round-robin-strict",
        "--scale", "0.4", "--compress", "2",
    )  # fmt: skip
    found = document(capsys, *options, "--csv", str(table), "--plot", str(plot))
    assert found["format"] == "alibaba-2023"
    assert (found["model"], found["gpus"], found["scale"], found["compress"]) == (
        "A100-80GB", 4, 0.4, 2,
    )  # fmt: skip
    assert found["begin_seconds"] == 500_100, "the first of the dense part has no lifetime"
    assert found["measured_seconds"] == pytest.approx(100 * 297 / 2)
    assert found["preplaced"] == 1
    left = found["left_out"]
    assert left["without_gpu"] > 20
    assert left["zero_lifetime"] > 10
    assert (left["over_before_begin"], left["no_profile"], left["malformed"]) == (1, 0, 2)
    assert [row["line"] for row in found["malformed_rows"]] == [304, 305]
    assert found["arrivals"] + sum(left.values()) + found["preplaced"] == 304
    for row in found["results"]:
        assert row["arrivals"] == found["arrivals"]
        assert sum(row["rejected_by_reason"].values()) == row["rejected"] > 0
        assert sum(kind["arrivals"] for kind in row["by_profile"].values()) == row["arrivals"]
        assert row["utilization_percent"] <= row["peak_utilization_percent"] <= 100
    with table.open(newline="") as file:
        flat = list(csv.DictReader(file))
    named = ["mfi", "first-fit", "round-robin-strict", "oracle"]
    assert [row["policy"] for row in flat] == [row["policy"] for row in found["results"]] == named
    limit = found["results"][-1]["rejected_share"]
    assert {row["oracle_rejected_share"] for row in found["results"]} == {limit}
    assert {row["oracle_rejected_share"] for row in flat} == {str(limit)}
    assert {row["oracle_missing"] for row in flat} == {""}
    assert found["gpus_per_node"] == 8
    asked = found["results"][0]["by_profile"]["2 x 7g.80gb"]["arrivals"]
    assert int(flat[0]["by_profile.2 x 7g.80gb.arrivals"]) == asked > 0
    assert plot.read_text().startswith("<?xml")

    assert exit_status(["replay", *options]) == 0
    text = capsys.readouterr().out
    assert "arrivals compressed 2 times" in text
    assert "shares x 0.4" in text
    assert "1 placed beforehand" in text
    assert "line 304: creation_time 'soon' is not a time" in text
    (line,) = [line for line in text.splitlines() if line.startswith("oracle")]
    assert line.split()[1] == f"{100 * limit:.2f}"
    assert line.split()[-3:] == ["-", "-", "-"]
    assert "a node" not in text


def test_nodes_are_said_and_used(capsys: pytest.CaptureFixture[str], pods: Path) -> None:
    options = (str(pods), "--gpus", "4", "--policy", "peer-das,mfi", "--gpus-per-node")
    one, two = (document(capsys, *options, each) for each in ("4", "2"))
    assert (one["gpus_per_node"], two["gpus_per_node"]) == (4, 2)
    das, mfi, limit = zip(one["results"], two["results"], strict=True)
    assert das[0] != das[1], "it chooses a node first"
    assert mfi[0] == mfi[1]
    assert limit[0] == limit[1]
    assert exit_status(["replay", *options, "3"]) == 0
    assert "on 4 A100-80GB, 3 a node, shares x 1" in capsys.readouterr().out


def test_without_the_limit(capsys: pytest.CaptureFixture[str], tmp_path: Path, pods: Path) -> None:
    found = document(capsys, str(pods), "--policy", "mfi", "--no-oracle")
    (row,) = found["results"]
    assert row["oracle_rejected_share"] is None
    assert row["oracle_missing"] == "it was not requested"
    file, table, plot = tmp_path / "t.csv", tmp_path / "rows.csv", tmp_path / "plot.png"
    file.write_text("arrival,lifetime,profile\n1,9,1g.10gb\n2,9,1g.10gb+me\n")
    options = (str(file), "--policy", "mfi", "--csv", str(table), "--plot", str(plot))
    assert exit_status(["replay", *options]) == 0
    text = capsys.readouterr().out
    assert "oracle: no exact rule says what A100-80GB could hold: media-extension may" in text
    assert [line.split()[1:] for line in text.splitlines() if line.startswith("oracle ")] == [
        ["-"] * 7
    ]
    with table.open(newline="") as stored:
        mfi, limit = csv.DictReader(stored)
    assert (mfi["rejected"], limit["rejected"]) == ("0", "")
    assert limit["by_profile.1g.10gb+me.arrivals"] == "1"
    assert "media-extension" in mfi["oracle_missing"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_another_beginning_and_another_model(
    capsys: pytest.CaptureFixture[str], pods: Path
) -> None:
    whole = document(capsys, str(pods), "--begin", "0", "--model", "A30", "--policy", "mfi")
    assert whole["preplaced"] == 0
    assert "4g.24gb" in whole["results"][0]["by_profile"]
    too_large = document(capsys, str(pods), "--scale", "1.5", "--policy", "mfi")
    assert too_large["left_out"]["no_profile"] > 50
    assert exit_status(["replay", str(pods), "--begin", "510000", "--gpus", "1"]) == 0
    assert exit_status(["replay", str(pods), "--begin", "900000"]) == 2


def test_many_malformed_rows_do_not_fill_the_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.csv"
    good = "0,5,1g.10gb\n1,5,1g.10gb\n"
    file.write_text("arrival,lifetime,profile\n" + good + "x,5,1g.10gb\n" * 30 + "9,1,8g.99gb\n")
    assert exit_status(["replay", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.count("  line ") == 5
    assert "31 malformed" in text
    assert "and 26 more" in text
    everything = document(capsys, str(file))
    assert len(everything["malformed_rows"]) == 31
    file.write_text("arrival,lifetime,profile\n" + "x,5,1g.10gb\n" * 30)
    assert exit_status(["replay", str(file), "--json"]) == 2
    assert capsys.readouterr().err.endswith(" and 25 more\n"), "no JSON, nothing it could list"
    assert everything["scale"] is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--policy", "fifo"], "unknown policy 'fifo'"),
        (["--gpus", "0"], "gpus must be 1 to"),
        (["--gpus-per-node", "0"], "gpus per node must be 1 to 1000000, not 0"),
        (["--scale", "0"], "--scale must be 0.001 to 1000, not 0"),
        (["--scale", "nan"], "--scale must be"),
        (["--compress", "-1"], "--compress must be"),
        (["--compress", "inf"], "--compress must be"),
        (["--begin", "-5"], "--begin must be"),
        (["--format", "xml"], "'xml' is not one of"),
        (["--format", "plain"], "format plain needs the column 'arrival'"),
        (["--strict"], "pods.csv, line 304: creation_time 'soon'"),
        (["--plot", "x.gif"], "must end in .png or .svg"),
        (["--csv", "/no/such/folder/x.csv"], "cannot be written"),
        (["--model", "T4"], "unknown GPU model 'T4'"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], pods: Path, options: list[str], problem: str
) -> None:
    assert exit_status(["replay", str(pods), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    assert problem in err


@pytest.mark.parametrize(
    ("text", "options", "problem"),
    [
        ("", [], "the header is of no known format"),
        ("arrival,lifetime,profile\n", [], "has no request that can be replayed. It has no"),
        ("arrival,lifetime,profile\n1,0,1g.10gb\n", [], "1 of zero lifetime"),
        ("arrival,lifetime,profile\n1,1,1g.99gb\n", [], "line 2: unknown profile"),
        ("arrival,lifetime,profile\n1,1,1g.10gb\n", ["--scale", "0.5"], "a plain trace has none"),
    ],
)
def test_traces_with_nothing_to_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, options: list[str], problem: str
) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    assert exit_status(["replay", str(file), *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert problem in err


def test_one_moment_alone_has_no_averages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival,lifetime,profile\n1,1,1g.10gb\n")
    plot = tmp_path / "plot.png"
    found = document(capsys, str(file), "--plot", str(plot))
    assert found["results"][0]["utilization_percent"] is None
    assert found["results"][0]["peak_active_gpus_percent"] == 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert exit_status(["replay", str(file)]) == 0
    assert " - " in capsys.readouterr().out

"""`slicewise plan` as typed in a shell, and its error messages."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from slicewise.cli.main import exit_status
from slicewise.lab import planning
from slicewise.lab.experiment import Tick
from slicewise.lab.runner import Outcome

SMALL = ["--load", "6", "--target-rejection", "2%", "--runs", "6", "--workers", "1"]
TRACE = str(Path(__file__).parents[2] / "examples" / "trace.csv")


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert exit_status(["plan", *arguments, "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_everything_is_said_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, points, plot = (tmp_path / name for name in ("rows.csv", "curve.csv", "plot.svg"))
    options = [
        *SMALL, "--mix", "uniform", "--distribution", "bimodal", "--policy", "least-lost,worst-fit",
        "--reference", "peer-nvidia-dra",
    ]  # fmt: skip
    files = ["--csv", str(table), "--curve", str(points), "--plot", str(plot)]
    found = document(capsys, *options, *files)
    assert (found["demand_gpus"], found["target_rejected_share"]) == (6, 0.02)
    assert (found["model"], found["count"], found["reference"]) == (
        "A100-80GB", "requests", "peer-nvidia-dra",
    )  # fmt: skip
    assert (found["runs"], found["seed"], found["duration"], found["warmup"]) == (6, 1, 40, 3)
    names = ["least-lost", "worst-fit", "peer-nvidia-dra", "oracle"]
    assert [row["policy"] for row in found["results"]] == names * 2
    needed = {(r["distribution"], r["policy"]): r["needed_gpus"] for r in found["results"]}
    for row in found["results"]:
        reference = needed[row["distribution"], "peer-nvidia-dra"]
        assert row["saved_gpus"] == reference - row["needed_gpus"]
        low, high = row["needed_gpus_ci95"]
        assert low <= row["needed_gpus"] <= high
        at = [
            point["rejected_share"]
            for point in found["curve"]
            if (point["policy"], point["distribution"]) == (row["policy"], row["distribution"])
            and point["gpus"] == row["needed_gpus"]
        ]
        assert at == [row["rejected_share"]]
    with table.open(newline="") as file:
        flat = list(csv.DictReader(file))
    assert [int(row["needed_gpus"]) for row in flat] == list(needed.values())
    assert flat[0]["needed_gpus_ci95_low"] == str(found["results"][0]["needed_gpus_ci95"][0])
    with points.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found["curve"])
    assert plot.read_text().startswith("<?xml")

    assert exit_status(["plan", *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Demand of 6 A100-80GB, at most 2% of requests rejected\n6 runs")
    lines = [line.split() for line in out.splitlines()]
    assert ["uniform"] in lines
    assert ["bimodal"] in lines
    ours = next(line for line in lines if line[:1] == ["least-lost"])
    assert ours[1] == str(needed["uniform", "least-lost"])
    assert "saved: beside peer-nvidia-dra, paired" in out
    assert err.startswith("round 1: 48 clusters to try\n")


def test_the_same_demand_in_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    rest = [*SMALL[2:], "--policy", "first-fit", "--no-oracle"]
    plain = document(capsys, "--load", "6", *rest)
    for words in ("48 slices", "48slices", "6 GPUs", "6.0", "1 slice"):
        if words == "1 slice":
            assert exit_status(["plan", "--load", words, *rest]) == 2
            assert "load must be 1 to 1000000 GPUs, not 0.125" in capsys.readouterr().err
        else:
            assert document(capsys, "--load", words, *rest) == plain
    share = [*rest[:1], "0.02", *rest[2:]]
    assert document(capsys, "--load", "6", *share) == plain
    assert plain["results"][0]["oracle_missing"] == "it was not requested"


def test_slices_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--load", "6", "--target-rejection", "2%", "--policy", "first-fit"]
    options += ["--workers", "1", "--count", "slices", "--step", "4", "--seed", "3"]
    found = document(capsys, *options)
    (ours, _) = found["results"]
    assert found["count"] == "slices"
    assert ours["rejected_slices_share"] <= 0.02
    assert all(point["gpus"] % 4 == 0 for point in found["curve"])
    assert exit_status(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert "at most 2% of requested slices rejected, in steps of 4 GPUs" in out
    assert f" {100 * ours['rejected_slices_share']:.3g} " in out


def test_a_seldom_rejection_takes_more_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--load", "2", "--policy", "first-fit", "--workers", "1", "--no-oracle"]
    assert exit_status(["plan", *rest, "--target-rejection", "1%"]) == 0
    out, err = capsys.readouterr()
    assert "1% is rare: 34 runs instead of 20." in err
    assert "34 runs" in out
    assert exit_status(["plan", *rest, "--target-rejection", "1%", "--runs", "20"]) == 2
    err = capsys.readouterr().err
    assert "1% of 5,920 requests is 59 rejections, and a result needs 100" in err
    assert "use --runs 34" in err


def test_policies_that_are_slow_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--load", "1", "--target-rejection", "20%", "--runs", "5", "--duration", "30"]
    assert exit_status(["plan", *options, "--workers", "1", "--policy", "peer-das"]) == 0
    out, err = capsys.readouterr()
    assert "peer-das runs on the slow path: it scans GPUs one by one." in err
    assert "simulating: 100% of" in err
    assert "first-fit" in out, "the reference takes part even if it is not named"


def test_one_run_has_no_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--load", "9", "--target-rejection", "20%", "--runs", "1", "--policy", "first-fit"]
    assert exit_status(["plan", *options, "--no-oracle"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  first-fit")
    )
    assert [line.split()[at] for at in (2, 6, 8)] == ["-", "-", "-"]


def test_where_there_is_no_limit_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--policy", "first-fit", "--mix", "1g.10gb+me=0.5,3g.40gb=0.5"]
    assert exit_status(["plan", *options]) == 0
    out = capsys.readouterr().out
    assert "oracle: no exact rule says what A100-80GB could hold" in out


def test_recorded_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, table = tmp_path / "plot.png", tmp_path / "rows.csv"
    options = ["--trace", TRACE, "--target-rejection", "10%", "--policy", "mfi,round-robin"]
    found = document(capsys, *options, "--plot", str(plot), "--csv", str(table))
    assert (found["format"], found["arrivals"], found["compress"]) == ("plain", 13, 1)
    assert [row["policy"] for row in found["results"]] == [
        "mfi", "round-robin", "first-fit", "oracle",
    ]  # fmt: skip
    for row in found["results"]:
        assert row["rejected"] <= 1
        assert row["first_gpus"] <= row["needed_gpus"]
        assert "needed_gpus_ci95" not in row, "one sample has no interval"
    assert plot.read_bytes().startswith(b"\x89PNG")
    with table.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 4
    assert exit_status(["plan", *options, "--compress", "2"]) == 0
    out, err = capsys.readouterr()
    assert "13 requests, " in out
    assert "arrivals compressed 2 times" in out
    assert "this size and every larger one tried meet the target" in out
    assert "round 1" in err


def test_what_was_left_out_of_a_trace_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.csv"
    rows = "".join(f"{i},50,{('7g.80gb', '1g.10gb')[i % 2]}\n" for i in range(60))
    file.write_text("arrival,lifetime,profile\n" + rows + "x,5,1g.10gb\n")
    rest = ["--begin", "10", "--policy", "first-fit"]
    assert exit_status(["plan", "--trace", str(file), *rest]) == 0
    out = capsys.readouterr().out
    assert "10 placed beforehand" in out
    assert "Rows left out: 1 malformed." in out
    assert "line 62: arrival 'x' is not a time" in out
    said = document(capsys, "--trace", str(file), *rest)
    assert said["left_out"]["malformed"] == 1
    assert [row["line"] for row in said["malformed_rows"]] == [62]
    assert exit_status(["plan", "--trace", str(file), "--strict"]) == 2
    assert "line 62" in capsys.readouterr().err
    file.write_text("arrival,lifetime,profile\n")
    assert exit_status(["plan", "--trace", str(file)]) == 2
    assert "has no request that can be replayed" in capsys.readouterr().err


def test_the_published_form_is_scaled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "pods.csv"
    rows = "".join(f"1,{500 + i % 3 * 100},{10 * i},{10 * i + 300}\n" for i in range(200))
    file.write_text("num_gpu,gpu_milli,creation_time,deletion_time\n" + rows)
    rest = ["--policy", "first-fit", "--target-rejection", "1%"]
    large = document(capsys, "--trace", str(file), *rest)
    small = document(capsys, "--trace", str(file), "--scale", "0.4", *rest)
    assert small["scale"] == 0.4
    assert small["results"][0]["needed_gpus"] < large["results"][0]["needed_gpus"]
    assert exit_status(["plan", "--trace", str(file), "--scale", "0.4", *rest]) == 0
    assert "shares x 0.4" in capsys.readouterr().out


def test_a_policy_that_never_meets_the_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A strict policy may reject on any cluster what another would place."""
    file = tmp_path / "t.csv"
    rows = "0,9000,1g.10gb\n" * 3 + "".join(f"{9 * i + 1},3,7g.80gb\n" for i in range(20))
    file.write_text("arrival,lifetime,profile\n" + rows)
    options = ["--trace", str(file), "--policy", "round-robin-strict", "--plot"]
    assert exit_status(["plan", *options, str(tmp_path / "p.svg")]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("round-robin-strict "))
    assert line.split()[1:] == ["-"] * 7
    assert "round-robin-strict: even 4 GPUs, as many as there are instances at most, do not" in out


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(experiment: Any, workers: int | None, tick: Tick) -> Outcome:
        return Outcome(experiment, interrupted=True)

    monkeypatch.setattr(planning, "run_experiment", stopped)
    assert exit_status(["plan", *SMALL]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("Interrupted: an unfinished search has no result.\n")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "the demand is missing: --load 85 (GPUs), or --trace FILE"),
        (["--load", "0.85"], "load must be 1 to 1000000 GPUs, not 0.85: it is the demand itself"),
        (["--load", "85%"], "--load '85%' is not a demand: write 85 (in whole GPUs) or"),
        (["--load", "many"], "is not a demand"),
        (["--load", "nan"], "is not a demand"),
        (["--load", "9" * 400], "load must be 1 to"),
        (["--load", "85", "--target-rejection", "few"], "is not a share: write 0.1% or 0.001"),
        (["--load", "85", "--target-rejection", "-1%"], "is not a share"),
        (["--load", "85", "--target-rejection", "1"], "must be 0.00001% to 50%, not 100%"),
        (["--load", "85", "--target-rejection", "0"], "not 0%"),
        (["--load", "85", "--target-rejection", "1e-99"], "must be 0.00001%"),
        (["--load", "85", "--target-rejection", "0.00001%"], "or --runs 69658"),
        (["--load", "85", "--mix", "normal"], "unknown distribution 'normal'"),
        (["--load", "85", "--policy", "fifo"], "unknown policy 'fifo'"),
        (["--load", "85", "--policy", "default,rehearsed"], "'rehearsed' is named twice"),
        (["--load", "85", "--reference", "fifo"], "unknown policy 'fifo'"),
        (["--load", "85", "--reference", "mfi,best-fit"], "--reference takes one policy"),
        (["--load", "85", "--step", "0"], "step must be 1 to"),
        (["--load", "85", "--runs", "0"], "rejections, and a result needs 100"),
        (["--load", "85", "--duration", "3"], "duration must be 4 to"),
        (["--load", "85", "--seed", "-1"], "seed must be"),
        (["--load", "85", "--workers", "0"], "workers must be 1 to"),
        (["--load", "85", "--gpus-per-node", "0"], "gpus per node must be"),
        (["--load", "85", "--count", "tenants"], "'tenants' is not one of"),
        (["--load", "85", "--plot", "x.gif"], "must end in .png or .svg"),
        (["--load", "85", "--curve", "/no/such/x.csv"], "cannot be written"),
        (["--load", "85", "--scale", "0.4"], "--scale is for recorded requests: it needs --trace"),
        (["--load", "85", "--strict"], "--strict is for recorded requests"),
        (["--trace", TRACE, "--load", "85"], "--load is for drawn requests: it cannot be used"),
        (["--trace", TRACE, "--runs", "20"], "--runs is for drawn requests"),
        (["--trace", TRACE, "--mix", "uniform"], "--mix is for drawn requests"),
        (["--trace", TRACE, "--scale", "0.4"], "a plain trace has none"),
        (["--trace", TRACE, "--gpus-per-node", "0"], "gpus per node must be"),
        (["--trace", TRACE, "--compress", "0"], "--compress must be"),
        (["--trace", "no-such.csv"], "cannot be read"),
    ],
)
def test_refusals_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert exit_status(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    assert problem in err

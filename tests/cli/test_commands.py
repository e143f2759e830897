"""Every command as a person would type it."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slicewise.cli.main import exit_status, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_status(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_score_follows_the_papers_example(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(printed(capsys, "score", "11000100", "--model", "A100-80GB", "--json"))
    assert document["model"] == "A100-80GB"
    assert document["mask"] == "11000100"
    assert document["score"] == {"partial": 16, "overlap": 23}
    three = document["by_profile"]["3g.40gb"]
    assert three["partial"] == {"score": 8, "blocked_starts": [0, 4]}
    assert three["fragmented"] is True
    assert document["by_profile"]["7g.80gb"]["fits_by_size"] is False
    for reading in ("partial", "overlap"):
        parts = [p[reading]["score"] for p in document["by_profile"].values()]
        assert sum(parts) == document["score"][reading]
    text = printed(capsys, "score", "11000100")
    assert "2x4 = 8" in text
    assert [line.split() for line in text.splitlines() if re.match("F +[0-9]", line)] == [
        ["F", "16", "23"]
    ]
    found = [(e["used"], e["compute"]["score"], e["either"]["score"]) for e in
             document["compute_slices"]]  # fmt: skip
    assert found == [(3, 13, 13), (2, 16, 16)]
    assert document["compute_slices"][0]["compute"]["by_profile"]["3g.40gb"] == 6
    assert re.search(r"^3 of 7 +13 +13 +1g\.20gb 1, 2g\.20gb 2, ", text, re.MULTILINE)
    full = printed(capsys, "score", "11111111")
    assert re.search(r"^7 of 7 +0 +0 +-", full, re.MULTILINE)
    assert "F in compute slices is unknown" in printed(capsys, "score", "00000001")


def test_geometry_lists_and_draws(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(printed(capsys, "geometry", "--json"))
    assert len(listed) == 28
    assert printed(capsys, "geometry").count("\n") > 28
    drawn = printed(capsys, "geometry", "a100")
    assert "A100-80GB" in drawn
    assert "7g.80gb" in drawn
    one = json.loads(printed(capsys, "geometry", "H200", "--json"))
    assert one["model"] == "H200-141GB"


def test_a_gpu_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(EXAMPLES / "my-gpu.toml")
    mine = json.loads(printed(capsys, "geometry", "--geometry", file, "--json"))
    assert len(mine) == 29
    by_path = json.loads(printed(capsys, "geometry", file, "--geometry", file, "--json"))
    assert by_path["model"] in {each["model"] for each in mine}
    text = printed(capsys, "simulate", "--geometry", file, "--gpus", "5", "--runs", "2",
                   "--workers", "1")  # fmt: skip
    assert "first-fit" in text


def test_policies_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {row["name"]: row for row in json.loads(printed(capsys, "policies", "--json"))}
    assert listed["mfi"]["decides"] == "constant time"
    assert "round-robin-strict" in printed(capsys, "policies")


def test_simulate_published(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    text = printed(
        capsys, "simulate", "--policy", "mfi,first-fit", "--policy", "round-robin", "--gpus", "10",
        "--runs", "3", "--workers", "1", "--json", "--csv", str(out), "--plot", str(plot),
    )  # fmt: skip
    document = json.loads(text)
    assert document["experiment"] == "published"
    rows = document["results"]
    assert len(rows) == 3 * 20
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert float(table[17]["acceptance_rate"]) == rows[17]["acceptance_rate"]
    assert plot.read_text().startswith("<?xml")
    assert "round-robin" in printed(
        capsys, "simulate", "--policy", "round-robin", "--gpus", "5", "--runs", "1", "--workers",
        "1", "--lifetime", "saturation",
    )  # fmt: skip


def test_every_distribution_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    printed(
        capsys, "simulate", "--policy", "mfi", "--gpus", "4", "--runs", "1", "--workers", "1",
        "--distribution", "uniform", "--distribution", "bimodal", "--plot", str(plot),
    )  # fmt: skip
    drawn = plot.read_text()
    assert all(f"Distribution: {name}" in drawn for name in ("uniform", "bimodal"))


def test_simulate_steady(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    command = [
        "simulate", "--experiment", "steady", "--load", "0.95", "--policy", "mfi,mfi-overlap",
        "--distribution", "1g.10gb=0.5,7g.80gb=0.5", "--gpus", "10", "--runs", "3", "--duration",
        "10", "--workers", "1", "--model", "H100-80GB",
    ]  # fmt: skip
    document = json.loads(printed(capsys, *command, "--json", "--plot", str(plot)))
    row = document["results"][1]
    for key in ("policy", "distribution", "load", "gpus"):
        assert (
            row[key]
            == {
                "policy": "mfi-overlap",
                "distribution": "1g.10gb=0.5,7g.80gb=0.5",
                "load": 0.95,
                "gpus": 10,
            }[key]
        )
    for figure in (
        "rejected_share",
        "rejected_slices_share",
        "utilization_percent",
        "active_gpus_percent",
        "fragmentation",
        "rejected_share_difference",
        "oracle_rejected_share",
    ):
        low, high = row[f"{figure}_ci95"]
        assert low <= row[figure] <= high
    assert [row["policy"] for row in document["results"]] == ["mfi", "mfi-overlap", "oracle"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = printed(capsys, *command)
    assert "mfi-overlap" in text
    assert [line.strip() for line in text.splitlines()[1:3]] == ["1g.10gb=0.5,", "7g.80gb=0.5"]
    line = next(line for line in text.splitlines() if line.startswith("  oracle"))
    assert line.split()[4:6] == ["-", "-"]


def test_the_limit_can_be_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "rows.csv", tmp_path / "plot.svg"
    command = [
        "simulate", "--experiment", "steady", "--policy", "mfi", "--gpus", "4", "--runs", "2",
        "--duration", "5", "--workers", "1", "--csv", str(out), "--plot", str(plot),
    ]  # fmt: skip
    assert "oracle" not in printed(capsys, *command, "--no-oracle")
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["oracle_rejected_share"], row["oracle_missing"]) == ("", "it was not requested")
    text = printed(capsys, *command, "--model", "Thor")
    line = next(line for line in text.splitlines() if line.startswith("  oracle"))
    assert line.split() == ["oracle", *"------"]
    assert "\noracle: no exact rule says what Thor-iGPU could hold: " in text
    assert plot.read_text().startswith("<?xml")


def test_reproduce_writes_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    text = printed(capsys, "reproduce", "--runs", "2", "--seed", "2", "--out", str(out),
                   "--workers", "1")  # fmt: skip
    assert "skew-small" in text
    assert str(out / "report.html") in text.replace("\n", "")
    document = json.loads((out / "results.json").read_text())
    keys = {"distribution", "policy", "demand", "acceptance_rate", "scheduled_ratio_to_mfi",
            "utilization_percent", "active_gpus_percent", "fragmentation"}  # fmt: skip
    assert all(keys <= set(row) for row in document["results"])
    assert {row["policy"] for row in document["results"]} == {"MFI", "BF-BI", "WF-BI", "FF", "RR"}
    assert {row["reading"] for row in document["results"]} == {"data", "text"}
    demands = sorted({row["demand"] for row in document["results"]})
    assert demands == [round(0.05 * i, 2) for i in range(20)]
    assert len(document["results"]) == 2 * 4 * 5 * 20
    assert (out / "results.csv").read_text().count("\n") == 1 + 800
    assert len(document["mean_fragmentation"]) == 2 * 4 * 5
    assert document["arithmetic"]["possible_gpus"] == [40, 80, 120, 160, 200]
    counts: list[str] = []
    for name, facts in document["readings"].items():
        judged = [line[name]["within_margin"] for line in document["comparison"]]
        assert (facts["within_margin"], facts["compared"]) == (sum(judged), len(judged))
        counts.append(f"{name} {sum(judged)} of 80")
    assert f"Figures within their margin: {', '.join(counts)}." in text
    for figure in ("demand-uniform", "bars", "fragmentation"):
        assert (out / f"{figure}.png").stat().st_size > 10_000
        assert (out / f"{figure}.svg").stat().st_size > 10_000
    report = (out / "report.html").read_text()
    assert "skew-small" in report
    again = tmp_path / "again"
    as_json = json.loads(printed(capsys, "reproduce", "--runs", "2", "--seed", "2", "--out",
                                 str(again), "--workers", "2", "--json"))  # fmt: skip
    assert as_json == document, "the same on two workers"
    other = printed(capsys, "reproduce", "--runs", "2", "--seed", "2", "--out", str(again),
                    "--workers", "1", "--reading", "text")  # fmt: skip
    assert "reading text" in other
    assert "reading data" in text
    assert (again / "results.csv").read_text() == (out / "results.csv").read_text()
    assert (again / "bars.svg").read_text() != (out / "bars.svg").read_text()


def test_names_of_files_are_said_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Square brackets are not taken as markup, and a long name is not broken."""
    monkeypatch.chdir(tmp_path)
    (folder := Path("[a")).mkdir()
    small = ["simulate", "--gpus", "2", "--runs", "1", "--workers", "1", "--policy", "mfi"]
    target = folder / f"b] [bold]{'x' * 90}.csv"
    printed(capsys, *small)
    assert exit_status([*small, "--csv", str(target)]) == 0
    assert f"Written: {target}\n" in capsys.readouterr().err
    shown = printed(capsys, "reproduce", "--runs", "1", "--workers", "1", "--out", "[/x]")
    assert "\nReport: [/x]/report.html (" in shown


def test_no_digit_is_lost_at_the_edge_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = printed(
        capsys, "simulate", "--experiment", "steady", "--gpus", "4", "--runs", "2", "--workers",
        "1", "--duration", "4", "--policy", "peer-driver-default,round-robin-strict",
    )  # fmt: skip
    assert "…" not in shown
    line = next(line for line in shown.splitlines() if "round-robin-strict" in line)
    assert line.count("±") + line.count(" to ") == 6, "the intervals, cut ones with both ends"


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        ("geometry", "Usable"),
        ("geometry A100", "1g.10gb+me"),
        ("score 11000100", "no: fragmented"),
        ("policies", "Fewest free slices"),
    ],
)
def test_nothing_is_cut_on_a_narrow_terminal(
    command: str, whole: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    shown = printed(capsys, *command.split())
    assert "…" not in shown
    assert whole in shown


def test_bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "scaling.png"
    small = ["bench", "--gpus", "20", "--gpus", "50"]
    document = json.loads(printed(capsys, *small, "--json", "--plot", str(plot)))
    assert [(row["path"], row["gpus"]) for row in document["decisions"]] == [
        (path, gpus)
        for gpus in (20, 50)
        for path in ("engine", "scan-compiled", "scan-numpy", "compiled")
    ]
    assert {row["load"] for row in document["decisions"]} == {0.85}
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = printed(capsys, "bench", "--gpus", "20", "--policy", "first-fit,round-robin")
    assert "round-robin" in text


@pytest.mark.parametrize("command", ["simulate --runs 1", "plan --load 8", "reproduce --out r"])
def test_without_the_laboratory_one_line_says_what_to_install(command: str, tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('No module named numba', name='numba')"
    (tmp_path / "numba.py").write_text(missing)  # for the workers, too
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.cli", *command.split()],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout == ""
    *_, last = done.stderr.splitlines()  # everything else is progress
    assert last == "slicewise: error: numba is not installed: install slicewise[lab]"
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "simulate" in printed(capsys)
    assert "--distribution" in printed(capsys, "simulate", "--help")
    assert printed(capsys, "--version").startswith("slicewise 0.")
    with pytest.raises(SystemExit) as end:
        run(["--version"])
    assert end.value.code == 0


@pytest.mark.parametrize(
    "command", ["--help", "policies", "policies --json", "geometry --json", "score 11000100"]
)
def test_a_reader_that_goes_away_ends_it_without_a_word(command: str) -> None:
    """As `cat` ends: by a closed pipe, which a shell reports as 128 + 13."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.cli", *command.split()],
        stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_was_read_before_the_reader_went_is_there() -> None:
    command = f"{sys.executable} -m slicewise.cli geometry --json | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[\n", "")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_keeps_what_was_finished(tmp_path: Path, workers: str) -> None:
    """Interrupted for real, once progress shows that the first tenth of the runs is done."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "simulate", "--runs", "15000", "--gpus", "20",
         "--policy", "mfi,first-fit", "--workers", workers, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("simulating: 30%"):
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "Interrupted" in errors
    document = json.loads(output)
    assert document["interrupted"] is True
    assert {row["policy"] for row in document["results"]} == {"mfi", "first-fit"}

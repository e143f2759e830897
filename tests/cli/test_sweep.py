"""`slicewise sweep`: results, interruptions, kills and resuming."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slicewise.cli.main import exit_status
from slicewise.lab.checkpoint import Checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep.toml"
SWEEP = """
title = "A <small> sweep"
experiment = "steady"
policies = ["mfi", "first-fit"]
distributions = ["uniform", "1g.10gb+me=1"]
loads = [0.8, 1.0]
gpus = [4, 8]
runs = 3
duration = 6
"""
LONG = "peer-driver-default"
RUNS = 2 * 2 * (3 + 2) * 3
"""Two loads, two sizes; the limit of the second distribution is not known."""


def write(folder: Path, text: str = SWEEP) -> str:
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert exit_status(["sweep", *arguments]) == status, capsys.readouterr().err
    return capsys.readouterr().out


def alone(file: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return printed(capsys, file, "--out", str(out), "--workers", "1", "--json")


def same_results(one: Path, other: Path) -> bool:
    names = ("runs.parquet", "summary.parquet", "report.html")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_results_are_written_to_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "out"
    document = json.loads(alone(write(tmp_path), out, capsys))
    assert document["experiment"] == "steady"
    assert document["policies"] == ["mfi", "first-fit", "oracle"]
    assert (document["runs"], document["missing"], document["interrupted"]) == (RUNS, 0, False)
    assert len(document["results"]) == 2 * 2 * 2 * 3
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint.sqlite",
        "report.html",
        "runs.parquet",
        "summary.parquet",
    ]
    assert pq.read_table(out / "runs.parquet").num_rows == RUNS
    summary = pq.read_table(out / "summary.parquet").to_pylist()
    for row, shown in zip(summary, document["results"], strict=True):
        assert row["rejected_share"] == shown["rejected_share"]
        assert row["seed"] == shown["seed"] == 1
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<h1>A &lt;small&gt; sweep</h1>" in page
    assert "Not complete" not in page
    text = printed(capsys, write(tmp_path), "--out", str(out))
    assert "uniform, 8 A100-80GB" in text
    first = document["results"][0]
    assert f"{100 * first['rejected_share']:.2f}±" in text


def test_the_published_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'experiment = "published"\npolicies = ["mfi"]\ngpus = 3\nruns = 2\nseeds = [1, 2]\n'
    out = str(tmp_path / "out")
    shown = printed(capsys, write(tmp_path, text), "--out", out, "--workers", "1")
    assert "uniform, 3 A100-80GB, seed 2" in shown
    document = json.loads(printed(capsys, write(tmp_path, text), "--out", out, "--json"))
    assert len(document["results"]) == 2 * 20
    assert document["loads"] == []
    assert "Accepted requests" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_two_workers_give_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path)
    two = printed(capsys, file, "--out", str(tmp_path / "two"), "--workers", "2", "--json")
    assert two == alone(file, tmp_path / "one", capsys)
    assert same_results(tmp_path / "one", tmp_path / "two")


def test_checking_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    text = printed(capsys, file, "--check", "--out", str(out))
    assert f"4 points, 3 runs for each distribution and policy: {RUNS} runs, 0 finished" in text
    assert "loads          0.8; 1\n" in text
    assert not out.exists()
    alone(file, out, capsys)
    more = write(tmp_path, SWEEP.replace("runs = 3", "runs = 4"))
    plan = json.loads(printed(capsys, more, "--check", "--out", str(out), "--json"))
    assert (plan["runs"], plan["finished"], plan["missing"]) == (RUNS * 4 // 3, RUNS, RUNS // 3)
    assert json.loads(printed(capsys, more, "--check", "--json"))["finished"] == 0


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, left = Checkpoint.keep, count

    def interrupted(log: Checkpoint, done: Any) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        keep(log, done)

    monkeypatch.setattr(Checkpoint, "keep", interrupted)


def test_an_interruption_leaves_a_report_and_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    arguments = ["sweep", file, "--out", str(out), "--workers", "1", "--json"]
    interrupt_after(RUNS - 4, monkeypatch)
    assert exit_status(arguments) == 130
    output, problem = capsys.readouterr()
    assert json.loads(output)["interrupted"] is True
    assert "run the same command to resume" in problem
    assert "Not complete." in (out / "report.html").read_text(encoding="utf-8")
    monkeypatch.undo()
    assert exit_status(arguments) == 0
    output, problem = capsys.readouterr()
    assert f"{RUNS - 4} of {RUNS} runs are finished already." in problem
    assert output == alone(file, tmp_path / "whole", capsys)
    assert same_results(out, tmp_path / "whole")


def test_an_interruption_before_the_first_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(1, monkeypatch)
    arguments = ["sweep", write(tmp_path), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert exit_status(arguments) == 2
    assert "no results yet" in capsys.readouterr().err


DYING = """
import os, signal, sys
from slicewise.cli.main import run
from slicewise.lab.checkpoint import Checkpoint

keep, left = Checkpoint.keep, int(sys.argv[1])

def die(log, done):
    global left
    left -= 1
    if left < 0:
        log._database.execute("DELETE FROM runs")  # a transaction that is never committed
        os.kill(os.getpid(), signal.SIGKILL)
    keep(log, done)

Checkpoint.keep = die
if __name__ == "__main__":
    run(sys.argv[2:])
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_killed_in_the_middle_of_a_transaction_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    arguments = ["sweep", file, "--out", str(out), "--workers", workers, "--json"]
    killed = subprocess.run(
        [sys.executable, "-c", DYING, "17", *arguments], capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (out / "report.html").exists()
    plan = json.loads(printed(capsys, file, "--check", "--out", str(out), "--json"))
    assert plan["finished"] == 17
    resumed = printed(capsys, *arguments[1:])
    assert resumed == alone(file, tmp_path / "whole", capsys)
    assert same_results(out, tmp_path / "whole")


def test_a_damaged_checkpoint_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write(tmp_path), tmp_path / "out"
    alone(file, out, capsys)
    checkpoint = out / "checkpoint.sqlite"
    checkpoint.write_bytes(b"not SQLite" * 1000)
    assert exit_status(["sweep", file, "--out", str(out), "--workers", "1"]) == 2
    assert capsys.readouterr().err == (
        f"slicewise: error: '{checkpoint}' cannot be read: file is not a database; "
        "delete it to run everything again\n"
    )


def test_the_example_is_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads(printed(capsys, str(EXAMPLE), "--check", "--json"))
    assert plan["runs"] == 240


def test_many_loads_are_not_truncated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = ", ".join(f"{load / 10}" for load in range(3, 11))
    text = f'experiment = "steady"\npolicies = "{LONG}"\ngpus = 2\nruns = 2\nloads = [{loads}]\n'
    shown = printed(capsys, write(tmp_path, text), "--out", str(tmp_path), "--workers", "1")
    assert "2 more loads are in the report" in shown
    assert "…" not in shown
    line = next(line for line in shown.splitlines() if LONG in line)
    assert line.count("±") + line.count(" to ") == 6, "the intervals, cut ones with both ends"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--out DIR is missing"),
        (["--out", "x", "--workers", "0"], "workers must be"),
        (["--out", "x", "--workers", "2", "--ray", "auto"], "give one"),
        (["--out", "/proc/nowhere"], "'/proc/nowhere' cannot be written"),
        (["--out", "x", "--ray"], "requires an argument"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert exit_status(["sweep", write(tmp_path), *arguments]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("slicewise: error: ")
    assert error.count("\n") == 1
    assert problem in error


def test_a_wrong_file_is_rejected_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, SWEEP.replace("loads", "load"))
    assert exit_status(["sweep", file, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        f"slicewise: error: {file}: load: no such field; did you mean loads?\n"
    )
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_error_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = "slicewise.cli.sweep.find_spec"
    monkeypatch.setattr(found, lambda name: None if name == "pyarrow" else object())
    assert exit_status(["sweep", write(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == (
        "slicewise: error: pyarrow is not installed: install slicewise[lab]\n"
    )

"""Experiments from Python: the same rows as the commands, as tables, drawings and data frames."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lab.html_page import Page

from slicewise import GpuState, Profile, ScanPolicy, ScorePolicy, SlicewiseError, lab
from slicewise.cli.main import exit_status
from slicewise.lab.checkpoint import FILE_NAME
from slicewise.lab.executors import InProcess

TRACE = "arrival,lifetime,profile\n0,10,3g.40gb\n1,10,7g.80gb\n2,10,1g.10gb\n"


class Tidy(ScorePolicy):
    """A policy of one's own, as a notebook has it."""

    name = "tidy"
    summary = "Lowest start first."

    def score(self, gpu: GpuState, profile: Profile, start: int) -> tuple[int, int]:
        return -gpu.mask.bit_count(), start


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert exit_status([*arguments, "--json", "--workers", "1"]) == 0
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    return document


def test_the_commands_give_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    small = {"gpus": 10, "runs": 2, "progress": False}
    steady = lab.simulate(["mfi", "least-lost"], duration=6, warmup=2, **small)  # type: ignore[arg-type]
    command = ("simulate", "--policy", "mfi,least-lost", "--gpus", "10", "--runs", "2")
    document = told(capsys, *command, "--experiment", "steady", "--duration", "6", "--warmup", "2")
    assert document["results"] == list(steady.rows)
    published = lab.simulate(["mfi", "least-lost"], experiment="published", **small)  # type: ignore[arg-type]
    assert told(capsys, *command)["results"] == list(published.rows)
    assert steady.settings["seed"] == document["seed"]
    plan = lab.plan(
        3, ["least-lost"], target=0.05, runs=20, duration=12, oracle=False, progress=False
    )
    document = told(
        capsys, "plan", "--load", "3", "--policy", "least-lost", "--target-rejection", "5%",
        "--runs", "20", "--duration", "12", "--no-oracle",
    )  # fmt: skip
    assert document["results"] == list(plan.rows)
    assert document["curve"] == list(plan.curve)


def test_a_replay_has_the_rows_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    result = lab.replay(trace, "least-lost", gpus=1, progress=False)
    assert (
        exit_status(["replay", str(trace), "--policy", "least-lost", "--gpus", "1", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["results"] == list(result.rows)
    assert "fragmented" in str(result.table())
    assert result.to_arrow()["rejected_by_reason.capacity"].to_pylist()[0] == 1


def test_a_result_is_shown_as_text_html_and_drawing(tmp_path: Path) -> None:
    result = lab.simulate(
        ["mfi", "least-lost"], ["uniform", {"1g.10gb": 0.5, "7g.80gb": 0.5}], gpus=8, runs=2,
        duration=6, warmup=2, progress=False,
    )  # fmt: skip
    heading, *lines = repr(result).splitlines()
    assert heading == f"8 A100-80GB, 2 runs at load 0.85, seed 1 (slicewise {result.version})"
    assert [line.split()[0] for line in lines[1:]] == [
        *("uniform", "mfi", "least-lost", "oracle"),
        *("1g.10gb=0.5,7g.80gb=0.5", "mfi", "least-lost", "oracle"),
    ]
    assert len({len(line) for line in lines if "±" in line}) == 1, "columns are aligned"
    page = Page(result._repr_html_())
    assert page.count("tr") == len(lines)
    assert heading in page.words
    drawing = result.plot()
    assert drawing._repr_svg_().startswith("<svg")
    assert drawing.save(tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SlicewiseError, match=r"must end in \.png or \.svg"):
        drawing.save(tmp_path / "bars.jpg")


def test_rows_become_an_arrow_table_with_intervals_as_columns() -> None:
    result = lab.simulate("mfi", gpus=8, runs=2, duration=6, warmup=2, oracle=False, progress=False)
    table = result.to_arrow()
    low, high = result.rows[0]["rejected_share_ci95"]
    assert table["rejected_share_ci95_low"].to_pylist() == [low]
    assert table["rejected_share_ci95_high"].to_pylist() == [high]


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_missing_data_frame_package_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slicewise.lab.result.find_spec", lambda name: None)
    result = lab.simulate("mfi", gpus=8, runs=2, duration=6, warmup=2, oracle=False, progress=False)
    with pytest.raises(SlicewiseError, match=f"{package} is not installed.*to_arrow"):
        getattr(result, f"to_{package}")()


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"gpus": 8, "duration": 6, "warmup": 2, "progress": False, "cache": tmp_path}
    first = lab.simulate("mfi", runs=2, **settings)  # type: ignore[arg-type]
    assert (tmp_path / FILE_NAME).exists()
    ran: list[int] = []
    work = InProcess.work

    def counted(self, experiments, jobs, tick):  # type: ignore[no-untyped-def]
        ran.extend(run for job in jobs for run in job.runs)
        return work(self, experiments, jobs, tick)

    monkeypatch.setattr(InProcess, "work", counted)
    assert lab.simulate("mfi", runs=2, **settings).rows == first.rows  # type: ignore[arg-type]
    assert ran == []
    lab.simulate("mfi", runs=3, **settings)  # type: ignore[arg-type]
    assert set(ran) == {2}, "only the run that is new"


def test_an_own_policy_runs_beside_the_default() -> None:
    result = lab.simulate(
        [Tidy(), "least-lost"], gpus=8, runs=2, duration=6, warmup=2, progress=False
    )
    assert [row["policy"] for row in result.rows] == ["tidy", "least-lost", "oracle"]
    assert 0 < result.rows[0]["rejected_share"] < 1


def test_a_policy_of_a_notebook_is_not_sent_to_other_processes(tmp_path: Path) -> None:
    own = type("Own", (Tidy,), {"__module__": "__main__"})()
    with pytest.raises(SlicewiseError, match="defined here, where worker processes cannot load"):
        lab.simulate([own], workers=2, progress=False)

    class Scan(ScanPolicy):
        name, summary = "scan", "x"

        def choose(self, cluster, request):  # type: ignore[no-untyped-def]
            return None

    scan = type("Own", (Scan,), {"__module__": "__main__"})()
    with pytest.raises(SlicewiseError, match="could not tell when it changes"):
        lab.simulate([scan], cache=tmp_path, progress=False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"experiment": "stedy"}, "experiment 'stedy' is neither steady nor published"),
        ({"experiment": "published", "migrate": 0.02}, "need the steady experiment"),
        ({"leases": "perfect"}, "leases 'perfect' is not one of exact, early"),
        ({"lifetimes": "long"}, "lifetimes 'long' is not one of uniform"),
        ({"policies": "least-lots"}, "least-lots"),
        ({"model": "A1000"}, "A1000"),
        ({"distributions": {"9g.90gb": 1.0}}, "9g.90gb"),
        ({"runs": 0}, "runs must be 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(SlicewiseError, match=sentence):
        lab.simulate(**({"progress": False} | arguments))  # type: ignore[arg-type]


def test_the_paper_and_a_sweep_run(tmp_path: Path) -> None:
    paper = lab.reproduce(runs=2, progress=False)
    assert {row["policy"] for row in paper.rows} >= {"mfi-either", "best-fit-strict"}
    assert paper.settings["gpus"] == 40
    file = tmp_path / "two.toml"
    file.write_text(
        'experiment = "steady"\ngpus = 8\nloads = [0.7, 0.9]\nruns = 2\nduration = 6\nwarmup = 2\n'
        'policies = ["mfi"]\noracle = false\n'
    )
    swept = lab.sweep(file, progress=False)
    assert [row["load"] for row in swept.rows] == [0.7, 0.9]
    assert swept.plot()._repr_svg_().startswith("<svg")


def test_public_names_are_those_listed_and_load_nothing_before() -> None:
    code = (
        "import sys, slicewise.lab as lab; assert 'numba' not in sys.modules;"
        "assert not {n for n in sys.modules if n.startswith('slicewise.lab.')};"
        "print(all(getattr(lab, name) is not None for name in lab.__all__))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "True\n"
    assert set(lab.__all__) <= set(dir(lab))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        getattr(lab, "simulat")  # noqa: B009


def test_intervals_of_shares_stay_within_the_whole() -> None:
    result = lab.simulate(
        ["mfi", "first-fit"], gpus=3, runs=2, duration=6, warmup=2, progress=False
    )
    ends = {
        figure: [row[f"{figure}_ci95"] for row in result.rows if row[f"{figure}_ci95"] is not None]
        for figure in ("rejected_share", "utilization_percent", "rejected_share_difference")
    }
    assert all(0 <= low <= high <= 1 for low, high in ends["rejected_share"])
    assert all(0 <= low <= high <= 100 for low, high in ends["utilization_percent"])
    assert any(low == 0 for low, _ in ends["rejected_share"]), "a wide one was cut"
    assert any(low < 0 for low, _ in ends["rejected_share_difference"])
    lines = str(result.table()).splitlines()
    assert any(" (0.00 to " in line for line in lines), "both ends of a cut interval are written"

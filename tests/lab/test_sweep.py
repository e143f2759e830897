"""Sweeps: experiment files, checkpoints, executors and Parquet files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise import Geometry, SlicewiseError, load_geometry, policy
from slicewise.lab import fingerprint
from slicewise.lab.checkpoint import Checkpoint, load_finished
from slicewise.lab.executors import Done, Executor, InProcess, Job, WorkerProcesses, local_executor
from slicewise.lab.experiment import (
    PUBLISHED_COLUMNS,
    STEADY_COLUMNS,
    Experiment,
    Published,
    Steady,
)
from slicewise.lab.fingerprint import digest
from slicewise.lab.measure import Measure
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.packed_tables import compile_tables
from slicewise.lab.parquet import runs_table, summary_table, write_table
from slicewise.lab.results import steady_rows
from slicewise.lab.runner import Outcome, missing_jobs, missing_runs, run_missing
from slicewise.lab.sustained import DriftKind, Knowledge, LifetimeLaw, drift
from slicewise.lab.sweep_file import Sweep, load_sweep, summary_rows, total_runs
from slicewise.lab.workload import Lifetime

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = """
experiment = "steady"
policies = ["mfi", "first-fit"]
distributions = ["uniform", "1g.10gb=0.5,7g.80gb=0.5"]
loads = [0.9, 1]
gpus = 4
runs = 3
duration = 6
"""


def ignore(units: int) -> None:
    """Ignore progress."""


def write(folder: Path, text: str, name: str = "sweep.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def run(sweep: Sweep, folder: Path, executor: Executor | None = None) -> tuple[list[Outcome], int]:
    """The outcomes, and how many runs had to be run."""
    outcomes = sweep.outcomes()
    load_finished(folder, outcomes)
    missing = missing_runs(outcomes)
    with Checkpoint(folder, sweep.experiments) as checkpoint:
        run_missing(outcomes, executor or InProcess(), ignore, checkpoint.keep)
    return outcomes, missing


@pytest.fixture
def small(tmp_path: Path) -> Sweep:
    return load_sweep(write(tmp_path, SMALL))


# The file.


def test_the_points_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    sweep = load_sweep(
        write(
            tmp_path,
            'title = "Two  by\\ntwo"\nexperiment = "steady"\nmodel = ["A100-80GB", "A30"]\n'
            'policies = "mfi"\ngpus = [4, 2]\nloads = [1, 0.5]\nseeds = [7, 0]\nruns = 2\n'
            "duration = 9\nwarmup = 1\ngpus_per_node = 2\noracle = false\n",
        )
    )
    assert (sweep.name, sweep.title, sweep.kind) == ("sweep.toml", "Two by two", "steady")
    found = [
        (e.mixes[0].geometry.model, e.gpus, e.load, e.seed)
        for e in sweep.experiments
        if isinstance(e, Steady)
    ]
    assert found == [
        (model, gpus, load, seed)
        for model in ("A100-80GB", "A30-24GB")
        for gpus in (4, 2)
        for load in (1.0, 0.5)
        for seed in (7, 0)
    ]
    first = sweep.experiments[0]
    assert isinstance(first, Steady)
    assert (first.runs, first.lifetimes, first.warmup, first.gpus_per_node) == (2, 9, 1, 2)
    assert not first.oracle
    assert [mix.name for mix in first.mixes] == ["uniform"]
    assert total_runs(sweep.outcomes()) == 16 * 2


def test_the_published_experiment_has_no_load(tmp_path: Path) -> None:
    text = 'experiment = "published"\npolicies = ["mfi"]\nlifetime = "saturation"\ngpus = [2, 3]\n'
    first, second = load_sweep(write(tmp_path, text)).experiments
    assert isinstance(first, Published)
    assert first.lifetime is Lifetime.SATURATION
    assert (first.gpus, second.gpus, first.runs) == (2, 3, 20)


def test_a_model_file_is_relative_to_the_experiment_file(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    own = (EXAMPLES / "my-gpu.toml").read_text(encoding="utf-8")
    write(tmp_path / "gpus", own, "mine.toml")
    text = '\ufeffexperiment = "steady"\npolicies = "mfi"\nmodel = "gpus/mine.toml"\n'
    (only,) = load_sweep(write(tmp_path, text)).experiments
    assert only.mixes[0].geometry.model == load_geometry(EXAMPLES / "my-gpu.toml").model


def test_the_example_is_a_sweep() -> None:
    sweep = load_sweep(EXAMPLES / "sweep.toml")
    assert len(sweep.experiments) == 2 * 3


STEADY = 'experiment = "steady"\npolicies = "mfi"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "experiment: is missing"),
        ("experiment = 1", "experiment: needs text"),
        ('experiment = "sturdy"', "experiment: unknown experiment 'sturdy'; did you mean steady?"),
        ('experiment = "steady"', "policies: is missing"),
        (STEADY + "load = 0.5", "load: no such field; did you mean loads?"),
        (STEADY + "colour = 1", "colour: no such field; known: experiment, "),
        (STEADY + "loads = []", "loads: is empty"),
        (STEADY + "loads = [0.5, 0.50]", "loads: 0.5 is named twice"),
        (STEADY + "loads = [0.5, true]", "loads[1]: needs a number, not true or false"),
        (STEADY + "loads = -1", "loads: -1 is negative"),
        (STEADY + "loads = inf", "loads: inf is not a finite number"),
        (STEADY + "loads = 0", "load 0.0 is not above 0"),
        (STEADY + "gpus = 0", "gpus must be 1 to"),
        (STEADY + "gpus = 2.5", "gpus: needs a whole number, not a fraction"),
        (STEADY + "seeds = -1", "seeds: is not in 0..2^64-1"),
        (STEADY + "seeds = 18446744073709551616", "seeds: is not in 0..2^64-1"),
        (STEADY + 'seeds = "one"', "seeds: needs a whole number, not text"),
        (STEADY + "runs = 0", "runs must be 1 to"),
        (STEADY + "duration = 3", "duration must be 4 to"),
        (STEADY + "oracle = 1", "oracle: needs true or false, not a whole number"),
        (STEADY + 'lifetime = "capacity"', "lifetime: is for the published experiment only"),
        ('experiment = "published"\npolicies = "mfi"\nloads = 1', "loads: is for the steady"),
        ('experiment = "published"\npolicies = "mfi"\nlifetime = "x"', "unknown lifetime rule"),
        ('experiment = "steady"\npolicies = "fifo"', "unknown policy 'fifo'"),
        ('experiment = "steady"\npolicies = ["mfi", "mfi"]', "policies: 'mfi' is named twice"),
        (
            'experiment = "steady"\npolicies = ["default", "rehearsed"]',
            "'rehearsed' is named twi",
        ),
        (STEADY + "gpus = 2\nloads = [0.5, 0.01]", "load 0.01 is too low for 2 A100-80GB"),
        (STEADY + 'distributions = "normal"', "unknown distribution 'normal'"),
        (STEADY + 'distributions = "1g.10gb=0.9"', "sums to 0.9"),
        (STEADY + 'model = "A1000"', "unknown GPU model 'A1000'; did you mean"),
        (STEADY + 'model = "none.toml"', "none.toml: cannot be read"),
        (STEADY + 'model = ["A100-80GB", "A30"]\ndistributions = "bimodal"', "A30-24GB has others"),
        (STEADY + 'model = ["A30", "A30-24GB"]', "model 'A30-24GB' is named twice"),
        (STEADY + f"seeds = {list(range(100_001))}", "spans 100,001 combinations"),
        (STEADY + f"runs = 1000\nseeds = {list(range(2_001))}", "spans 2,001,000 runs"),
        ("experiment = ", "not TOML: "),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("# " + "x" * (1 << 20), "larger than 1,048,576 bytes"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SlicewiseError) as caught:
        load_sweep(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b'a = "x"\nb = "\xff"\n')
    for name, problem in (
        ("none.toml", "cannot be read"),
        ("binary.toml", "line 2 is not UTF-8"),
        ("a\0b", "is not a path"),
    ):
        with pytest.raises(SlicewiseError, match=problem):
            load_sweep(tmp_path / name)


@given(
    text=st.lists(
        st.builds(
            "{} = {}".format,
            st.sampled_from(
                ["experiment", "policies", "model", "gpus", "loads", "seeds", "runs", "lifetime"]
            ),
            st.sampled_from(
                ['"steady"', '"published"', '"mfi"', '["mfi"]', "1", "[2, 3]", "0.5", "-1", "[]",
                 "nan", "true", "{}", "[[]]", '""', '"\\u0000"', "1e400", "2024-01-01"]
            ),
        ),
        max_size=6,
    ).map("\n".join)
)  # fmt: skip
def test_any_file_gives_a_sweep_or_an_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("sweep"), text)
    with contextlib.suppress(SlicewiseError):
        assert load_sweep(path).experiments


# What a result depends on.


def other_value(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, Lifetime):
        return Lifetime.SATURATION
    if isinstance(value, Measure):
        return Measure.COMPUTE
    if isinstance(value, LifetimeLaw):
        return LifetimeLaw.HEAVY
    if value is None:
        return Knowledge.HALF
    if value == ():
        return (drift(DriftKind.SUDDEN, parse_mix("skew-small", load_geometry("A100-80GB"))),)
    assert isinstance(value, (int, float))
    return value + 1


@pytest.mark.parametrize("cls", [Steady, Published])
def test_every_setting_with_an_effect_changes_the_digest(
    cls: type[Experiment], a100: Geometry
) -> None:
    mixes = (parse_mix("uniform", a100),)
    plain = cls(mixes, (policy("mfi"),), 4)
    without_effect = {"mixes", "policies", "runs", "oracle", "_compiled"}
    changed: list[str] = []
    for field in fields(plain):
        if field.name in ("mixes", "policies", "_compiled"):
            continue
        change: dict[str, Any] = {field.name: other_value(getattr(plain, field.name))}
        other = replace(plain, **change)
        if digest(other, 0, 0) != digest(plain, 0, 0):
            changed.append(field.name)
    assert set(changed) == {field.name for field in fields(plain)} - without_effect


def test_what_else_changes_the_digest(a100: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(mix: Mix, name: str = "mfi", entrant: int = 0) -> str:
        return digest(Steady((mix,), (policy(name),), 4), 0, entrant)

    uniform = parse_mix("uniform", a100)
    known = of(uniform)
    assert of(parse_mix("bimodal", a100)) != known
    assert of(uniform, "first-fit") != known
    assert of(uniform, "peer-volcano") != known
    assert of(uniform, entrant=1) != known
    # Neither names nor other entrants matter.
    assert of(replace(uniform, name="alike")) == known
    both = Steady((parse_mix("bimodal", a100), uniform), (policy("best-fit"), policy("mfi")), 4)
    assert digest(both, 1, 1) == known
    # The same names on another geometry.
    shifted = replace(
        a100, profiles=tuple(replace(p, starts=p.starts[:1], preferred=()) for p in a100.profiles)
    )
    assert of(parse_mix("uniform", shifted)) != known
    # A policy that decides otherwise under the same name.
    cls = type(policy("mfi"))
    monkeypatch.setattr(cls, "score", lambda self, gpu, profile, start: -start)
    assert of(uniform) != known
    monkeypatch.undo()
    assert of(uniform) == known
    monkeypatch.setattr(fingerprint, "made_with", lambda: {"slicewise": "next", "numpy": "2"})
    assert of(uniform) != known


def test_a_policy_without_source_is_identified_by_its_module() -> None:
    assert fingerprint._source("no.such.module") == "no.such.module"
    assert (
        fingerprint._source("slicewise.policies.peers.volcano")
        != "slicewise.policies.peers.volcano"
    )


# What is finished.


def test_finished_runs_are_not_repeated(small: Sweep, tmp_path: Path) -> None:
    first, missing = run(small, tmp_path / "runs")
    assert missing == total_runs(first) == 2 * (2 * 3) * 3
    again, missing = run(small, tmp_path / "runs")
    assert missing == 0
    assert summary_rows(again) == summary_rows(first)
    load_finished(tmp_path / "none", small.outcomes())
    assert not (tmp_path / "none").exists(), "reading creates no file"


def test_an_extended_file_runs_only_what_is_new(small: Sweep, tmp_path: Path) -> None:
    run(small, tmp_path / "runs")
    for before, after, new in (
        ("runs = 3", "runs = 5", 2 * 6 * 2),
        ("loads = [0.9, 1]", "loads = [0.8, 0.9, 1]", 6 * 3),
        ('["mfi", "first-fit"]', '["best-fit", "mfi", "first-fit"]', 2 * 2 * 3),
        ('["uniform", ', "[", 0),
        ("runs = 3", "runs = 2", 0),
        ("gpus = 4", "gpus = 4\noracle = false", 0),
        ("duration = 6", "duration = 7", 2 * 6 * 3),
    ):
        extended = load_sweep(write(tmp_path, SMALL.replace(before, after)))
        outcomes = extended.outcomes()
        load_finished(tmp_path / "runs", outcomes)
        assert missing_runs(outcomes) == new, after
        resumed, _ = run(extended, tmp_path / f"copy of {after}")
        with Checkpoint(tmp_path / f"unused {after}", extended.experiments) as checkpoint:
            run_missing(outcomes, InProcess(), ignore, checkpoint.keep)
        assert summary_rows(outcomes) == summary_rows(resumed), after


def test_runs_with_a_drift_are_kept(a100: Geometry, tmp_path: Path) -> None:
    changing = drift(DriftKind.APPEARS, parse_mix("uniform", a100))
    steady = Steady(
        (changing.first,), (policy("mfi"),), gpus=2, runs=2, lifetimes=5, drift=(changing,)
    )
    for missing in (4, 0):
        outcome = Outcome(steady)
        load_finished(tmp_path / "runs", [outcome])
        assert missing_runs([outcome]) == missing
        with Checkpoint(tmp_path / "runs", [steady]) as checkpoint:
            run_missing([outcome], InProcess(), ignore, checkpoint.keep)


def killed_sessions(path: Path, folder: Path) -> Iterator[Path]:
    """Copies of a checkpoint with its write-ahead log cut off at many places."""
    log = path.with_name(path.name + "-wal").read_bytes()
    copy = folder / path.name
    for length in range(0, len(log) + 1, 997):
        shutil.copy(path, copy)
        copy.with_name(copy.name + "-wal").write_bytes(log[:length])
        copy.with_name(copy.name + "-shm").unlink(missing_ok=True)
        yield copy


def test_a_session_may_be_killed_at_any_moment(small: Sweep, tmp_path: Path) -> None:
    """Whatever part of the write-ahead log was written, it holds whole jobs and no error."""
    only = Sweep("x", "", "", "steady", small.experiments[:1])
    (outcome,) = only.outcomes()
    copies = tmp_path / "copies"
    copies.mkdir()
    with Checkpoint(tmp_path / "runs", only.experiments) as checkpoint:
        run_missing([outcome], InProcess(), ignore, checkpoint.keep)
        before = 0
        for copy in killed_sessions(tmp_path / "runs", copies):
            (found,) = only.outcomes()
            load_finished(copy, [found])
            finished = sum(map(len, found.samples.values()))
            assert finished >= before
            before = finished
            for cell, samples in found.samples.items():
                for number, sample in samples.items():
                    assert (sample == outcome.samples[cell][number]).all()
    assert 0 < before <= 6 * 3
    resumed, missing = run(only, copy)
    assert missing == 6 * 3 - before
    assert summary_rows(resumed) == summary_rows([outcome])


def test_two_results_of_the_same_run_are_refused(small: Sweep, tmp_path: Path) -> None:
    first, _ = run(small, tmp_path / "runs")
    wrong = np.zeros(len(STEADY_COLUMNS), np.int64)
    with (
        Checkpoint(tmp_path / "runs", small.experiments) as checkpoint,
        pytest.raises(SlicewiseError, match="runs: run 1 has another result"),
    ):
        checkpoint.keep(Done(Job(0, 0, 0, (1,)), {1: wrong}, "another machine"))
    again, missing = run(small, tmp_path / "runs")
    assert missing == 0
    assert summary_rows(again) == summary_rows(first)


def test_a_checkpoint_that_cannot_be_written_or_read(small: Sweep, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = Done(Job(0, 0, 0, (0,)), {0: np.zeros(8, np.int64)}, "me")
    with (
        Checkpoint(tmp_path / "folder", small.experiments) as checkpoint,
        pytest.raises(SlicewiseError, match=r"'.*folder' cannot be written: unable to open"),
    ):
        checkpoint.keep(done)
    with pytest.raises(SlicewiseError, match=r"'.*folder' cannot be read: unable to open [^;]*$"):
        load_finished(tmp_path / "folder", small.outcomes())
    (tmp_path / "text").write_text("not a database " * 100)
    with pytest.raises(SlicewiseError, match="not a database; delete it to run everything again"):
        load_finished(tmp_path / "text", small.outcomes())


def test_a_full_disk(small: Sweep, tmp_path: Path) -> None:
    """Finished jobs stay; the one that finds no space is reported."""
    path = tmp_path / "runs"
    samples = small.experiments[0].simulate(0, 0, 0, ignore)
    with Checkpoint(path, small.experiments) as checkpoint:
        checkpoint.keep(Done(Job(0, 0, 0, (0,)), {0: samples}, "me"))
        assert checkpoint._database is not None
        pages = checkpoint._database.execute("PRAGMA page_count").fetchone()[0]
        checkpoint._database.execute(f"PRAGMA max_page_count = {pages}")
        large = Done(Job(0, 0, 1, (0,)), {0: np.zeros(100_000, np.int64)}, "me")
        with pytest.raises(SlicewiseError, match="cannot be written: database or disk is full"):
            checkpoint.keep(large)
    outcomes = small.outcomes()
    load_finished(path, outcomes)
    assert missing_runs(outcomes) == total_runs(outcomes) - 1


def test_sessions_at_the_same_time_share_a_checkpoint(small: Sweep, tmp_path: Path) -> None:
    samples = small.experiments[0].simulate(0, 0, 0, ignore)
    path = tmp_path / "runs"
    with (
        Checkpoint(path, small.experiments) as one,
        Checkpoint(path, small.experiments) as two,
    ):
        one.keep(Done(Job(0, 0, 0, (0,)), {0: samples}, "one"))
        two.keep(Done(Job(0, 0, 0, (0,)), {0: samples}, "two"))
        two.keep(Done(Job(0, 0, 0, (1,)), {1: samples}, "two"))
    outcomes = small.outcomes()
    load_finished(path, outcomes)
    assert missing_runs(outcomes) == total_runs(outcomes) - 2


# Executors.


def test_one_and_two_workers_and_a_resumed_sweep_give_the_same_bytes(
    small: Sweep, tmp_path: Path
) -> None:
    def files(outcomes: Sequence[Outcome]) -> tuple[bytes, bytes]:
        runs, summary = tmp_path / "runs.parquet", tmp_path / "summary.parquet"
        write_table(runs, runs_table(outcomes), {"experiment": SMALL})
        write_table(summary, summary_table(summary_rows(outcomes)), {"experiment": SMALL})
        return runs.read_bytes(), summary.read_bytes()

    one, _ = run(small, tmp_path / "one", InProcess())
    two, _ = run(small, tmp_path / "two", WorkerProcesses(2))
    assert files(one) == files(two)
    resumed, missing = run(small, tmp_path / "three", Stopping(7))
    assert missing == total_runs(resumed)
    assert [outcome.interrupted for outcome in resumed] == [True, True]
    resumed, missing = run(small, tmp_path / "three", WorkerProcesses(2))
    assert missing == total_runs(resumed) - 7
    assert not any(outcome.interrupted for outcome in resumed)
    assert files(one) == files(resumed)


class Stopping:
    """An executor that is interrupted after some runs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Any
    ) -> Generator[Done]:
        for number, done in enumerate(InProcess().work(experiments, jobs, tick)):
            if number == self.after:
                raise KeyboardInterrupt
            yield done


def test_jobs_cover_what_is_missing_and_advance_together(small: Sweep) -> None:
    outcomes = small.outcomes()
    outcomes[0].samples[0, 0] = {1: np.zeros(8, np.int64)}
    jobs = missing_jobs(outcomes)
    runs = [(job.experiment, job.mix, job.entrant, run) for job in jobs for run in job.runs]
    assert len(set(runs)) == len(runs) == total_runs(outcomes) - 1
    assert (0, 0, 0, 1) not in runs
    assert [run for *_, run in runs] == sorted(run for *_, run in runs)
    many = [Outcome(replace(small.experiments[0], runs=1000))]
    assert {len(job.runs) for job in missing_jobs(many)} == {25}


def test_tables_are_made_once_for_all_points(small: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def counting(models: Any, policy: Any, measured: Any) -> Any:
        made.append(policy)
        return compile_tables(models, policy, measured)

    monkeypatch.setattr("slicewise.lab.experiment.compile_tables", counting)
    run_missing(small.outcomes(), InProcess(), ignore)
    assert len(made) == 2 * 2, "once for each mix and policy, and not for each load"


def test_there_is_one_worker_per_core_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    executor = local_executor(None)
    assert isinstance(executor, WorkerProcesses)
    assert executor.workers == 5
    assert isinstance(local_executor(1), InProcess)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert isinstance(local_executor(None), InProcess)


# Results.


def test_the_summary_has_the_rows_of_every_point(small: Sweep) -> None:
    outcomes = small.outcomes()
    run_missing(outcomes, InProcess(), ignore)
    rows = summary_rows(outcomes)
    alone = [row for outcome in outcomes for row in steady_rows(outcome)]
    assert [{k: row[k] for k in other} for row, other in zip(rows, alone, strict=True)] == alone
    assert list(rows[0])[:7] == [
        "model",
        "gpus",
        "load",
        "seed",
        "distribution",
        "policy",
        "runs",
    ]
    outcomes[0].samples.clear()
    assert summary_rows(outcomes) == rows[len(rows) // 2 :]
    assert summary_rows([]) == []


def test_parquet_holds_every_run_of_the_steady_experiment(small: Sweep, tmp_path: Path) -> None:
    outcomes, _ = run(small, tmp_path / "runs")
    path = tmp_path / "runs.parquet"
    write_table(path, runs_table(outcomes), {"experiment": SMALL})
    table = pq.read_table(path)
    assert table.schema.metadata[b"slicewise.experiment"].decode() == SMALL
    assert table.num_rows == total_runs(outcomes)
    for row in table.to_pylist():
        (experiment,) = [
            e for e in small.experiments if isinstance(e, Steady) and e.load == row["load"]
        ]
        names = [mix.name for mix in experiment.mixes]
        entrants = ["mfi", "first-fit", "oracle"]
        sums = experiment.simulate(
            names.index(row["distribution"]), entrants.index(row["policy"]), row["run"], ignore
        )
        assert [row[name] for name in STEADY_COLUMNS] == sums.tolist()
    summary = summary_table(summary_rows(outcomes)).to_pylist()
    rows = summary_rows(outcomes)
    assert [row["rejected_share"] for row in summary] == [row["rejected_share"] for row in rows]
    ends = [[row["fragmentation_ci95_low"], row["fragmentation_ci95_high"]] for row in summary]
    assert ends == [row["fragmentation_ci95"] or [None, None] for row in rows]


def test_parquet_holds_every_bin_of_the_published_experiment(tmp_path: Path) -> None:
    text = 'experiment = "published"\npolicies = ["mfi"]\ngpus = 3\nruns = 2\nseeds = [0, 5]\n'
    sweep = load_sweep(write(tmp_path, text))
    outcomes, _ = run(sweep, tmp_path / "runs")
    rows = runs_table(outcomes).to_pylist()
    assert len(rows) == 2 * 2 * 20
    sample = sweep.experiments[1].simulate(0, 0, 1, ignore)
    last = [row for row in rows if row["seed"] == 5 and row["run"] == 1]
    assert [[row[name] for name in PUBLISHED_COLUMNS] for row in last] == sample.tolist()
    assert [row["demand"] for row in last] == [round(b / 20, 2) for b in range(20)]
    assert [row["runs"] for row in summary_rows(outcomes)] == [2] * (2 * 20)


def test_tables_that_cannot_be_written(small: Sweep, tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match="no results to write"):
        runs_table(small.outcomes())
    outcomes, _ = run(small, tmp_path / "runs")
    with pytest.raises(SlicewiseError, match="cannot be written"):
        write_table(tmp_path / "no" / "runs.parquet", runs_table(outcomes), {})
    (tmp_path / "taken").mkdir()
    with pytest.raises(SlicewiseError, match="cannot be written"):
        write_table(tmp_path / "taken", runs_table(outcomes), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "sweep.toml", "taken"]

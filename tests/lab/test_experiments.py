"""Experiments: compiled equals engine, on any number of workers, interrupted or not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from slicewise import (
    Cluster,
    Geometry,
    Policy,
    Request,
    ScanPolicy,
    SlicewiseError,
    Spot,
    TablePolicy,
    policy,
)
from slicewise.lab import runner
from slicewise.lab.executors import Job, WorkerProcesses
from slicewise.lab.experiment import STEADY_COLUMNS, Experiment, Published, Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.results import mean_fragmentation, published_rows, steady_rows
from slicewise.lab.runner import run_experiment, total_units
from slicewise.lab.workload import Lifetime
from slicewise.policies.registry import policy_names

COMPILED = [name for name in policy_names() if isinstance(policy(name), TablePolicy)]


def ignore(units: int) -> None:
    """Ignore progress."""


def policies(*names: str) -> tuple[Policy, ...]:
    return tuple(policy(name) for name in names)


def small(a100: Geometry, *names: str, runs: int = 4, on_engine: bool = False) -> Published:
    mixes = (parse_mix("uniform", a100), parse_mix("skew-small", a100))
    return Published(mixes, policies(*names), 12, runs, 3, on_engine)


@pytest.mark.parametrize("lifetime", Lifetime)
@pytest.mark.parametrize("name", COMPILED)
def test_published_compiled_equals_engine(a100: Geometry, name: str, lifetime: Lifetime) -> None:
    mixes = (parse_mix("bimodal", a100),)
    fast = Published(mixes, policies(name), 9, 3, 3, lifetime=lifetime)
    slow = Published(mixes, policies(name), 9, 3, 3, True, lifetime=lifetime)
    for run in range(3):
        assert (fast.simulate(0, 0, run, ignore) == slow.simulate(0, 0, run, ignore)).all()


@pytest.mark.parametrize("name", COMPILED)
def test_steady_compiled_equals_engine(a100: Geometry, name: str) -> None:
    mixes = (parse_mix("skew-small", a100),)
    fast = Steady(mixes, policies(name), 6, 2, 3, load=0.95, lifetimes=8)
    slow = Steady(mixes, policies(name), 6, 2, 3, True, load=0.95, lifetimes=8)
    for run in range(2):
        ours, theirs = fast.simulate(0, 0, run, ignore), slow.simulate(0, 0, run, ignore)
        seen = STEADY_COLUMNS.index("states_examined")
        assert theirs[seen] == 0 < ours[seen]
        theirs[seen] = ours[seen]
        assert (ours == theirs).all()
        assert ours[1] > 0, "a stream without a rejection would show little"


def test_a_tiny_cluster_skips_bins_and_keeps_the_state_before(a100: Geometry) -> None:
    whole = Published((parse_mix("7g.80gb=1", a100),), policies("mfi"), 2, 1, 1)
    out = whole.simulate(0, 0, 0, ignore)
    assert out[:, 0].tolist() == [0] * 10 + [1] + [0] * 8 + [1]
    assert out[9].tolist() == [0, 0, 0, 0, 0, 0]
    assert out[10:19, 2].tolist() == [1] * 9
    engine = Published(whole.mixes, whole.policies, 2, 1, 1, True)
    assert (engine.simulate(0, 0, 0, ignore) == out).all()


def test_workers_do_not_change_the_result(a100: Geometry) -> None:
    experiment = small(a100, "mfi", "round-robin", runs=7)
    ticks: list[int] = []
    alone = run_experiment(experiment, 1, ticks.append)
    together = run_experiment(experiment, 3, ticks.append)
    assert sum(ticks) == 2 * total_units(experiment) == 2 * 2 * 2 * 7
    assert published_rows(alone) == published_rows(together)
    assert mean_fragmentation(alone) == mean_fragmentation(together)


def test_the_engine_gives_the_same_rows(a100: Geometry) -> None:
    fast = run_experiment(small(a100, "mfi"), 1, ignore)
    slow = run_experiment(small(a100, "mfi", on_engine=True), 1, ignore)
    assert published_rows(fast) == published_rows(slow)


def test_an_interruption_keeps_the_runs_that_every_policy_finished(a100: Geometry) -> None:
    experiment = small(a100, "mfi", "first-fit", runs=6)

    def stop_after(count: int) -> runner.Outcome:
        done = 0

        def tick(units: int) -> None:
            nonlocal done
            done += 1
            if done > count:
                raise KeyboardInterrupt

        return run_experiment(experiment, 1, tick)

    # All 2 x 2 cells advance together, a run at a time.
    outcome = stop_after(15)
    assert outcome.interrupted
    assert [outcome.paired_runs(0), outcome.paired_runs(1)] == [[0, 1, 2, 3], [0, 1, 2]]
    first_mix = published_rows(outcome)[: 2 * 20]
    whole = run_experiment(small(a100, "mfi", "first-fit", runs=4), 1, ignore)
    assert first_mix == published_rows(whole)[: 2 * 20]
    assert {row["distribution"] for row in published_rows(stop_after(2))} == {"uniform"}
    with pytest.raises(SlicewiseError, match="interrupted before every policy"):
        published_rows(stop_after(0))


class SelfDestructive(ScanPolicy):
    """Ends its own process, as running out of memory would."""

    name = "self-destructive"
    summary = "Kills its process."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class Failing(ScanPolicy):
    """Raises what slicewise would raise."""

    name = "failing"
    summary = "Raises."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        raise SlicewiseError("no more")


class Mistaken(ScanPolicy):
    """Raises an error with more arguments than its message."""

    name = "mistaken"
    summary = "Asks for what is not there."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        cluster.models[0].profile("9g.90gb")
        return None


def in_module_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Worker processes must be able to import the policies: put this file on their path."""
    import importlib
    import shutil
    import sys

    shutil.copy(__file__, tmp_path / "policies_for_workers.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sys.modules.pop("policies_for_workers", None)
    return importlib.import_module("policies_for_workers")


def test_a_worker_that_dies_or_fails_is_reported(
    a100: Geometry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = in_module_of_its_own(tmp_path, monkeypatch)
    mixes = (parse_mix("uniform", a100),)
    for cls, problem in (
        ("SelfDestructive", "ended unexpectedly"),
        ("Failing", "no more"),
        ("Mistaken", "unknown profile on A100-80GB '9g.90gb'"),
    ):
        dying = Published(mixes, (getattr(module, cls)(),), 3, 4, 1)
        with pytest.raises(SlicewiseError, match=problem):
            run_experiment(dying, 2, ignore)


def test_a_worker_that_is_killed_is_reported(a100: Geometry) -> None:
    experiment = small(a100, "mfi", runs=200)
    work = WorkerProcesses(2).work(
        [experiment], runner.missing_jobs([runner.Outcome(experiment)]), ignore
    )
    worker = int(next(work).worker.removeprefix("process "))
    blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{worker}/status").read_text())
    assert blocked is not None
    assert int(blocked[1], 16) & 1 << signal.SIGINT - 1, "only the parent handles Ctrl-C"
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(SlicewiseError, match="ended unexpectedly"):
        list(work)
    assert not multiprocessing.active_children()


def test_closing_the_generator_ends_workers_in_the_middle_of_a_job(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)
    endless = Steady(mixes, policies("mfi"), 1000, 2, 1, lifetimes=1_000_000, oracle=False)
    work = WorkerProcesses(2).work([endless], [Job(0, 0, 0, (0,)), Job(0, 0, 0, (1,))], stop)
    with pytest.raises(KeyboardInterrupt):
        next(work)
    assert not multiprocessing.active_children()


def stop(units: int) -> None:
    """Interrupt at the first sign of progress."""
    raise KeyboardInterrupt


def test_workers_that_cannot_be_started(a100: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(process: BaseProcess) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(BaseProcess, "start", no_more)
    with pytest.raises(SlicewiseError, match="Too many open files; try fewer --workers"):
        run_experiment(small(a100, "mfi"), 2, ignore)


ORPHANED = """
import os, signal
from slicewise import load_geometry, policy
from slicewise.lab.executors import Job, WorkerProcesses
from slicewise.lab.experiment import Steady
from slicewise.lab.mix import parse_mix

def report(units):
    import multiprocessing
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    mixes = (parse_mix("uniform", load_geometry("a100")),)
    endless = Steady(mixes, (policy("mfi"),), 1000, 2, 1, lifetimes=1_000_000, oracle=False)
    list(WorkerProcesses(2).work([endless], [Job(0, 0, 0, (0,)), Job(0, 0, 0, (1,))], report))
"""


def test_workers_end_when_their_parent_is_killed() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    workers = killed.stdout.split()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def test_steady_rows_compare_with_the_first_policy(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)
    experiment = Steady(mixes, policies("worst-fit", "mfi"), 20, 5, 1, load=0.9, lifetimes=6)
    rows = steady_rows(run_experiment(experiment, 1, ignore))
    assert [row["policy"] for row in rows] == ["worst-fit", "mfi", "oracle"]
    worst, mfi, _ = rows
    assert worst["rejected_share_difference"] == 0
    gap = mfi["rejected_share"] - worst["rejected_share"]  # type: ignore[operator]
    assert mfi["rejected_share_difference"] == pytest.approx(gap)
    assert mfi["rejected_share_difference_ci95"][1] < 0  # type: ignore[index]
    for row in rows:
        interval, value = row["utilization_percent_ci95"], row["utilization_percent"]
        assert isinstance(interval, list)
        assert isinstance(value, float)
        assert interval[0] < value < interval[1]


def test_one_run_gives_figures_without_intervals(a100: Geometry) -> None:
    rows = published_rows(run_experiment(small(a100, "first-fit", runs=1), 1, ignore))
    assert all(row["acceptance_rate_ci95"] is None for row in rows)
    assert all(row["scheduled_ratio_to_mfi"] is None for row in rows)
    labelled = published_rows(
        run_experiment(small(a100, "mfi", runs=1), 1, ignore), labels={"mfi": "MFI"}
    )
    assert {row["policy"] for row in labelled} == {"MFI"}
    ratios = {row["scheduled_ratio_to_mfi"] for row in labelled if row["demand"] == 0.85}
    assert ratios == {1.0}


def test_invalid_experiments_are_rejected(a100: Geometry) -> None:
    mixes = (parse_mix("uniform", a100),)
    mfi = policies("mfi")
    for build, problem in (
        (lambda: Published((), mfi), "at least one distribution"),
        (lambda: Published(mixes, mfi, 0), "gpus must be 1 to"),
        (lambda: Published(mixes, mfi, 1, -5), "runs must be 1 to"),
        (lambda: Published(mixes, mfi, 1, 1, -1), "seed must be 0 to"),
        (lambda: Steady(mixes, mfi, load=0), "load 0 is not"),
        (lambda: Steady(mixes, mfi, load=float("nan")), "load nan is not"),
        (lambda: Steady(mixes, mfi, lifetimes=3), "duration must be 4 to"),
        (lambda: Steady(mixes, mfi, warmup=-1), "warmup must be 0 to"),
    ):
        with pytest.raises(SlicewiseError, match=problem):
            build()


def test_long_steady_runs_are_drawn_in_chunks(
    a100: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slicewise.lab import experiment as module

    monkeypatch.setattr(module, "_CHUNK", 50)
    steady: Experiment = Steady((parse_mix("uniform", a100),), policies("mfi"), 5, 1, 1, load=0.5)
    ticks: list[int] = []
    sums = steady.simulate(0, 0, 0, ticks.append)
    assert sum(ticks) == steady.units(0)
    assert set(ticks[:-1]) == {50}
    longest = steady.units(0) // 40
    assert sums[0] == steady.units(0) - 3 * longest
    assert np.all(sums >= 0)
